//! Calls captured in a CUDA graph.

use std::sync::Arc;

use candle::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle::cuda_backend::cudarc::driver::{CudaGraph, CudaStream};
use candle::{Device, Result, Tensor};
use candle_paged_attn::cache::KvDtype;
use candle_paged_attn::paged_decode_into;
use testkit::cases::{CaseSpec, Scales};

use crate::support::*;

/// A replay plans for and reads what the tensors hold by then.
#[test]
fn a_replay_sees_changed_inputs() -> Result<()> {
    let Some((device, stream)) = streamed("a_replay_sees_changed_inputs")? else { return Ok(()) };
    let of = |lens: Vec<i64>| CaseSpec { lens, ..spec(KvDtype::Bf16, Scales::None) };
    let long = of(vec![5000, 300]).build()?;
    let mut call = on(&long, &device, Tables::Device)?;
    call.options.validate = false;
    let out = Tensor::full(half::bf16::NAN, call.q.shape(), &Device::Cpu)?.to_device(&device)?;
    let run =
        || paged_decode_into(&out, &call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options);
    run()?;
    let graph = captured(&stream, run)?;
    // Shorter contexts: the tables' first lanes still hold.
    for lens in [[5000i32, 300], [777, 20], [1, 0]] {
        let lens = Tensor::new(&lens, &Device::Cpu)?;
        call.context_lens.inplace_op2(&lens.to_device(&device)?, &Overwrite)?;
        graph.launch().map_err(candle::Error::wrap)?;
        let mut expected = long.clone();
        expected.context_lens = lens;
        expected.expected()?.compare(&out.to_device(&Device::Cpu)?, None, 8e-3, 0.)?;
    }
    Ok(())
}

/// Replays go on in the scratch memory that they were captured with when another call has come to need more, and nobody else gets it.
#[test]
fn a_replay_after_a_larger_call() -> Result<()> {
    let Some((device, stream)) = streamed("a_replay_after_a_larger_call")? else { return Ok(()) };
    let of = |query_len| CaseSpec {
        lens: vec![5000, 300],
        query_lens: vec![query_len],
        kv_heads: 4,
        group: 16,
        ..spec(KvDtype::Bf16, Scales::None)
    };
    let (case, larger) = (of(1).build()?, of(4).build()?);
    let mut call = on(&case, &device, Tables::Device)?;
    call.options.validate = false;
    let out = Tensor::zeros(call.q.shape(), call.q.dtype(), &device)?;
    let decode =
        || paged_decode_into(&out, &call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options);
    decode()?;
    let graph = captured(&stream, decode)?;
    run(&on(&larger, &device, Tables::Device)?)?;
    let others = Tensor::full(7f32, 1 << 18, &Device::Cpu)?;
    let others = (0..16).map(|_| others.to_device(&device)).collect::<Result<Vec<_>>>()?;
    graph.launch().map_err(candle::Error::wrap)?;
    case.expected()?.compare(&out.to_device(&Device::Cpu)?, None, 8e-3, 0.)?;
    assert!(others.iter().all(|other| other.to_vec1::<f32>().unwrap().iter().all(|&x| x == 7.0)));
    Ok(())
}

/// The GPU through a stream that can be captured.
fn streamed(test: &str) -> Result<Option<(Device, Arc<CudaStream>)>> {
    if gpu(test).is_none() {
        return Ok(None);
    }
    let device = Device::new_cuda_with_stream(0)?;
    let Device::Cuda(cuda) = &device else { return Ok(None) };
    // SAFETY: all work is on the device's one stream.
    unsafe { cuda.disable_event_tracking() };
    let stream = cuda.cuda_stream();
    Ok(Some((device, stream)))
}

/// What `run` enqueues on `stream`, as a graph.
fn captured(stream: &Arc<CudaStream>, run: impl FnOnce() -> Result<()>) -> Result<CudaGraph> {
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(candle::Error::wrap)?;
    let run = run();
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).map_err(candle::Error::wrap)?;
    run?;
    graph.ok_or_else(|| candle::Error::msg("the capture gave no graph"))
}

/// Copies one I32 tensor over another on the device.
struct Overwrite;

impl candle::InplaceOp2 for Overwrite {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, _: &mut candle::CpuStorage, _: &candle::Layout, _: &candle::CpuStorage, _: &candle::Layout) -> Result<()> {
        candle::bail!("overwrite: on the CPU")
    }

    fn cuda_fwd(&self, to: &mut candle::CudaStorage, _: &candle::Layout, from: &candle::CudaStorage, _: &candle::Layout) -> Result<()> {
        let device = from.device.clone();
        device.memcpy_dtod(from.as_cuda_slice::<i32>()?, to.as_cuda_slice_mut::<i32>()?)
    }
}
