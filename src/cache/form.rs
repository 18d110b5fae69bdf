//! What the tensors of one layer are, checked once: sizes, dtype, strides and scales.

use candle::{CpuStorage, DType, Layout, Result, Storage, Tensor, bail};

use super::overlap::overlap;
use super::{CacheDims, CacheLayout, KvDtype, KvStrides, LayerCache, MXFP4_BLOCK};
use crate::op::call::Meta;
use crate::op::locks::storage_address;
use crate::op::shapes::check_last_contiguous;
use crate::options::KvScale;
#[cfg(feature = "nvrtc")]
use crate::registry::ScaleMode;

/// A layer's tensors, known to be on one device, to agree with each other and to lie within their storages.
pub(crate) struct LayerForm<'a> {
    pub dims: CacheDims,
    pub dtype: KvDtype,
    pub key: Side<'a>,
    pub value: Side<'a>,
}

/// K or V.
pub(crate) struct Side<'a> {
    pub cache: &'a Tensor,
    pub strides: KvStrides,
    pub scale: ScaleForm<'a>,
}

/// `value = stored * scale`.
pub(crate) enum ScaleForm<'a> {
    Factor(f32),
    /// F32 with one element on a GPU, which is not read here.
    #[cfg(feature = "cuda")]
    OnDevice(&'a Tensor),
    /// F32 `[pages, kv_heads, page_size]`.
    PerToken(&'a Tensor),
    /// E8M0 `[pages, kv_heads, page_size, head_dim / 32]`.
    Block(&'a Tensor),
}

impl<'a> ScaleForm<'a> {
    /// The scale tensor that has pages, if any.
    pub fn paged(&self) -> Option<&'a Tensor> {
        match *self {
            Self::Factor(_) => None,
            #[cfg(feature = "cuda")]
            Self::OnDevice(_) => None,
            Self::PerToken(scales) | Self::Block(scales) => Some(scales),
        }
    }
}

impl<'a> LayerForm<'a> {
    /// What the kernels do about scales: those of the side that has more of them.
    #[cfg(feature = "nvrtc")]
    pub fn scale_mode(&self) -> ScaleMode {
        let mode = |side: &Side<'_>| match side.scale {
            ScaleForm::Factor(1.0) if self.dtype != KvDtype::Fp8 => ScaleMode::None,
            ScaleForm::Factor(_) => ScaleMode::Scalar,
            #[cfg(feature = "cuda")]
            ScaleForm::OnDevice(_) => ScaleMode::Scalar,
            ScaleForm::PerToken(_) => ScaleMode::PerToken,
            ScaleForm::Block(_) => ScaleMode::Block,
        };
        mode(&self.key).max(mode(&self.value))
    }

    /// Checks `layer` as tensors of `layout`; `op` is named in the error where a device has no kernel.
    pub fn of(op: &str, layer: &'a LayerCache, layout: CacheLayout) -> Result<Self> {
        let dtype = KvDtype::of(layer.key.dtype())?;
        let dims = layout.dims_of_key(layer.key.dims(), dtype)?;
        let CacheDims { page_size, kv_heads, head_dim, .. } = dims;
        if page_size == 0 || kv_heads == 0 || head_dim == 0 {
            bail!("key_cache: page_size, kv_heads and head_dim are at least 1, got {:?} ({})", layer.key.dims(), layout.name())
        }
        layout.check(dims, dtype)?;
        let value_shape = layout.value_shape(dims, dtype);
        if layer.value.dtype() != layer.key.dtype() || layer.value.dims() != value_shape {
            let (found, dtype) = (layer.value.dims(), layer.value.dtype());
            bail!("value_cache: {value_shape:?} of {:?} goes with this key_cache, got {found:?} of {dtype:?}", layer.key.dtype())
        }
        for (name, cache) in [("key_cache", &layer.key), ("value_cache", &layer.value)] {
            check_tensor(op, name, cache, &layer.key)?;
            check_last_contiguous(name, cache.layout())?;
        }
        let form = Self {
            dims,
            dtype,
            key: Side {
                cache: &layer.key,
                strides: layout.key_strides(layer.key.layout()),
                scale: scale_form(op, "k_scale", &layer.k_scale, &layer.key, dims, dtype)?,
            },
            value: Side {
                cache: &layer.value,
                strides: layout.value_strides(layer.value.layout()),
                scale: scale_form(op, "v_scale", &layer.v_scale, &layer.key, dims, dtype)?,
            },
        };
        form.check_apart()?;
        Ok(form)
    }

    /// Refuses tensors that have an element in common: a write to one would change the other.
    fn check_apart(&self) -> Result<()> {
        let tensors: Vec<_> = self.tensors().collect();
        for (i, (name, tensor)) in tensors.iter().enumerate() {
            for (other_name, other) in &tensors[..i] {
                if storage_address(tensor) == storage_address(other) && overlap(tensor.layout(), other.layout()) {
                    bail!("{name}: is the same memory as {other_name}, in part at least")
                }
            }
        }
        Ok(())
    }

    /// Every tensor that has pages, with its name.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &'a Tensor)> {
        let scales = [("k_scale", self.key.scale.paged()), ("v_scale", self.value.scale.paged())];
        let caches = [("key_cache", self.key.cache), ("value_cache", self.value.cache)];
        caches.into_iter().chain(scales.into_iter().filter_map(|(name, scale)| Some((name, scale?))))
    }
}

