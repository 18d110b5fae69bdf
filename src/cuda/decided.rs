//! What is decided of a call before anything is enqueued: its sizes, its plan, its kernel.

use std::sync::Arc;

use candle::cuda_backend::cudarc::driver::CudaStream;
use candle::{Device, Result, Tensor, bail};

use super::device::Gpu;
use super::specialize::{ReducerCut, reducer_cut};
use super::workspace::is_capturing;
use crate::gpu::plan_shape::{PlanShape, longest_query};
use crate::op::PagedDecode;
use crate::op::call::Call;
use crate::op::decide::{HostTables, Prepared, check_contents, longest, problem};
use crate::op::shapes::Shapes;
use crate::options::PlanChoice;
use crate::plan::{HostPlan, PLANNER_THREADS};
use crate::registry::{self, Problem, Selection, Tasks};

/// Where a call's tasks come from.
pub(super) enum Plan {
    /// Made or checked on the host, to be uploaded.
    Host(Arc<HostPlan>),
    /// In memory, or to be made there by the planner first.
    Device { capacity: usize, made: bool, one_tile_tasks: bool },
    /// One task a row.
    Free,
}

/// What was decided of a call.
pub(crate) struct Decided {
    pub(super) shapes: Shapes,
    /// New tokens of the longest sequence.
    pub(super) query_len: usize,
    pub(super) selection: Selection,
    pub(super) plan: Plan,
}

/// Whether the tables are on the CPU.
pub(super) fn on_host(op: &PagedDecode) -> Result<bool> {
    let host = op.block_tables.device().is_cpu();
    for (name, tensor) in [("context_lens", Some(&op.context_lens)), ("query_start", op.options.query_start.as_ref())] {
        if let Some(tensor) = tensor.filter(|tensor| tensor.device().is_cpu() != host) {
            bail!(
                "{name}: on {:?}, but block_tables are on {:?}; tables and lengths are all on the CPU or all on q's device",
                tensor.device().location(),
                op.block_tables.device().location()
            )
        }
    }
    Ok(host)
}

pub(super) fn decide_on_host(op: &PagedDecode, call: &Call<'_>, gpu: &Gpu) -> Result<Decided> {
    let Prepared { shapes, rows, plan, selection } = Prepared::new(call, &op.host_tables(), op.given_plan()?, &gpu.arch, registry::select)?;
    Ok(Decided { shapes, query_len: longest(&rows), selection, plan: Plan::Host(plan) })
}

pub(super) fn decide_on_device(op: &PagedDecode, call: &Call<'_>, gpu: &Gpu, stream: &CudaStream) -> Result<Decided> {
    let options = &op.options;
    let shapes = Shapes::new(call)?;
    let query_len = longest_query(&shapes, options)?;
    if options.validate && !is_capturing(stream)? {
        validate(op, call, gpu, &shapes, query_len)?;
    }
    let shape = PlanShape::of(&shapes, options, query_len);
    let plan = match &options.plan {
        PlanChoice::Given(plan) => {
            if plan.rows() != shape.rows() || plan.capacity() < shape.rows() {
                bail!("plan: has {} rows and {} slots, the call has {} rows", plan.rows(), plan.capacity(), shape.rows())
            }
            match plan.work_info().device() {
                Device::Cuda(_) => Plan::Device {
                    capacity: plan.capacity(),
                    made: true,
                    one_tile_tasks: plan.made_on_host().is_some_and(|plan| plan.longest_task() <= 1),
                },
                _ => Plan::Host(plan.host()?),
            }
        }
        PlanChoice::Free => Plan::Free,
        PlanChoice::Default => default_plan(&shapes, &shape, gpu)?,
    };
    Decided::new(shapes, query_len, plan, call, gpu)
}

/// The plan of a call that gives none, its tables on the device.
pub(super) fn default_plan(shapes: &Shapes, shape: &PlanShape, gpu: &Gpu) -> Result<Plan> {
    let tiles = table_tiles(shapes, gpu);
    Ok(match shape.capacity(&gpu.arch, Some(shapes.table_tokens()))? {
        // The planner's block has a row a thread; batches past that have more rows than slots are worth.
        capacity if capacity > shape.rows() && tiles > 1 && shape.rows() <= PLANNER_THREADS => {
            Plan::Device { capacity, made: false, one_tile_tasks: shape.rows().saturating_mul(tiles) <= capacity }
        }
        _ => Plan::Free,
    })
}

impl Decided {
    /// A call that is to run by `plan`; `query_len` is its longest query.
    pub fn new(shapes: Shapes, query_len: usize, plan: Plan, call: &Call<'_>, gpu: &Gpu) -> Result<Self> {
        let selection = registry::select(&plan.problem(&shapes, query_len, call, gpu), &gpu.arch)?;
        Ok(Self { shapes, query_len, selection, plan })
    }

    pub fn plan_rows(&self) -> usize {
        plan_rows(&self.shapes)
    }

    pub fn slots(&self) -> usize {
        self.plan.slots(&self.shapes)
    }

    /// How results of a row's tasks are merged where there are several.
    pub fn reducer_cut(&self, gpu: &Gpu) -> ReducerCut {
        let Shapes { batch, q_heads, dims, .. } = &self.shapes;
        let rows = batch.saturating_mul(self.query_len).saturating_mul(*q_heads);
        reducer_cut(self.slots().div_ceil(self.plan_rows().max(1)), rows, dims.head_dim, gpu.arch.compute_units)
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

fn plan_rows(shapes: &Shapes) -> usize {
    shapes.batch * if shapes.per_head { shapes.dims.kv_heads } else { 1 }
}

impl Plan {
    fn slots(&self, shapes: &Shapes) -> usize {
        match self {
            Self::Host(plan) => plan.capacity(),
            Self::Device { capacity, .. } => *capacity,
            Self::Free => plan_rows(shapes),
        }
    }

    /// The call as the registry sees it.
    pub fn problem(&self, shapes: &Shapes, query_len: usize, call: &Call<'_>, gpu: &Gpu) -> Problem {
        let tasks = match self {
            Self::Host(plan) => Tasks::of(plan),
            Self::Device { capacity, one_tile_tasks, .. } => Tasks { slots: *capacity, one_a_row: false, of_one_tile: *one_tile_tasks },
            Self::Free => Tasks { slots: plan_rows(shapes), one_a_row: true, of_one_tile: table_tiles(shapes, gpu) <= 1 },
        };
        problem(shapes, call, query_len, tasks, &gpu.arch)
    }
}

/// Tiles that a row of the block table has room for.
pub(super) fn table_tiles(shapes: &Shapes, gpu: &Gpu) -> usize {
    shapes.table_tokens().div_ceil(gpu.arch.name.tile_tokens())
}

/// Reads tables, lengths and a given plan back and checks them. Waits for the device.
fn validate(op: &PagedDecode, call: &Call<'_>, gpu: &Gpu, shapes: &Shapes, query_len: usize) -> Result<()> {
    let (block_tables, context_lens) = (to_cpu(&op.block_tables)?, to_cpu(&op.context_lens)?);
    let query_start = op.options.query_start.as_ref().map(to_cpu).transpose()?;
    let tables = HostTables { block_tables: &block_tables, context_lens: &context_lens, query_start: query_start.as_ref() };
    check_contents(shapes, &tables, call, query_len, op.given_plan()?, &gpu.arch)
}

/// A copy of the whole storage behind a tensor, seen through the same strides: copies on the device would need candle's own kernels.
fn to_cpu(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_device(&Device::Cpu)
}
