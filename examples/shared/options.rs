//! Values of command-line options that several examples take.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use clap::ValueEnum;
use serde::Deserialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvArg {
    F32,
    F16,
    Bf16,
    Fp8,
    Mxfp4,
}

impl From<KvArg> for KvDtype {
    fn from(kv: KvArg) -> Self {
        match kv {
            KvArg::F32 => Self::F32,
            KvArg::F16 => Self::F16,
            KvArg::Bf16 => Self::Bf16,
            KvArg::Fp8 => Self::Fp8,
            KvArg::Mxfp4 => Self::Mxfp4,
        }
    }
}

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
