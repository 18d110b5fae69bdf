//! From a checked call to a CPU job.

use std::sync::Arc;

use candle::{CpuStorage, DType, Layout, Result, Storage, Tensor, bail};
use half::{bf16, f16};

use super::PagedDecode;
use super::call::{Call, Described, Meta, options_meta};
use super::decide::{HostTables, Prepared};
use super::elements::offsets;
use super::host::{self, cpu_storage};
use super::locks::Locks;
use crate::cache::{KvDtype, check_bounds};
use crate::case;
use crate::cpu::{self, Job, KvData, KvView, Output, OutputData, QueryData, QueryView, Scale};
use crate::options::{KvScale, PlanChoice};
use crate::plan::HostPlan;
use crate::registry::{self, Arch};

/// A tensor's storage with its layout.
pub(crate) type Operand<'a> = (&'a CpuStorage, &'a Layout);

/// `[rows, heads, head_dim]` seen through strides.
pub(crate) struct RowStrides {
    start: usize,
    pub row: usize,
    pub head: usize,
}

/// q's, k's or out's 3-D strides; `None` where a 4-D layout's two leading dims do not fold into one.
pub(crate) fn row_strides(layout: &Layout) -> Option<RowStrides> {
    let (start, s, d) = (layout.start_offset(), layout.stride(), layout.dims());
    match d.len() {
        3 => Some(RowStrides { start, row: s[0], head: s[1] }),
        _ if d[0] <= 1 || d[1] == 0 || s[0] == d[1] * s[1] => Some(RowStrides { start, row: s[1], head: s[2] }),
        _ if d[1] == 1 => Some(RowStrides { start, row: s[0], head: s[2] }),
        _ => None,
    }
}

impl Prepared {
    /// An LSE of -inf for every row and head.
    pub(super) fn empty_lse(&self) -> Result<Vec<f32>> {
        let elements = self.shapes.rows * self.shapes.q_heads;
        check_memory(elements, size_of::<f32>())?;
        Ok(vec![f32::NEG_INFINITY; elements])
    }

    /// Contiguous `[rows, q_heads, head_dim]`.
    fn output_layout(&self) -> Layout {
        Layout::contiguous((self.shapes.rows, self.shapes.q_heads, self.shapes.dims.head_dim))
    }
}

impl PagedDecode {
    /// The decisions of a call on the CPU. `out` is the output, where it is given.
    pub(crate) fn prepare(&self, q: Operand<'_>, key: Operand<'_>, value: Operand<'_>, out: Option<Operand<'_>>) -> Result<Prepared> {
        case::check_recorder()?;
        let operands = [("q", q), ("key_cache", key), ("value_cache", value)].into_iter().chain(out.map(|out| ("out", out)));
        let call = self.call([q, key, value].map(|(storage, layout)| Meta::of(storage, layout)), out.map(|(_, layout)| layout));
        let prepared = Prepared::new(&call, &self.host_tables(), self.given_plan()?, &Arch::host()?, registry::select)?;
        for (name, (storage, layout)) in operands {
            check_bounds(name, storage, layout)?;
        }
        Ok(prepared)
    }

