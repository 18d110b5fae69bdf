//! [`RocmPages`]: the pages of a [`PagedKvCache`](crate::cache::PagedKvCache) in an AMD GPU's memory.

use candle::backend::BackendStorage;
use candle::{CpuStorage, DType, Result, Tensor, bail};

use super::device::RocmDevice;
use super::host::cpu;
use super::launch::Launch;
use super::module::KernelId;
use super::pinned::Upload;
use super::scalar::Scalar;
use super::scale::ScaleArgs;
use super::specialize::{self, WriteKey};
use super::strides::paged;
use super::tensor::RocmTensor;
use crate::cache::{
    CacheConfig, CacheDims, CacheLayout, KvDtype, LayerCache, check_pairs, check_tokens, gather_as, last_writes, layer_of, needed_pages,
};
use crate::gpu::args::WriteArgs;
use crate::gpu::bytes::{as_bytes, contiguous_bytes};
use crate::gpu::launch;
use crate::gpu::plan_shape::clamp;
use crate::op::Operand;
use crate::op::locks::Locks;
use crate::options::KvScale;
use crate::quant::fp8::{FNUZ_SCALE_FACTOR, decode_e4m3, decode_e4m3_fnuz};
use crate::registry::{ArchName, ScaleMode};

/// Every layer's K, V and scales on one device.
///
/// FP8 is the device's own encoding: on gfx942 FNUZ, whose codes are worth half of OCP's, so a scale that a configuration gives is doubled there and the
/// same values are stored as on any other device.
#[derive(Clone, Debug)]
pub struct RocmPages {
    device: RocmDevice,
    dims: CacheDims,
    dtype: KvDtype,
    layout: CacheLayout,
    layers: Vec<LayerCache<RocmTensor>>,
}

/// Whether the device's FP8 is FNUZ.
pub(super) fn is_fnuz(device: &RocmDevice) -> bool {
    device.arch().name == ArchName::Gfx942
}

impl RocmPages {
    /// Zeroed pages. Errors: a cache that no kernel of the device reads; no memory.
    pub(crate) fn new(config: &CacheConfig, layout: CacheLayout, device: &RocmDevice) -> Result<Self> {
        let dims = config.dims;
        let factor = if is_fnuz(device) && config.dtype == KvDtype::Fp8 { FNUZ_SCALE_FACTOR } else { 1.0 };
        let layer = || config.layer(layout, factor, |shape, dtype| RocmTensor::zeros(shape, dtype, device));
        specialize::select(&config.problem(layout), device.arch())?;
        let layers = (0..config.layers).map(|_| layer()).collect::<Result<_>>()?;
        Ok(Self { device: device.clone(), dims, dtype: config.dtype, layout, layers })
    }

    /// The device.
    pub fn device(&self) -> &RocmDevice {
        &self.device
    }

    pub(crate) fn layers(&self) -> &[LayerCache<RocmTensor>] {
        &self.layers
    }

    pub(super) fn dims(&self) -> CacheDims {
        self.dims
    }

    pub(super) fn layout(&self) -> CacheLayout {
        self.layout
    }

    /// [`crate::cache::PagedKvCache::write`].
    pub(crate) fn write(&self, layer: usize, k: &Tensor, v: &Tensor, slot_mapping: &Tensor) -> Result<()> {
        let layer = layer_of(&self.layers, layer)?;
        let locks = Locks::new([k, v]);
        let (k, v) = ((cpu("k", locks.get(0))?, k.layout()), (cpu("v", locks.get(1))?, v.layout()));
        let tokens = NewTokens::new(k, v, slot_mapping, self.dims)?;
        let upload = self.device.upload(&tokens.parts())?;
        self.writer(layer, &tokens, &upload, 0)?.run()
    }

    /// The launch that writes `tokens`, which are parts `part` and on of an upload, in the order of [`NewTokens::parts`].
    pub(super) fn writer(&self, layer: &LayerCache<RocmTensor>, tokens: &NewTokens, upload: &Upload, part: usize) -> Result<Writer> {
        let CacheDims { pages, page_size, kv_heads, head_dim } = self.dims;
        let scales = match (self.dtype, &layer.k_scale) {
            (KvDtype::Mxfp4, _) => ScaleMode::Block,
            (KvDtype::Fp8, KvScale::Tensor(_)) => ScaleMode::PerToken,
            (KvDtype::Fp8, _) => ScaleMode::Scalar,
            _ => ScaleMode::None,
        };
        let (k_scale, v_scale) = (
            ScaleArgs::of("k_scale", &layer.k_scale, scales, &self.device)?,
            ScaleArgs::of("v_scale", &layer.v_scale, scales, &self.device)?,
        );
        let key = WriteKey {
            arch: self.device.arch().name,
            head_dim,
            page_size,
            dtype: tokens.dtype,
            kv_dtype: self.dtype,
            scales,
            layout: self.layout,
        };
        let args = WriteArgs {
            k: upload.address(part)?,
            v: upload.address(part + 1)?,
            slots: upload.address(part + 2)?,
            key: layer.key.address(),
            value: layer.value.address(),
            k_scale: k_scale.address,
            v_scale: v_scale.address,
            k_row: (kv_heads * head_dim) as i64,
            k_head: head_dim as i64,
            v_row: (kv_heads * head_dim) as i64,
            v_head: head_dim as i64,
            key_stride: paged("key_cache", &layer.key, self.layout, self.layout.key_strides(layer.key.layout()))?,
            value_stride: paged("value_cache", &layer.value, self.layout, self.layout.value_strides(layer.value.layout()))?,
            k_scale_stride: k_scale.stride,
            v_scale_stride: v_scale.stride,
            tokens: clamp(tokens.slots.len()),
            kv_heads: clamp(kv_heads),
            pages: clamp(pages),
        };
        let kernel = self.device.kernel_of(KernelId::Write(key), || specialize::write(&key))?;
        // SAFETY: k, v and slots are of the upload, which the caller keeps; slots are within the cache, whose tensors have the dims given.
        let launch = unsafe { Launch::new(&self.device, kernel, launch::writer(tokens.slots.len(), kv_heads), args) }?;
        Ok(Writer { launch, _scalars: [k_scale.scalar, v_scale.scalar] })
    }

