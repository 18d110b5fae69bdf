//! The facts of a call that choose its kernel.

use candle::DType;

use crate::cache::{CacheLayout, KvDtype};

/// How FP8 or MXFP4 scales are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleMode {
    None,
    Scalar,
    PerToken,
    Block,
}

/// One call, as numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub page_size: usize,
    /// Most new tokens of any sequence.
    pub query_len: usize,
    pub query_dtype: DType,
    pub kv_dtype: KvDtype,
    pub layout: CacheLayout,
    pub scales: ScaleMode,
    /// Row length of the block table, in pages.
    pub max_pages: usize,
    pub per_head_tables: bool,
    pub ragged: bool,
    pub windowed: bool,
    pub softcap: bool,
    pub sinks: bool,
    pub positive_scale: bool,
    /// Output strides equal the query's.
    pub output_like_query: bool,
    /// Plan-free call: one task a sequence.
    pub plan_free: bool,
    pub max_partitions: Option<usize>,
    /// Slots of the plan.
    pub capacity: usize,
}
