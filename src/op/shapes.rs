//! What can be checked of a call from shapes and dtypes alone.

use candle::{DType, Layout, Result, bail};

use super::call::{Call, Meta};
use crate::cache::{CacheDims, KvDtype};
use crate::options::{DecodeOptions, KvScale};
use crate::registry::ScaleMode;

/// Heads are of a multiple of 8 channels, at most so many.
pub(crate) const MAX_HEAD_DIM: usize = 1024;
/// Most tokens of a page.
pub(crate) const MAX_PAGE_SIZE: usize = 1024;

/// Caps `c` for which both `c` and `1 / c` keep their accuracy in f32.
const SOFTCAPS: std::ops::RangeInclusive<f32> = 1e-30..=1e30;

type Options<'a> = DecodeOptions<Meta<'a>, ()>;

/// The sizes of a call whose shapes and dtypes agree.
#[derive(Clone, Debug)]
pub(crate) struct Shapes {
    /// Rows of q: `batch * query_len`, or the sum of a ragged batch's query lengths.
    pub rows: usize,
    pub q_heads: usize,
    pub q_dtype: DType,
    pub dims: CacheDims,
    pub kv_dtype: KvDtype,
    pub batch: usize,
    pub max_pages: usize,
    pub per_head: bool,
    pub scales: ScaleMode,
    pub softmax_scale: f32,
}

impl Shapes {
    /// Checks everything that needs no tensor contents.
    pub fn new(call: &Call<'_>) -> Result<Self> {
        let options = &call.options;
        let (dims, kv_dtype) = cache_dims(call.key, call.value, options)?;
        let (rows, q_heads, query_batch) = query_dims(call.q, dims, kv_dtype)?;
        let (batch, max_pages, per_head) = table_dims(call.block_tables, call.context_lens, dims)?;
        check_batch(rows, query_batch, batch, call.q.layout, options)?;
        let scales = check_scales(kv_dtype, dims, options)?;
        let softmax_scale = check_scores(q_heads, dims.head_dim, options)?;
        Ok(Self { rows, q_heads, q_dtype: call.q.dtype, dims, kv_dtype, batch, max_pages, per_head, scales, softmax_scale })
    }

    /// Tokens that a row of the block table has room for.
    #[cfg(any(feature = "rocm", feature = "nvrtc"))]
    pub fn table_tokens(&self) -> usize {
        self.max_pages.saturating_mul(self.dims.page_size)
    }

    /// Rows of a plan: sequences, or where every KV head has a block table of its own, (sequence, KV head) pairs.
    #[cfg(any(feature = "rocm", feature = "nvrtc"))]
    pub fn plan_rows(&self) -> usize {
        self.batch * self.rows_of_a_sequence()
    }

    /// Plan rows of a sequence.
    pub fn rows_of_a_sequence(&self) -> usize {
        if self.per_head { self.dims.kv_heads } else { 1 }
    }

    /// KV heads that run the tasks of a plan row.
    pub fn heads_of_a_row(&self) -> usize {
        if self.per_head { 1 } else { self.dims.kv_heads }
    }

    /// Query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.q_heads / self.dims.kv_heads
    }
}

fn cache_dims(key: Meta<'_>, value: Meta<'_>, options: &Options<'_>) -> Result<(CacheDims, KvDtype)> {
    let kv_dtype = KvDtype::of(key.dtype)?;
    if value.dtype != key.dtype {
        bail!("value_cache: dtype {:?} differs from key_cache's {:?}", value.dtype, key.dtype)
    }
    let layout = options.layout;
    let dims = layout.dims_of_key(key.layout.dims(), kv_dtype)?;
    let CacheDims { page_size, kv_heads, head_dim, .. } = dims;
    if head_dim == 0 || head_dim > MAX_HEAD_DIM || !head_dim.is_multiple_of(8) {
        bail!("key_cache: head_dim {head_dim} is not a multiple of 8 from 8 to {MAX_HEAD_DIM} (shape {:?})", key.layout.dims())
    }
    if page_size == 0 || page_size > MAX_PAGE_SIZE {
        bail!("key_cache: page size {page_size} is not from 1 to {MAX_PAGE_SIZE} (shape {:?})", key.layout.dims())
    }
    if kv_heads == 0 {
        bail!("key_cache: 0 KV heads (shape {:?})", key.layout.dims())
    }
    layout.check(dims, kv_dtype)?;
    let expected = layout.value_shape(dims, kv_dtype);
    if value.layout.dims() != expected {
        bail!(
            "value_cache: shape {:?}, but a {} cache whose key_cache is {:?} needs {expected:?} (K and V head dims must be equal)",
            value.layout.dims(),
            layout.name(),
            key.layout.dims()
        )
    }
    for (name, meta) in [("key_cache", key), ("value_cache", value)] {
        check_last_contiguous(name, meta.layout)?;
    }
    Ok((dims, kv_dtype))
}

