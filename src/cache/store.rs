//! [`PagedKvCache`]: the tensors.

use candle::{CpuStorage, DType, Device, Layout, Result, Tensor, bail};

use super::write::reshape_and_cache_storage;
use super::{CacheDims, CacheLayout, KvDtype, MXFP4_BLOCK, copy_pages, gather, reshape_and_cache};
use crate::op::shapes::{MAX_HEAD_DIM, MAX_PAGE_SIZE};
use crate::options::{DecodeOptions, KvScale};
#[cfg(feature = "cuda")]
use crate::registry::select;
use crate::registry::{Arch, preferred_layout};
#[cfg(any(feature = "rocm", feature = "cuda"))]
use crate::registry::{Problem, ScaleMode};
#[cfg(feature = "rocm")]
use crate::rocm::{RocmDevice, RocmOptions, RocmPages, RocmTensor};

/// Where a cache lives: a candle device, or a device that candle has no storage for.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Placement<'a> {
    /// A device of candle's.
    Candle(&'a Device),
    /// An AMD GPU.
    #[cfg(feature = "rocm")]
    Rocm(&'a RocmDevice),
}

impl<'a> From<&'a Device> for Placement<'a> {
    fn from(device: &'a Device) -> Self {
        Self::Candle(device)
    }
}

#[cfg(feature = "rocm")]
impl<'a> From<&'a RocmDevice> for Placement<'a> {
    fn from(device: &'a RocmDevice) -> Self {
        Self::Rocm(device)
    }
}

impl Placement<'_> {
    /// The layout that the device's kernels read fastest.
    fn preferred_layout(self, dtype: KvDtype) -> Result<CacheLayout> {
        Ok(match self {
            #[cfg(feature = "cuda")]
            Self::Candle(device @ Device::Cuda(_)) => preferred_layout(&crate::cuda::arch_of(device)?, dtype),
            Self::Candle(_) => preferred_layout(&Arch::host()?, dtype),
            #[cfg(feature = "rocm")]
            Self::Rocm(device) => preferred_layout(device.arch(), dtype),
        })
    }
}

/// How an 8-bit or 4-bit cache scales what it stores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantization {
    /// Stored as they are (F32, F16, BF16; FP8 with scale 1).
    None,
    /// FP8 with one scale each for K and V: stored = value / scale.
    Scalar {
        /// K's scale, finite and above 0.
        k: f32,
        /// V's scale, finite and above 0.
        v: f32,
    },
    /// FP8 with a scale per (page, head, token), chosen from the token's largest magnitude.
    PerToken,
    /// MXFP4: E8M0 scales of 32-element blocks.
    Block,
}

/// What a cache is made of.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Layers, each with K and V tensors of its own.
    pub layers: usize,
    /// Sizes of each layer.
    pub dims: CacheDims,
    /// What one stored element is.
    pub dtype: KvDtype,
    /// `None`: the layout the registry prefers on the device.
    pub layout: Option<CacheLayout>,
    /// How elements are scaled; must go with `dtype`.
    pub quantization: Quantization,
}

/// The K and V pages of every layer on one device.
///
/// Cloning shares the tensors. The cache knows nothing of sequences: a [`PagePool`](super::PagePool) says which pages are whose.
#[derive(Clone, Debug)]
pub struct PagedKvCache {
    config: CacheConfig,
    layout: CacheLayout,
    pages: Pages,
}

/// Every layer's tensors, by the kind of device they are on.
#[derive(Clone, Debug)]
enum Pages {
    Candle(Vec<LayerCache>),
    #[cfg(feature = "rocm")]
    Rocm(RocmPages),
}

/// One layer's tensors, of type `T`.
#[derive(Clone, Debug)]
pub struct LayerCache<T = Tensor> {
    /// K, shaped as [`CacheLayout::key_shape`] says.
    pub key: T,
    /// V, shaped as [`CacheLayout::value_shape`] says.
    pub value: T,
    /// The factor from K's stored elements to values.
    pub k_scale: KvScale<T>,
    /// The factor from V's stored elements to values.
    pub v_scale: KvScale<T>,
}

