//! Attention over candle's CUDA tensors.

use std::sync::Arc;

use candle::cuda_backend::cudarc::driver::{CudaStream, sys};
use candle::{CudaDevice, CudaStorage, DType, Device, Layout, Result, Storage, Tensor, bail};
use half::{bf16, f16};

use super::device::Gpu;
use super::launch::{Kernel, check};
use super::memory::{Reads, cuda_storage, meta, write_address};
use super::record::maybe_record;
use super::specialize::{self, ReducerCut, reducer_cut};
use super::strides::{self, is_aligned, paged, paged_scale, table_row};
use super::workspace::{self, Own, Workspace, is_capturing};
use crate::case;
use crate::gpu::args::{CudaTileArgs, Paged, PlanArgs, ReduceArgs};
use crate::gpu::launch::{self, LaunchShape};
use crate::gpu::plan_shape::{PlanShape, clamp};
use crate::op::call::{Call, Meta};
use crate::op::decide::{HostTables, Prepared, check_covers, check_tables, longest, problem};
use crate::op::locks::Locks;
use crate::op::shapes::Shapes;
use crate::op::{CallSummary, PagedDecode};
use crate::options::{DecodeOptions, KvScale, PlanChoice};
use crate::plan::{HostPlan, PLANNER_THREADS};
use crate::registry::{self, Problem, ScaleMode, Selection, block_rows};

/// A tensor's storage with its layout.
pub(crate) type Operand<'a> = (&'a CudaStorage, &'a Layout);

/// Attends into fresh contiguous storage of q's shape and dtype; `with_lse`: and F32 `[rows, q_heads]`.
pub(crate) fn attend_new(
    op: &PagedDecode,
    q: Operand<'_>,
    key: Operand<'_>,
    value: Operand<'_>,
    with_lse: bool,
) -> Result<(CudaStorage, Option<CudaStorage>)> {
    let call = Checked::new(op, q, key, value, None)?;
    let device = &q.0.device;
    let layout = Layout::contiguous(q.1.shape());
    let mut out = empty(call.decided.shapes.q_dtype, layout.shape().elem_count(), device)?;
    let lse_layout = Layout::contiguous((call.decided.shapes.rows, call.decided.shapes.q_heads));
    let mut lse = if with_lse { Some(empty(DType::F32, lse_layout.shape().elem_count(), device)?) } else { None };
    call.run((&mut out, &layout), lse.as_mut().map(|lse| (lse, &lse_layout)))?;
    Ok((out, lse))
}

/// The decisions of a call that is to follow with the same tensors; its kernels are loaded.
pub(crate) fn decide(op: &PagedDecode, q: Operand<'_>, key: Operand<'_>, value: Operand<'_>) -> Result<Decided> {
    let call = Checked::new(op, q, key, value, None)?;
    call.load()?;
    Ok(call.decided)
}

/// Attends into fresh contiguous storage of q's shape and dtype, as was decided.
pub(crate) fn attend_decided(
    op: &PagedDecode,
    decided: Decided,
    q: Operand<'_>,
    key: Operand<'_>,
    value: Operand<'_>,
) -> Result<CudaStorage> {
    let device = &q.0.device;
    let call = Checked { op, q, key, value, gpu: Gpu::of(device)?, stream: device.cuda_stream(), decided };
    let layout = Layout::contiguous(q.1.shape());
    let mut out = empty(call.decided.shapes.q_dtype, layout.shape().elem_count(), device)?;
    call.run((&mut out, &layout), None)?;
    Ok(out)
}

/// Attends into `out`, which has q's shape and dtype.
pub(crate) fn attend_into(
    op: &PagedDecode,
    out: (&mut CudaStorage, &Layout),
    q: Operand<'_>,
    key: Operand<'_>,
    value: Operand<'_>,
) -> Result<()> {
    meta("out", out.0, out.1)?;
    Checked::new(op, q, key, value, Some(out.1))?.run(out, None)
}

/// What is decided of a call; nothing is enqueued.
pub(crate) fn explain(op: &PagedDecode, q: Operand<'_>, key: Operand<'_>, value: Operand<'_>) -> Result<CallSummary> {
    let Decided { selection, plan, .. } = Checked::new(op, q, key, value, None)?.decided;
    let tasks = match plan {
        Plan::Host(plan) => plan.tasks(),
        Plan::Device { capacity, .. } => capacity,
        Plan::Free => op.context_lens.elem_count(),
    };
    Ok(CallSummary { selection, tasks })
}