    /// [`crate::cache::PagedKvCache::copy_pages`].
    pub(crate) fn copy_pages(&self, pairs: &[(u32, u32)]) -> Result<()> {
        check_pairs(pairs, self.dims.pages)?;
        for tensor in self.layers.iter().flat_map(tensors) {
            for &(src, dst) in pairs.iter().filter(|(src, dst)| src != dst) {
                tensor.narrow(0, dst as usize, 1)?.copy_from_device(&tensor.narrow(0, src as usize, 1)?)?;
            }
        }
        Ok(())
    }

    /// [`crate::cache::PagedKvCache::gather`]. Waits for the device.
    pub(crate) fn gather(&self, layer: usize, pages: &[u32], len: usize) -> Result<(Tensor, Tensor)> {
        let layer = layer_of(&self.layers, layer)?;
        let pages = needed_pages(self.dims, pages, len)?;
        let read = |tensor: &RocmTensor| self.read_pages(tensor, pages);
        let scale = |scale: &KvScale<RocmTensor>| match scale {
            KvScale::None => Ok(KvScale::None),
            KvScale::Scalar(factor) => Ok(KvScale::Scalar(*factor)),
            KvScale::Tensor(tensor) => read(tensor).map(KvScale::Tensor),
        };
        let copy = LayerCache {
            key: read(&layer.key)?,
            value: read(&layer.value)?,
            k_scale: scale(&layer.k_scale)?,
            v_scale: scale(&layer.v_scale)?,
        };
        let ids: Vec<u32> = (0..pages.len() as u32).collect();
        gather_as(&copy, self.layout, &ids, len, if is_fnuz(&self.device) { decode_e4m3_fnuz } else { decode_e4m3 })
    }

    /// `pages` of one tensor, on the CPU in that order.
    fn read_pages(&self, tensor: &RocmTensor, pages: &[u32]) -> Result<Tensor> {
        let mut dims = tensor.dims().to_vec();
        dims[0] = pages.len();
        let copy = RocmTensor::empty(dims, tensor.dtype(), &self.device)?;
        for (at, &page) in pages.iter().enumerate() {
            copy.narrow(0, at, 1)?.copy_from_device(&tensor.narrow(0, page as usize, 1)?)?;
        }
        copy.to_tensor()
    }
}

/// A layer's tensors that have pages.
fn tensors(layer: &LayerCache<RocmTensor>) -> impl Iterator<Item = &RocmTensor> {
    layer.tensors().map(|(_, tensor)| tensor)
}

/// A launch of the write kernel, and what it needs beside the upload and the cache.
pub(super) struct Writer {
    launch: Launch<WriteArgs>,
    _scalars: [Option<Scalar>; 2],
}

impl Writer {
    /// Enqueues it.
    pub fn run(&self) -> Result<()> {
        self.launch.run()
    }
}

/// New tokens that were checked against a cache, ready to be uploaded.
pub(super) struct NewTokens<'a> {
    k: std::borrow::Cow<'a, [u8]>,
    v: std::borrow::Cow<'a, [u8]>,
    dtype: DType,
    slots: Vec<i64>,
}

impl<'a> NewTokens<'a> {
    /// The checks of [`crate::cache::reshape_and_cache`].
    pub fn new(k: Operand<'a>, v: Operand<'a>, slot_mapping: &Tensor, dims: CacheDims) -> Result<Self> {
        let (_, _, slots) = check_tokens(k, v, slot_mapping, dims)?;
        let slots = last_writes(slots);
        let dtype = BackendStorage::dtype(k.0);
        if BackendStorage::dtype(v.0) == dtype {
            return Ok(Self { k: contiguous_bytes(k)?, v: contiguous_bytes(v)?, dtype, slots });
        }
        // One kernel reads both: F32 holds either as it is.
        let widened = |(storage, layout): Operand<'_>| -> Result<std::borrow::Cow<'a, [u8]>> {
            let CpuStorage::F32(values) = storage.to_dtype(layout, DType::F32)? else { bail!("k: converted to F32, but is not") };
            Ok(as_bytes(&values).to_vec().into())
        };
        Ok(Self { k: widened(k)?, v: widened(v)?, dtype: DType::F32, slots })
    }

    /// k, v and the slots.
    pub fn parts(&self) -> [&[u8]; 3] {
        [&self.k, &self.v, as_bytes(&self.slots)]
    }
}
