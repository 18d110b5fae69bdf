//! What the tests share.

use std::ops::Deref;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use candle::cuda_backend::CudaStorageSlice as Slice;
use candle::cuda_backend::cudarc::driver::CudaGraph;
use candle::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle::{CudaStorage, DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype, PagedKvCache, Quantization};
use candle_paged_attn::{AppendAndAttend, DecodeOptions, KvScale, paged_decode_with_lse};
pub use testkit::assert_same;
pub use testkit::bits::{Bits, bits};
use testkit::cases::{Case, CaseSpec};
pub use testkit::contracts::refuses;

pub use crate::specs::{decode_and_verify, forms, spec};

/// A capture has the GPU for itself: what other threads do meanwhile, such as making a device, ends it.
static IN_USE: RwLock<()> = RwLock::new(());

/// The GPU, shared with other tests.
pub struct Gpu {
    device: Device,
    _shared: RwLockReadGuard<'static, ()>,
}

impl Deref for Gpu {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

/// The GPU of a test that captures, while no other runs.
pub struct LoneGpu {
    pub device: Device,
    _alone: RwLockWriteGuard<'static, ()>,
}

/// The GPU; `None`, and a line that says so, where there is none.
pub fn gpu(test: &str) -> Option<Gpu> {
    let _shared = IN_USE.read().unwrap_or_else(PoisonError::into_inner);
    Some(Gpu { device: found(test, Device::new_cuda(0))?, _shared })
}

/// The GPU with a stream of its own, which can be captured; `None`, and a line that says so, where there is none.
pub fn lone_gpu(test: &str) -> Option<LoneGpu> {
    let _alone = IN_USE.write().unwrap_or_else(PoisonError::into_inner);
    Some(LoneGpu { device: found(test, Device::new_cuda_with_stream(0))?, _alone })
}

fn found(test: &str, device: Result<Device>) -> Option<Device> {
    device.inspect_err(|error| eprintln!("skipped: {test}: {}", error.to_string().lines().next().unwrap_or_default())).ok()
}

/// Work that was captured.
pub struct Graph(CudaGraph);

impl Graph {
    /// `work`, done once and then captured.
    pub fn of(device: &Device, work: impl Fn() -> Result<()>) -> Result<Self> {
        let Device::Cuda(cuda) = device else { candle::bail!("not a CUDA device") };
        work()?;
        let stream = cuda.cuda_stream();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(candle::Error::wrap)?;
        let captured = work();
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).map_err(candle::Error::wrap);
        captured?;
        match graph? {
            Some(graph) => Ok(Self(graph)),
            None => candle::bail!("nothing was captured"),
        }
    }

    pub fn replay(&self) -> Result<()> {
        self.0.launch().map_err(candle::Error::wrap)
    }
}

/// Copies `from`, on any device, over `to`, which is contiguous and of the same shape, on the GPU.
pub fn overwrite(to: &Tensor, from: &Tensor) -> Result<()> {
    assert_eq!((to.dims(), to.dtype()), (from.dims(), from.dtype()));
    to.inplace_op2(&from.contiguous()?.to_device(to.device())?, &Overwrite)
}

struct Overwrite;

impl candle::InplaceOp2 for Overwrite {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, _: &mut candle::CpuStorage, _: &candle::Layout, _: &candle::CpuStorage, _: &candle::Layout) -> Result<()> {
        candle::bail!("overwrite: on the CPU")
    }

    fn cuda_fwd(&self, to: &mut CudaStorage, _: &candle::Layout, from: &CudaStorage, layout: &candle::Layout) -> Result<()> {
        let device = from.device.clone();
        macro_rules! copy {
            ($($kind:ident),*) => {
                match (&from.slice, &mut to.slice) {
                    $((Slice::$kind(from), Slice::$kind(to)) => {
                        let start = layout.start_offset();
                        device.memcpy_dtod(&from.slice(start..start + to.len()), to)
                    })*
                    _ => candle::bail!("overwrite: dtype"),
                }
            };
        }
        copy!(U8, U32, I32, I64, BF16, F16, F32, F8E4M3)
    }
}

/// Where a call's tables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    Host,
    Device,
}

/// A view of `tensor`'s whole storage on `device`: candle copies the storage, and nothing is computed there.
pub fn upload(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    tensor.to_device(device)
}

