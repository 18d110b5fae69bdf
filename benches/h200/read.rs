//! How fast memory can be read: what bandwidth is measured against.

use anyhow::Result;
use candle::CudaDevice;
use candle::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg, sys::CUdevice_attribute, sys::CUevent_flags};
use candle::cuda_backend::cudarc::nvrtc::compile_ptx;

/// A thread has eight loads of 16 bytes under way, and leaves the caches alone.
const SOURCE: &str = r#"
extern "C" __global__ void read(const uint4* from, long long count, uint4* to) {
    uint4 sum = {0, 0, 0, 0};
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i + 7 * step < count; i += 8 * step) {
        uint4 x[8];
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = __ldcs(from + i + j * step);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x ^= x[j].x, sum.y ^= x[j].y, sum.z ^= x[j].z, sum.w ^= x[j].w;
    }
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678) *to = sum;
}
"#;

const BYTES: usize = 4 << 30;
/// Blocks of 256 threads on an SM: the fastest counts.
const BLOCKS: [u32; 3] = [2, 4, 8];
const RUNS: usize = 8;

/// Bytes a second: the best run of the best grid.
pub fn rate(device: &CudaDevice) -> Result<f64> {
    let (stream, flags) = (device.cuda_stream(), Some(CUevent_flags::CU_EVENT_DEFAULT));
    let context = stream.context();
    let sms = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let read = context.load_module(compile_ptx(SOURCE)?)?.load_function("read")?;
    let mut memory = stream.alloc_zeros::<u8>(BYTES)?;
    let mut to = stream.alloc_zeros::<u8>(16)?;
    let (from, end) = (context.new_event(flags)?, context.new_event(flags)?);
    let mut best = 0f64;
    for blocks in BLOCKS {
        let grid = LaunchConfig { grid_dim: (sms as u32 * blocks, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        for _ in 0..RUNS {
            from.record(&stream)?;
            // SAFETY: the arguments that it takes; it reads whole steps within them.
            unsafe { stream.launch_builder(&read).arg(&mut memory).arg(&(BYTES as i64 / 16)).arg(&mut to).launch(grid) }?;
            end.record(&stream)?;
            best = best.max(BYTES as f64 / (f64::from(from.elapsed_ms(&end)?) / 1e3));
        }
    }
    Ok(best)
}
