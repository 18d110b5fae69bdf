//! What is decided of a call before anything is enqueued: its sizes, its plan, its kernel. Pure.

use std::sync::Arc;

use candle::{Device, Result, Tensor, bail};

use super::specialize::{ReducerCut, reducer_cut};
use crate::gpu::plan_shape::{PlanShape, longest_query};
use crate::op::PagedDecode;
use crate::op::call::{Call, Described};
use crate::op::decide::{check_host, host_plan, longest, problem};
use crate::op::shapes::Shapes;
use crate::options::{DecodeOptions, PlanChoice};
use crate::plan::{HostPlan, PLANNER_THREADS};
use crate::registry::{self, Arch, Problem, Selection, Tasks};

/// Where a call's tasks come from.
pub(super) enum Plan {
    /// Made or checked on the host, to be uploaded.
    Host(Arc<HostPlan>),
    /// In memory, or to be made there by the planner first.
    /// `task_tiles`: most of any task, as far as is known.
    Device { capacity: usize, made: bool, task_tiles: usize },
    /// One task a row, of at most so many tiles.
    Free { tiles: usize },
}

/// What is decided of a call: the plan, the kernel, how results are merged.
pub struct Decided {
    pub(super) shapes: Shapes,
    /// New tokens of the longest sequence.
    pub(super) query_len: usize,
    pub(super) selection: Selection,
    pub(super) plan: Plan,
}

/// Whether the options leave open how rows are split.
fn splits_freely<T, P>(options: &DecodeOptions<T, P>) -> bool {
    options.max_partitions.is_none() && options.workgroup_budget.is_none()
}

/// Refuses a plan of `rows` rows and `slots` slots for a call of `needed` rows: a row without tasks is cleared by the slot of its number.
fn check_slots(rows: usize, slots: usize, needed: usize) -> Result<()> {
    if rows != needed || slots < needed {
        bail!("plan: has {rows} rows and {slots} slots, the call has {needed} rows")
    }
    Ok(())
}

/// The plan of a call with its tables on the device. Rows that are not to be split need none, nor do few short ones, which clusters of blocks
/// walk whole.
pub(super) fn plan_on_device(shapes: &Shapes, query_len: usize, call: &Call<'_>, arch: &Arch, choice: &PlanChoice) -> Result<Plan> {
    let shape = PlanShape::of(shapes, &call.options, query_len);
    let (plan, most_tokens) = match choice {
        PlanChoice::Given(plan) => {
            check_slots(plan.rows(), plan.capacity(), shape.rows())?;
            if !matches!(plan.work_info().device(), Device::Cuda(_)) {
                return Ok(Plan::Host(plan.host()?));
            }
            let task_tiles = plan.made_on_host().map_or(usize::MAX, |plan| plan.longest_task());
            if plan.is_one_task_a_row() {
                return Ok(Plan::Free { tiles: task_tiles });
            }
            (Plan::Device { capacity: plan.capacity(), made: true, task_tiles }, plan.most_tokens_split_freely())
        }
        PlanChoice::Free => return Ok(Plan::Free { tiles: table_tiles(shapes, arch) }),
        PlanChoice::Default => {
            let freely = splits_freely(&call.options);
            (default_plan(shapes, &shape, freely, arch)?, freely.then(|| shapes.table_tokens()))
        }
    };
    Ok(most_tokens.and_then(|most| whole_rows(shapes, query_len, call, arch, most)).unwrap_or(plan))
}

/// No plan, where rows of at most `most_tokens` tokens are few and short.
fn whole_rows(shapes: &Shapes, query_len: usize, call: &Call<'_>, arch: &Arch, most_tokens: usize) -> Option<Plan> {
    let most_tokens = most_tokens.min(shapes.table_tokens());
    let plan = Plan::Free { tiles: most_tokens.div_ceil(arch.name.tile_tokens()) };
    registry::walks_whole_rows(&plan.problem(shapes, query_len, call, arch), most_tokens, arch).then_some(plan)
}

/// The plan of a call that gives none, its tables on the device; `freely`: the options leave open how rows are split.
fn default_plan(shapes: &Shapes, shape: &PlanShape, freely: bool, arch: &Arch) -> Result<Plan> {
    let tiles = table_tiles(shapes, arch);
    Ok(match shape.capacity(arch, Some(shapes.table_tokens()))? {
        // The planner's block has a row a thread; batches past that have more rows than slots are worth.
        capacity if (capacity > shape.rows() || (freely && takes_turns(shape, arch))) && tiles > 1 && shape.rows() <= PLANNER_THREADS => {
            let task_tiles = if shape.rows().saturating_mul(tiles) <= capacity { 1 } else { tiles };
            Plan::Device { capacity, made: false, task_tiles }
        }
        _ => Plan::Free { tiles },
    })
}

/// Whether rows are planned for their order alone, where they are kept whole by default: those that are more than SMs, but no more than two each, take
/// turns, the longest first.
fn takes_turns(shape: &PlanShape, arch: &Arch) -> bool {
    let blocks = shape.rows().saturating_mul(shape.blocks_of_a_task());
    shape.rows() > 1 && (arch.compute_units + 1..=2 * arch.compute_units).contains(&blocks)
}