/// Uninitialised storage.
fn empty(dtype: DType, elements: usize, device: &CudaDevice) -> Result<CudaStorage> {
    // SAFETY: the kernels write every element.
    unsafe {
        Ok(match dtype {
            DType::F32 => CudaStorage::wrap_cuda_slice(device.alloc::<f32>(elements)?, device.clone()),
            DType::F16 => CudaStorage::wrap_cuda_slice(device.alloc::<f16>(elements)?, device.clone()),
            DType::BF16 => CudaStorage::wrap_cuda_slice(device.alloc::<bf16>(elements)?, device.clone()),
            other => bail!("q: dtype {other:?} is not F32, F16 or BF16"),
        })
    }
}

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
    shapes: Shapes,
    /// New tokens of the longest sequence.
    query_len: usize,
    pub selection: Selection,
    plan: Plan,
}

/// A call that was checked.
struct Checked<'a> {
    op: &'a PagedDecode,
    q: Operand<'a>,
    key: Operand<'a>,
    value: Operand<'a>,
    gpu: Arc<Gpu>,
    stream: Arc<CudaStream>,
    decided: Decided,
}

impl<'a> Checked<'a> {
    fn new(op: &'a PagedDecode, q: Operand<'a>, key: Operand<'a>, value: Operand<'a>, out: Option<&Layout>) -> Result<Self> {
        case::check_recorder()?;
        let device = &q.0.device;
        let (gpu, stream) = (Gpu::of(device)?, device.cuda_stream());
        let metas = [meta("q", q.0, q.1)?, meta("key_cache", key.0, key.1)?, meta("value_cache", value.0, value.1)?];
        let call = op.call(metas, out);
        let mut decided = if on_host(op)? { decide_on_host(op, &call, &gpu)? } else { decide_on_device(op, &call, &gpu, &stream)? };
        if decided.selection.key.cuda.is_some() && !is_tile_aligned([q, key, value], metas, &op.options, &stream)? {
            let problem = decided.plan.problem(&decided.shapes, decided.query_len, &call, &gpu);
            decided.selection = registry::select_plain(&problem, &gpu.arch)?;
        }
        Ok(Self { op, q, key, value, gpu, stream, decided })
    }
}

