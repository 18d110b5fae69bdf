//! What is decided of a call before anything is enqueued: its sizes, its plan, its kernel.

use std::sync::Arc;

use candle::{Device, Result, bail};

use super::specialize::{ReducerCut, reducer_cut};
use crate::gpu::plan_shape::PlanShape;
use crate::op::call::Call;
use crate::op::decide::problem;
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

/// What was decided of a call.
pub(crate) struct Decided {
    pub(super) shapes: Shapes,
    /// New tokens of the longest sequence.
    pub(super) query_len: usize,
    pub(super) selection: Selection,
    pub(super) plan: Plan,
}

/// Whether the options leave open how rows are split.
pub(super) fn splits_freely<T, P>(options: &DecodeOptions<T, P>) -> bool {
    options.max_partitions.is_none() && options.workgroup_budget.is_none()
}

/// Refuses a plan of `rows` rows and `slots` slots for a call of `needed` rows: a row without tasks is cleared by the slot of its number.
pub(super) fn check_slots(rows: usize, slots: usize, needed: usize) -> Result<()> {
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
pub(super) fn whole_rows(shapes: &Shapes, query_len: usize, call: &Call<'_>, arch: &Arch, most_tokens: usize) -> Option<Plan> {
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

impl Decided {
    /// A call that is to run by `plan`; `query_len` is its longest query.
    pub fn new(shapes: Shapes, query_len: usize, plan: Plan, call: &Call<'_>, arch: &Arch) -> Result<Self> {
        let selection = registry::select(&plan.problem(&shapes, query_len, call, arch), arch)?;
        Ok(Self { shapes, query_len, selection, plan })
    }

    pub fn plan_rows(&self) -> usize {
        self.shapes.plan_rows()
    }

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
