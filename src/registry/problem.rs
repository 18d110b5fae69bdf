//! The facts of a call that choose its kernel.

use candle::{DType, Result, bail};

use crate::cache::{CacheDims, CacheLayout, KvDtype};
use crate::plan::HostPlan;

/// Query rows (query token, head) of one matrix tile.
pub const M_TILE_ROWS: usize = 16;

/// How FP8 or MXFP4 scales are stored. Where K's and V's differ, the finer of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ScaleMode {
    /// Stored values are the values.
    None,
    /// One factor for the cache, wherever it lives.
    Scalar,
    /// One F32 a (page, KV head, token).
    PerToken,
    /// One E8M0 byte a (page, KV head, token, 32 dims): MXFP4.
    Block,
}

/// One call, as numbers.
///
/// ```
/// use candle_paged_attn::registry::{Arch, Problem, select};
///
/// let verify = Problem { batch: 8, query_len: 4, ..Problem::default() };
/// let selection = select(&verify, &Arch::gfx950())?;
/// assert_eq!(selection.kernel(), "pa_bf16_d128_p128_m4_mtp_fused");
/// # Ok::<(), candle::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub q_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Most new tokens of any sequence.
    pub query_len: usize,
    /// Dtype of q and of the output.
    pub query_dtype: DType,
    /// What the cache stores.
    pub kv_dtype: KvDtype,
    /// Where the cache stores it.
    pub layout: CacheLayout,
    /// How FP8 or MXFP4 elements are scaled.
    pub scales: ScaleMode,
    /// Row length of the block table, in pages.
    pub max_pages: usize,
    /// Every KV head has a block table of its own.
    pub per_head_tables: bool,
    /// Sequences may have different query lengths.
    pub ragged: bool,
    /// There is a sliding window.
    pub windowed: bool,
    /// Scores are capped.
    pub softcap: bool,
    /// Query heads have sinks.
    pub sinks: bool,
    /// The softmax scale is above 0.
    pub positive_scale: bool,
    /// Output strides equal the query's.
    pub output_like_query: bool,
    /// Plan-free call: one task a sequence.
    pub plan_free: bool,
    /// Most tasks of a sequence; `None`: as many as there are slots.
    pub max_partitions: Option<usize>,
    /// Slots of the plan.
    pub capacity: usize,
    /// Most tiles of any task of the plan; `usize::MAX` where that is not known.
    pub task_tiles: usize,
    /// Leading kernel-argument dwords to preload into scalar registers where the arch can: 16 unless configured; 0 turns it off.
    pub kernarg_preload: usize,
}

/// What a kernel is chosen by of a plan, as far as the host knows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tasks {
    pub slots: usize,
    /// No row has several.
    pub one_a_row: bool,
    /// There are records of them, the longest first; else they are the rows as they come.
    pub planned: bool,
    /// Tiles of the longest; `usize::MAX` where that is not known.
    pub most_tiles: usize,
}

impl Tasks {
    /// Of a plan whose records the host has.
    pub fn of(plan: &HostPlan) -> Self {
        Self { slots: plan.capacity(), one_a_row: plan.is_one_task_a_row(), planned: true, most_tiles: plan.longest_task() }
    }
}

impl Default for Problem {
    /// Plain causal decode of one sequence with 16 query heads on one KV head, BF16, head_dim 128, page 128, in the AMD kernels' layout.
    fn default() -> Self {
        Self {
            batch: 1,
            q_heads: 16,
            kv_heads: 1,
            head_dim: 128,
            page_size: 128,
            query_len: 1,
            query_dtype: DType::BF16,
            kv_dtype: KvDtype::Bf16,
            layout: CacheLayout::Shuffled,
            scales: ScaleMode::None,
            max_pages: 2048,
            per_head_tables: false,
            ragged: false,
            windowed: false,
            softcap: false,
            sinks: false,
            positive_scale: true,
            output_like_query: true,
            plan_free: false,
            max_partitions: None,
            capacity: 1,
            task_tiles: usize::MAX,
            kernarg_preload: 16,
        }
    }
}

impl Problem {
    /// The same call by `plan`. Whether each row is one task is the plan's to say, not `max_partitions`', which a given plan need not follow.
    pub fn with_plan(self, plan: &HostPlan) -> Self {
        self.with_tasks(Tasks::of(plan))
    }

