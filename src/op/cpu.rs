//! From a checked call to a CPU job.

use candle::backend::BackendStorage;
use candle::{CpuStorage, DType, Layout, Result, Storage, Tensor, bail};
use half::{bf16, f16};

use super::elements::offsets;
use super::host::{self, cpu_storage};
use super::locks::Locks;
use super::shapes::{Meta, Shapes};
use super::{CallSummary, PagedDecode};
use crate::cache::{KvDtype, check_bounds};
use crate::case;
use crate::cpu::{self, Job, KvData, KvView, Output, OutputData, QueryData, QueryView, Row, Scale};
use crate::options::{KvScale, PlanChoice};
use crate::plan::{HostPlan, PlanRequest};
use crate::registry::{self, Arch, Problem};

/// A tensor's storage with its layout.
pub(crate) type Operand<'a> = (&'a CpuStorage, &'a Layout);

/// `[rows, heads, head_dim]` seen through strides.
struct RowStrides {
    start: usize,
    row: usize,
    head: usize,
}

/// q's, k's or out's 3-D strides; `None` where a 4-D layout's two leading dims do not fold into one.
fn row_strides(layout: &Layout) -> Option<RowStrides> {
    let (start, s, d) = (layout.start_offset(), layout.stride(), layout.dims());
    match d.len() {
        3 => Some(RowStrides { start, row: s[0], head: s[1] }),
        _ if d[0] <= 1 || d[1] == 0 || s[0] == d[1] * s[1] => Some(RowStrides { start, row: s[1], head: s[2] }),
        _ if d[1] == 1 => Some(RowStrides { start, row: s[0], head: s[2] }),
        _ => None,
    }
}

impl PagedDecode {
    /// Attends into fresh contiguous storage of q's shape and dtype.
    pub(crate) fn attend_new(&self, q: Operand<'_>, key: Operand<'_>, value: Operand<'_>) -> Result<CpuStorage> {
        let shapes = self.shapes(q, key, value)?;
        self.attend_fresh(&shapes, q, key, value, None)
    }

    /// [`PagedDecode::attend_new`] with the LSE `[rows, q_heads]`.
    pub(super) fn attend_with_lse(&self, q: Operand<'_>, key: Operand<'_>, value: Operand<'_>) -> Result<(CpuStorage, Vec<f32>)> {
        let shapes = self.shapes(q, key, value)?;
        check_memory(shapes.rows * shapes.q_heads, size_of::<f32>())?;
        let mut lse = vec![f32::NEG_INFINITY; shapes.rows * shapes.q_heads];
        let out = self.attend_fresh(&shapes, q, key, value, Some(&mut lse))?;
        Ok((out, lse))
    }

