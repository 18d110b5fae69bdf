//! One workload's call, made once and captured.

use std::ffi::CString;

use anyhow::{Result, bail, ensure};
use candle::cuda_backend::cudarc::driver::CudaGraph;
use candle::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle::{CudaDevice, Device, Tensor};
use candle_paged_attn::cache::{CacheDims, CacheLayout, KvDtype};
use candle_paged_attn::plan::{DecodePlan, PlanRequest};
use candle_paged_attn::{DecodeOptions, KvScale, PlanChoice, cuda, explain_call, paged_decode_into};
use float8::F8E4M3;
use half::bf16;
use testkit::workloads::Workload;

use crate::borrowed;

/// Device addresses of a call's tensors.
#[repr(C)]
pub struct Buffers {
    /// BF16 `[batch * query_len, q_heads, head_dim]`.
    q: u64,
    /// As q.
    out: u64,
    /// I32 `[batch, table_width]`.
    block_tables: u64,
    /// I32 `[batch]`.
    context_lens: u64,
    /// F32 `[pages, kv_heads, page_size]`; 0: an FP8 cache has one factor, 1.
    k_scale: u64,
    /// As `k_scale`.
    v_scale: u64,
    /// `cache_count` addresses. An Nhd cache is `[pages, 2, page_size, kv_heads, head_dim]`, another one K and then V.
    caches: *const u64,
    cache_count: usize,
    pages: usize,
    /// The workload's own, or another to be used in its place.
    page_size: usize,
}

/// A graph of calls, and what it reads that is not Python's.
pub struct Captured {
    pub graph: CudaGraph,
    /// JSON.
    pub choice: CString,
    _options: DecodeOptions,
}

impl Captured {
    /// # Safety
    /// The buffers are as their fields say, outlive the graph, and no work on them is under way.
    pub unsafe fn new(
        cuda: &CudaDevice,
        workload: &Workload,
        layout: &str,
        plan_in_call: bool,
        calls: usize,
        buffers: &Buffers,
    ) -> Result<Self> {
        let workload = &Workload { page_size: buffers.page_size, ..workload.clone() };
        // SAFETY: the caller's word.
        let mut call = unsafe { Call::new(cuda, workload, CacheLayout::from_name(layout)?, buffers) }?;
        call.options.plan = match (workload.plan_free, plan_in_call) {
            (true, _) => PlanChoice::Free,
            (false, true) => PlanChoice::Default,
            (false, false) => PlanChoice::Given(plan(workload, cuda)?),
        };
        // Compiles the kernels, checks the tables, and leaves the first cache's result in `out`.
        call.options.validate = true;
        call.run(0)?;
        call.options.validate = false;
        // Nothing in the graph writes tables, lengths or a plan that was made ahead.
        call.options.tables_settled = true;
        let choice = call.choice()?;
        let stream = cuda.cuda_stream();
        stream.synchronize()?;
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let run = (0..calls).try_for_each(|turn| call.run(turn));
        let graph = stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)?;
        run?;
        let Some(graph) = graph else { bail!("the capture gave no graph") };
        Ok(Self { graph, choice, _options: call.options })
    }
}

/// The plan that an engine makes once a step for all layers.
fn plan(workload: &Workload, cuda: &CudaDevice) -> Result<DecodePlan> {
    let lens: Vec<i32> = workload.contexts().into_iter().map(|tokens| tokens as i32).collect();
    let query_lens = [workload.query_len];
    let request = PlanRequest {
        max_partitions: workload.max_partitions,
        max_context_len: workload.contexts().into_iter().max(),
        ..PlanRequest::new(&lens, &query_lens, workload.num_kv_heads)
    };
    let device = Device::Cuda(cuda.clone());
    Ok(DecodePlan::new(&request, &cuda::arch_of(&device)?, &device)?)
}

/// The arguments, with K and V of each cache.
struct Call {
    q: Tensor,
    out: Tensor,
    caches: Vec<[Tensor; 2]>,
    block_tables: Tensor,
    context_lens: Tensor,
    options: DecodeOptions,
}