/// Whether the tables are on the CPU.
fn on_host(op: &PagedDecode) -> Result<bool> {
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

fn decide_on_host(op: &PagedDecode, call: &Call<'_>, gpu: &Gpu) -> Result<Decided> {
    let Prepared { shapes, rows, plan, selection } = Prepared::new(call, &op.host_tables(), op.given_plan()?, &gpu.arch, registry::select)?;
    Ok(Decided { shapes, query_len: longest(&rows), selection, plan: Plan::Host(plan) })
}

fn decide_on_device(op: &PagedDecode, call: &Call<'_>, gpu: &Gpu, stream: &CudaStream) -> Result<Decided> {
    let options = &op.options;
    let shapes = Shapes::new(call)?;
    let query_len = match (&options.query_start, options.max_query_len) {
        (None, _) => shapes.rows.checked_div(shapes.batch).unwrap_or(0),
        (Some(_), None) => shapes.rows,
        (Some(_), Some(0)) if shapes.rows > 0 => bail!("max_query_len: 0, but q has {} rows", shapes.rows),
        (Some(_), Some(most)) => most.min(shapes.rows),
    };
    if options.validate && !is_capturing(stream)? {
        validate(op, call, gpu, &shapes, query_len)?;
    }
    let shape = plan_shape(&shapes, options, query_len);
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
        match &self.plan {
            Plan::Host(plan) => !plan.is_one_task_a_row(),
            Plan::Device { .. } => self.slots() > self.plan_rows(),
            Plan::Free => false,
        }
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
    fn problem(&self, shapes: &Shapes, query_len: usize, call: &Call<'_>, gpu: &Gpu) -> Problem {
        let one_tile_tasks = match self {
            Self::Host(plan) => plan.longest_task() <= 1,
            Self::Device { one_tile_tasks, .. } => *one_tile_tasks,
            Self::Free => table_tiles(shapes, gpu) <= 1,
        };
        Problem { one_tile_tasks, ..problem(shapes, call, query_len, self.slots(shapes), &gpu.arch) }
    }
}

/// Tiles that a row of the block table has room for.
fn table_tiles(shapes: &Shapes, gpu: &Gpu) -> usize {
    shapes.table_tokens().div_ceil(gpu.arch.name.tile_tokens())
}

pub(super) fn plan_shape<T, P>(shapes: &Shapes, options: &DecodeOptions<T, P>, query_len: usize) -> PlanShape {
    PlanShape {
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

/// Reads tables, lengths and a given plan back and checks them. Waits for the device.
fn validate(op: &PagedDecode, call: &Call<'_>, gpu: &Gpu, shapes: &Shapes, query_len: usize) -> Result<()> {
    let (block_tables, context_lens) = (to_cpu(&op.block_tables)?, to_cpu(&op.context_lens)?);
    let query_start = op.options.query_start.as_ref().map(to_cpu).transpose()?;
    let tables = HostTables { block_tables: &block_tables, context_lens: &context_lens, query_start: query_start.as_ref() };
    let rows = check_tables(shapes, &tables, call.options.window)?;
    let longest = longest(&rows);
    if longest > query_len {
        bail!("max_query_len: {query_len}, but a sequence has {longest} new tokens")
    }
    match op.given_plan()? {
        Some(plan) => check_covers(&plan, &rows, call, &gpu.arch),
        None => Ok(()),
    }
}

/// A copy of the whole storage behind a tensor, seen through the same strides: copies on the device would need candle's own kernels.
fn to_cpu(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_device(&Device::Cpu)
}

/// Whether the tensor-core tile can load the tensors by its 16 bytes (q by 4).
fn is_tile_aligned(operands: [Operand<'_>; 3], metas: [Meta<'_>; 3], options: &DecodeOptions, stream: &CudaStream) -> Result<bool> {
    let mut reads = Reads::new(stream);
    let [q, key, value] = operands.map(|(storage, layout)| reads.address(storage, layout));
    let [row, head] = strides::rows("q", metas[0].layout)?;
    let steps = |paged: crate::cache::KvStrides| [paged.page as i64, paged.head as i64, paged.token as i64];
    Ok(is_aligned(q, &metas[0], &[row as i64, head as i64], 4)
        && is_aligned(key, &metas[1], &steps(options.layout.key_strides(metas[1].layout)), 16)
        && is_aligned(value, &metas[2], &steps(options.layout.value_strides(metas[2].layout)), 16))
}

/// A small tensor on the device, or its bytes on the host to be uploaded.
enum Small<'a> {
    None,
    Device(&'a Storage, &'a Layout),
    Host(Vec<u8>),
}

impl<'a> Small<'a> {
    /// `tensor`, whose rows (all but the last dim, if `strided_rows`) may be apart on the device.
    fn of(name: &str, tensor: Option<&'a Tensor>, storage: impl FnOnce() -> &'a Storage) -> Result<Self> {
        let Some(tensor) = tensor else { return Ok(Self::None) };
        match tensor.device() {
            Device::Cpu => host_bytes(name, tensor).map(Self::Host),
            _ => Ok(Self::Device(storage(), tensor.layout())),
        }
    }

    /// As [`Small::of`], refusing elements that are apart.
    fn contiguous(name: &str, tensor: Option<&'a Tensor>, storage: impl FnOnce() -> &'a Storage) -> Result<Self> {
        match tensor {
            Some(tensor) if !tensor.device().is_cpu() && !tensor.is_contiguous() => {
                bail!("{name}: the CUDA kernels read it contiguous, got {:?} with strides {:?}", tensor.dims(), tensor.stride())
            }
            _ => Self::of(name, tensor, storage),
        }
    }
}

/// The elements of a small CPU tensor in order, four bytes each.
fn host_bytes(name: &str, tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::U32 => flat.to_vec1::<u32>()?.into_iter().flat_map(u32::to_ne_bytes).collect(),
        DType::I32 => flat.to_vec1::<i32>()?.into_iter().flat_map(i32::to_ne_bytes).collect(),
        DType::F32 => flat.to_vec1::<f32>()?.into_iter().flat_map(f32::to_ne_bytes).collect(),
        other => bail!("{name}: dtype {other:?} is neither U32, I32 nor F32"),
    })
}

/// The part of the workspace that a call lays out for itself.
#[derive(Default)]
struct Room {
    uploads: Vec<u8>,
    bytes: usize,
}

impl Room {
    const ALIGNMENT: usize = 256;

    /// Bytes that are uploaded, all of them before any [`Room::scratch`]. Gives their offset.
    fn upload(&mut self, bytes: &[u8]) -> usize {
        let at = self.uploads.len().next_multiple_of(Self::ALIGNMENT);
        self.uploads.resize(at, 0);
        self.uploads.extend_from_slice(bytes);
        self.bytes = self.uploads.len();
        at
    }