    fn attend_fresh(
        &self,
        shapes: &Shapes,
        q: Operand<'_>,
        key: Operand<'_>,
        value: Operand<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<CpuStorage> {
        let layout = Layout::contiguous((shapes.rows, shapes.q_heads, shapes.dims.head_dim));
        let mut out = zeros(shapes.q_dtype, layout.shape().elem_count())?;
        self.attend(shapes, q, key, value, (&mut out, &layout), lse)?;
        Ok(out)
    }

    /// Attends into `out`, which has q's shape and dtype.
    pub(super) fn attend_into(&self, out: (&mut CpuStorage, &Layout), q: Operand<'_>, key: Operand<'_>, value: Operand<'_>) -> Result<()> {
        let shapes = self.shapes(q, key, value)?;
        check_bounds("out", out.0, out.1)?;
        self.attend(&shapes, q, key, value, out, None)
    }

    /// What the registry and the planner decide for this call.
    pub(super) fn summary(&self, q: Operand<'_>, key: Operand<'_>, value: Operand<'_>) -> Result<CallSummary> {
        let shapes = self.shapes(q, key, value)?;
        let rows = host::rows(&shapes, &self.context_lens, &self.options)?;
        let plan = self.plan(&shapes, &rows)?;
        let selection = registry::select(&self.problem(&shapes, &rows, &plan, true), &Arch::cpu(cpu::isa()?))?;
        let tasks = plan.work.iter().filter(|task| task[0] >= 0).count();
        Ok(CallSummary { selection, tasks })
    }

    fn shapes(&self, q: Operand<'_>, key: Operand<'_>, value: Operand<'_>) -> Result<Shapes> {
        let [q_meta, key_meta, value_meta] =
            [q, key, value].map(|(storage, layout)| Meta { dtype: BackendStorage::dtype(storage), layout });
        let shapes = Shapes::new(q_meta, key_meta, value_meta, &self.block_tables, &self.context_lens, &self.options)?;
        for (name, (storage, layout)) in [("q", q), ("key_cache", key), ("value_cache", value)] {
            check_bounds(name, storage, layout)?;
        }
        Ok(shapes)
    }

    /// All checks of a call, and nothing else.
    pub(crate) fn check(&self, q: Operand<'_>, key: Operand<'_>, value: Operand<'_>) -> Result<()> {
        case::check_recorder()?;
        let shapes = self.shapes(q, key, value)?;
        let rows = host::rows(&shapes, &self.context_lens, &self.options)?;
        let (storage, layout) = self.block_tables.storage_and_layout();
        let table = host::page_table(&shapes, cpu_storage("block_tables", &storage)?, layout)?;
        host::check_pages(&shapes, &rows, &table, self.options.window)?;
        let plan = self.plan(&shapes, &rows)?;
        registry::select(&self.problem(&shapes, &rows, &plan, true), &Arch::cpu(cpu::isa()?))?;
        Ok(())
    }

    fn attend(
        &self,
        shapes: &Shapes,
        q: Operand<'_>,
        key: Operand<'_>,
        value: Operand<'_>,
        (out, out_layout): (&mut CpuStorage, &Layout),
        lse: Option<&mut [f32]>,
    ) -> Result<()> {
        let options = &self.options;
        case::maybe_record(q, key, value, &self.block_tables, &self.context_lens, options)?;
        let rows = host::rows(shapes, &self.context_lens, options)?;
        let (table_storage, table_layout) = self.block_tables.storage_and_layout();
        let table = host::page_table(shapes, cpu_storage("block_tables", &table_storage)?, table_layout)?;
        host::check_pages(shapes, &rows, &table, options.window)?;
        let plan = self.plan(shapes, &rows)?;
        let like_query = out_layout.stride() == q.1.stride();
        let selection = registry::select(&self.problem(shapes, &rows, &plan, like_query), &Arch::cpu(cpu::isa()?))?;
        let Some(isa) = selection.cpu_isa else { bail!("registry: {} is not a CPU kernel", selection.kernel) };
        let q_packed = pack_query(q)?;
        let (q_storage, q_strides) = match &q_packed {
            Some((storage, strides)) => (storage, strides),
            None => (q.0, &row_strides(q.1).expect("pack_query leaves only foldable layouts")),
        };
        let sinks = options.sinks.as_ref().map(|t| read_f32("sinks", t)).transpose()?;
        let scales = Locks::of([options.k_scale.tensor(), options.v_scale.tensor()]);
        let job = Job {
            isa,
            dims: shapes.dims,
            q_heads: shapes.q_heads,
            query: QueryView {
                data: query_data(q_storage)?,
                start: q_strides.start,
                row_stride: q_strides.row,
                head_stride: q_strides.head,
            },
            key: KvView {
                data: kv_data(key.0, shapes.kv_dtype)?,
                strides: options.layout.key_strides(key.1),
                scale: scale_view("k_scale", &options.k_scale, || scales.get(0))?,
            },
            value: KvView {
                data: kv_data(value.0, shapes.kv_dtype)?,
                strides: options.layout.value_strides(value.1),
                scale: scale_view("v_scale", &options.v_scale, || scales.get(1))?,
            },
            table,
            rows: &rows,
            per_head: shapes.per_head,
            softmax_scale: shapes.softmax_scale,
            window: options.window,
            softcap: options.softcap,
            sinks: sinks.as_deref(),
            plan: &plan,
        };
        run_into(&job, shapes, out, out_layout, lse)
    }

    /// The host plan of a call: given, free, or made here.
    fn plan(&self, shapes: &Shapes, rows: &[Row]) -> Result<std::borrow::Cow<'_, HostPlan>> {
        use std::borrow::Cow;
        let context_lens: Vec<i32> = rows.iter().map(|r| r.context_len as i32).collect();
        let query_lens: Vec<usize> = rows.iter().map(|r| r.query_len).collect();
        let request = PlanRequest {
            context_lens: &context_lens,
            query_lens: &query_lens,
            kv_heads: plan_heads(shapes, rows),
            window: self.options.window,
            max_partitions: self.options.max_partitions,
            workgroup_budget: self.options.workgroup_budget,
        };
        Ok(match &self.options.plan {
            PlanChoice::Default => Cow::Owned(HostPlan::new(&request, &Arch::cpu(cpu::isa()?))?),
            PlanChoice::Free => Cow::Owned(HostPlan::free(&request)),
            PlanChoice::Given(plan) => {
                let host = plan.host()?;
                host.check_covers(&request)?;
                Cow::Owned(HostPlan::clone(&host))
            }
        })
    }

