//! Attention over tensors on an AMD GPU.

use std::sync::Arc;

use candle::{DType, Result, bail};

use super::device::RocmDevice;
use super::launch::Launch;
use super::module::KernelId;
use super::plan::RocmPlan;
use super::reducer::reducer;
use super::scalar::Scalar;
use super::scale::ScaleArgs;
use super::specialize;
use super::strides::{Rows, paged, table_row};
use super::tensor::RocmTensor;
use crate::gpu::args::{PlanArgs, ReduceArgs, TileArgs};
use crate::gpu::launch::LaunchShape;
use crate::gpu::plan_shape::{PlanShape, clamp, longest_query};
use crate::op::call::{Call, Described, options_meta};
use crate::op::decide::{HostTables, check_contents, problem};
use crate::op::shapes::{Shapes, check_output};
use crate::options::{DecodeOptions, PlanChoice};
use crate::plan::{PlannerBlock, TILE_TOKENS};
use crate::registry::{Arch, M_TILE_ROWS, Selection, Tasks};

/// Options of a call on device tensors: scales, sinks, `query_start` and the plan live on the device.
///
/// `plan`: `Given` a [`RocmPlan`] that is refreshed once a step; `Default` plans on the device in every call, but where one task a sequence is what the
/// plan would be; `Free` is one task a sequence.
pub type RocmOptions = DecodeOptions<RocmTensor, RocmPlan>;

/// [`crate::paged_decode`] over tensors on an AMD GPU: the same shapes and contracts, but for what the kernels do not take.
///
/// The work is enqueued, nothing waits for it, and it can be captured in a graph ([`RocmDevice::capture`]) once each of its kernels has been
/// compiled, which a call before the capture does. With `options.validate` the tables and lengths are read back and checked first, but never while
/// capturing; without it a wrong page id is clamped to the cache, and a length past its table to what the table has lanes for.
///
/// # Errors
/// Those of [`crate::paged_decode`], and: tensors on another device; an F32 cache; layouts other than Shuffled and Vllm (MXFP4: Nhd and Hnd); a
/// head_dim or page size without a kernel; block tables whose lanes are strided, and a 4-D q whose leading dims do not fold into one stride.
pub fn decode(
    q: &RocmTensor,
    key_cache: &RocmTensor,
    value_cache: &RocmTensor,
    block_tables: &RocmTensor,
    context_lens: &RocmTensor,
    options: &RocmOptions,
) -> Result<RocmTensor> {
    let out = RocmTensor::empty(q.dims(), q.dtype(), q.device())?;
    decode_into(&out, None, q, key_cache, value_cache, block_tables, context_lens, options)?;
    Ok(out)
}

/// [`decode`] with the log-sum-exp of each row and head: F32 `[rows, q_heads]`, as [`crate::paged_decode_with_lse`]'s.
pub fn decode_with_lse(
    q: &RocmTensor,
    key_cache: &RocmTensor,
    value_cache: &RocmTensor,
    block_tables: &RocmTensor,
    context_lens: &RocmTensor,
    options: &RocmOptions,
) -> Result<(RocmTensor, RocmTensor)> {
    let out = RocmTensor::empty(q.dims(), q.dtype(), q.device())?;
    let (&head_dim, leading) = match q.dims().split_last() {
        Some(split) if q.dims().len() >= 3 => split,
        _ => bail!("q: expected [rows, q_heads, head_dim] or [batch, query_len, q_heads, head_dim], got {:?}", q.dims()),
    };
    let q_heads = leading[leading.len() - 1];
    let rows = q.layout().shape().elem_count().checked_div(q_heads * head_dim).unwrap_or(0);
    let lse = RocmTensor::empty((rows, q_heads), DType::F32, q.device())?;
    decode_into(&out, Some(&lse), q, key_cache, value_cache, block_tables, context_lens, options)?;
    Ok((out, lse))
}

