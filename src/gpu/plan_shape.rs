//! [`PlanShape`]: what a plan made on a GPU is made for.

use candle::{Result, bail};

#[cfg(any(feature = "rocm", feature = "cuda"))]
use super::args::PlanArgs;
use crate::op::decide::row_blocks;
use crate::op::shapes::Shapes;
use crate::options::DecodeOptions;
use crate::plan::{PlanRequest, capacity, no_lengths};
use crate::registry::Arch;

/// What of a batch stays the same from step to step: a plan's tensors are made for it, whatever the lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanShape {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub q_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Every KV head has a block table (and a length) of its own.
    pub per_head_tables: bool,
    /// New tokens of every sequence; of the longest where `ragged`.
    pub query_len: usize,
    /// Sequences have query lengths of their own: a `query_start`.
    pub ragged: bool,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Most tasks of a sequence; `None`: as many as there are slots.
    pub max_partitions: Option<usize>,
    /// Task slots over all KV heads; `None`: the arch's default.
    pub workgroup_budget: Option<usize>,
}

impl PlanShape {
    /// Of a call whose longest sequence has `query_len` new tokens.
    pub(crate) fn of<T, P>(shapes: &Shapes, options: &DecodeOptions<T, P>, query_len: usize) -> Self {
        Self {
            batch: shapes.batch,
            q_heads: shapes.q_heads,
            kv_heads: shapes.dims.kv_heads,
            per_head_tables: shapes.per_head,
            query_len,
            ragged: options.query_start.is_some(),
            window: options.window,
            max_partitions: options.max_partitions,
            workgroup_budget: options.workgroup_budget,
        }
    }

    /// Plan rows: sequences, or (sequence, KV head) pairs with per-head tables.
    pub fn rows(&self) -> usize {
        self.batch.saturating_mul(self.heads_per_row())
    }

    pub(crate) fn heads_per_row(&self) -> usize {
        if self.per_head_tables { self.kv_heads } else { 1 }
    }

    /// Blocks that run each task of a row: KV heads, times blocks of many query rows.
    pub(crate) fn blocks_of_a_task(&self) -> usize {
        let heads = if self.per_head_tables { 1 } else { self.kv_heads };
        heads.saturating_mul(row_blocks(self.query_len, self.q_heads / self.kv_heads))
    }

    /// Slots of its plan, whose rows have at most `max_context_len` tokens.
    pub(crate) fn capacity(&self, arch: &Arch, max_context_len: Option<usize>) -> Result<usize> {
        if self.kv_heads == 0 || !self.q_heads.is_multiple_of(self.kv_heads) || self.q_heads == 0 {
            bail!("q_heads: {} query heads are not a multiple of {} KV heads", self.q_heads, self.kv_heads)
        }
        let (context_lens, query_lens) = (no_lengths(self.rows()), [self.query_len]);
        let request = PlanRequest {
            context_lens: &context_lens,
            query_lens: &query_lens,
            kv_heads: self.blocks_of_a_task(),
            window: self.window,
            max_partitions: self.max_partitions,
            workgroup_budget: self.workgroup_budget,
            max_context_len,
        };
        capacity(&request, arch)
    }
}

#[cfg(any(feature = "rocm", feature = "cuda"))]
impl PlanShape {
    /// What the planner is told: where lengths and query starts are, and where its work and reduce records go, of which there are `slots`.
    pub(crate) fn planner_args(&self, [context_lens, query_start]: [u64; 2], [work, reduce]: [u64; 2], slots: usize) -> PlanArgs {
        PlanArgs {
            context_lens,
            query_start,
            work,
            reduce,
            rows: clamp(self.rows()),
            heads_per_row: clamp(self.heads_per_row()),
            query_len: clamp(self.query_len),
            window: self.window.map_or(0, clamp),
            capacity: clamp(slots),
            max_partitions: self.max_partitions.map_or(u32::MAX, |most| u32::try_from(most).unwrap_or(u32::MAX)),
        }
    }
}

/// New tokens of the longest sequence of a call, as far as the host knows.
pub(crate) fn longest_query<T, P>(shapes: &Shapes, options: &DecodeOptions<T, P>) -> Result<usize> {
    match (&options.query_start, options.max_query_len) {
        (None, _) => Ok(shapes.rows.checked_div(shapes.batch).unwrap_or(0)),
        (Some(_), None) => Ok(shapes.rows),
        (Some(_), Some(0)) if shapes.rows > 0 => bail!("max_query_len: 0, but q has {} rows", shapes.rows),
        (Some(_), Some(most)) => Ok(most.min(shapes.rows)),
    }
}

/// A count as the kernels' 32-bit integers: every larger one means the same.
#[cfg(any(feature = "rocm", feature = "cuda"))]
pub(crate) fn clamp(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