    fn problem(&self, shapes: &Shapes, rows: &[Row], plan: &HostPlan, output_like_query: bool) -> Problem {
        let options = &self.options;
        Problem {
            batch: shapes.batch,
            q_heads: shapes.q_heads,
            kv_heads: shapes.dims.kv_heads,
            head_dim: shapes.dims.head_dim,
            page_size: shapes.dims.page_size,
            query_len: rows.iter().map(|r| r.query_len).max().unwrap_or(0),
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
            output_like_query,
            plan_free: matches!(options.plan, PlanChoice::Free),
            max_partitions: options.max_partitions,
            capacity: plan.work.len(),
            kernarg_preload: 0,
        }
    }
}

/// KV heads a plan slot stands for. A sequence with many query rows is split into row blocks that are parallel items of their own, so
/// each of its slots counts that often against the budget: a long prefill chunk gets few partitions and so few partial results.
fn plan_heads(shapes: &Shapes, rows: &[Row]) -> usize {
    let heads = if shapes.per_head { 1 } else { shapes.dims.kv_heads };
    let blocks: usize = rows.iter().map(|r| (r.query_len * shapes.group()).div_ceil(cpu::ROW_BLOCK).max(1)).sum();
    heads * blocks.div_ceil(rows.len().max(1)).max(1)
}

/// Runs the job into `out`, through contiguous storage where `out`'s strides do not fold.
fn run_into(job: &Job<'_>, shapes: &Shapes, out: &mut CpuStorage, out_layout: &Layout, mut lse: Option<&mut [f32]>) -> Result<()> {
    if let Some(strides) = row_strides(out_layout) {
        let mut output =
            Output { data: output_data(out)?, start: strides.start, row_stride: strides.row, head_stride: strides.head, lse: lse.take() };
        return cpu::run(job, &mut output);
    }
    let contiguous = Layout::contiguous((shapes.rows, shapes.q_heads, shapes.dims.head_dim));
    let mut packed = zeros(shapes.q_dtype, contiguous.shape().elem_count())?;
    run_into(job, shapes, &mut packed, &contiguous, lse)?;
    scatter(&packed, out, out_layout)
}

/// Copies contiguous `from` to the elements of `layout` in `to`.
fn scatter(from: &CpuStorage, to: &mut CpuStorage, layout: &Layout) -> Result<()> {
    fn copy<T: Copy>(from: &[T], to: &mut [T], layout: &Layout) {
        for (value, at) in from.iter().zip(offsets(layout)) {
            to[at] = *value;
        }
    }
    match (from, to) {
        (CpuStorage::F32(from), CpuStorage::F32(to)) => copy(from, to, layout),
        (CpuStorage::F16(from), CpuStorage::F16(to)) => copy(from, to, layout),
        (CpuStorage::BF16(from), CpuStorage::BF16(to)) => copy(from, to, layout),
        _ => bail!("out: dtype differs from q's"),
    }
    Ok(())
}

/// A contiguous copy of a q whose leading dims do not fold into rows; `None` where they do.
fn pack_query((storage, layout): Operand<'_>) -> Result<Option<(CpuStorage, RowStrides)>> {
    fn gather<T: Copy>(data: &[T], layout: &Layout) -> Vec<T> {
        offsets(layout).map(|i| data[i]).collect()
    }
    if row_strides(layout).is_some() {
        return Ok(None);
    }
    let packed = match storage {
        CpuStorage::F32(data) => CpuStorage::F32(gather(data, layout)),
        CpuStorage::F16(data) => CpuStorage::F16(gather(data, layout)),
        CpuStorage::BF16(data) => CpuStorage::BF16(gather(data, layout)),
        _ => bail!("q: dtype is not F32, F16 or BF16"),
    };
    let (heads, dim) = (layout.dims()[2], layout.dims()[3]);
    Ok(Some((packed, RowStrides { start: 0, row: heads * dim, head: dim })))
}

