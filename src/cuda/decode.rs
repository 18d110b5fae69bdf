//! Attention over candle's CUDA tensors.

use std::sync::Arc;

use candle::cuda_backend::cudarc::driver::{CudaStream, sys};
use candle::{CudaDevice, CudaStorage, DType, Layout, Result, Storage, Tensor, bail};
use half::{bf16, f16};

use super::decide::{decide_on_device, on_host};
use super::decided::{Decided, Plan};
use super::device::Gpu;
use super::launch::{Kernel, check};
use super::memory::{Reads, check_device, cuda_storage, meta, write_address};
use super::record::maybe_record;
use super::small::{Room, Small, check_contiguous};
use super::specialize;
use super::strides::{RowSteps, is_aligned, paged, paged_scale, table_row};
use super::workspace::{self, Own, Workspace, is_capturing};
use crate::case;
use crate::gpu::args::{CudaTileArgs, Paged, ReduceArgs};
use crate::gpu::bytes::as_bytes;
use crate::gpu::launch::{self, LaunchShape};
use crate::gpu::plan_shape::{PlanShape, clamp};
use crate::op::call::Meta;
use crate::op::locks::Locks;
use crate::op::{CallSummary, PagedDecode};
use crate::options::{KvScale, PlanChoice};
use crate::registry::{self, ScaleMode};

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

/// What is known of a call that is to follow with the same tensors.
pub(crate) struct Ready {
    decided: Decided,
    strides: Strides,
}

/// The decisions of a call that is to follow with the same tensors; its kernels are loaded.
pub(crate) fn decide(op: &PagedDecode, q: Operand<'_>, key: Operand<'_>, value: Operand<'_>) -> Result<Ready> {
    let call = Checked::new(op, q, key, value, None)?;
    call.load()?;
    Ok(Ready { decided: call.decided, strides: call.strides })
}

/// Attends into fresh contiguous storage of q's shape and dtype, as was decided, right behind the write of the tokens.
pub(crate) fn attend_decided(
    op: &PagedDecode,
    Ready { decided, strides }: Ready,
    q: Operand<'_>,
    key: Operand<'_>,
    value: Operand<'_>,
) -> Result<CudaStorage> {
    let device = &q.0.device;
    let call = Checked { op, q, key, value, gpu: Gpu::of(device)?, stream: device.cuda_stream(), decided, strides, behind_write: true };
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
        Plan::Free { .. } => op.context_lens.elem_count(),
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

/// A call that was checked.
struct Checked<'a> {
    op: &'a PagedDecode,
    q: Operand<'a>,
    key: Operand<'a>,
    value: Operand<'a>,
    gpu: Arc<Gpu>,
    stream: Arc<CudaStream>,
    decided: Decided,
    strides: Strides,
    /// Whether the kernel ahead in the stream is a cache write.
    behind_write: bool,
}

/// What the kernels are told of q, the cache and the tables.
#[derive(Clone, Copy)]
struct Strides {
    q: RowSteps,
    key: Paged,
    value: Paged,
    /// From a row of the tables to the next, where they are on the device.
    table_row: i64,
}

impl Strides {
    fn of(op: &PagedDecode, [q, key, value]: [&Layout; 3]) -> Result<Self> {
        let (layout, tables) = (op.options.layout, &op.block_tables);
        Ok(Self {
            q: RowSteps::of(q),
            key: paged("key_cache", key, layout, layout.key_strides(key))?,
            value: paged("value_cache", value, layout, layout.value_strides(value))?,
            // From the host they come in order.
            table_row: if tables.device().is_cpu() { tables.dims()[tables.rank() - 1] as i64 } else { table_row(tables.layout())? },
        })
    }
}

