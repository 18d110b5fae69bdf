//! What the CUDA backend decides of a call before it launches anything, as `src/cuda/decided.rs` and `src/op/decide.rs` do: plan and kernel.

use candle::Result;
use candle_paged_attn::plan::{HostPlan, PLANNER_THREADS, PlanRequest, capacity};
use candle_paged_attn::registry::{Arch, Problem, Selection, select, walks_whole_rows};
use testkit::cases::{Case, CaseSpec, PlanRows};

/// Where a call's tables are: on the host their contents are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    Host,
    Device,
}

/// Where a call's tasks come from.
#[derive(Clone, Debug)]
pub enum Plan {
    Host(HostPlan),
    /// So many slots, filled on the device.
    Device(usize),
    /// One task a row.
    Free,
}

/// What is decided.
pub struct Decided {
    pub plan: Plan,
    pub selection: Selection,
    /// New tokens of the longest sequence, as far as the host knows.
    pub query_len: usize,
}

/// A call as decisions see it.
struct Call<'a> {
    spec: &'a CaseSpec,
    arch: &'a Arch,
    rows: &'a PlanRows,
    /// But for its plan.
    problem: Problem,
}

/// Query rows whose blocks count as one of a plan's workgroups.
const ROW_BLOCK: usize = 64;

impl Decided {
    pub fn new(case: &Case, rows: &PlanRows, arch: &Arch, tables: Tables) -> Result<Self> {
        let spec = &case.spec;
        let max_pages = case.block_tables.dims()[case.block_tables.rank() - 1];
        // Of ragged sequences on the device it is known only how many rows they have together.
        let is_unknown = tables == Tables::Device && spec.query_lens.len() > 1;
        let query_len = if is_unknown { rows.queries() } else { rows.longest_query() };
        let problem = Problem { max_pages, query_len, ..spec.problem() };
        let call = Call { spec, arch, rows, problem };
        let (plan, problem) = match tables {
            Tables::Host => call.on_host()?,
            Tables::Device => call.on_device()?,
        };
        Ok(Self { plan, selection: select(&problem, arch)?, query_len })
    }

    /// Slots of a plan for `rows` rows.
    pub fn slots(&self, rows: usize) -> usize {
        match &self.plan {
            Plan::Host(plan) => plan.capacity(),
            Plan::Device(slots) => *slots,
            Plan::Free => rows,
        }
    }
}

impl Call<'_> {
    fn on_host(self) -> Result<(Plan, Problem)> {
        if let Some(whole) = self.whole_rows() {
            return Ok(whole);
        }
        let rows = self.rows.lens.len();
        let blocks: usize = self.rows.query_lens.iter().map(|&query_len| self.row_blocks(query_len)).sum();
        let most = self.rows.lens.iter().max().map(|&longest| longest.max(0) as usize);
        let request = self.request(&self.rows.query_lens, blocks.div_ceil(rows.max(1)).max(1), most);
        let plan = if self.spec.plan_free { HostPlan::free(&request, self.arch) } else { HostPlan::new(&request, self.arch)? };
        let problem = self.problem.with_plan(&plan);
        Ok((Plan::Host(plan), problem))
    }

    fn on_device(self) -> Result<(Plan, Problem)> {
        let whole = if self.spec.plan_free { Some(self.free()) } else { self.whole_rows() };
        if let Some(whole) = whole {
            return Ok(whole);
        }
        let (rows, tiles) = (self.rows.lens.len(), self.table_tiles());
        let blocks = self.row_blocks(self.problem.query_len);
        let slots = capacity(&self.request(&[self.problem.query_len], blocks, Some(self.table_tokens())), self.arch)?;
        let in_turns = rows > 1 && self.takes_turns(rows * self.heads() * blocks);
        if (slots > rows || in_turns) && tiles > 1 && rows <= PLANNER_THREADS {
            let task_tiles = if rows * tiles <= slots { 1 } else { tiles };
            return Ok((Plan::Device(slots), Problem { max_partitions: None, capacity: slots, task_tiles, ..self.problem }));
        }
        Ok(self.free())
    }

    /// More blocks of whole rows than SMs, but no more than two each.
    fn takes_turns(&self, blocks: usize) -> bool {
        let sms = self.arch.compute_units;
        self.splits_freely() && (sms + 1..=2 * sms).contains(&blocks)
    }

    /// No plan, where rows are few and short.
    fn whole_rows(&self) -> Option<(Plan, Problem)> {
        let (plan, problem) = self.free();
        let walks = self.splits_freely() && !self.spec.plan_free && walks_whole_rows(&problem, self.table_tokens(), self.arch);
        walks.then_some((plan, problem))
    }

    fn free(&self) -> (Plan, Problem) {
        let (capacity, task_tiles) = (self.rows.lens.len(), self.table_tiles());
        (Plan::Free, Problem { plan_free: true, max_partitions: None, capacity, task_tiles, ..self.problem.clone() })
    }

    /// `blocks` run each task of a row in a KV head.
    fn request<'a>(&'a self, query_lens: &'a [usize], blocks: usize, max_context_len: Option<usize>) -> PlanRequest<'a> {
        PlanRequest {
            window: self.spec.window,
            max_partitions: self.spec.max_partitions,
            workgroup_budget: self.spec.workgroup_budget,
            max_context_len,
            ..PlanRequest::new(&self.rows.lens, query_lens, self.heads() * blocks)
        }
    }

    fn splits_freely(&self) -> bool {
        self.spec.max_partitions.is_none() && self.spec.workgroup_budget.is_none()
    }

    /// KV heads that share a plan row.
    fn heads(&self) -> usize {
        if self.spec.per_head { 1 } else { self.spec.kv_heads }
    }

    fn row_blocks(&self, query_len: usize) -> usize {
        (query_len * self.spec.group).div_ceil(ROW_BLOCK).max(1)
    }

    fn table_tokens(&self) -> usize {
        self.problem.max_pages * self.spec.page_size
    }

    fn table_tiles(&self) -> usize {
        self.table_tokens().div_ceil(self.arch.name.tile_tokens())
    }
}