/// [`decode`] into `out`, a tensor or view of q's shape and dtype whose last dim is contiguous, and its LSEs into `lse`, F32 `[rows, q_heads]`
/// contiguous, where given. What a graph replays.
#[allow(clippy::too_many_arguments)]
pub fn decode_into(
    out: &RocmTensor,
    lse: Option<&RocmTensor>,
    q: &RocmTensor,
    key_cache: &RocmTensor,
    value_cache: &RocmTensor,
    block_tables: &RocmTensor,
    context_lens: &RocmTensor,
    options: &RocmOptions,
) -> Result<()> {
    let tensors = Tensors { q, key: key_cache, value: value_cache, block_tables, context_lens, out, lse };
    tensors.check(options)?;
    Decode::new(&tensors, options)?.run()
}

/// The tensors of a call.
#[derive(Clone, Copy)]
pub(super) struct Tensors<'a> {
    pub q: &'a RocmTensor,
    pub key: &'a RocmTensor,
    pub value: &'a RocmTensor,
    pub block_tables: &'a RocmTensor,
    pub context_lens: &'a RocmTensor,
    pub out: &'a RocmTensor,
    pub lse: Option<&'a RocmTensor>,
}

/// What was decided of a call.
pub(super) struct Decided {
    pub shapes: Shapes,
    /// New tokens of the longest sequence.
    pub query_len: usize,
    pub selection: Selection,
}

impl<'a> Tensors<'a> {
    fn call(&self, options: &'a RocmOptions) -> Call<'a> {
        Call {
            q: self.q.meta(),
            key: self.key.meta(),
            value: self.value.meta(),
            out: Some(self.out.layout()),
            block_tables: self.block_tables.meta(),
            context_lens: self.context_lens.meta(),
            options: options_meta(options),
        }
    }

    /// Every tensor with its name; `out` is not among them.
    fn inputs(&self, options: &'a RocmOptions) -> impl Iterator<Item = (&'static str, &'a RocmTensor)> {
        let own = [("q", self.q), ("key_cache", self.key), ("value_cache", self.value), ("block_tables", self.block_tables)];
        let optional = [
            ("query_start", options.query_start.as_ref()),
            ("sinks", options.sinks.as_ref()),
            ("k_scale", options.k_scale.tensor()),
            ("v_scale", options.v_scale.tensor()),
        ];
        let given = optional.into_iter().filter_map(|(name, tensor)| Some((name, tensor?)));
        own.into_iter().chain([("context_lens", self.context_lens)]).chain(given)
    }

    /// Refuses tensors of other devices, and outputs that are not what the call writes.
    fn check(&self, options: &'a RocmOptions) -> Result<()> {
        let (q, out, device) = (self.q, self.out, self.q.device());
        for (name, tensor) in self.inputs(options).chain([("out", out)]).chain(self.lse.map(|lse| ("lse", lse))) {
            check_device(name, tensor, device)?;
            tensor.meta().check_bounds(name, tensor.storage_elements())?;
        }
        check_output(out.meta(), q.meta())?;
        if let Some(lse) = self.lse
            && lse.elem_count() > 0
            && lse.shares_storage(out)
        {
            bail!("lse: shares its storage with out")
        }
        let written = [("out", Some(out)), ("lse", self.lse)].into_iter().filter_map(|(name, tensor)| Some((name, tensor?)));
        for (written, tensor) in written {
            if let Some((name, _)) = self.inputs(options).find(|(_, input)| input.elem_count() > 0 && input.shares_storage(tensor)) {
                bail!("{written}: shares its storage with {name}")
            }
        }
        Ok(())
    }
}

/// Refuses a tensor of another device.
pub(super) fn check_device(name: &str, tensor: &RocmTensor, device: &RocmDevice) -> Result<()> {
    device.check_same(tensor.device(), name)
}

/// The launches of a call, and the memory they use beside its tensors.
pub(super) struct Decode {
    planner: Option<Launch<PlanArgs>>,
    tile: Option<Launch<TileArgs>>,
    reducer: Option<Launch<ReduceArgs>>,
    /// Partial results, a plan of this call's own, scalars.
    _plan: Option<RocmPlan>,
    _memory: Vec<RocmTensor>,
    _scalars: [Option<Scalar>; 2],
}

impl Decode {
    /// Decides a call over device tensors from their shapes alone (and, where it is to be validated, from their contents).
    pub fn new(tensors: &Tensors<'_>, options: &RocmOptions) -> Result<Self> {
        let device = tensors.q.device();
        let call = tensors.call(options);
        let shapes = Shapes::new(&call)?;
        let query_len = longest_query(&shapes, options)?;
        if options.validate && !device.is_capturing() {
            validate(tensors, options, &call, &shapes, query_len, device.arch())?;
        }
        let plan_shape = PlanShape::of(&shapes, options, query_len);
        let plan = match &options.plan {
            PlanChoice::Given(plan) => {
                check_plan(plan, &plan_shape, device)?;
                Some(plan.clone())
            }
            PlanChoice::Default if needs_plan(&shapes, plan_shape, device)? => Some(RocmPlan::uninitialised(plan_shape, device)?),
            PlanChoice::Default | PlanChoice::Free => None,
        };
        let planner = match (&options.plan, &plan) {
            (PlanChoice::Default, Some(plan)) => Some(plan.planner(tensors.context_lens, options.query_start.as_ref())?),
            _ => None,
        };
        let free = Tasks { slots: plan_shape.rows(), one_a_row: true, planned: false, most_tiles: usize::MAX };
        let tasks = plan.as_ref().map_or(free, RocmPlan::tasks);
        let selection = specialize::select(&problem(&shapes, &call, query_len, tasks, device.arch()), device.arch())?;
        let launches = Self::of(tensors, options, &Decided { shapes, query_len, selection }, plan.as_ref())?;
        Ok(Self { planner, _plan: plan, ..launches })
    }

