//! What is decided before anything is computed or launched: every check, the plan, the kernel. Pure; serves any arch.

use std::sync::Arc;

use candle::{Result, Tensor};

use super::CallSummary;
use super::call::Call;
use super::host::{self, cpu_storage};
use super::shapes::Shapes;
use crate::cpu::{self, Row};
use crate::options::PlanChoice;
use crate::plan::{HostPlan, PlanRequest};
use crate::registry::{self, Arch, Problem, Selection};

/// Leading dwords of the AMD tile's arguments that are preloaded into scalar registers where the arch can.
const TILE_PRELOAD: usize = 14;

/// The tensors whose contents decide, on the CPU.
#[derive(Clone, Copy)]
pub(crate) struct HostTables<'a> {
    pub block_tables: &'a Tensor,
    pub context_lens: &'a Tensor,
    pub query_start: Option<&'a Tensor>,
}

/// A call that was checked, planned, and given a kernel.
pub(crate) struct Prepared {
    pub shapes: Shapes,
    pub rows: Vec<Row>,
    pub plan: Arc<HostPlan>,
    pub selection: Selection,
}

impl Prepared {
    /// Decides a call whose tables are on the host, for `arch`. `given` is its plan, where the caller made one.
    pub fn new(call: &Call<'_>, tables: &HostTables<'_>, given: Option<Arc<HostPlan>>, arch: &Arch) -> Result<Self> {
        let shapes = Shapes::new(call)?;
        let rows = check_tables(&shapes, tables, call.options.window)?;
        let plan = plan(&shapes, &rows, call, given, arch)?;
        let selection = registry::select(&problem(&shapes, call, longest(&rows), plan.capacity(), arch), arch)?;
        Ok(Self { shapes, rows, plan, selection })
    }

    pub fn summary(self) -> CallSummary {
        CallSummary { selection: self.selection, tasks: self.plan.tasks() }
    }
}

/// Reads and checks lengths, query starts and every page id that will be read; gives the plan rows.
pub(crate) fn check_tables(shapes: &Shapes, tables: &HostTables<'_>, window: Option<usize>) -> Result<Vec<Row>> {
    let rows = host::rows(shapes, tables.context_lens, tables.query_start)?;
    let (storage, layout) = tables.block_tables.storage_and_layout();
    let table = host::page_table(shapes, cpu_storage("block_tables", &storage)?, layout)?;
    host::check_pages(shapes, &rows, &table, window)?;
    Ok(rows)
}

/// The longest query of the batch.
pub(crate) fn longest(rows: &[Row]) -> usize {
    rows.iter().map(|r| r.query_len).max().unwrap_or(0)
}

/// The host plan of a call: given, free, or made here.
fn plan(shapes: &Shapes, rows: &[Row], call: &Call<'_>, given: Option<Arc<HostPlan>>, arch: &Arch) -> Result<Arc<HostPlan>> {
    let context_lens: Vec<i32> = rows.iter().map(|r| r.context_len as i32).collect();
    let query_lens: Vec<usize> = rows.iter().map(|r| r.query_len).collect();
    let blocks: usize = query_lens.iter().map(|&len| row_blocks(shapes, len)).sum();
    let kv_heads = plan_heads(shapes, blocks.div_ceil(rows.len().max(1)));
    let request = plan_request(call, &context_lens, &query_lens, kv_heads);
    Ok(match (given, &call.options.plan) {
        (Some(plan), _) => {
            plan.check_covers(&request)?;
            plan
        }
        (None, PlanChoice::Free) => Arc::new(HostPlan::free(&request)),
        (None, _) => Arc::new(HostPlan::new(&request, arch)?),
    })
}

/// What a call's plan is made for.
pub(crate) fn plan_request<'a>(call: &Call<'_>, context_lens: &'a [i32], query_lens: &'a [usize], kv_heads: usize) -> PlanRequest<'a> {
    PlanRequest {
        context_lens,
        query_lens,
        kv_heads,
        window: call.options.window,
        max_partitions: call.options.max_partitions,
        workgroup_budget: call.options.workgroup_budget,
    }
}

/// Row blocks (workgroups of up to four M-tiles on a GPU) of a sequence's rows in one KV head.
pub(crate) fn row_blocks(shapes: &Shapes, query_len: usize) -> usize {
    query_len.saturating_mul(shapes.group()).div_ceil(cpu::ROW_BLOCK).max(1)
}

/// KV heads a plan slot stands for. A sequence with many query rows is split into row blocks that are parallel items of their own, so
/// each of its slots counts that often against the budget: a long prefill chunk gets few partitions and so few partial results.
pub(crate) fn plan_heads(shapes: &Shapes, row_blocks: usize) -> usize {
    let heads = if shapes.per_head { 1 } else { shapes.dims.kv_heads };
    heads * row_blocks.max(1)
}

/// The call as the registry sees it: `query_len` is its longest query, `capacity` its plan's slots.
pub(crate) fn problem(shapes: &Shapes, call: &Call<'_>, query_len: usize, capacity: usize, arch: &Arch) -> Problem {
    let options = &call.options;
    Problem {
        batch: shapes.batch,
        q_heads: shapes.q_heads,
        kv_heads: shapes.dims.kv_heads,
        head_dim: shapes.dims.head_dim,
        page_size: shapes.dims.page_size,
        query_len,
        query_dtype: shapes.q_dtype,
        kv_dtype: shapes.kv_dtype,
        layout: options.layout,
        scales: shapes.scales,
        max_pages: shapes.max_pages,
        per_head_tables: shapes.per_head,
        ragged: options.query_start.is_some(),
        windowed: options.window.is_some(),
        softcap: options.softcap.is_some(),
        sinks: options.sinks.is_some(),
        positive_scale: shapes.softmax_scale > 0.0,
        output_like_query: call.out.is_none_or(|layout| layout.stride() == call.q.layout.stride()),
        plan_free: options.plan.is_free(),
        max_partitions: options.max_partitions,
        capacity,
        kernarg_preload: if arch.name.is_amd() { TILE_PRELOAD } else { 0 },
    }
}