/// Rows, query heads and, for a 4-D q, its batch.
fn query_dims(q: Meta<'_>, dims: CacheDims, kv_dtype: KvDtype) -> Result<(usize, usize, Option<usize>)> {
    check_query_dtype("q", q.dtype)?;
    let (rows, q_heads, head_dim, batch) = match *q.layout.dims() {
        [rows, heads, d] => (rows, heads, d, None),
        [batch, len, heads, d] => match batch.checked_mul(len) {
            Some(rows) => (rows, heads, d, Some(batch)),
            None => bail!("q: shape {:?} overflows", q.layout.dims()),
        },
        _ => bail!("q: expected [rows, q_heads, head_dim] or [batch, query_len, q_heads, head_dim], got {:?}", q.layout.dims()),
    };
    if head_dim != dims.head_dim {
        let bytes = if kv_dtype == KvDtype::Mxfp4 { " (a U8 cache is MXFP4, two channels a byte; FP8 is F8E4M3)" } else { "" };
        bail!("q: head_dim {head_dim} differs from the cache's {}{bytes}", dims.head_dim)
    }
    if q_heads == 0 || !q_heads.is_multiple_of(dims.kv_heads) {
        bail!(
            "q: {q_heads} query heads are not a multiple of the cache's {} KV heads (q's shape {:?}, read as [.., q_heads, head_dim]; the call's \
             layout says which dimension of the cache its heads are)",
            dims.kv_heads,
            q.layout.dims()
        )
    }
    let bytes = [rows, q_heads, head_dim, size_of::<f32>()].into_iter().try_fold(1usize, usize::checked_mul);
    if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
        bail!("q: shape {:?} passes the address space", q.layout.dims())
    }
    check_last_contiguous("q", q.layout)?;
    Ok((rows, q_heads, batch))
}

/// Refuses what q (and so the output) cannot be.
pub(crate) fn check_query_dtype(name: &str, dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        other => bail!("{name}: dtype {other:?} is not F32, F16 or BF16"),
    }
}

/// Refuses an output that is not of q's shape and dtype, or cannot be written row by row.
pub(crate) fn check_output(out: Meta<'_>, q: Meta<'_>) -> Result<()> {
    if out.layout.dims() != q.layout.dims() || out.dtype != q.dtype {
        bail!("out: {:?} {:?}, but q is {:?} {:?}", out.dtype, out.layout.dims(), q.dtype, q.layout.dims())
    }
    check_last_contiguous("out", out.layout)?;
    if out.layout.has_internal_overlap() {
        bail!("out: elements of {:?} with strides {:?} share memory", out.layout.dims(), out.layout.stride())
    }
    Ok(())
}

/// Refuses a tensor whose last dim is strided.
pub(crate) fn check_last_contiguous(name: &str, layout: &Layout) -> Result<()> {
    match (layout.dims().last(), layout.stride().last()) {
        (Some(&n), Some(&stride)) if n > 1 && stride != 1 => {
            bail!("{name}: the last dim is contiguous, got {:?} with strides {:?}", layout.dims(), layout.stride())
        }
        _ => Ok(()),
    }
}

/// Batch, pages a table row, and whether every KV head has its own table.
fn table_dims(block_tables: Meta<'_>, context_lens: Meta<'_>, dims: CacheDims) -> Result<(usize, usize, bool)> {
    for (name, tensor) in [("block_tables", block_tables), ("context_lens", context_lens)] {
        if !matches!(tensor.dtype, DType::U32 | DType::I32) {
            bail!("{name}: dtype {:?} is not U32 or I32", tensor.dtype)
        }
    }
    let kv_heads = dims.kv_heads;
    let (batch, max_pages, per_head) = match *block_tables.dims() {
        [batch, pages] => (batch, pages, false),
        [batch, heads, pages] if heads == kv_heads => (batch, pages, true),
        _ => bail!("block_tables: expected [batch, max_pages] or [batch, {kv_heads} KV heads, max_pages], got {:?}", block_tables.dims()),
    };
    let expected = if per_head { vec![batch, kv_heads] } else { vec![batch] };
    if context_lens.dims() != expected {
        bail!("context_lens: shape {:?}, but block_tables {:?} needs {expected:?}", context_lens.dims(), block_tables.dims())
    }
    Ok((batch, max_pages, per_head))
}

fn check_batch(rows: usize, query_batch: Option<usize>, batch: usize, q: &Layout, options: &Options<'_>) -> Result<()> {
    if let Some(start) = &options.query_start {
        if query_batch.is_some() {
            bail!(
                "q: shape {:?}; where sequences have query lengths of their own (query_start, a pool's batch) it is [rows, q_heads, head_dim]",
                q.dims()
            )
        }
        if !matches!(start.dtype, DType::U32 | DType::I32) || start.dims() != [batch + 1] {
            bail!("query_start: expected U32 or I32 [{}], got {:?} {:?}", batch + 1, start.dtype, start.dims())
        }
        return Ok(());
    }
    match query_batch {
        Some(b) if b != batch => bail!("q: batch {b} (shape {:?}), but block_tables has {batch} rows", q.dims()),
        None if batch == 0 && rows != 0 => bail!("q: {rows} rows for an empty batch"),
        None if batch != 0 && !rows.is_multiple_of(batch) => {
            bail!("q: {rows} rows are not a multiple of the batch {batch}; a ragged batch needs query_start")
        }
        _ => Ok(()),
    }
}