impl<T> LayerCache<T> {
    /// Every tensor with its name.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&'static str, &T)> {
        let scales = [("k_scale", self.k_scale.tensor()), ("v_scale", self.v_scale.tensor())];
        let scales = scales.into_iter().filter_map(|(name, scale)| Some((name, scale?)));
        [("key_cache", &self.key), ("value_cache", &self.value)].into_iter().chain(scales)
    }
}

impl CacheConfig {
    /// Bytes of one page over all layers, K, V and paged scales: what a memory budget is divided by to choose `dims.pages`.
    pub fn page_bytes(&self) -> Result<usize> {
        let CacheDims { page_size, kv_heads, head_dim, .. } = self.dims;
        let scale_bits = match self.quantization {
            Quantization::None | Quantization::Scalar { .. } => 0,
            Quantization::PerToken => 32,
            Quantization::Block => head_dim / MXFP4_BLOCK * 8,
        };
        let row_bytes = head_dim.checked_mul(self.dtype.bits()).and_then(|bits| bits.checked_add(scale_bits)).map(|bits| bits / 8);
        let bytes = [page_size, kv_heads, self.layers, 2].into_iter().try_fold(row_bytes, |bytes, n| Some(bytes?.checked_mul(n))).flatten();
        match bytes {
            Some(bytes) => Ok(bytes),
            None => bail!("dims: a page of {:?} in {} layers passes the address space", self.dims, self.layers),
        }
    }

    fn check(&self, layout: CacheLayout) -> Result<()> {
        let CacheDims { pages, page_size, kv_heads, head_dim } = self.dims;
        for (name, size) in
            [("layers", self.layers), ("pages", pages), ("page_size", page_size), ("kv_heads", kv_heads), ("head_dim", head_dim)]
        {
            if size == 0 {
                bail!("{name}: at least 1")
            }
        }
        if head_dim > MAX_HEAD_DIM || !head_dim.is_multiple_of(8) {
            bail!("head_dim: a multiple of 8 up to {MAX_HEAD_DIM}, got {head_dim}")
        }
        if page_size > MAX_PAGE_SIZE {
            bail!("page_size: at most {MAX_PAGE_SIZE}, got {page_size}")
        }
        if pages > i32::MAX as usize {
            bail!("pages: page ids are 31-bit, got {pages} pages")
        }
        layout.check(self.dims, self.dtype)?;
        match (self.dtype, self.quantization) {
            (KvDtype::Mxfp4, Quantization::Block) => {}
            (KvDtype::Mxfp4, other) => bail!("quantization: an MXFP4 cache is quantized by Block, not {other:?}"),
            (KvDtype::Fp8, Quantization::Scalar { k, v }) if !(k.is_finite() && k > 0.0 && v.is_finite() && v > 0.0) => {
                bail!("quantization: scales are finite and above 0, got k {k}, v {v}")
            }
            (KvDtype::Fp8, Quantization::None | Quantization::Scalar { .. } | Quantization::PerToken) => {}
            (_, Quantization::None) => {}
            (dtype, other) => bail!("quantization: {other:?} does not go with {} elements", dtype.name()),
        }
        match self.page_bytes()?.checked_mul(pages) {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
            _ => bail!("pages: {pages} pages of {} bytes pass the address space", self.page_bytes()?),
        }
    }

    /// The plainest call over such a cache, to see whether a GPU has a kernel that reads it.
    #[cfg(any(feature = "rocm", feature = "cuda"))]
    pub(crate) fn problem(&self, layout: CacheLayout) -> Problem {
        Problem {
            q_heads: self.dims.kv_heads,
            kv_heads: self.dims.kv_heads,
            head_dim: self.dims.head_dim,
            page_size: self.dims.page_size,
            kv_dtype: self.dtype,
            layout,
            scales: if self.dtype == KvDtype::Mxfp4 { ScaleMode::Block } else { ScaleMode::None },
            ..Problem::default()
        }
    }

