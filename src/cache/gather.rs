//! [`gather`]: a sequence's pages back to contiguous values.

use candle::{CpuStorage, Result, Storage, Tensor, bail};
use rayon::prelude::*;

use super::form::{LayerForm, ScaleForm, Side};
use super::rows::take_row;
use super::{CacheDims, CacheLayout, KvStrides, LayerCache, MXFP4_BLOCK};
use crate::quant::{fp8, mxfp4};

const OP: &str = "gather";

/// The first `len` tokens of `pages` (page ids in token order) as contiguous F32 k and v `[len, kv_heads, head_dim]`, scales applied.
///
/// Page ids that hold none of the first `len` tokens are not looked at. K and v are on the CPU; a cache on a GPU is waited for.
pub fn gather(cache: &LayerCache, layout: CacheLayout, pages: &[u32], len: usize) -> Result<(Tensor, Tensor)> {
    #[cfg(feature = "cuda")]
    if cache.key.device().is_cuda() {
        let needed = needed_pages(LayerForm::of(OP, cache, layout)?.dims, pages, len)?;
        let copy = crate::cuda::read_pages(cache, needed)?;
        let ids: Vec<u32> = (0..needed.len() as u32).collect();
        return gather_as(&copy, layout, &ids, len, fp8::decode_e4m3);
    }
    gather_as(cache, layout, pages, len, fp8::decode_e4m3)
}

/// [`gather`] of a cache whose FP8 codes mean what `fp8` says.
pub(crate) fn gather_as(
    cache: &LayerCache,
    layout: CacheLayout,
    pages: &[u32],
    len: usize,
    fp8: fn(u8) -> f32,
) -> Result<(Tensor, Tensor)> {
    let form = LayerForm::of(OP, cache, layout)?;
    let pages = needed_pages(form.dims, pages, len)?;
    Ok((gather_side(&form, &form.key, pages, len, fp8)?, gather_side(&form, &form.value, pages, len, fp8)?))
}

/// The ids that hold the first `len` tokens, each within the cache.
pub(crate) fn needed_pages(dims: CacheDims, pages: &[u32], len: usize) -> Result<&[u32]> {
    let CacheDims { pages: limit, page_size, .. } = dims;
    let needed = len.div_ceil(page_size);
    let Some(pages) = pages.get(..needed) else {
        bail!("pages: {len} tokens are {needed} pages of {page_size}, got {} page ids", pages.len())
    };
    if let Some((at, page)) = pages.iter().enumerate().find(|&(_, &page)| page as usize >= limit) {
        bail!("pages: page id {page} at index {at} in a cache of {limit} pages")
    }
    Ok(pages)
}

fn gather_side(form: &LayerForm, side: &Side, pages: &[u32], len: usize, fp8: fn(u8) -> f32) -> Result<Tensor> {
    let CacheDims { page_size, kv_heads, head_dim, .. } = form.dims;
    let (cache, _) = side.cache.storage_and_layout();
    let scales = side.scale.paged().map(Tensor::storage_and_layout);
    let scales = match &scales {
        None => None,
        Some((storage, layout)) => Some((cpu(storage)?, KvStrides::of_scale(layout))),
    };
    let reader = Reader { cache: cpu(&cache)?, strides: side.strides, scale: &side.scale, scales, fp8 };
    let mut out = vec![0f32; len * kv_heads * head_dim];
    out.par_chunks_exact_mut(kv_heads * head_dim).enumerate().with_min_len(16).for_each(|(token, out)| {
        let page = pages[token / page_size] as usize;
        for (head, row) in out.chunks_exact_mut(head_dim).enumerate() {
            reader.read((page, head, token % page_size), row);
        }
    });
    Tensor::from_vec(out, (len, kv_heads, head_dim), &candle::Device::Cpu)
}

fn cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!("{OP}: there is no kernel for devices other than the CPU yet"),
    }
}

/// Decodes rows of one side.
struct Reader<'a> {
    cache: &'a CpuStorage,
    strides: KvStrides,
    scale: &'a ScaleForm<'a>,
    scales: Option<(&'a CpuStorage, KvStrides)>,
    fp8: fn(u8) -> f32,
}

impl Reader<'_> {
    fn read(&self, at: (usize, usize, usize), out: &mut [f32]) {
        match self.cache {
            CpuStorage::F32(cache) => take_row(cache, &self.strides, at, out),
            CpuStorage::F16(cache) => self.decode(cache, at, out, half::f16::to_f32),
            CpuStorage::BF16(cache) => self.decode(cache, at, out, half::bf16::to_f32),
            CpuStorage::F8E4M3(cache) => self.decode(cache, at, out, |code| (self.fp8)(code.to_bits())),
            CpuStorage::U8(cache) => return self.read_blocks(cache, at, out),
            _ => unreachable!("LayerForm admits KV dtypes only"),
        }
        let factor = match (self.scale, self.scales) {
            (ScaleForm::Factor(factor), _) => *factor,
            (_, Some((CpuStorage::F32(scales), strides))) => scales[strides.offset(at.0, at.1, at.2, 0)],
            _ => unreachable!("LayerForm pairs a per-token scale with an F32 tensor"),
        };
        if factor != 1.0 {
            out.iter_mut().for_each(|v| *v *= factor);
        }
    }

    fn decode<T: Copy + Default>(&self, cache: &[T], at: (usize, usize, usize), out: &mut [f32], value: impl Fn(T) -> f32) {
        let mut row = vec![T::default(); out.len()];
        take_row(cache, &self.strides, at, &mut row);
        out.iter_mut().zip(row).for_each(|(out, stored)| *out = value(stored));
    }

    fn read_blocks(&self, cache: &[u8], at: (usize, usize, usize), out: &mut [f32]) {
        let Some((CpuStorage::U8(scales), strides)) = self.scales else { unreachable!("LayerForm pairs an MXFP4 cache with U8 scales") };
        let mut packed = vec![0; out.len() / 2];
        take_row(cache, &self.strides, at, &mut packed);
        let mut block_scales = vec![0; out.len() / MXFP4_BLOCK];
        take_row(scales, &strides, at, &mut block_scales);
        let blocks = out.as_chunks_mut::<MXFP4_BLOCK>().0.iter_mut().zip(packed.as_chunks::<{ mxfp4::BLOCK_BYTES }>().0);
        for ((values, packed), scale) in blocks.zip(block_scales) {
            mxfp4::dequantize_block(packed, scale, values);
        }
    }
}