impl<'a> Checked<'a> {
    fn new(op: &'a PagedDecode, q: Operand<'a>, key: Operand<'a>, value: Operand<'a>, out: Option<&Layout>) -> Result<Self> {
        case::check_recorder()?;
        let device = &q.0.device;
        check_device("key_cache", key.0, device)?;
        check_device("value_cache", value.0, device)?;
        let (gpu, stream) = (Gpu::of(device)?, device.cuda_stream());
        let metas = [meta("q", q.0, q.1)?, meta("key_cache", key.0, key.1)?, meta("value_cache", value.0, value.1)?];
        let call = op.call(metas, out);
        let mut decided =
            if on_host(op)? { Decided::by_contents(op, &call, &gpu.arch)? } else { decide_on_device(op, &call, &gpu, &stream)? };
        let strides = Strides::of(op, [q.1, key.1, value.1])?;
        if decided.selection.key.cuda.is_some() && !is_tile_aligned([q, key, value], metas, &strides, &stream) {
            let problem = decided.plan.problem(&decided.shapes, decided.query_len, &call, &gpu.arch);
            decided.selection = registry::select_plain(&problem, &gpu.arch)?;
        }
        let checked = Self { op, q, key, value, gpu, stream, decided, strides, behind_write: false };
        checked.check_forms()?;
        Ok(checked)
    }
}

