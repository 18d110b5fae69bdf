//! What a caller may ask of a decode call.

use candle::Tensor;

use crate::cache::CacheLayout;
use crate::plan::DecodePlan;

/// The factor from a stored K or V element to its value: `value = stored * scale`.
#[derive(Clone, Debug, Default)]
pub enum KvScale {
    /// Stored values are the values.
    #[default]
    None,
    /// One factor for the whole cache.
    Scalar(f32),
    /// A tensor, told apart by dtype and shape: F32 with one element (one factor for the cache), F32 `[pages, kv_heads, page_size]`
    /// (one per token and head), or U8 `[pages, kv_heads, page_size, head_dim/32]` (the E8M0 block scales of an MXFP4 cache).
    Tensor(Tensor),
}

impl KvScale {
    /// The tensor, where the scale is one.
    pub(crate) fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Tensor(tensor) => Some(tensor),
            Self::None | Self::Scalar(_) => None,
        }
    }
}

/// How a call is split into tasks.
#[derive(Clone, Debug, Default)]
pub enum PlanChoice {
    /// Plan here, from the call's own lengths.
    #[default]
    Default,
    /// No plan: each sequence is one task.
    Free,
    /// A plan made before, for these same lengths.
    Given(DecodePlan),
}

/// Options of [`crate::paged_decode`] and its kin; `Default` is a plain causal decode of an NHD cache without scales (see
/// [`crate::cache::PagedKvCache::decode_options`] for a cache's own).
#[derive(Clone, Debug)]
pub struct DecodeOptions {
    /// Factor on q·k; any finite value up to about 2e38 in magnitude (times a scalar K scale). `None`: `1 / sqrt(head_dim)`.
    pub softmax_scale: Option<f32>,
    /// Sliding window W: the query at position p attends positions `> p - W` only. `None`: all. At least 1.
    pub window: Option<usize>,
    /// Scores become `c * tanh(score / c)`; c from 1e-30 to 1e30.
    pub softcap: Option<f32>,
    /// One raw logit per query head, F32 `[q_heads]`, that joins the denominator and the LSE.
    pub sinks: Option<Tensor>,
    /// The factor from K's stored elements to values.
    pub k_scale: KvScale,
    /// The factor from V's stored elements to values.
    pub v_scale: KvScale,
    /// How the cache tensors are laid out.
    pub layout: CacheLayout,
    /// U32 or I32 `[batch + 1]`: first query row of each sequence, and the end. `None`: every sequence has `rows / batch` rows, so a batch of
    /// mixed query lengths whose rows happen to divide evenly is taken for an even one: give it whenever lengths may differ.
    pub query_start: Option<Tensor>,
    /// How the call is split into tasks.
    pub plan: PlanChoice,
    /// Most tasks a sequence may be split into. `None`: the planner's own limit.
    pub max_partitions: Option<usize>,
    /// Task slots over all KV heads. `None`: the arch's default.
    pub workgroup_budget: Option<usize>,
    /// Read device-resident tables and lengths back and check them (host-resident ones always are). Default: debug builds.
    pub validate: bool,
}

impl Default for DecodeOptions {
    fn default() -> Self {
        Self {
            softmax_scale: None,
            window: None,
            softcap: None,
            sinks: None,
            k_scale: KvScale::None,
            v_scale: KvScale::None,
            layout: CacheLayout::default(),
            query_start: None,
            plan: PlanChoice::Default,
            max_partitions: None,
            workgroup_budget: None,
            validate: cfg!(debug_assertions),
        }
    }
}