/// Where the tables of a call are: block tables, lengths and query starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    /// On the CPU: their contents decide.
    Host,
    /// On the GPU: the call's sizes decide, and the planner's kernel plans.
    Device,
}

impl Decided {
    /// What a GPU of `arch` would run of a call whose tensors are on the CPU, were q and the caches (`[q, key_cache, value_cache]`) on the GPU and its
    /// tables there or not.
    ///
    /// # Errors
    /// What the call itself would refuse.
    pub fn of(op: &PagedDecode, tensors: [&Tensor; 3], tables: Tables, arch: &Arch) -> Result<Self> {
        let call = op.call(tensors.map(Described::meta), None);
        match tables {
            Tables::Host => Self::by_contents(op, &call, arch),
            Tables::Device => {
                let shapes = Shapes::new(&call)?;
                let query_len = longest_query(&shapes, &op.options)?;
                Self::by_sizes(op, shapes, query_len, &call, arch)
            }
        }
    }

    /// A call with its tables on the host.
    pub(super) fn by_contents(op: &PagedDecode, call: &Call<'_>, arch: &Arch) -> Result<Self> {
        let (shapes, rows) = check_host(call, &op.host_tables())?;
        let query_len = longest(&rows);
        // As where the tables are on the device.
        let is_default = matches!(op.options.plan, PlanChoice::Default) && splits_freely(&op.options);
        let plan = match whole_rows(&shapes, query_len, call, arch, shapes.table_tokens()).filter(|_| is_default) {
            Some(plan) => plan,
            None => {
                let plan = host_plan(&shapes, &rows, call, op.given_plan()?, arch)?;
                check_slots(plan.reduce.len(), plan.capacity(), rows.len())?;
                Plan::Host(plan)
            }
        };
        Self::new(shapes, query_len, plan, call, arch)
    }

    /// A call with its tables on the device, of a longest query of `query_len` as far as the host knows.
    pub(super) fn by_sizes(op: &PagedDecode, shapes: Shapes, query_len: usize, call: &Call<'_>, arch: &Arch) -> Result<Self> {
        let plan = plan_on_device(&shapes, query_len, call, arch, &op.options.plan)?;
        Self::new(shapes, query_len, plan, call, arch)
    }

    /// A call that is to run by `plan`; `query_len` is its longest query.
    pub(super) fn new(shapes: Shapes, query_len: usize, plan: Plan, call: &Call<'_>, arch: &Arch) -> Result<Self> {
        let selection = registry::select(&plan.problem(&shapes, query_len, call, arch), arch)?;
        Ok(Self { shapes, query_len, selection, plan })
    }

    /// The kernel.
    pub fn selection(&self) -> &Selection {
        &self.selection
    }

    /// New tokens of the longest sequence, as far as the host knows.
    pub fn query_len(&self) -> usize {
        self.query_len
    }

    /// The plan, where the host makes it.
    pub fn host_plan(&self) -> Option<&HostPlan> {
        match &self.plan {
            Plan::Host(plan) => Some(plan),
            Plan::Device { .. } | Plan::Free { .. } => None,
        }
    }

    /// Rows of the plan: sequences, or (sequence, KV head) pairs with per-head tables.
    pub fn plan_rows(&self) -> usize {
        self.shapes.plan_rows()
    }

    /// Slots of the plan; without one a slot a row.
    pub fn slots(&self) -> usize {
        self.plan.slots(&self.shapes)
    }

    /// How results of a row's tasks are merged where there are several.
    pub fn reducer_cut(&self, arch: &Arch) -> ReducerCut {
        let Shapes { batch, q_heads, .. } = &self.shapes;
        let rows = batch.saturating_mul(self.query_len).saturating_mul(*q_heads);
        reducer_cut(self.slots().div_ceil(self.plan_rows().max(1)), rows, &self.selection, arch.compute_units)
    }

    /// Whether a row may have several tasks, whose results are merged.
    pub fn is_split(&self) -> bool {
        self.selection.needs_reducer()
    }

    /// Whether the planner makes the plan first.
    pub fn is_planned_here(&self) -> bool {
        matches!(self.plan, Plan::Device { made: false, .. })
    }
}

impl Plan {
    fn slots(&self, shapes: &Shapes) -> usize {
        match self {
            Self::Host(plan) => plan.capacity(),
            Self::Device { capacity, .. } => *capacity,
            Self::Free { .. } => shapes.plan_rows(),
        }
    }

    /// The call as the registry sees it.
    pub fn problem(&self, shapes: &Shapes, query_len: usize, call: &Call<'_>, arch: &Arch) -> Problem {
        let tasks = match self {
            Self::Host(plan) => Tasks::of(plan),
            Self::Device { capacity, task_tiles, .. } => {
                Tasks { slots: *capacity, one_a_row: false, planned: true, most_tiles: *task_tiles }
            }
            Self::Free { tiles } => Tasks { slots: shapes.plan_rows(), one_a_row: true, planned: false, most_tiles: *tiles },
        };
        problem(shapes, call, query_len, tasks, arch)
    }
}

/// Tiles that a row of the block table has room for.
pub(super) fn table_tiles(shapes: &Shapes, arch: &Arch) -> usize {
    shapes.table_tokens().div_ceil(arch.name.tile_tokens())
}