    /// The call on q, K and V of any device.
    pub(crate) fn call<'a>(&'a self, [q, key, value]: [Meta<'a>; 3], out: Option<&'a Layout>) -> Call<'a> {
        let (block_tables, context_lens) = (self.block_tables.meta(), self.context_lens.meta());
        Call { q, key, value, out, block_tables, context_lens, options: options_meta(&self.options) }
    }

    /// The tables of the call, which must be on the CPU.
    pub(crate) fn host_tables(&self) -> HostTables<'_> {
        HostTables { block_tables: &self.block_tables, context_lens: &self.context_lens, query_start: self.options.query_start.as_ref() }
    }

    /// The records of a plan that the caller made.
    pub(crate) fn given_plan(&self) -> Result<Option<Arc<HostPlan>>> {
        match &self.options.plan {
            PlanChoice::Given(plan) => plan.host().map(Some),
            PlanChoice::Default | PlanChoice::Free => Ok(None),
        }
    }

    /// Attends into fresh contiguous storage of q's shape and dtype.
    pub(crate) fn attend_new(
        &self,
        call: &Prepared,
        q: Operand<'_>,
        key: Operand<'_>,
        value: Operand<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<CpuStorage> {
        let layout = call.output_layout();
        let mut out = zeros(call.shapes.q_dtype, layout.shape().elem_count())?;
        self.attend(call, q, key, value, (&mut out, &layout), lse)?;
        Ok(out)
    }

    /// Attends into `out`, which has q's shape and dtype.
    pub(super) fn attend(
        &self,
        call: &Prepared,
        q: Operand<'_>,
        key: Operand<'_>,
        value: Operand<'_>,
        out: (&mut CpuStorage, &Layout),
        lse: Option<&mut [f32]>,
    ) -> Result<()> {
        let (options, shapes) = (&self.options, &call.shapes);
        case::maybe_record(q, key, value, &self.block_tables, &self.context_lens, options)?;
        let Some(isa) = call.selection.cpu_isa else { bail!("registry: {} is not a CPU kernel", call.selection.kernel()) };
        let (table, table_layout) = self.block_tables.storage_and_layout();
        let gathered;
        let (query, strides) = match row_strides(q.1) {
            Some(strides) => (q.0, strides),
            None => {
                gathered = gather_query(q)?;
                (&gathered, RowStrides { start: 0, row: shapes.q_heads * shapes.dims.head_dim, head: shapes.dims.head_dim })
            }
        };
        let sinks = options.sinks.as_ref().map(|t| read_f32("sinks", t)).transpose()?;
        let scales = Locks::of([options.k_scale.tensor(), options.v_scale.tensor()]);
        let k_scale = scale_view("k_scale", &options.k_scale, || scales.get(0))?;
        let v_scale = scale_view("v_scale", &options.v_scale, || scales.get(1))?;
        let view = |storage, strides, scale| Ok::<_, candle::Error>(KvView { data: kv_data(storage, shapes.kv_dtype)?, strides, scale });
        let job = Job {
            isa,
            dims: shapes.dims,
            q_heads: shapes.q_heads,
            query: QueryView { data: query_data(query)?, start: strides.start, row_stride: strides.row, head_stride: strides.head },
            key: view(key.0, options.layout.key_strides(key.1), k_scale)?,
            value: view(value.0, options.layout.value_strides(value.1), v_scale)?,
            table: host::page_table(shapes, cpu_storage("block_tables", &table)?, table_layout)?,
            rows: &call.rows,
            per_head: shapes.per_head,
            softmax_scale: shapes.softmax_scale,
            window: options.window,
            softcap: options.softcap,
            sinks: sinks.as_deref(),
            plan: &call.plan,
        };
        run_into(&job, call, out, lse)
    }
}

/// Runs the job into `out`, through contiguous storage where `out`'s strides do not fold.
fn run_into(job: &Job<'_>, call: &Prepared, (out, layout): (&mut CpuStorage, &Layout), lse: Option<&mut [f32]>) -> Result<()> {
    let Some(RowStrides { start, row, head }) = row_strides(layout) else {
        let contiguous = call.output_layout();
        let mut packed = zeros(call.shapes.q_dtype, contiguous.shape().elem_count())?;
        run_into(job, call, (&mut packed, &contiguous), lse)?;
        return scatter(&packed, out, layout);
    };
    cpu::run(job, &mut Output { data: output_data(out)?, start, row_stride: row, head_stride: head, lse })
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

/// A contiguous copy of q.
fn gather_query((storage, layout): Operand<'_>) -> Result<CpuStorage> {
    fn gather<T: Copy>(data: &[T], layout: &Layout) -> Vec<T> {
        offsets(layout).map(|i| data[i]).collect()
    }
    Ok(match query_data(storage)? {
        QueryData::F32(data) => CpuStorage::F32(gather(data, layout)),
        QueryData::F16(data) => CpuStorage::F16(gather(data, layout)),
        QueryData::Bf16(data) => CpuStorage::BF16(gather(data, layout)),
    })
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
