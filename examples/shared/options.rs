//! Values of command-line options that several examples take.

use candle::DType;
use candle_paged_attn::cache::CacheLayout;
use clap::ValueEnum;
use serde::Deserialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueryArg {
    Bf16,
    F16,
    F32,
}

impl From<QueryArg> for DType {
    fn from(query: QueryArg) -> Self {
        match query {
            QueryArg::Bf16 => Self::BF16,
            QueryArg::F16 => Self::F16,
            QueryArg::F32 => Self::F32,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScalesArg {
    None,
    Scalar,
    PerToken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayoutArg {
    Nhd,
    Hnd,
    Vllm,
    Shuffled,
}

impl From<LayoutArg> for CacheLayout {
    fn from(layout: LayoutArg) -> Self {
        match layout {
            LayoutArg::Nhd => Self::Nhd,
            LayoutArg::Hnd => Self::Hnd,
            LayoutArg::Vllm => Self::Vllm,
            LayoutArg::Shuffled => Self::Shuffled,
        }
    }
}
