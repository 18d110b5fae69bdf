//! Calls captured in a CUDA graph.

use candle::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle::{Device, Result, Tensor};
use candle_paged_attn::cache::KvDtype;
use candle_paged_attn::paged_decode_into;
use testkit::cases::{CaseSpec, Scales};

use crate::support::*;

/// A replay plans for and reads what the tensors hold by then.
#[test]
fn a_replay_sees_changed_inputs() -> Result<()> {
    if gpu("a_replay_sees_changed_inputs").is_none() {
        return Ok(());
    }
    let device = Device::new_cuda_with_stream(0)?;
    let Device::Cuda(cuda) = &device else { return Ok(()) };
    // SAFETY: all work is on the device's one stream.
    unsafe { cuda.disable_event_tracking() };
    let stream = cuda.cuda_stream();
    let of = |lens: Vec<i64>| CaseSpec { lens, ..spec(KvDtype::Bf16, Scales::None) };
    let long = of(vec![5000, 300]).build()?;
    let mut call = on(&long, &device, Tables::Device)?;
    call.options.validate = false;
    let out = Tensor::full(half::bf16::NAN, call.q.shape(), &Device::Cpu)?.to_device(&device)?;
    let run =
        || paged_decode_into(&out, &call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options);
    run()?;
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(candle::Error::wrap)?;
    let captured = run();
    let graph =
        stream.end_capture(CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).map_err(candle::Error::wrap)?;
    captured?;
    let graph = graph.expect("a graph");
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