/// An output of zeros, or an error where memory cannot be had (a failed allocation would end the process).
fn zeros(dtype: DType, elements: usize) -> Result<CpuStorage> {
    check_memory(elements, dtype.size_in_bytes())?;
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(vec![0.0; elements]),
        DType::F16 => CpuStorage::F16(vec![f16::ZERO; elements]),
        DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; elements]),
        other => bail!("q: dtype {other:?} is not F32, F16 or BF16"),
    })
}

fn query_data(storage: &CpuStorage) -> Result<QueryData<'_>> {
    Ok(match storage {
        CpuStorage::F32(data) => QueryData::F32(data),
        CpuStorage::F16(data) => QueryData::F16(data),
        CpuStorage::BF16(data) => QueryData::Bf16(data),
        _ => bail!("q: dtype is not F32, F16 or BF16"),
    })
}

fn output_data(storage: &mut CpuStorage) -> Result<OutputData<'_>> {
    Ok(match storage {
        CpuStorage::F32(data) => OutputData::F32(data),
        CpuStorage::F16(data) => OutputData::F16(data),
        CpuStorage::BF16(data) => OutputData::Bf16(data),
        _ => bail!("out: dtype is not F32, F16 or BF16"),
    })
}

fn kv_data(storage: &CpuStorage, dtype: KvDtype) -> Result<KvData<'_>> {
    Ok(match (storage, dtype) {
        (CpuStorage::F32(data), KvDtype::F32) => KvData::F32(data),
        (CpuStorage::F16(data), KvDtype::F16) => KvData::F16(data),
        (CpuStorage::BF16(data), KvDtype::Bf16) => KvData::Bf16(data),
        (CpuStorage::F8E4M3(data), KvDtype::Fp8) => KvData::Fp8(data),
        (CpuStorage::U8(data), KvDtype::Mxfp4) => KvData::Mxfp4(data),
        _ => bail!("key_cache: storage is not {dtype:?}"),
    })
}

/// Every element of a small F32 tensor.
pub(super) fn read_f32(name: &str, tensor: &Tensor) -> Result<Vec<f32>> {
    let (storage, layout) = tensor.storage_and_layout();
    let storage = cpu_storage(name, &storage)?;
    match storage {
        CpuStorage::F32(data) => {
            check_bounds(name, storage, layout)?;
            Ok(offsets(layout).map(|i| data[i]).collect())
        }
        _ => bail!("{name}: dtype {:?} is not F32", tensor.dtype()),
    }
}

/// The memory that an output of `elements` takes can be had; asked of the allocator where it is more than a call's usual.
fn check_memory(elements: usize, size: usize) -> Result<()> {
    const USUAL: usize = 1 << 28;
    match elements.checked_mul(size) {
        Some(bytes) if bytes <= USUAL || Vec::<u8>::new().try_reserve_exact(bytes).is_ok() => Ok(()),
        _ => bail!("q: no memory for an output of {elements} elements"),
    }
}

/// A scale as the kernels read it; `storage` gives its tensor's, where it has one.
fn scale_view<'a>(name: &str, scale: &KvScale, storage: impl FnOnce() -> &'a Storage) -> Result<Scale<'a>> {
    let layout = match scale {
        KvScale::None => return Ok(Scale::Scalar(1.0)),
        KvScale::Scalar(factor) => return Ok(Scale::Scalar(*factor)),
        KvScale::Tensor(tensor) => tensor.layout(),
    };
    let storage = cpu_storage(name, storage())?;
    check_bounds(name, storage, layout)?;
    let (start, s) = (layout.start_offset(), layout.stride());
    Ok(match storage {
        CpuStorage::F32(data) if layout.shape().elem_count() == 1 => Scale::Scalar(data[start]),
        CpuStorage::F32(data) => Scale::PerToken { data, start, page_stride: s[0], head_stride: s[1], token_stride: s[2] },
        CpuStorage::U8(data) => Scale::Block { data, start, page_stride: s[0], head_stride: s[1], token_stride: s[2] },
        _ => bail!("{name}: neither F32 nor U8"),
    })
}
