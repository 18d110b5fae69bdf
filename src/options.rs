//! What a caller may ask of a decode call.

use candle::Tensor;

use crate::cache::CacheLayout;
use crate::plan::DecodePlan;

/// The factor from a stored K or V element to its value: `value = stored * scale`. `T` is the tensor type of the device.
#[derive(Clone, Copy, Debug, Default)]
pub enum KvScale<T = Tensor> {
    /// Stored values are the values.
    #[default]
    None,
    /// One factor for the whole cache.
    Scalar(f32),
    /// A tensor, told apart by dtype and shape: F32 with one element (one factor for the cache), F32 `[pages, kv_heads, page_size]`
    /// (one per token and head), or U8 `[pages, kv_heads, page_size, head_dim/32]` (the E8M0 block scales of an MXFP4 cache).
    Tensor(T),
}

impl<T> KvScale<T> {
    /// The tensor, where the scale is one.
    pub(crate) fn tensor(&self) -> Option<&T> {
        match self {
            Self::Tensor(tensor) => Some(tensor),
            Self::None | Self::Scalar(_) => None,
        }
    }

    /// The same scale of another tensor type.
    pub(crate) fn map<'a, U>(&'a self, f: impl FnOnce(&'a T) -> U) -> KvScale<U> {
        match self {
            Self::None => KvScale::None,
            Self::Scalar(factor) => KvScale::Scalar(*factor),
            Self::Tensor(tensor) => KvScale::Tensor(f(tensor)),
        }
    }
}

/// How a call is split into tasks. `P` is the plan type of the device.
#[derive(Clone, Copy, Debug, Default)]
pub enum PlanChoice<P = DecodePlan> {
    /// Plan here, from the call's own lengths.
    #[default]
    Default,
    /// No plan: each sequence is one task.
    Free,
    /// A plan made before, for these same lengths.
    Given(P),
}

impl<P> PlanChoice<P> {
    /// Whether there is no plan.
    pub(crate) fn is_free(&self) -> bool {
        matches!(self, Self::Free)
    }
}

/// Options of [`crate::paged_decode`] and its kin; `Default` is a plain causal decode of an NHD cache without scales (see
/// [`crate::cache::PagedKvCache::decode_options`] for a cache's own). `T` and `P` are the tensor and plan types of the device: candle's, unless a
/// backend has its own.
#[derive(Clone, Copy, Debug)]
pub struct DecodeOptions<T = Tensor, P = DecodePlan> {
    /// Factor on q·k; any finite value up to about 2e38 in magnitude (times a scalar K scale). `None`: `1 / sqrt(head_dim)`.
    pub softmax_scale: Option<f32>,
    /// Sliding window W: the query at position p attends positions `> p - W` only. `None`: all. At least 1.
    pub window: Option<usize>,
    /// Scores become `c * tanh(score / c)`; c from 1e-30 to 1e30.
    pub softcap: Option<f32>,
    /// One raw logit per query head, F32 `[q_heads]`, that joins the denominator and the LSE.
    pub sinks: Option<T>,
    /// The factor from K's stored elements to values.
    pub k_scale: KvScale<T>,
    /// The factor from V's stored elements to values.
    pub v_scale: KvScale<T>,
    /// How the cache tensors are laid out.
    pub layout: CacheLayout,
    /// U32 or I32 `[batch + 1]`: first query row of each sequence, and the end. `None`: every sequence has `rows / batch` rows, so a batch of
    /// mixed query lengths whose rows happen to divide evenly is taken for an even one: give it whenever lengths may differ.
    pub query_start: Option<T>,
    /// The longest of a ragged batch's query lengths, where `query_start` lives on a device and is not read back; a longer sequence's rows
    /// past it are not computed. `None`: as many as there are rows. Host-resident `query_start` says it by itself.
    pub max_query_len: Option<usize>,
    /// How the call is split into tasks.
    pub plan: PlanChoice<P>,
    /// Most tasks a sequence may be split into. `None`: the planner's own limit.
    pub max_partitions: Option<usize>,
    /// Task slots over all KV heads. `None`: the arch's default.
    pub workgroup_budget: Option<usize>,
    /// Read device-resident tables and lengths back and check them (host-resident ones always are). Default: debug builds.
    pub validate: bool,
    /// A promise about the kernel right ahead of this call in its stream: it writes none of the call's block tables, lengths, query starts and given plan,
    /// and it began after they had been written, as every kernel does that is not launched to overlap the one before it. So it is where layers share what
    /// is made once a step; not right behind a plan's refresh, nor for a layer that makes its own tables on the device. A CUDA call then reads them while
    /// that kernel ends, which saves up to a microsecond. Nothing checks it, [`Self::validate`] neither: broken, rows come out wrong or not at all, or the
    /// call's kernel never ends; it still touches no memory but the call's.
    ///
    /// [`crate::AppendAndAttend`] does so by itself, as its own write comes between. Without effect where the call uploads some of them or makes its plan
    /// on the device, without tensor cores, on GPUs before compute capability 9.0, and on other backends.
    pub tables_settled: bool,
}

impl<T, P> Default for DecodeOptions<T, P> {
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
            max_query_len: None,
            plan: PlanChoice::Default,
            max_partitions: None,
            workgroup_budget: None,
            validate: cfg!(debug_assertions),
            tables_settled: false,
        }
    }
}
