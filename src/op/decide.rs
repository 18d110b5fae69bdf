//! What is decided before anything is computed or launched: every check, the plan, the kernel. Pure; serves any arch.

use std::sync::Arc;

use candle::{Result, Tensor};

use super::CallSummary;
use super::call::Call;
use super::host::{self, cpu_storage};
use super::shapes::Shapes;
use crate::cpu::{self, Row};
use crate::plan::{HostPlan, PlanRequest};
use crate::registry::{Arch, Problem, Selection, Tasks};

/// Leading dwords of the AMD tile's arguments that are preloaded into scalar registers where the arch can.
const TILE_PRELOAD: usize = 14;

/// How a kernel is chosen: [`crate::registry::select`], or a backend's choice among the kernels that it has.
pub(crate) type Select = fn(&Problem, &Arch) -> Result<Selection>;

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
    /// Decides a call whose tables are on the host, for `arch`. `given` is its plan, where the caller made one; `select` chooses among the
    /// arch's kernels.
    pub fn new(call: &Call<'_>, tables: &HostTables<'_>, given: Option<Arc<HostPlan>>, arch: &Arch, select: Select) -> Result<Self> {
        let (shapes, rows) = check_host(call, tables)?;
        let plan = host_plan(&shapes, &rows, call, given, arch)?;
        let selection = select(&problem(&shapes, call, longest(&rows), Tasks::of(&plan), arch), arch)?;
        Ok(Self { shapes, rows, plan, selection })
    }

    pub fn summary(self) -> CallSummary {
        CallSummary { selection: self.selection, tasks: self.plan.tasks() }
    }
}

/// Checks a call and its tables, on the host; gives its sizes and plan rows.
pub(crate) fn check_host(call: &Call<'_>, tables: &HostTables<'_>) -> Result<(Shapes, Vec<Row>)> {
    let shapes = Shapes::new(call)?;
    let rows = check_tables(&shapes, tables, call.options.window)?;
    Ok((shapes, rows))
}

/// Reads and checks lengths, query starts and every page id that will be read; gives the plan rows.
fn check_tables(shapes: &Shapes, tables: &HostTables<'_>, window: Option<usize>) -> Result<Vec<Row>> {
    let rows = host::rows(shapes, tables.context_lens, tables.query_start)?;
    let (storage, layout) = tables.block_tables.storage_and_layout();
    let table = host::page_table(shapes, cpu_storage("block_tables", &storage)?, layout)?;
    host::check_pages(shapes, &rows, &table, window)?;
    Ok(rows)
}

/// [`check_tables`] of a call that was decided without their contents, of a longest query of `query_len`, and of the plan that it was given.
#[cfg(any(feature = "rocm", feature = "cuda"))]
pub(crate) fn check_contents(
    shapes: &Shapes,
    tables: &HostTables<'_>,
    call: &Call<'_>,
    query_len: usize,
    given: Option<Arc<HostPlan>>,
    arch: &Arch,
) -> Result<()> {
    let rows = check_tables(shapes, tables, call.options.window)?;
    let longest = longest(&rows);
    if longest > query_len {
        candle::bail!("max_query_len: {query_len}, but a sequence has {longest} new tokens")
    }
    given.map_or(Ok(()), |plan| check_covers(&plan, &rows, call, arch))
}

/// The longest query of the batch.
pub(crate) fn longest(rows: &[Row]) -> usize {
    rows.iter().map(|r| r.query_len).max().unwrap_or(0)
}

/// The host plan of a call: given, free, or made here.
pub(crate) fn host_plan(
    shapes: &Shapes,
    rows: &[Row],
    call: &Call<'_>,
    given: Option<Arc<HostPlan>>,
    arch: &Arch,
) -> Result<Arc<HostPlan>> {
    if let Some(plan) = given {
        check_covers(&plan, rows, call, arch)?;
        return Ok(plan);
    }
    with_request(rows, call, |request| {
        // KV heads a slot stands for. A sequence with many query rows is split into row blocks that are parallel items of their own, so each
        // of its slots counts that often against the budget: a long prefill chunk gets few partitions and so few partial results.
        let blocks: usize = rows.iter().map(|row| row_blocks(row.query_len, shapes.group())).sum();
        let request = PlanRequest {
            kv_heads: shapes.heads_of_a_row() * blocks.div_ceil(rows.len().max(1)).max(1),
            max_context_len: rows.iter().map(|row| row.context_len).max(),
            ..request
        };
        Ok(Arc::new(if call.options.plan.is_free() { HostPlan::free(&request, arch) } else { HostPlan::new(&request, arch)? }))
    })
}

/// Refuses a plan that is not for these rows.
fn check_covers(plan: &HostPlan, rows: &[Row], call: &Call<'_>, arch: &Arch) -> Result<()> {
    with_request(rows, call, |request| plan.check_covers(&request, arch))
}

/// Calls `f` with what a plan of these rows is made for, but for the KV heads that share a row.
fn with_request<T>(rows: &[Row], call: &Call<'_>, f: impl FnOnce(PlanRequest<'_>) -> Result<T>) -> Result<T> {
    let context_lens: Vec<i32> = rows.iter().map(|r| r.context_len as i32).collect();
    let query_lens: Vec<usize> = rows.iter().map(|r| r.query_len).collect();
    f(PlanRequest {
        context_lens: &context_lens,
        query_lens: &query_lens,
        kv_heads: 1,
        window: call.options.window,
        max_partitions: call.options.max_partitions,
        workgroup_budget: call.options.workgroup_budget,
        max_context_len: None,
    })
}

/// Row blocks (workgroups of up to four M-tiles on a GPU) of a sequence's rows in one KV head.
pub(crate) fn row_blocks(query_len: usize, group: usize) -> usize {
    query_len.saturating_mul(group).div_ceil(cpu::ROW_BLOCK).max(1)
}

/// The call as the registry sees it: `query_len` is its longest query, `tasks` its plan's.
pub(crate) fn problem(shapes: &Shapes, call: &Call<'_>, query_len: usize, tasks: Tasks, arch: &Arch) -> Problem {
    let options = &call.options;
    let problem = Problem {
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
        kernarg_preload: if arch.name.is_amd() { TILE_PRELOAD } else { 0 },
        // These are the tasks'.
        plan_free: false,
        max_partitions: None,
        capacity: 0,
        task_tiles: usize::MAX,
    };
    problem.with_tasks(tasks)
}
