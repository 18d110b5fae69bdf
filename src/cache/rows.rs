//! Rows of head_dim values, to and from what a cache stores.

use candle::{CpuStorage, DType, Layout, Result, bail};
use float8::F8E4M3;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use super::form::{ScaleForm, check_bounds};
use super::{CacheDims, KvDtype, KvStrides, MXFP4_BLOCK};
use crate::op::call::Meta;
use crate::quant::{fp8, mxfp4};

/// Values from which rows are converted on the rayon pool.
const PARALLEL: usize = 1 << 16;

/// Refuses new tokens' k or v (`name`) that does not fit a cache of `dims`; gives how many tokens there are.
pub(crate) fn check_new_tokens(name: &str, rows: Meta<'_>, dims: CacheDims) -> Result<usize> {
    let CacheDims { kv_heads, head_dim, .. } = dims;
    let &[tokens, heads, dim] = rows.dims() else { bail!("{name}: the shape is [tokens, kv_heads, head_dim], got {:?}", rows.dims()) };
    if heads != kv_heads || dim != head_dim {
        bail!("{name}: [tokens, {kv_heads}, {head_dim}] goes with this cache, got {:?}", rows.dims())
    }
    if !matches!(rows.dtype, DType::F32 | DType::F16 | DType::BF16) {
        bail!("{name}: the dtype is F32, F16 or BF16, got {:?}", rows.dtype)
    }
    let stride = rows.layout.stride();
    if stride[2] != 1 && dim > 1 {
        bail!("{name}: head_dim is contiguous, got {:?} with strides {stride:?}", rows.dims())
    }
    Ok(tokens)
}

/// New tokens' k or v `[tokens, kv_heads, head_dim]`, head_dim contiguous.
pub(crate) struct Source<'a> {
    data: SourceData<'a>,
    start: usize,
    token_stride: usize,
    head_stride: usize,
    pub tokens: usize,
    heads: usize,
    head_dim: usize,
}

enum SourceData<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

impl<'a> Source<'a> {
    /// `name` is k or v; refuses what does not fit a cache of `dims`.
    pub fn new(name: &str, storage: &'a CpuStorage, layout: &Layout, dims: CacheDims) -> Result<Self> {
        let CacheDims { kv_heads: heads, head_dim, .. } = dims;
        let tokens = check_new_tokens(name, Meta::of(storage, layout), dims)?;
        let data = match storage {
            CpuStorage::F32(data) => SourceData::F32(data),
            CpuStorage::F16(data) => SourceData::F16(data),
            CpuStorage::BF16(data) => SourceData::Bf16(data),
            _ => unreachable!("check_new_tokens admits F32, F16 and BF16 only"),
        };
        check_bounds(name, storage, layout)?;
        let stride = layout.stride();
        Ok(Self { data, start: layout.start_offset(), token_stride: stride[0], head_stride: stride[1], tokens, heads, head_dim })
    }

    /// Loads row `token * heads + head`.
    fn load(&self, row: usize, out: &mut [f32]) {
        let at = self.start + (row / self.heads) * self.token_stride + (row % self.heads) * self.head_stride;
        let range = at..at + self.head_dim;
        match self.data {
            SourceData::F32(data) => out.copy_from_slice(&data[range]),
            SourceData::F16(data) => data[range].convert_to_f32_slice(out),
            SourceData::Bf16(data) => data[range].convert_to_f32_slice(out),
        }
    }

    /// `width` elements made from each row.
    fn map<T: Copy + Default + Send>(&self, width: usize, convert: impl Fn(usize, &mut [f32], &mut [T]) + Sync) -> Vec<T> {
        let rows = self.tokens * self.heads;
        let mut out = vec![T::default(); rows * width];
        let step = |values: &mut Vec<f32>, (row, out): (usize, &mut [T])| {
            self.load(row, values);
            convert(row, values, out);
        };
        let scratch = || vec![0.0; self.head_dim];
        if rows * self.head_dim < PARALLEL {
            let mut values = scratch();
            out.chunks_exact_mut(width).enumerate().for_each(|row| step(&mut values, row));
        } else {
            out.par_chunks_exact_mut(width).enumerate().with_min_len(16).for_each_init(scratch, step);
        }
        out
    }
}