    /// The launches of a decided call with its plan, `None` for one task a plan row. Everything that can fail but the launches themselves is done here.
    pub fn of(tensors: &Tensors<'_>, options: &RocmOptions, decided: &Decided, plan: Option<&RocmPlan>) -> Result<Self> {
        let Decided { shapes, query_len, selection } = decided;
        let device = tensors.q.device();
        let none = Self { planner: None, tile: None, reducer: None, _plan: None, _memory: vec![], _scalars: [None, None] };
        if shapes.rows == 0 {
            return Ok(none);
        }
        let mut memory = vec![];
        // Without a page there is nothing to attend, whatever the lengths say, and no id that could be clamped.
        let no_pages = shapes.dims.pages == 0 || shapes.max_pages == 0;
        let (lens, plan) = match no_pages {
            false => (tensors.context_lens, plan),
            true => {
                memory.push(RocmTensor::zeros(tensors.context_lens.dims(), DType::I32, device)?);
                (&memory[0], None)
            }
        };
        check_contiguous("context_lens", lens)?;
        let query_start = options.query_start.as_ref();
        query_start.into_iter().try_for_each(|start| check_contiguous("query_start", start))?;
        let grid = Grid::new(shapes, selection, plan);
        let sinks = options.sinks.as_ref();
        sinks.into_iter().try_for_each(|sinks| check_contiguous("sinks", sinks))?;
        let lse = tensors.lse.map(|lse| check_lse(lse, shapes)).transpose()?;
        let direct = selection.flags().direct_output;
        let scratch = if direct { None } else { Some(Scratch::new(&grid, shapes.dims.head_dim, device)?) };
        let k_scale = ScaleArgs::of("k_scale", &options.k_scale, selection.key.scales, device)?;
        let v_scale = ScaleArgs::of("v_scale", &options.v_scale, selection.key.scales, device)?;
        let (q, out) = (Rows::of("q", tensors.q)?, Rows::of("out", tensors.out)?);
        let plan_rows = grid.plan_rows;
        let args = TileArgs {
            work: plan.map_or(0, |plan| plan.work_info().address()),
            block_tables: tensors.block_tables.address(),
            q: tensors.q.address(),
            max_pages: count("block_tables", "pages a row", shapes.max_pages)?,
            plan_rows: count("block_tables", "rows", plan_rows)?,
            q_row: count("q", "elements from a row to the next", q.row)?,
            q_head: count("q", "elements from a head to the next", q.head)?,
            statistics: match &scratch {
                Some(scratch) => scratch.statistics.address(),
                None => plan.map_or(0, |plan| plan.reduce_info().address()),
            },
            key: tensors.key.address(),
            value: tensors.value.address(),
            k_scale: k_scale.address,
            v_scale: v_scale.address,
            context_lens: lens.address(),
            query_start: query_start.map_or(0, RocmTensor::address),
            out: scratch.as_ref().map_or_else(|| tensors.out.address(), |scratch| scratch.partial.address()),
            lse: lse.filter(|_| direct).unwrap_or(0),
            table_row: table_row(tensors.block_tables)?,
            key_stride: paged("key_cache", tensors.key, options.layout, options.layout.key_strides(tensors.key.layout()))?,
            value_stride: paged("value_cache", tensors.value, options.layout, options.layout.value_strides(tensors.value.layout()))?,
            k_scale_stride: k_scale.stride,
            v_scale_stride: v_scale.stride,
            out_row: out.row as i64,
            out_head: out.head as i64,
            scale_log2: shapes.softmax_scale * std::f32::consts::LOG2_E,
            softcap: options.softcap.unwrap_or(0.0),
            window: options.window.map_or(0, clamp),
            query_len: clamp(*query_len),
            kv_heads: clamp(shapes.dims.kv_heads),
            pages: clamp(shapes.dims.pages),
            rows: clamp(grid.rows),
            q_rows: clamp(shapes.rows),
        };
        let kernel = device.kernel_of(KernelId::Tile(selection.key), || specialize::tile(selection))?;
        // SAFETY: each tensor was checked against the sizes that the arguments give, the kernel clamps page ids and table columns, and writes
        // `out` or the scratch alone.
        let tile = unsafe { Launch::new(device, kernel, grid.launch(selection.threads)?, args) }?.with_lds(selection.staged_bytes as u32);
        let reducer = match &scratch {
            None => None,
            Some(scratch) => {
                let args = ReduceArgs {
                    reduce: plan.map_or(0, |plan| plan.reduce_info().address()),
                    partial: scratch.partial.address(),
                    statistics: scratch.statistics.address(),
                    sinks: sinks.map_or(0, RocmTensor::address),
                    query_start: query_start.map_or(0, RocmTensor::address),
                    out: tensors.out.address(),
                    lse: lse.unwrap_or(0),
                    out_row: out.row as i64,
                    out_head: out.head as i64,
                    query_len: clamp(*query_len),
                    q_heads: clamp(shapes.q_heads),
                    kv_heads: clamp(shapes.dims.kv_heads),
                    rows: clamp(grid.rows),
                    per_head: i32::from(shapes.per_head),
                    q_rows: clamp(shapes.rows),
                    out_sequence: 0,
                };
                let shape = reducer(shapes.dims.head_dim, *query_len, shapes.q_heads, shapes.batch, grid.slots, grid.plan_rows);
                let (arch, ragged) = (device.arch().name, query_start.is_some());
                let (head_dim, output, threads) = (shapes.dims.head_dim, shapes.q_dtype, shape.threads);
                let spec = || specialize::reduce(arch, head_dim, output, ragged, threads as usize);
                let kernel = device.kernel_of(KernelId::Reduce { head_dim, output, ragged, threads }, spec)?;
                // SAFETY: it reads the partial results that the tile wrote, and writes `out` and `lse`, which have a row for each (sequence, token).
                Some(unsafe { Launch::new(device, kernel, shape, args) }?)
            }
        };
        memory.extend(scratch.into_iter().flat_map(|scratch| [scratch.partial, scratch.statistics]));
        Ok(Self { tile: Some(tile), reducer, _memory: memory, _scalars: [k_scale.scalar, v_scale.scalar], ..none })
    }