    /// One layer whose tensors `zeros` makes; `factor` times what the configuration says is each scalar scale.
    pub(crate) fn layer<T>(
        &self,
        layout: CacheLayout,
        factor: f32,
        zeros: impl Fn(Vec<usize>, DType) -> Result<T>,
    ) -> Result<LayerCache<T>> {
        let CacheDims { pages, page_size, kv_heads, head_dim } = self.dims;
        let scale = |scalar: f32| -> Result<KvScale<T>> {
            Ok(match self.quantization {
                Quantization::None if factor == 1.0 || self.dtype != KvDtype::Fp8 => KvScale::None,
                Quantization::None => KvScale::Scalar(factor),
                Quantization::Scalar { .. } => KvScale::Scalar(scalar * factor),
                Quantization::PerToken => KvScale::Tensor(zeros(vec![pages, kv_heads, page_size], DType::F32)?),
                Quantization::Block => KvScale::Tensor(zeros(vec![pages, kv_heads, page_size, head_dim / MXFP4_BLOCK], DType::U8)?),
            })
        };
        let (k, v) = match self.quantization {
            Quantization::Scalar { k, v } => (k, v),
            _ => (1.0, 1.0),
        };
        Ok(LayerCache {
            key: zeros(layout.key_shape(self.dims, self.dtype), self.dtype.dtype())?,
            value: zeros(layout.value_shape(self.dims, self.dtype), self.dtype.dtype())?,
            k_scale: scale(k)?,
            v_scale: scale(v)?,
        })
    }
}

/// Zeros, or an error where host memory cannot be had (a failed allocation would end the process).
fn zeros(shape: Vec<usize>, dtype: DType, device: &Device) -> Result<Tensor> {
    let bytes = shape.iter().product::<usize>() * dtype.size_in_bytes();
    if device.is_cpu() && Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
        bail!("pages: no memory for a tensor {shape:?} of {dtype:?} ({bytes} bytes)")
    }
    Tensor::zeros(shape, dtype, device)
}

