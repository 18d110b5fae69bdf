//! [`PagedKvCache`]: the tensors.

use candle::{Device, Result, Tensor, bail};

use super::{CacheDims, CacheLayout, KvDtype};
use crate::options::KvScale;

/// How an 8-bit cache scales what it stores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantization {
    /// Stored as they are (F32, F16, BF16; FP8 with scale 1).
    None,
    /// FP8 with one scale each for K and V: stored = value / scale.
    Scalar { k: f32, v: f32 },
    /// FP8 with a scale per (page, head, token), chosen from the token's largest magnitude.
    PerToken,
    /// MXFP4: E8M0 scales of 32-element blocks.
    Block,
}

/// What a cache is made of.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    pub layers: usize,
    pub dims: CacheDims,
    pub dtype: KvDtype,
    /// `None`: the layout the registry prefers on the device.
    pub layout: Option<CacheLayout>,
    pub quantization: Quantization,
}

/// The K and V pages of every layer on one device.
#[derive(Clone, Debug)]
pub struct PagedKvCache {
    config: CacheConfig,
    layers: Vec<LayerCache>,
}

/// One layer's tensors.
#[derive(Clone, Debug)]
pub struct LayerCache {
    pub key: Tensor,
    pub value: Tensor,
    pub k_scale: KvScale,
    pub v_scale: KvScale,
}

impl PagedKvCache {
    pub fn new(config: CacheConfig, device: &Device) -> Result<Self> {
        let _ = (config, device);
        bail!("unwritten")
    }

    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    pub fn layout(&self) -> CacheLayout {
        CacheLayout::Nhd
    }

    pub fn layer(&self, layer: usize) -> Result<&LayerCache> {
        match self.layers.get(layer) {
            Some(cache) => Ok(cache),
            None => bail!("layer: {layer} of a cache of {} layers", self.layers.len()),
        }
    }

    /// Writes k and v `[tokens, kv_heads, head_dim]` (F32, F16 or BF16) to `slot_mapping` I64 `[tokens]`, quantizing as configured.
    pub fn write(&self, layer: usize, k: &Tensor, v: &Tensor, slot_mapping: &Tensor) -> Result<()> {
        let _ = (layer, k, v, slot_mapping);
        bail!("unwritten")
    }
}
