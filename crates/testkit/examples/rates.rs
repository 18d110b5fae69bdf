//! Prints what this machine can do.

use candle::DType;
use testkit::rates;

fn main() -> anyhow::Result<()> {
    println!("{} threads", rates::threads());
    println!("memory read: {:.1} GB/s over 1 GiB", rates::memory_read(1 << 30) / 1e9);
    for rate in [rates::f32_fma(), rates::bf16_dot()] {
        println!("{}: {:.0} GFLOP/s", rate.instructions, rate.flops / 1e9);
    }
    for dtype in [DType::BF16, DType::F32] {
        println!("candle matmul 2048^3 {dtype:?}: {:.0} GFLOP/s", rates::candle_matmul(dtype, 2048)? / 1e9);
    }
    Ok(())
}
