//! What the macros that kernels are specialized by are called and numbered, on every GPU.

use candle::{DType, Result, bail};

use crate::cache::CacheLayout;
use crate::registry::ScaleMode;

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