    /// Uninitialised bytes. Gives their offset.
    fn scratch(&mut self, bytes: usize) -> usize {
        let at = self.bytes.next_multiple_of(Self::ALIGNMENT);
        self.bytes = at + bytes;
        at
    }
}

impl Checked<'_> {
    fn run(&self, out: (&mut CudaStorage, &Layout), lse: Option<(&mut CudaStorage, &Layout)>) -> Result<()> {
        maybe_record(self.op, [self.q, self.key, self.value], &self.stream)?;
        if self.decided.shapes.rows == 0 {
            return Ok(());
        }
        workspace::with(&self.stream, |workspace| self.run_in(workspace, out, lse))
    }

    fn run_in(&self, workspace: &mut Workspace, out: (&mut CudaStorage, &Layout), lse: Option<(&mut CudaStorage, &Layout)>) -> Result<()> {
        let Self { op, gpu, stream, decided, .. } = self;
        let Decided { shapes, query_len, selection, plan } = decided;
        let (options, device, dims) = (&op.options, &self.q.0.device, shapes.dims);
        let mut own = Own::default();

        // Small tensors, on the device or to be uploaded.
        let given = match &options.plan {
            PlanChoice::Given(given) => [Some(given.work_info()), Some(given.reduce_info())],
            PlanChoice::Default | PlanChoice::Free => [None, None],
        };
        let scales = [&options.k_scale, &options.v_scale].map(KvScale::tensor);
        let locks = Locks::of([
            Some(&op.block_tables),
            Some(&op.context_lens),
            options.query_start.as_ref(),
            options.sinks.as_ref(),
            scales[0],
            scales[1],
            given[0],
            given[1],
        ]);
        let mut reads = Reads::new(stream);
        let tables = Small::of("block_tables", Some(&op.block_tables), || locks.get(0))?;
        let lens = Small::contiguous("context_lens", Some(&op.context_lens), || locks.get(1))?;
        let starts = Small::contiguous("query_start", options.query_start.as_ref(), || locks.get(2))?;
        let sinks = Small::contiguous("sinks", options.sinks.as_ref(), || locks.get(3))?;
        let mut room = Room::default();
        let smalls = [("block_tables", &tables), ("context_lens", &lens), ("query_start", &starts), ("sinks", &sinks)];
        let offsets = smalls.map(|(_, small)| match small {
            Small::Host(bytes) => room.upload(bytes),
            Small::None | Small::Device(..) => 0,
        });
        let uploaded_plan = match plan {
            Plan::Host(plan) => Some([plan.work.as_flattened(), plan.reduce.as_flattened()].map(|records| room.upload(&as_bytes(records)))),
            Plan::Device { .. } | Plan::Free => None,
        };

        // Scratch.
        let (plan_rows, slots) = (decided.plan_rows(), decided.slots());
        let heads = if shapes.per_head { 1 } else { dims.kv_heads };
        let rows = selection.row_groups * block_rows(&selection.key);
        let planned = room.scratch(if decided.is_planned_here() { slots * 16 + plan_rows * 8 } else { 0 });
        let no_pages = dims.pages == 0 || shapes.max_pages == 0;
        let zero_lens = room.scratch(if no_pages { plan_rows * 4 } else { 0 });
        let is_split = decided.is_split();
        let states = if is_split { slots * heads * rows } else { 0 };
        let (partial, statistics) = (room.scratch(states * dims.head_dim * 4), room.scratch(states * 8));
        let base = workspace.room(room.bytes, &mut own, stream)?;
        workspace::upload(base, &room.uploads, stream)?;
        let mut small = |i: usize| -> Result<u64> {
            let (name, small) = smalls[i];
            match small {
                Small::None => Ok(0),
                Small::Host(_) => Ok(base + offsets[i] as u64),
                Small::Device(storage, layout) => {
                    let storage = cuda_storage(name, storage, device)?;
                    meta(name, storage, layout)?;
                    Ok(reads.address(storage, layout))
                }
            }
        };
        let (block_tables, mut context_lens, query_start, sinks) = (small(0)?, small(1)?, small(2)?, small(3)?);
        if no_pages {
            // Without a page there is nothing to attend, whatever the lengths say.
            context_lens = base + zero_lens as u64;
            // SAFETY: bytes that were laid out for it.
            check(unsafe { sys::cuMemsetD8Async(context_lens, 0, plan_rows * 4, stream.cu_stream()) }, "cuMemsetD8Async of lengths")?;
        }
        let mut scale = |name: &str, scale: &KvScale, lock: usize| -> Result<(u64, Paged)> {
            let value = match (scale, selection.key.scales) {
                (_, ScaleMode::None) => return Ok((0, Paged::default())),
                (KvScale::Tensor(tensor), mode) => {
                    let storage = cuda_storage(name, locks.get(lock), device)?;
                    meta(name, storage, tensor.layout())?;
                    let address = reads.address(storage, tensor.layout());
                    let stride = if mode == ScaleMode::Scalar { Paged::default() } else { paged_scale(tensor.layout()) };
                    if mode != ScaleMode::Scalar && tensor.rank() < 3 {
                        bail!("{name}: one factor, but the other side has a scale per token: the CUDA kernels need both sides alike")
                    }
                    return Ok((address, stride));
                }
                (_, ScaleMode::PerToken | ScaleMode::Block) => {
                    bail!("{name}: one factor, but the other side has a scale per token: the CUDA kernels need both sides alike")
                }
                (KvScale::None, ScaleMode::Scalar) => 1.0,
                (KvScale::Scalar(value), ScaleMode::Scalar) => *value,
            };
            Ok((workspace.scalar(value, &mut own, stream)?, Paged::default()))
        };
        let (k_scale, k_scale_stride) = scale("k_scale", &options.k_scale, 4)?;
        let (v_scale, v_scale_stride) = scale("v_scale", &options.v_scale, 5)?;
        let [work, reduce] = match (plan, uploaded_plan) {
            (_, Some(offsets)) => offsets.map(|at| base + at as u64),
            (Plan::Device { made: true, .. }, _) => {
                let [work, reduce] = [("plan", 6, given[0]), ("plan", 7, given[1])].map(|(name, lock, tensor)| -> Result<u64> {
                    let Some(tensor) = tensor else { bail!("{name}: not given") };
                    if !tensor.is_contiguous() {
                        bail!("{name}: records of {:?} with strides {:?} are not contiguous", tensor.dims(), tensor.stride())
                    }
                    Ok(reads.address(cuda_storage(name, locks.get(lock), device)?, tensor.layout()))
                });
                [work?, reduce?]
            }
            (Plan::Device { made: false, .. }, _) => [base + planned as u64, base + (planned + slots * 16) as u64],
            (Plan::Free | Plan::Host(_), _) => workspace.free_plan(plan_rows, clamp(table_tiles(shapes, gpu)), stream)?,
        };

        // Launches.
        if decided.is_planned_here() {
            let shape = plan_shape(shapes, options, *query_len);
            let args = PlanArgs {
                context_lens,
                query_start,
                work,
                reduce,
                rows: clamp(plan_rows),
                heads_per_row: clamp(shape.heads_per_row()),
                query_len: clamp(*query_len),
                window: options.window.map_or(0, clamp),
                capacity: clamp(slots),
                max_partitions: options.max_partitions.map_or(u32::MAX, |most| u32::try_from(most).unwrap_or(u32::MAX)),
            };
            let planner = gpu.planner(stream, plan_rows, shape.ragged)?;
            // SAFETY: it reads a length for each row (and the starts) and writes the records that room was made for.
            unsafe { planner.launch(stream, launch::PLAN, false, &args) }?;
        }
        let [q_row, q_head] = strides::rows("q", self.q.1)?;
        let [out_row, out_head] = strides::rows("out", out.1)?;
        let out_meta = Meta { dtype: shapes.q_dtype, layout: out.1 };
        let out_layout = out.1;
        let (out, _out_guard) = write_address(out.0, out_layout, stream);
        if !is_aligned(out, &out_meta, &[out_row as i64, out_head as i64], 4 * shapes.q_dtype.size_in_bytes() as u64) {
            bail!(
                "out: {:?} with strides {:?} is not aligned to four elements, as the CUDA kernels need",
                out_layout.dims(),
                out_layout.stride()
            )
        }
        let lse = lse.map(|(lse, layout)| write_address(lse, layout, stream));
        let lse_address = lse.as_ref().map_or(0, |(address, _)| *address);
        let args = CudaTileArgs {
            work,
            reduce,
            block_tables,
            context_lens,
            query_start,
            q: reads.address(self.q.0, self.q.1),
            key: reads.address(self.key.0, self.key.1),
            value: reads.address(self.value.0, self.value.1),
            k_scale,
            v_scale,
            sinks,
            out,
            lse: lse_address,
            partial: base + partial as u64,
            statistics: base + statistics as u64,
            table_row: match &tables {
                Small::Host(_) => shapes.max_pages as i64,
                Small::None | Small::Device(..) => table_row(op.block_tables.layout())?,
            },
            q_row: q_row as i64,
            q_head: q_head as i64,
            out_row: out_row as i64,
            out_head: out_head as i64,
            key_stride: paged("key_cache", self.key.1, options.layout, options.layout.key_strides(self.key.1))?,
            value_stride: paged("value_cache", self.value.1, options.layout, options.layout.value_strides(self.value.1))?,
            k_scale_stride,
            v_scale_stride,
            scale_log2: shapes.softmax_scale * std::f32::consts::LOG2_E,
            softcap: options.softcap.unwrap_or(0.0),
            window: options.window.map_or(0, clamp),
            query_len: clamp(*query_len),
            kv_heads: clamp(dims.kv_heads),
            pages: clamp(dims.pages),
            max_pages: clamp(shapes.max_pages),
            plan_rows: clamp(plan_rows),
            rows: clamp(rows),
            q_rows: clamp(shapes.rows),
        };
        let grid = [
            count("slots", slots, i32::MAX as usize)?,
            count("KV heads", heads, MOST_YZ)?,
            count("blocks of query rows", selection.row_groups, MOST_YZ)?,
        ];
        let tile = gpu.tile(stream, selection)?;
        let reducer = if is_split { Some(self.reducer()?) } else { None };
        let shape = LaunchShape { threads: selection.threads as u32, grid };
        // SAFETY: each tensor was checked against the sizes that the arguments give, the kernel clamps page ids and table columns, and writes
        // `out`, `lse` or the workspace alone.
        unsafe { tile.launch(stream, shape, gpu.overlaps(), &args) }?;
        if let Some((kernel, shape)) = reducer {
            let args = ReduceArgs {
                reduce,
                partial: args.partial,
                statistics: args.statistics,
                sinks,
                query_start,
                out,
                lse: lse_address,
                out_row: out_row as i64,
                out_head: out_head as i64,
                query_len: clamp(*query_len),
                q_heads: clamp(shapes.q_heads),
                kv_heads: clamp(dims.kv_heads),
                rows: clamp(rows),
                per_head: i32::from(shapes.per_head),
                q_rows: clamp(shapes.rows),
            };
            // SAFETY: it reads the partial results that the tile wrote, and writes `out` and `lse`, which have a row for each (sequence, token).
            unsafe { kernel.launch(stream, shape, gpu.overlaps(), &args) }?;
        }
        Ok(())
    }

    /// Compiles and loads the call's kernels, where they are not.
    fn load(&self) -> Result<()> {
        let Self { gpu, stream, decided, op, .. } = self;
        gpu.tile(stream, &decided.selection)?;
        if decided.is_planned_here() {
            gpu.planner(stream, decided.plan_rows(), op.options.query_start.is_some())?;
        }
        if decided.is_split() {
            self.reducer()?;
        }
        Ok(())
    }

    fn reducer(&self) -> Result<(Kernel, LaunchShape)> {
        let Decided { shapes, query_len, .. } = &self.decided;
        let cut = self.decided.reducer_cut(&self.gpu);
        let (heads, threads) = specialize::reducer_block(cut.warps);
        let ragged = self.op.options.query_start.is_some();
        let kernel = self.gpu.reducer(&self.stream, shapes.dims.head_dim, shapes.q_dtype, ragged, shapes.per_head, cut)?;
        let grid = [
            count("query rows", query_len.saturating_mul(cut.split), i32::MAX as usize)?,
            count("query heads", shapes.q_heads.div_ceil(heads), MOST_YZ)?,
            count("sequences", shapes.batch, MOST_YZ)?,
        ];
        Ok((kernel, LaunchShape { threads: threads as u32, grid }))
    }
}

/// What CUDA admits in a grid's second and third dim.
const MOST_YZ: usize = 65535;

fn count(what: &str, value: usize, most: usize) -> Result<u32> {
    if value > most {
        bail!("paged-decode: {value} {what}, the CUDA kernels take {most}")
    }
    Ok(value as u32)
}

fn as_bytes(records: &[i32]) -> Vec<u8> {
    records.iter().flat_map(|record| record.to_ne_bytes()).collect()
}
