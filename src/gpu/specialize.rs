//! What specializations have in common on every GPU: how macros are called and numbered, the planner, the cache writes. Pure.

use candle::{DType, Result, bail};

use crate::cache::{CacheLayout, KvDtype};
use crate::jit::{Source, Specialization};
use crate::plan::{PlannerBlock, Split};
use crate::registry::{Arch, ArchName, ScaleMode};

pub(crate) fn defines(numbers: &[(&str, usize)], switches: &[(&str, bool)]) -> Vec<(String, String)> {
    let switches = switches.iter().map(|&(name, on)| (name, usize::from(on)));
    numbers.iter().copied().chain(switches).map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

pub(crate) fn mark(on: bool, mark: &str) -> &str {
    if on { mark } else { "" }
}

/// Number and name of q's (or the output's, or new k's and v's) dtype.
fn query(dtype: DType) -> Result<(usize, &'static str)> {
    match dtype {
        DType::BF16 => Ok((0, "bf16")),
        DType::F16 => Ok((1, "f16")),
        DType::F32 => Ok((2, "f32")),
        other => bail!("q: dtype {other:?} is not F32, F16 or BF16"),
    }
}

pub(crate) fn query_code(dtype: DType) -> Result<usize> {
    query(dtype).map(|(code, _)| code)
}

pub(crate) fn query_name(dtype: DType) -> Result<&'static str> {
    query(dtype).map(|(_, name)| name)
}

pub(crate) fn scales_code(scales: ScaleMode) -> usize {
    match scales {
        ScaleMode::None => 0,
        ScaleMode::Scalar => 1,
        ScaleMode::PerToken => 2,
        ScaleMode::Block => 3,
    }
}

pub(crate) fn layout_code(layout: CacheLayout) -> usize {
    match layout {
        CacheLayout::Shuffled => 0,
        CacheLayout::Vllm => 1,
        CacheLayout::Nhd => 2,
        CacheLayout::Hnd => 3,
    }
}

pub(crate) fn kv_code(kv: KvDtype) -> usize {
    match kv {
        KvDtype::Bf16 => 0,
        KvDtype::F16 => 1,
        KvDtype::Fp8 => 2,
        KvDtype::Mxfp4 => 3,
        KvDtype::F32 => 4,
    }
}

pub(crate) fn specialization(arch: ArchName, source: Source, kernel: String, defines: Vec<(String, String)>) -> Specialization {
    Specialization { arch, source, kernel, defines, options: vec![] }
}

/// The device planner for `rows` plan rows.
///
/// Errors: more rows than a block has LDS (shared memory) for; such a batch is planned on the host.
pub fn plan(arch: &Arch, rows: usize, ragged: bool) -> Result<Specialization> {
    let PlannerBlock { bucket, .. } = PlannerBlock::new(rows, arch)?;
    let min_max = Split::of(rows, arch) == Split::MinMax;
    let split = if min_max { "minmax" } else { "proportional" };
    let kernel = format!("pa_plan_r{bucket}_{split}{}", mark(ragged, "_ragged"));
    let defines =
        defines(&[("PA_BUCKET", bucket), ("PA_TILE", arch.name.tile_tokens())], &[("PA_MIN_MAX", min_max), ("PA_RAGGED", ragged)]);
    Ok(specialization(arch.name, Source::Plan, kernel, defines))
}

/// What a kernel that writes new tokens into their pages is specialized on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WriteKey {
    /// What it runs on.
    pub arch: ArchName,
    /// Channels of a head.
    pub head_dim: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Dtype of the new k and v.
    pub dtype: DType,
    /// What the cache stores.
    pub kv_dtype: KvDtype,
    /// How its elements are scaled.
    pub scales: ScaleMode,
    /// Where it stores them.
    pub layout: CacheLayout,
}

/// The kernel that writes new tokens into their pages; what a backend does not write it has refused.
pub(crate) fn write(key: &WriteKey) -> Result<Specialization> {
    let WriteKey { arch, head_dim, page_size, dtype, kv_dtype, scales, layout } = *key;
    // As for the tile, an FP8 cache without scales has scalar ones of 1.
    let scales = if kv_dtype == KvDtype::Fp8 { scales.max(ScaleMode::Scalar) } else { scales };
    let scaled = match scales {
        ScaleMode::Scalar => "_scalar",
        ScaleMode::PerToken => "_token",
        ScaleMode::None | ScaleMode::Block => "",
    };
    let (kv, query) = (kv_dtype.name(), query_name(dtype)?);
    let kernel = format!("pa_write_{kv}_d{head_dim}_p{page_size}_{query}{scaled}_{}", layout.name());
    let number = [
        ("PA_HEAD_DIM", head_dim),
        ("PA_PAGE", page_size),
        ("PA_QUERY", query_code(dtype)?),
        ("PA_KV", kv_code(kv_dtype)),
        ("PA_SCALES", scales_code(scales)),
        ("PA_LAYOUT", layout_code(layout)),
    ];
    Ok(specialization(arch, Source::Write, kernel, defines(&number, &[])))
}