/// Whether the tensor-core tile can load the tensors by its 16 bytes (q by 4).
fn is_tile_aligned(operands: [Operand<'_>; 3], metas: [Meta<'_>; 3], strides: &Strides, stream: &CudaStream) -> bool {
    let mut reads = Reads::new(stream);
    let [q, key, value] = operands.map(|(storage, layout)| reads.address(storage, layout));
    let steps = |paged: Paged| [paged.page, paged.head, paged.token];
    is_aligned(q, &metas[0], &strides.q.all(), 4)
        && is_aligned(key, &metas[1], &steps(strides.key), 16)
        && is_aligned(value, &metas[2], &steps(strides.value), 16)
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
        let Decided { shapes, query_len, selection, .. } = decided;
        let (options, dims) = (&op.options, shapes.dims);
        let mut own = Own::default();
        let locks = self.locks();
        let smalls = self.smalls(&locks)?;
        let mut reads = Reads::new(stream);
        let laid = self.lay_out(&smalls);
        let base = workspace.room(laid.room.bytes, &mut own, stream)?;
        workspace::upload(base, &laid.room.uploads, stream)?;
        let mut small = |i: usize| self.small_address(&smalls[i], base + laid.smalls[i] as u64, &mut reads);
        let (block_tables, mut context_lens, query_start, sinks) = (small(0)?, small(1)?, small(2)?, small(3)?);
        let (plan_rows, slots) = (decided.plan_rows(), decided.slots());
        if self.has_no_pages() {
            // Without a page there is nothing to attend, whatever the lengths say.
            context_lens = base + laid.zero_lens as u64;
            // SAFETY: bytes that were laid out for it.
            check(unsafe { sys::cuMemsetD8Async(context_lens, 0, plan_rows * 4, stream.cu_stream()) }, "cuMemsetD8Async of lengths")?;
        }
        let mut scale = |name, scale, lock| self.scale(name, scale, locks.get_if(lock), &mut reads, workspace, &mut own);
        let (k_scale, k_scale_stride) = scale("k_scale", &options.k_scale, 4)?;
        let (v_scale, v_scale_stride) = scale("v_scale", &options.v_scale, 5)?;
        let [work, reduce] = self.records(base, &laid, [locks.get_if(6), locks.get_if(7)], &mut reads)?;
        if decided.is_planned_here() {
            self.launch_planner([context_lens, query_start], [work, reduce])?;
        }
        let out_steps = RowSteps::of(out.1);
        let out_layout = out.1;
        let (out, _out_guard) = write_address(out.0, out_layout, stream);
        check_out_aligned(out, &Meta { dtype: shapes.q_dtype, layout: out_layout }, out_steps)?;
        let lse = lse.map(|(lse, layout)| write_address(lse, layout, stream));
        let heads = self.decided.shapes.heads_of_a_row();
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
            lse: lse.as_ref().map_or(0, |(address, _)| *address),
            partial: base + laid.partial as u64,
            statistics: base + laid.statistics as u64,
            table_row: self.strides.table_row,
            q_row: self.strides.q.row,
            q_head: self.strides.q.head,
            out_row: out_steps.row,
            out_head: out_steps.head,
            q_sequence: self.strides.q.sequence,
            out_sequence: out_steps.sequence,
            key_stride: self.strides.key,
            value_stride: self.strides.value,
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
            rows: clamp(self.slot_rows()),
            q_rows: clamp(shapes.rows),
            settled: i32::from(self.is_settled(&laid)),
        };
        let cluster = selection.key.cuda.map_or(1, |shape| shape.cluster);
        let grid = [
            count("blocks (slots times KV heads)", slots.saturating_mul(heads).saturating_mul(cluster), i32::MAX as usize)?,
            1,
            count("blocks of query rows", selection.row_groups, MOST_YZ)?,
        ];
        let tile = gpu.tile(stream, selection)?;
        let reducer = if decided.is_split() { Some(self.reducer()?) } else { None };
        let shape = LaunchShape { threads: selection.threads as u32, grid };
        // SAFETY: each tensor was checked against the sizes that the arguments give, the kernel clamps page ids and table columns, and writes
        // `out`, `lse` or the workspace alone.
        unsafe { tile.launch(stream, shape, gpu.overlaps(), &args) }?;
        match reducer {
            Some((kernel, shape)) => self.launch_reducer(kernel, shape, &args),
            None => Ok(()),
        }
    }

    /// The small tensors', scales' and given plan's storages, in that order.
    fn locks(&self) -> Locks<'_, 8> {
        let PagedDecode { block_tables, context_lens, options } = self.op;
        let given = match &options.plan {
            PlanChoice::Given(given) => [Some(given.work_info()), Some(given.reduce_info())],
            PlanChoice::Default | PlanChoice::Free => [None, None],
        };
        let (starts, sinks) = (options.query_start.as_ref(), options.sinks.as_ref());
        let scales = [&options.k_scale, &options.v_scale].map(KvScale::tensor);
        Locks::of([Some(block_tables), Some(context_lens), starts, sinks, scales[0], scales[1], given[0], given[1]])
    }

    /// Block tables, lengths, starts and sinks.
    fn smalls<'a>(&'a self, locks: &'a Locks<'_, 8>) -> Result<[(&'static str, Small<'a>); 4]> {
        let PagedDecode { block_tables, context_lens, options } = self.op;
        Ok([
            ("block_tables", Small::of("block_tables", Some(block_tables), || locks.get(0))?),
            ("context_lens", Small::of("context_lens", Some(context_lens), || locks.get(1))?),
            ("query_start", Small::of("query_start", options.query_start.as_ref(), || locks.get(2))?),
            ("sinks", Small::of("sinks", options.sinks.as_ref(), || locks.get(3))?),
        ])
    }

    /// Where a small tensor is; `uploaded`: if it came from the host.
    fn small_address<'a>(&self, (name, small): &(&str, Small<'a>), uploaded: u64, reads: &mut Reads<'a>) -> Result<u64> {
        match small {
            Small::None => Ok(0),
            Small::Host(_) => Ok(uploaded),
            Small::Device(storage, layout) => {
                let storage = cuda_storage(name, storage, &self.q.0.device)?;
                meta(name, storage, layout)?;
                Ok(reads.address(storage, layout))
            }
        }
    }

    /// Everything that the call needs in the workspace: what is uploaded, a plan to be made, zeros in place of lengths, partial results.
    fn lay_out(&self, smalls: &[(&str, Small<'_>); 4]) -> Laid {
        let Decided { shapes, plan, .. } = &self.decided;
        let mut room = Room::default();
        let offsets = smalls.each_ref().map(|(_, small)| match small {
            Small::Host(bytes) => room.upload(bytes),
            Small::None | Small::Device(..) => 0,
        });
        let records = match plan {
            Plan::Host(plan) => Some([plan.work.as_flattened(), plan.reduce.as_flattened()].map(|records| room.upload(as_bytes(records)))),
            Plan::Device { .. } | Plan::Free { .. } => None,
        };
        let (plan_rows, slots) = (self.decided.plan_rows(), self.decided.slots());
        let planned = room.scratch(if self.decided.is_planned_here() { slots * 16 + plan_rows * 8 } else { 0 });
        let zero_lens = room.scratch(if self.has_no_pages() { plan_rows * 4 } else { 0 });
        let states = if self.decided.is_split() { slots * self.decided.shapes.heads_of_a_row() * self.slot_rows() } else { 0 };
        let channel = if specialize::leaves_f16(&self.decided.selection) { 2 } else { 4 };
        let (partial, statistics) = (room.scratch(states * shapes.dims.head_dim * channel), room.scratch(states * 8));
        Laid { room, smalls: offsets, records, planned, zero_lens, partial, statistics }
    }

    /// Whether the tile may read tables, lengths, starts and records before the kernel ahead of it has ended. A cache write began when all before it had
    /// ended, and writes none of them. What this call puts there itself is not there before its copy, its zeros or its planner have ended.
    fn is_settled(&self, laid: &Laid) -> bool {
        let makes_some = self.decided.is_planned_here() || self.has_no_pages() || !laid.room.uploads.is_empty();
        (self.behind_write || self.op.options.tables_settled) && !makes_some
    }

    /// Whether the cache or the tables have no page at all.
    fn has_no_pages(&self) -> bool {
        self.decided.shapes.dims.pages == 0 || self.decided.shapes.max_pages == 0
    }

    /// Query rows that a (slot, KV head) has room for.
    fn slot_rows(&self) -> usize {
        specialize::slot_rows(&self.decided.selection)
    }

    /// A scale's address and strides; a number is put on the device. One factor beside a side that has a scale per token is every token's, by strides
    /// of 0. `storage`: of a tensor.
    fn scale<'a>(
        &self,
        name: &str,
        scale: &KvScale,
        storage: Option<&'a Storage>,
        reads: &mut Reads<'a>,
        workspace: &mut Workspace,
        own: &mut Own,
    ) -> Result<(u64, Paged)> {
        let mode = self.decided.selection.key.scales;
        let value = match scale {
            _ if mode == ScaleMode::None => return Ok((0, Paged::default())),
            KvScale::Tensor(tensor) => {
                let Some(storage) = storage else { bail!("{name}: a tensor without a storage") };
                let storage = cuda_storage(name, storage, &self.q.0.device)?;
                meta(name, storage, tensor.layout())?;
                let stride = if tensor.elem_count() == 1 { Paged::default() } else { paged_scale(tensor.layout()) };
                return Ok((reads.address(storage, tensor.layout()), stride));
            }
            KvScale::Scalar(value) => *value,
            KvScale::None => 1.0,
        };
        Ok((workspace.scalar(value, own, &self.stream)?, Paged::default()))
    }

    /// Where the plan's records are, or will be, 0 without any; `given`: the storages of a plan that the caller gave.
    fn records<'a>(&self, base: u64, laid: &Laid, given: [Option<&'a Storage>; 2], reads: &mut Reads<'a>) -> Result<[u64; 2]> {
        match (&self.decided.plan, &self.op.options.plan, laid.records) {
            (_, _, Some(offsets)) => Ok(offsets.map(|at| base + at as u64)),
            (Plan::Device { made: true, .. }, PlanChoice::Given(tensors), _) => {
                let mut address = |tensor: &Tensor, storage: Option<&'a Storage>| -> Result<u64> {
                    let Some(storage) = storage else { bail!("plan: not given") };
                    Ok(reads.address(cuda_storage("plan", storage, &self.q.0.device)?, tensor.layout()))
                };
                Ok([address(tensors.work_info(), given[0])?, address(tensors.reduce_info(), given[1])?])
            }
            (Plan::Device { .. }, _, _) => Ok([base + laid.planned as u64, base + (laid.planned + self.decided.slots() * 16) as u64]),
            (Plan::Free { .. } | Plan::Host(_), _, _) => Ok([0; 2]),
        }
    }

    /// `reads`: lengths and query starts; `writes`: work and reduce records.
    fn launch_planner(&self, reads: [u64; 2], writes: [u64; 2]) -> Result<()> {
        let shape = PlanShape::of(&self.decided.shapes, &self.op.options, self.decided.query_len);
        let args = shape.planner_args(reads, writes, self.decided.slots());
        let planner = self.gpu.planner(&self.stream, shape.rows(), shape.ragged)?;
        // SAFETY: it reads a length for each row (and the starts) and writes the records that room was made for.
        unsafe { planner.launch(&self.stream, launch::PLAN, false, &args) }
    }

    /// Merges what the tile with arguments `tile` leaves.
    fn launch_reducer(&self, kernel: Kernel, shape: LaunchShape, tile: &CudaTileArgs) -> Result<()> {
        let shapes = &self.decided.shapes;
        let args = ReduceArgs {
            reduce: tile.reduce,
            partial: tile.partial,
            statistics: tile.statistics,
            sinks: tile.sinks,
            query_start: tile.query_start,
            out: tile.out,
            lse: tile.lse,
            out_row: tile.out_row,
            out_head: tile.out_head,
            query_len: tile.query_len,
            q_heads: clamp(shapes.q_heads),
            kv_heads: tile.kv_heads,
            rows: tile.rows,
            per_head: i32::from(shapes.per_head),
            q_rows: tile.q_rows,
            out_sequence: tile.out_sequence,
        };
        // SAFETY: it reads the partial results that the tile wrote, and writes `out` and `lse`, which have a row for each (sequence, token).
        unsafe { kernel.launch(&self.stream, shape, self.gpu.overlaps(), &args) }
    }

    /// Refuses what the kernels have no arguments for, and what a graph cannot take: before anything is enqueued, so before an append writes.
    fn check_forms(&self) -> Result<()> {
        let options = &self.op.options;
        let PagedDecode { block_tables, context_lens, .. } = self.op;
        let others =
            [("context_lens", Some(context_lens)), ("query_start", options.query_start.as_ref()), ("sinks", options.sinks.as_ref())];
        others.iter().try_for_each(|(name, tensor)| check_contiguous(name, *tensor))?;
        if let PlanChoice::Given(given) = &options.plan {
            check_contiguous("plan", Some(given.work_info()))?;
            check_contiguous("plan", Some(given.reduce_info()))?;
        }
        let is_on_host = |tensor: &Tensor| tensor.device().is_cpu();
        let smalls = others.into_iter().filter_map(|(_, tensor)| tensor).chain([block_tables]);
        let from_host = matches!(self.decided.plan, Plan::Host(_)) || smalls.into_iter().any(is_on_host);
        if from_host && is_capturing(&self.stream)? {
            bail!("paged-decode: tables, lengths, sinks or a plan on the CPU, from where a graph cannot take them; keep them on the device")
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
        let cut = self.decided.reducer_cut(&self.gpu.arch);
        let ragged = self.op.options.query_start.is_some();
        let kernel = self.gpu.reducer(&self.stream, shapes.dims.head_dim, shapes.q_dtype, ragged, shapes.per_head, cut)?;
        let [rows, heads] = cut.grid(*query_len, shapes.q_heads, shapes.dims.head_dim);
        let grid = [
            count("query rows", rows, i32::MAX as usize)?,
            count("query heads", heads, MOST_YZ)?,
            count("sequences", shapes.batch, MOST_YZ)?,
        ];
        Ok((kernel, LaunchShape { threads: cut.threads() as u32, grid }))
    }
}

/// Where a call's parts are in the workspace.
struct Laid {
    room: Room,
    /// Of the small tensors that are uploaded.
    smalls: [usize; 4],
    /// Of a host plan's work and reduce records.
    records: Option<[usize; 2]>,
    /// Of a plan that is made on the device: work records, then reduce records.
    planned: usize,
    zero_lens: usize,
    partial: usize,
    statistics: usize,
}

fn check_out_aligned(address: u64, out: &Meta<'_>, steps: RowSteps) -> Result<()> {
    if is_aligned(address, out, &steps.all(), 4 * out.dtype.size_in_bytes() as u64) {
        return Ok(());
    }
    let (dims, stride) = (out.layout.dims(), out.layout.stride());
    bail!("out: {dims:?} with strides {stride:?} is not aligned to four elements, as the CUDA kernels need")
}

/// What CUDA admits in a grid's second and third dim.
const MOST_YZ: usize = 65535;

fn count(what: &str, value: usize, most: usize) -> Result<u32> {
    if value > most {
        bail!("paged-decode: {value} {what}, the CUDA kernels take {most}")
    }
    Ok(value as u32)
}