fn check_scales(kv_dtype: KvDtype, dims: CacheDims, options: &Options<'_>) -> Result<ScaleMode> {
    let k = scale_mode("k_scale", &options.k_scale, kv_dtype, dims)?;
    let v = scale_mode("v_scale", &options.v_scale, kv_dtype, dims)?;
    // A cache with one side per token takes the per-token kernels; the other side's scale is broadcast.
    Ok(match (k, v) {
        (ScaleMode::PerToken, _) | (_, ScaleMode::PerToken) => ScaleMode::PerToken,
        (ScaleMode::Scalar, _) | (_, ScaleMode::Scalar) => ScaleMode::Scalar,
        (mode, _) => mode,
    })
}

fn scale_mode(name: &str, scale: &KvScale<Meta<'_>>, kv_dtype: KvDtype, dims: CacheDims) -> Result<ScaleMode> {
    let CacheDims { pages, page_size, kv_heads, head_dim } = dims;
    let mode = match scale {
        KvScale::None => ScaleMode::None,
        KvScale::Scalar(value) if !value.is_finite() => bail!("{name}: {value} is not finite"),
        KvScale::Scalar(_) => ScaleMode::Scalar,
        KvScale::Tensor(t) if t.dtype == DType::F32 && t.layout.shape().elem_count() == 1 && kv_dtype != KvDtype::Mxfp4 => {
            ScaleMode::Scalar
        }
        KvScale::Tensor(t) if t.dtype == DType::F32 && t.dims() == [pages, kv_heads, page_size] => ScaleMode::PerToken,
        KvScale::Tensor(t) if t.dtype == DType::U8 && t.dims() == [pages, kv_heads, page_size, head_dim / 32] => {
            check_last_contiguous(name, t.layout)?;
            ScaleMode::Block
        }
        KvScale::Tensor(t) => bail!(
            "{name}: {:?} {:?} is neither one F32, nor F32 {:?} (per token), nor U8 {:?} (E8M0 blocks)",
            t.dtype,
            t.dims(),
            [pages, kv_heads, page_size],
            [pages, kv_heads, page_size, head_dim / 32]
        ),
    };
    match (kv_dtype, mode) {
        (KvDtype::Fp8, ScaleMode::None | ScaleMode::Scalar | ScaleMode::PerToken) | (KvDtype::Mxfp4, ScaleMode::Block) => Ok(mode),
        (KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16, ScaleMode::None) => Ok(mode),
        (KvDtype::Mxfp4, _) => bail!("{name}: an MXFP4 cache needs U8 E8M0 scales [pages, kv_heads, page_size, head_dim/32]"),
        (KvDtype::Fp8, _) => bail!("{name}: an FP8 cache takes no E8M0 block scales"),
        _ => bail!("{name}: a {kv_dtype:?} cache holds values as they are; only FP8 and MXFP4 caches have scales (KvScale::None here)"),
    }
}

/// Checks the score options; gives the softmax scale.
fn check_scores(q_heads: usize, head_dim: usize, options: &Options<'_>) -> Result<f32> {
    let scale = options.softmax_scale.unwrap_or(1.0 / (head_dim as f32).sqrt());
    let k_scale = if let KvScale::Scalar(k_scale) = options.k_scale { k_scale } else { 1.0 };
    if !(scale * k_scale * std::f32::consts::LOG2_E).is_finite() {
        bail!("softmax_scale: {scale} (times a k_scale of {k_scale}) is not finite, or so large that scores are not")
    }
    if options.window == Some(0) {
        bail!("window: 0 tokens; a window has at least 1")
    }
    if let Some(cap) = options.softcap
        && !SOFTCAPS.contains(&cap)
    {
        bail!("softcap: {cap} is not from {:e} to {:e}", SOFTCAPS.start(), SOFTCAPS.end())
    }
    if options.max_partitions == Some(0) {
        bail!("max_partitions: 0; a sequence has at least 1")
    }
    if options.workgroup_budget == Some(0) {
        bail!("workgroup_budget: 0; a plan has at least 1 slot")
    }
    if let Some(sinks) = &options.sinks
        && (sinks.dtype != DType::F32 || sinks.dims() != [q_heads])
    {
        bail!("sinks: expected F32 [{q_heads}], got {:?} {:?}", sinks.dtype, sinks.dims())
    }
    Ok(scale)
}