    pub(crate) fn with_tasks(self, tasks: Tasks) -> Self {
        let Tasks { slots, one_a_row, planned, most_tiles } = tasks;
        let max_partitions = (one_a_row && planned).then_some(1);
        Self { plan_free: one_a_row && !planned, max_partitions, capacity: slots, task_tiles: most_tiles, ..self }
    }

    /// Query heads of one KV head. 0 where `q_heads < kv_heads` or there is no KV head.
    pub fn group(&self) -> usize {
        self.q_heads.checked_div(self.kv_heads).unwrap_or(0)
    }

    /// Rows (query token, head) of one KV head.
    pub fn query_rows(&self) -> usize {
        self.query_len.saturating_mul(self.group())
    }

    /// 16-row tiles that the rows of one KV head fill: `ceil(query_len * group / 16)`, at least 1.
    pub fn m_tiles(&self) -> usize {
        self.query_rows().div_ceil(M_TILE_ROWS).max(1)
    }

    /// Whether every sequence is one task: a plan of one partition, or no plan.
    pub fn one_partition(&self) -> bool {
        self.plan_free || self.max_partitions == Some(1)
    }

    /// Workgroups of one (task slot, KV head), times task slots and KV heads, where each takes one group of M-tiles.
    pub fn workgroups(&self) -> usize {
        // One partition means one slot a row, whatever capacity says.
        if self.one_partition() { self.pairs() } else { self.capacity.saturating_mul(if self.per_head_tables { 1 } else { self.kv_heads }) }
    }

    /// (Row, KV head) pairs.
    pub(super) fn pairs(&self) -> usize {
        self.batch.saturating_mul(self.kv_heads)
    }

    /// Refuses what no kernel of any arch can be: sizes of 0, heads that do not divide, dtypes and scales that do not go together,
    /// a layout that cannot hold the sizes.
    pub(super) fn check(&self) -> Result<()> {
        let Self { q_heads, kv_heads, head_dim, page_size, query_len, kv_dtype, scales, .. } = *self;
        if kv_heads == 0 || q_heads == 0 || q_heads % kv_heads != 0 {
            bail!("q_heads: {q_heads} query heads are not a multiple (1 or more times) of {kv_heads} KV heads")
        }
        if head_dim == 0 {
            bail!("head_dim: at least 1, got 0")
        }
        if page_size == 0 {
            bail!("page_size: at least 1, got 0")
        }
        if self.max_partitions == Some(0) {
            bail!("max_partitions: at least 1, got 0")
        }
        if query_len.checked_mul(self.group()).is_none() {
            bail!("query_len: {query_len} tokens of {} heads a KV head are more rows than an address can count", self.group())
        }
        if !matches!(self.query_dtype, DType::F32 | DType::F16 | DType::BF16) {
            bail!("q: dtype {:?} is not F32, F16 or BF16", self.query_dtype)
        }
        match (kv_dtype, scales) {
            (KvDtype::Mxfp4, ScaleMode::Block) => {}
            (KvDtype::Mxfp4, _) => bail!("scales: an MXFP4 cache needs block scales (E8M0), got {scales:?}"),
            (_, ScaleMode::Block) => bail!("scales: block scales are MXFP4's, the cache is {kv_dtype:?}"),
            _ => {}
        }
        self.layout.check(CacheDims { pages: self.max_pages, page_size, kv_heads, head_dim }, kv_dtype)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PlanRequest;
    use crate::registry::Arch;

    #[test]
    fn an_empty_row_leaves_its_slot_to_others() {
        let request = PlanRequest { workgroup_budget: Some(3), ..PlanRequest::new(&[0, 9000, 100], &[1], 1) };
        let plan = HostPlan::new(&request, &Arch::sm90()).unwrap();
        assert_eq!((plan.capacity(), plan.reduce[1][1]), (3, 2));
        assert!(!Tasks::of(&plan).one_a_row);
        let short = PlanRequest { context_lens: &[0, 100, 100], ..request };
        assert!(Tasks::of(&HostPlan::new(&short, &Arch::sm90()).unwrap()).one_a_row);
    }
}