/// New tokens as a cache stores them.
pub(super) struct StoredRows {
    /// `[tokens, kv_heads, head_dim]` (head_dim / 2 bytes for MXFP4).
    pub values: CpuStorage,
    /// The scales chosen for them, `[tokens, kv_heads]` F32 or `[tokens, kv_heads, head_dim / 32]` E8M0.
    pub scales: Option<CpuStorage>,
}

/// Converts and quantizes.
pub(super) fn encode(source: &Source, dtype: KvDtype, scale: &ScaleForm) -> StoredRows {
    match scale {
        ScaleForm::Factor(factor) => StoredRows { values: encode_values(source, dtype, |_| *factor), scales: None },
        #[cfg(feature = "cuda")]
        ScaleForm::OnDevice(_) => unreachable!("on the CPU a scale of one element is a factor"),
        ScaleForm::PerToken(_) => {
            let scales = source.map(1, |_, values, out| {
                out[0] = fp8::token_scale(values.iter().fold(0.0, |m: f32, v| m.max(v.abs())));
            });
            StoredRows { values: encode_values(source, dtype, |row| scales[row]), scales: Some(CpuStorage::F32(scales)) }
        }
        ScaleForm::Block(_) => {
            let blocks = source.head_dim / MXFP4_BLOCK;
            let scales = source.map(blocks, |_, values, out| {
                for (scale, block) in out.iter_mut().zip(values.as_chunks::<MXFP4_BLOCK>().0) {
                    *scale = mxfp4::block_scale(block);
                }
            });
            let values = source.map(source.head_dim / 2, |row, values, out| {
                let packed = out.as_chunks_mut::<{ mxfp4::BLOCK_BYTES }>().0;
                for ((block, packed), &scale) in values.as_chunks::<MXFP4_BLOCK>().0.iter().zip(packed).zip(&scales[row * blocks..]) {
                    mxfp4::pack_block(block, scale, packed);
                }
            });
            StoredRows { values: CpuStorage::U8(values), scales: Some(CpuStorage::U8(scales)) }
        }
    }
}

/// Rows divided by their factors, in any dtype but MXFP4 (whose scales are not one a row).
fn encode_values(source: &Source, dtype: KvDtype, factor: impl Fn(usize) -> f32 + Sync) -> CpuStorage {
    let width = source.head_dim;
    let divide = |row: usize, values: &mut [f32]| match factor(row) {
        1.0 => {}
        factor => values.iter_mut().for_each(|v| *v /= factor),
    };
    macro_rules! rows {
        ($store:expr) => {
            source.map(width, |row, values, out| {
                divide(row, values);
                $store(values, out)
            })
        };
    }
    match dtype {
        KvDtype::F32 => CpuStorage::F32(rows!(|values: &[f32], out: &mut [f32]| out.copy_from_slice(values))),
        KvDtype::F16 => CpuStorage::F16(rows!(|values: &[f32], out: &mut [f16]| out.convert_from_f32_slice(values))),
        KvDtype::Bf16 => CpuStorage::BF16(rows!(|values: &[f32], out: &mut [bf16]| out.convert_from_f32_slice(values))),
        KvDtype::Fp8 => CpuStorage::F8E4M3(rows!(|values: &[f32], out: &mut [F8E4M3]| {
            for (out, &value) in out.iter_mut().zip(values) {
                *out = F8E4M3::from_bits(fp8::encode_e4m3(value));
            }
        })),
        KvDtype::Mxfp4 => unreachable!("MXFP4 caches have block scales"),
    }
}

/// Puts `row` where the cache keeps (page, head, token).
pub(super) fn put_row<T: Copy>(cache: &mut [T], strides: &KvStrides, (page, head, token): (usize, usize, usize), row: &[T]) {
    for (first, dims, at) in strides.runs(page, head, token, row.len()) {
        let values = &row[first..first + dims];
        if strides.dim == 1 {
            cache[at..at + dims].copy_from_slice(values);
        } else {
            values.iter().enumerate().for_each(|(i, &value)| cache[at + i * strides.dim] = value);
        }
    }
}

/// Reads the row that [`put_row`] put there.
pub(super) fn take_row<T: Copy>(cache: &[T], strides: &KvStrides, (page, head, token): (usize, usize, usize), row: &mut [T]) {
    for (first, dims, at) in strides.runs(page, head, token, row.len()) {
        let values = &mut row[first..first + dims];
        if strides.dim == 1 {
            values.copy_from_slice(&cache[at..at + dims]);
        } else {
            values.iter_mut().enumerate().for_each(|(i, value)| *value = cache[at + i * strides.dim]);
        }
    }
}