    /// Enqueues the launches.
    pub fn run(&self) -> Result<()> {
        self.planner.as_ref().map_or(Ok(()), Launch::run)?;
        self.tile.as_ref().map_or(Ok(()), Launch::run)?;
        self.reducer.as_ref().map_or(Ok(()), Launch::run)
    }
}

/// The tile's grid.
struct Grid {
    plan_rows: usize,
    slots: usize,
    /// KV heads that share a slot.
    heads: usize,
    row_groups: usize,
    /// Rows that a (slot, KV head) has room for.
    rows: usize,
}

impl Grid {
    fn new(shapes: &Shapes, selection: &Selection, plan: Option<&RocmPlan>) -> Self {
        let plan_rows = shapes.plan_rows();
        Self {
            plan_rows,
            slots: plan.map_or(plan_rows, RocmPlan::capacity),
            heads: shapes.heads_of_a_row(),
            row_groups: selection.row_groups,
            rows: selection.row_groups * selection.key.m_tiles * M_TILE_ROWS,
        }
    }

    fn launch(&self, threads: usize) -> Result<LaunchShape> {
        let grid = [count("plan", "slots", self.slots)?, count("q", "KV heads", self.heads)?, count("q", "row groups", self.row_groups)?];
        Ok(LaunchShape { threads: count("q", "threads", threads)?, grid })
    }
}

/// Partial results of a plan's tasks.
struct Scratch {
    /// F32 `[slots, heads, rows, head_dim]`.
    partial: RocmTensor,
    /// F32 `[slots, heads, rows, 2]`.
    statistics: RocmTensor,
}

impl Scratch {
    fn new(grid: &Grid, head_dim: usize, device: &RocmDevice) -> Result<Self> {
        let of = |width| RocmTensor::empty(vec![grid.slots, grid.heads, grid.rows, width], DType::F32, device);
        Ok(Self { partial: of(head_dim)?, statistics: of(2)? })
    }
}

/// Whether a plan could give any sequence more than one task. Batches past a planner block's rows have more rows than slots are worth.
fn needs_plan(shapes: &Shapes, shape: PlanShape, device: &RocmDevice) -> Result<bool> {
    let one_tile = shapes.table_tokens() <= TILE_TOKENS;
    Ok(!one_tile && shape.capacity(device.arch(), None)? > shape.rows() && PlannerBlock::new(shape.rows(), device.arch()).is_ok())
}

/// Refuses a plan that was made for another batch: it would leave tokens out.
fn check_plan(plan: &RocmPlan, shape: &PlanShape, device: &RocmDevice) -> Result<()> {
    check_device("plan", plan.work_info(), device)?;
    if plan.rows() != shape.rows() {
        bail!("plan: has {} rows, the call has {}", plan.rows(), shape.rows())
    }
    // What else differs changes how a batch is split, not what is covered.
    if let Some(made_for) = plan.shape() {
        let covered = |shape: &PlanShape| (shape.query_len, shape.ragged, shape.window, shape.per_head_tables);
        if covered(made_for) != covered(shape) {
            bail!("plan: made for {made_for:?}, the call is {shape:?}")
        }
    }
    Ok(())
}

/// Reads tables, lengths and a given plan back and checks them. Waits for the device.
fn validate(tensors: &Tensors<'_>, options: &RocmOptions, call: &Call<'_>, shapes: &Shapes, query_len: usize, arch: &Arch) -> Result<()> {
    let (block_tables, context_lens) = (tensors.block_tables.to_tensor()?, tensors.context_lens.to_tensor()?);
    let query_start = options.query_start.as_ref().map(RocmTensor::to_tensor).transpose()?;
    let tables = HostTables { block_tables: &block_tables, context_lens: &context_lens, query_start: query_start.as_ref() };
    let given = match &options.plan {
        PlanChoice::Given(plan) => Some(Arc::new(plan.host()?)),
        PlanChoice::Default | PlanChoice::Free => None,
    };
    check_contents(shapes, &tables, call, query_len, given, arch)
}

/// The LSE's address, once it is seen to be F32 `[rows, q_heads]`.
fn check_lse(lse: &RocmTensor, shapes: &Shapes) -> Result<u64> {
    if lse.dtype() != DType::F32 || lse.dims() != [shapes.rows, shapes.q_heads] || !lse.is_contiguous() {
        bail!("lse: expected contiguous F32 [{}, {}], got {:?} {:?}", shapes.rows, shapes.q_heads, lse.dtype(), lse.dims())
    }
    Ok(lse.address())
}

/// Refuses a small tensor whose elements are apart.
fn check_contiguous(name: &str, tensor: &RocmTensor) -> Result<()> {
    if tensor.is_contiguous() {
        return Ok(());
    }
    bail!("{name}: the AMD kernels read it contiguous, got {:?} with strides {:?}", tensor.dims(), tensor.stride())
}

/// `value` as a kernel's 32-bit argument.
fn count(name: &str, what: &str, value: usize) -> Result<u32> {
    match u32::try_from(value) {
        Ok(value) => Ok(value),
        Err(_) => bail!("{name}: {value} {what}, the AMD kernels count to {}", u32::MAX),
    }
}