impl Call {
    /// # Safety
    /// As [`Captured::new`].
    unsafe fn new(cuda: &CudaDevice, w: &Workload, layout: CacheLayout, buffers: &Buffers) -> Result<Self> {
        ensure!(w.kv_dtype() != KvDtype::Mxfp4, "an MXFP4 cache");
        let dims = CacheDims { pages: buffers.pages, page_size: w.page_size, kv_heads: w.num_kv_heads, head_dim: w.head_dim };
        let rows = (w.batch * w.query_len, w.num_q_heads, w.head_dim);
        // SAFETY: the caller's word, for these and all below.
        let [q, out] = [buffers.q, buffers.out].map(|at| unsafe { borrowed::tensor::<bf16>(cuda, at, rows) });
        let addresses = unsafe { std::slice::from_raw_parts(buffers.caches, buffers.cache_count) };
        let caches = addresses.iter().map(|&at| unsafe { cache(cuda, at, layout, w.kv_dtype(), dims) });
        let scale = |at: u64| match (w.kv_dtype(), at) {
            (KvDtype::Fp8, 0) => KvScale::Scalar(1.0),
            (KvDtype::Fp8, at) => {
                KvScale::Tensor(unsafe { borrowed::tensor::<f32>(cuda, at, (dims.pages, dims.kv_heads, dims.page_size)) })
            }
            _ => KvScale::None,
        };
        Ok(Self {
            q,
            out,
            caches: caches.collect::<Result<_>>()?,
            block_tables: unsafe { borrowed::tensor::<i32>(cuda, buffers.block_tables, (w.batch, w.table_width())) },
            context_lens: unsafe { borrowed::tensor::<i32>(cuda, buffers.context_lens, w.batch) },
            options: DecodeOptions {
                k_scale: scale(buffers.k_scale),
                v_scale: scale(buffers.v_scale),
                layout,
                max_partitions: w.max_partitions,
                ..DecodeOptions::default()
            },
        })
    }

    /// Enqueues the call over the cache of this turn.
    fn run(&self, turn: usize) -> Result<()> {
        let [key, value] = &self.caches[turn % self.caches.len()];
        Ok(paged_decode_into(&self.out, &self.q, key, value, &self.block_tables, &self.context_lens, &self.options)?)
    }

    fn choice(&self) -> Result<CString> {
        let [key, value] = &self.caches[0];
        let summary = explain_call(&self.q, key, value, &self.block_tables, &self.context_lens, &self.options)?;
        let json = serde_json::json!({ "kernel": summary.selection.kernel(), "tasks": summary.tasks });
        Ok(CString::new(json.to_string())?)
    }
}

/// K and V of the cache at an address.
///
/// # Safety
/// As [`Captured::new`].
unsafe fn cache(cuda: &CudaDevice, at: u64, layout: CacheLayout, kv: KvDtype, dims: CacheDims) -> Result<[Tensor; 2]> {
    let elements = dims.pages * 2 * dims.page_size * dims.kv_heads * dims.head_dim;
    // SAFETY: the caller's word.
    let whole = unsafe {
        match kv {
            KvDtype::Fp8 => borrowed::tensor::<F8E4M3>(cuda, at, elements),
            _ => borrowed::tensor::<bf16>(cuda, at, elements),
        }
    };
    if layout == CacheLayout::Nhd {
        let pages = whole.reshape((dims.pages, 2, dims.page_size, dims.kv_heads, dims.head_dim))?;
        return Ok([pages.narrow(1, 0, 1)?.squeeze(1)?, pages.narrow(1, 1, 1)?.squeeze(1)?]);
    }
    let half = |at: usize, shape: Vec<usize>| whole.narrow(0, at, elements / 2)?.reshape(shape);
    Ok([half(0, layout.key_shape(dims, kv))?, half(elements / 2, layout.value_shape(dims, kv))?])
}
