//! [`reshape_and_cache`]: scatter new tokens into their slots.

use candle::{CpuStorage, InplaceOp1, Layout, Result, Storage, Tensor, bail};

use super::form::{LayerForm, Lent, Side, shares_storage};
use super::rows::{Source, StoredRows, encode, put_row};
use super::{CacheDims, CacheLayout, KvDtype, KvStrides, LayerCache, MXFP4_BLOCK};
use crate::op::locks::Locks;

const OP: &str = "reshape_and_cache";

/// Writes new tokens' `k` and `v` `[tokens, kv_heads, head_dim]` (F32, F16 or BF16, head_dim contiguous, other strides free) into a layer.
///
/// Token i goes to slot `slot_mapping[i]` (I64 `[tokens]`): page `slot / page_size`, offset `slot % page_size`; a negative slot skips the
/// token. Where a slot comes twice, the later token is what stays.
///
/// Any of the input dtypes goes into any KV dtype, rounded to nearest even. The scales of `cache` say how it is quantized:
/// - none or one factor: stored = value / factor; FP8 saturates at ±448 × factor;
/// - F32 `[pages, kv_heads, page_size]` (FP8): the token's scale becomes its largest magnitude / 448 (1 for zeros) and is written too;
/// - U8 `[pages, kv_heads, page_size, head_dim / 32]` (MXFP4): each block's E8M0 scale is written too.
///
/// What is not finite is not hidden where scales are chosen here: a NaN reads back as NaN (with its whole block in MXFP4), an infinity
/// turns its token (FP8) or block (MXFP4) into NaN. With a given factor FP8 saturates infinities.
///
/// Cache tensors may be strided views (K and V of one `[pages, 2, ..]` tensor). Everything is checked before the first byte is written:
/// shapes, dtypes, slots, and that k, v share no storage with the cache; on an error the cache is as it was.
///
/// On a CUDA device k, v and the cache are there; the slots are too, or on the CPU. Slots there are read back and checked in debug builds, but never
/// while a graph is captured; one past the cache is skipped. The write is enqueued, and nothing waits for it.
pub fn reshape_and_cache(k: &Tensor, v: &Tensor, slot_mapping: &Tensor, cache: &LayerCache, layout: CacheLayout) -> Result<()> {
    let locks = Locks::new([k, v]);
    match (locks.get(0), locks.get(1)) {
        (Storage::Cpu(k_data), Storage::Cpu(v_data)) => {
            reshape_and_cache_storage((k_data, k.layout()), (v_data, v.layout()), slot_mapping, cache, layout)
        }
        #[cfg(feature = "cuda")]
        (Storage::Cuda(k_data), Storage::Cuda(v_data)) => {
            let (k, v) = ((k_data, k.layout()), (v_data, v.layout()));
            crate::cuda::CacheWrite::new(k, v, slot_mapping, cache, layout, cfg!(debug_assertions))?.run()
        }
        _ => bail!("{OP}: k is on {:?}, v on {:?}; this build has no kernel for that", k.device().location(), v.device().location()),
    }
}

/// [`reshape_and_cache`] from inside an op, where candle has lent the storages of k and v.
pub(crate) fn reshape_and_cache_storage(
    (k, k_layout): (&CpuStorage, &Layout),
    (v, v_layout): (&CpuStorage, &Layout),
    slot_mapping: &Tensor,
    cache: &LayerCache,
    layout: CacheLayout,
) -> Result<()> {
    let form = LayerForm::of(OP, cache, layout)?;
    if !cache.key.device().is_cpu() {
        bail!("k: on the CPU, but key_cache is on {:?}", cache.key.device().location())
    }
    check_apart(&form, [k, v])?;
    let (k, v, slots) = check_tokens((k, k_layout), (v, v_layout), slot_mapping, form.dims)?;
    let (k, v) = (encode(&k, form.dtype, &form.key.scale), encode(&v, form.dtype, &form.value.scale));
    scatter_side(&form, &form.key, &k, &slots)?;
    scatter_side(&form, &form.value, &v, &slots)
}

/// Refuses k and v that share their storage with the cache.
pub(crate) fn check_apart<S: Lent>(form: &LayerForm<'_>, [k, v]: [&S; 2]) -> Result<()> {
    for (tensor, cache) in form.tensors() {
        for (name, storage) in [("k", k), ("v", v)] {
            if shares_storage(cache, storage) {
                bail!("{name}: shares its storage with {tensor}, which is to be written; pass a copy")
            }
        }
    }
    Ok(())
}