/// The case with its tensors on `device`.
pub fn on(case: &Case, device: &Device, tables: Tables) -> Result<Case> {
    let place = match tables {
        Tables::Host => &Device::Cpu,
        Tables::Device => device,
    };
    let scale = |scale: &KvScale| match scale {
        KvScale::Tensor(tensor) => upload(tensor, device).map(KvScale::Tensor),
        other => Ok(other.clone()),
    };
    let options = &case.options;
    Ok(Case {
        spec: case.spec.clone(),
        q: upload(&case.q, device)?,
        key_cache: upload(&case.key_cache, device)?,
        value_cache: upload(&case.value_cache, device)?,
        block_tables: upload(&case.block_tables, place)?,
        context_lens: upload(&case.context_lens, place)?,
        options: DecodeOptions {
            sinks: options.sinks.as_ref().map(|t| upload(t, device)).transpose()?,
            query_start: options.query_start.as_ref().map(|t| upload(t, place)).transpose()?,
            k_scale: scale(&options.k_scale)?,
            v_scale: scale(&options.v_scale)?,
            // No kernel has written what a copy brought there.
            tables_settled: tables == Tables::Device,
            ..options.clone()
        },
    })
}

/// Output and LSE of a case that is on the GPU, on the CPU.
pub fn run(case: &Case) -> Result<(Tensor, Tensor)> {
    let (out, lse) =
        paged_decode_with_lse(&case.q, &case.key_cache, &case.value_cache, &case.block_tables, &case.context_lens, &case.options)?;
    Ok((out.to_device(&Device::Cpu)?, lse.to_device(&Device::Cpu)?))
}

/// [`run`] of a case that is on the CPU, its tables where they are to be.
pub fn run_with(device: &Device, tables: Tables) -> impl Fn(&Case) -> Result<(Tensor, Tensor)> {
    move |case| run(&on(case, device, tables)?)
}

/// Runs a case with its tables on the host and on the device and compares both with the float64 answer. Gives the worst row's relative L2.
#[track_caller]
pub fn check(device: &Device, spec: &CaseSpec) -> f64 {
    let case = spec.build().unwrap_or_else(|e| panic!("{spec:?}: {e}"));
    check_call(device, &case)
}

/// [`check`] of a case that is on the CPU.
#[track_caller]
pub fn check_call(device: &Device, case: &Case) -> f64 {
    let mut worst = 0.0f64;
    for tables in [Tables::Host, Tables::Device] {
        let checked = on(case, device, tables).and_then(|call| {
            let (out, lse) = run(&call)?;
            case.expected()?.compare(&out, Some(&lse), case.spec.cuda_tolerance(), 2e-3)
        });
        worst = worst.max(checked.unwrap_or_else(|e| panic!("tables on the {tables:?}: {:?}: {e}", case.spec)));
    }
    worst
}

/// Every form of a cache, in every layout that it comes in.
pub fn caches() -> Vec<(KvDtype, Quantization, CacheLayout)> {
    let kinds = [
        (KvDtype::F32, Quantization::None),
        (KvDtype::F16, Quantization::None),
        (KvDtype::Bf16, Quantization::None),
        (KvDtype::Fp8, Quantization::None),
        (KvDtype::Fp8, Quantization::Scalar { k: 0.05, v: 0.03 }),
        (KvDtype::Fp8, Quantization::PerToken),
        (KvDtype::Mxfp4, Quantization::Block),
    ];
    let all = kinds.into_iter().flat_map(|(dtype, quantization)| CacheLayout::ALL.map(|layout| (dtype, quantization, layout)));
    all.filter(|(dtype, _, layout)| *dtype != KvDtype::Mxfp4 || matches!(layout, CacheLayout::Nhd | CacheLayout::Hnd)).collect()
}

/// Output of `AppendAndAttend` over a cache on the GPU that holds the case's pages; no token is new.
pub fn over_a_cache(case: &Case, device: &Device, tables: Tables) -> Result<Tensor> {
    let options = &case.options;
    let config = case.cache_config()?;
    let dims = config.dims;
    let cache = PagedKvCache::new(config, device)?;
    let layer = cache.layer(0)?;
    overwrite(&layer.key, &case.key_cache)?;
    overwrite(&layer.value, &case.value_cache)?;
    for (to, from) in [(&layer.k_scale, &options.k_scale), (&layer.v_scale, &options.v_scale)] {
        if let (KvScale::Tensor(to), KvScale::Tensor(from)) = (to, from) {
            overwrite(to, from)?;
        }
    }
    let rows = case.q.dim(0)?;
    let new = Tensor::zeros((rows, dims.kv_heads, dims.head_dim), DType::BF16, device)?;
    let call = on(case, device, tables)?;
    let op = AppendAndAttend {
        cache: &cache,
        layer: 0,
        slot_mapping: Tensor::full(-1i64, rows, &Device::Cpu)?,
        block_tables: call.block_tables,
        context_lens: call.context_lens,
        options: call.options,
    };
    op.apply(&call.q, &new, &new)?.to_device(&Device::Cpu)
}