fn scale_form<'a>(
    op: &str,
    name: &'static str,
    scale: &'a KvScale,
    key: &Tensor,
    dims: CacheDims,
    dtype: KvDtype,
) -> Result<ScaleForm<'a>> {
    let CacheDims { pages, page_size, kv_heads, head_dim } = dims;
    let form = match scale {
        KvScale::None => ScaleForm::Factor(1.0),
        KvScale::Scalar(factor) => ScaleForm::Factor(*factor),
        KvScale::Tensor(scales) => {
            check_tensor(op, name, scales, key)?;
            match (scales.dtype(), scales.dims()) {
                (DType::F32, shape) if shape == [pages, kv_heads, page_size] => ScaleForm::PerToken(scales),
                (DType::U8, shape) if shape == [pages, kv_heads, page_size, head_dim / MXFP4_BLOCK] => {
                    check_last_contiguous(name, scales.layout())?;
                    ScaleForm::Block(scales)
                }
                #[cfg(feature = "cuda")]
                (DType::F32, _) if scales.elem_count() == 1 && !scales.device().is_cpu() => ScaleForm::OnDevice(scales),
                (DType::F32, _) if scales.elem_count() == 1 => ScaleForm::Factor(scales.flatten_all()?.to_vec1::<f32>()?[0]),
                (found, shape) => bail!(
                    "{name}: {found:?} {shape:?} is neither one F32, nor F32 [{pages}, {kv_heads}, {page_size}] (pages, kv_heads, page_size), nor U8 \
                     of that shape and [head_dim / {MXFP4_BLOCK}]"
                ),
            }
        }
    };
    match (&form, dtype) {
        (ScaleForm::Block(_), KvDtype::Mxfp4) => {}
        (_, KvDtype::Mxfp4) => bail!("{name}: an MXFP4 cache needs its U8 block scales"),
        (ScaleForm::Block(_), _) => bail!("{name}: U8 block scales go with an MXFP4 cache, not with {}", dtype.name()),
        (ScaleForm::PerToken(_), KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16) => {
            bail!("{name}: a scale per token goes with an FP8 cache, not with {}", dtype.name())
        }
        (ScaleForm::Factor(factor), _) if !factor.is_finite() || *factor == 0.0 => {
            bail!("{name}: a scale is finite and not 0, got {factor}")
        }
        _ => {}
    }
    Ok(form)
}

/// Refuses a tensor that is not where `key` is, that reaches past its storage, or two of whose elements are the same memory.
fn check_tensor(op: &str, name: &str, tensor: &Tensor, key: &Tensor) -> Result<()> {
    let (place, beside) = (tensor.device().location(), key.device().location());
    if place != beside {
        bail!("{name}: on {place:?}, but key_cache is on {beside:?}")
    }
    let (storage, layout) = tensor.storage_and_layout();
    let elements = match &*storage {
        Storage::Cpu(storage) => storage_len(storage)?,
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => crate::cuda::elements(storage),
        _ => bail!("{op}: this build has no kernel for {place:?} ({name} is there)"),
    };
    Meta { dtype: tensor.dtype(), layout }.check_bounds(name, elements)?;
    let mut axes: Vec<(usize, usize)> =
        layout.stride().iter().copied().zip(layout.dims().iter().copied()).filter(|&(_, n)| n > 1).collect();
    axes.sort_unstable();
    let mut span = 1;
    for (stride, size) in axes {
        if stride < span {
            bail!("{name}: elements of {:?} with strides {:?} share memory", layout.dims(), layout.stride())
        }
        span += stride * (size - 1);
    }
    Ok(())
}

/// Refuses a layout that reaches past its storage.
pub(crate) fn check_bounds(name: &str, storage: &CpuStorage, layout: &Layout) -> Result<()> {
    Meta::of(storage, layout).check_bounds(name, storage_len(storage)?)
}

fn storage_len(storage: &CpuStorage) -> Result<usize> {
    Ok(match storage {
        CpuStorage::U8(data) => data.len(),
        CpuStorage::F8E4M3(data) => data.len(),
        CpuStorage::F16(data) => data.len(),
        CpuStorage::BF16(data) => data.len(),
        CpuStorage::F32(data) => data.len(),
        CpuStorage::I64(data) => data.len(),
        CpuStorage::U32(data) => data.len(),
        CpuStorage::I32(data) => data.len(),
        other => bail!("dtype {:?} is not one a cache or its input has", candle::backend::BackendStorage::dtype(other)),
    })
}

/// Whether `storage` is the one behind `tensor`.
pub(crate) fn shares_storage<S: Lent>(tensor: &Tensor, storage: &S) -> bool {
    S::of(&tensor.storage_and_layout().0).is_some_and(|own| std::ptr::eq(own, storage))
}

/// A device's storage, as candle lends it to an op.
pub(crate) trait Lent: Sized {
    fn of(storage: &Storage) -> Option<&Self>;
}

impl Lent for CpuStorage {
    fn of(storage: &Storage) -> Option<&Self> {
        match storage {
            Storage::Cpu(storage) => Some(storage),
            _ => None,
        }
    }
}

#[cfg(feature = "cuda")]
impl Lent for candle::CudaStorage {
    fn of(storage: &Storage) -> Option<&Self> {
        match storage {
            Storage::Cuda(storage) => Some(storage),
            _ => None,
        }
    }
}