/// New tokens that fit a cache of `dims`: k, v, and a slot for each.
pub(crate) fn check_tokens<'a>(
    (k, k_layout): (&'a CpuStorage, &Layout),
    (v, v_layout): (&'a CpuStorage, &Layout),
    slot_mapping: &Tensor,
    dims: CacheDims,
) -> Result<(Source<'a>, Source<'a>, Vec<i64>)> {
    let (k, v) = (Source::new("k", k, k_layout, dims)?, Source::new("v", v, v_layout, dims)?);
    check_as_many(k.tokens, v.tokens)?;
    let slots = checked_slots(slot_mapping, k.tokens, dims)?;
    Ok((k, v, slots))
}

/// Refuses another number of tokens in v than in k.
pub(crate) fn check_as_many(k: usize, v: usize) -> Result<()> {
    if k != v {
        bail!("v: {v} tokens beside k's {k}")
    }
    Ok(())
}

/// Where a slot comes twice, the later token is what stays: the earlier ones are skipped, where all are written at once.
#[cfg(any(feature = "rocm", feature = "cuda"))]
pub(crate) fn last_writes(mut slots: Vec<i64>) -> Vec<i64> {
    let last: std::collections::HashMap<i64, usize> = slots.iter().copied().enumerate().map(|(token, slot)| (slot, token)).collect();
    for (token, slot) in slots.iter_mut().enumerate() {
        if last.get(slot) != Some(&token) {
            *slot = -1;
        }
    }
    slots
}

/// The slots, each negative or within the cache.
pub(crate) fn checked_slots(slot_mapping: &Tensor, tokens: usize, dims: CacheDims) -> Result<Vec<i64>> {
    if !slot_mapping.device().is_cpu() || slot_mapping.dtype() != candle::DType::I64 || slot_mapping.dims() != [tokens] {
        let (shape, dtype) = (slot_mapping.dims(), slot_mapping.dtype());
        bail!(
            "slot_mapping: I64 [{tokens}] on the CPU (one slot a token of k), got {dtype:?} {shape:?} on {:?}",
            slot_mapping.device().location()
        )
    }
    let slots = slot_mapping.to_vec1::<i64>()?;
    let limit = dims.pages * dims.page_size;
    for (token, &slot) in slots.iter().enumerate() {
        if usize::try_from(slot).is_ok_and(|slot| slot >= limit) {
            bail!("slot_mapping: slot {slot} of token {token} in a cache of {limit} slots ({} pages of {})", dims.pages, dims.page_size)
        }
    }
    Ok(slots)
}

fn scatter_side(form: &LayerForm, side: &Side, rows: &StoredRows, slots: &[i64]) -> Result<()> {
    let CacheDims { page_size, kv_heads: heads, head_dim, .. } = form.dims;
    let width = if form.dtype == KvDtype::Mxfp4 { head_dim / 2 } else { head_dim };
    side.cache.inplace_op1(&Scatter { rows: &rows.values, width, slots, page_size, heads, strides: side.strides })?;
    if let (Some(scales), Some(rows)) = (side.scale.paged(), &rows.scales) {
        let width = if form.dtype == KvDtype::Mxfp4 { head_dim / MXFP4_BLOCK } else { 1 };
        let strides = KvStrides::of_scale(scales.layout());
        scales.inplace_op1(&Scatter { rows, width, slots, page_size, heads, strides })?;
    }
    Ok(())
}

/// Puts rows `[tokens, heads, width]` to the slots of one tensor of the same dtype.
struct Scatter<'a> {
    rows: &'a CpuStorage,
    width: usize,
    slots: &'a [i64],
    page_size: usize,
    heads: usize,
    strides: KvStrides,
}

impl Scatter<'_> {
    fn run<T: Copy>(&self, rows: &[T], cache: &mut [T]) {
        let tokens = rows.chunks_exact(self.heads * self.width);
        for (&slot, token) in self.slots.iter().zip(tokens) {
            let Ok(slot) = usize::try_from(slot) else { continue };
            for (head, row) in token.chunks_exact(self.width).enumerate() {
                put_row(cache, &self.strides, (slot / self.page_size, head, slot % self.page_size), row);
            }
        }
    }
}

impl InplaceOp1 for Scatter<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, cache: &mut CpuStorage, _: &Layout) -> Result<()> {
        match (self.rows, cache) {
            (CpuStorage::F32(rows), CpuStorage::F32(cache)) => self.run(rows, cache),
            (CpuStorage::F16(rows), CpuStorage::F16(cache)) => self.run(rows, cache),
            (CpuStorage::BF16(rows), CpuStorage::BF16(cache)) => self.run(rows, cache),
            (CpuStorage::F8E4M3(rows), CpuStorage::F8E4M3(cache)) => self.run(rows, cache),
            (CpuStorage::U8(rows), CpuStorage::U8(cache)) => self.run(rows, cache),
            _ => bail!("{OP}: a cache tensor changed its dtype"),
        }
        Ok(())
    }
}

#[cfg(all(test, any(feature = "rocm", feature = "cuda")))]
mod tests {
    use super::last_writes;

    #[test]
    fn the_last_of_equal_slots_is_written() {
        assert_eq!(last_writes(vec![3, 5, 3, -1, 5, 7, -1]), [-1, -1, 3, -1, 5, 7, -1]);
    }
}