impl PagedKvCache {
    /// Zeroed pages on `device`, a `&Device` of candle's or a device of a backend here. Refuses sizes, dtypes and scales that do not go
    /// together, and sizes that memory cannot hold.
    pub fn new<'a>(config: CacheConfig, device: impl Into<Placement<'a>>) -> Result<Self> {
        let placement = device.into();
        let layout = match config.layout {
            Some(layout) => layout,
            None => placement.preferred_layout(config.dtype)?,
        };
        config.check(layout)?;
        let pages = match placement {
            Placement::Candle(device) => {
                #[cfg(feature = "cuda")]
                if device.is_cuda() {
                    select(&config.problem(layout), &crate::cuda::arch_of(device)?)?;
                }
                let layer = |_| config.layer(layout, 1.0, |shape, dtype| zeros(shape, dtype, device));
                Pages::Candle((0..config.layers).map(layer).collect::<Result<_>>()?)
            }
            #[cfg(feature = "rocm")]
            Placement::Rocm(device) => Pages::Rocm(RocmPages::new(&config, layout, device)?),
        };
        Ok(Self { config, layout, pages })
    }

    /// What the cache was made from.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The layout of every layer's tensors.
    pub fn layout(&self) -> CacheLayout {
        self.layout
    }

    /// The tensors of a layer.
    ///
    /// # Errors
    /// A layer that is not there; a cache on a device for which candle has no tensors.
    pub fn layer(&self, layer: usize) -> Result<&LayerCache> {
        match &self.pages {
            Pages::Candle(layers) => layer_of(layers, layer),
            #[cfg(feature = "rocm")]
            Pages::Rocm(pages) => bail!(
                "layer: this cache is on {}, where candle has no tensors: see rocm_layer and rocm_decode_options",
                pages.device().name()
            ),
        }
    }

    /// The tensors of a layer on an AMD GPU.
    ///
    /// # Errors
    /// A layer that is not there; a cache that is on a candle device.
    #[cfg(feature = "rocm")]
    pub fn rocm_layer(&self, layer: usize) -> Result<&LayerCache<RocmTensor>> {
        match &self.pages {
            Pages::Rocm(pages) => layer_of(pages.layers(), layer),
            Pages::Candle(_) => bail!("rocm_layer: this cache is on a candle device: see layer"),
        }
    }

    /// The pages on an AMD GPU, where they are on one.
    #[cfg(feature = "rocm")]
    pub(crate) fn rocm(&self) -> Option<&RocmPages> {
        match &self.pages {
            Pages::Rocm(pages) => Some(pages),
            Pages::Candle(_) => None,
        }
    }

    /// The options under which a layer is attended: the cache's layout and the layer's scales, all else by default. For
    /// [`crate::paged_decode`] over `layer`'s tensors, so that no scale is forgotten.
    pub fn decode_options(&self, layer: usize) -> Result<DecodeOptions> {
        let LayerCache { k_scale, v_scale, .. } = self.layer(layer)?.clone();
        Ok(DecodeOptions { layout: self.layout, k_scale, v_scale, ..DecodeOptions::default() })
    }

    /// [`PagedKvCache::decode_options`] for [`crate::rocm::decode`] over [`PagedKvCache::rocm_layer`]'s tensors.
    #[cfg(feature = "rocm")]
    pub fn rocm_decode_options(&self, layer: usize) -> Result<RocmOptions> {
        let LayerCache { k_scale, v_scale, .. } = self.rocm_layer(layer)?.clone();
        Ok(DecodeOptions { layout: self.layout, k_scale, v_scale, ..DecodeOptions::default() })
    }

    /// Writes k and v `[tokens, kv_heads, head_dim]` (F32, F16 or BF16, on the CPU where the cache is on a device that candle does not have) to
    /// `slot_mapping` I64 `[tokens]`, quantizing as configured: [`reshape_and_cache`] on one layer.
    pub fn write(&self, layer: usize, k: &Tensor, v: &Tensor, slot_mapping: &Tensor) -> Result<()> {
        match &self.pages {
            Pages::Candle(layers) => reshape_and_cache(k, v, slot_mapping, layer_of(layers, layer)?, self.layout),
            #[cfg(feature = "rocm")]
            Pages::Rocm(pages) => pages.write(layer, k, v, slot_mapping),
        }
    }

    /// [`PagedKvCache::write`] from inside an op, where candle has lent the storages of k and v.
    pub(crate) fn write_storage(
        &self,
        layer: usize,
        k: (&CpuStorage, &Layout),
        v: (&CpuStorage, &Layout),
        slot_mapping: &Tensor,
    ) -> Result<()> {
        reshape_and_cache_storage(k, v, slot_mapping, self.layer(layer)?, self.layout)
    }

    /// Copies pages (src, dst) in every layer, in order: [`copy_pages`]. What a pool's copy-on-write asks for.
    pub fn copy_pages(&self, pairs: &[(u32, u32)]) -> Result<()> {
        if pairs.is_empty() {
            return Ok(());
        }
        match &self.pages {
            Pages::Candle(layers) => layers.iter().try_for_each(|layer| copy_pages(layer, self.layout, pairs)),
            #[cfg(feature = "rocm")]
            Pages::Rocm(rocm) => rocm.copy_pages(pairs),
        }
    }

    /// The first `len` tokens of `pages` as contiguous F32 k and v `[len, kv_heads, head_dim]` on the CPU, scales applied: [`gather`].
    pub fn gather(&self, layer: usize, pages: &[u32], len: usize) -> Result<(Tensor, Tensor)> {
        match &self.pages {
            Pages::Candle(layers) => gather(layer_of(layers, layer)?, self.layout, pages, len),
            #[cfg(feature = "rocm")]
            Pages::Rocm(rocm) => rocm.gather(layer, pages, len),
        }
    }
}

/// A layer, or an error that names it.
pub(crate) fn layer_of<T>(layers: &[LayerCache<T>], layer: usize) -> Result<&LayerCache<T>> {
    match layers.get(layer) {
        Some(cache) => Ok(cache),
        None => bail!("layer: {layer} of a cache of {} layers", layers.len()),
    }
}
