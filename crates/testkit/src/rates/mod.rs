//! What this machine can do: the rates that a kernel's time is held against.
//!
//! Each is measured over all cores with code of our own that does nothing else, and is the best of several passes: a limit, not a
//! typical value.

mod arithmetic;
mod memory;

pub use arithmetic::{Arithmetic, bf16_dot, f32_fma};
pub use memory::memory_read;

use std::thread;
use std::time::Instant;

use anyhow::Result;
use candle::{DType, Device, Tensor};

/// Threads that a measurement uses: all that this process may run on.
pub fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Candle's own matmul of two square matrices of `size`, in FLOP/s (two for a multiply-add). BF16 is what candle does with it on the
/// CPU: widen to F32, multiply, narrow back.
pub fn candle_matmul(dtype: DType, size: usize) -> Result<f64> {
    let a = Tensor::randn(0f32, 1.0, (size, size), &Device::Cpu)?.to_dtype(dtype)?;
    let b = Tensor::randn(0f32, 1.0, (size, size), &Device::Cpu)?.to_dtype(dtype)?;
    a.matmul(&b)?;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        std::hint::black_box(a.matmul(&b)?);
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * (size as f64).powi(3) / best)
}

/// Seconds that `work` takes when every thread runs it on its own part at once, best of `passes`.
fn best_seconds<T: Sync>(parts: &[T], passes: usize, work: impl Fn(&T) + Sync) -> f64 {
    let pass = || {
        let start = Instant::now();
        thread::scope(|scope| {
            for part in parts {
                scope.spawn(|| work(part));
            }
        });
        start.elapsed().as_secs_f64()
    };
    (0..passes).map(|_| pass()).fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_plausible() {
        let read = memory_read(64 << 20);
        assert!((1e8..1e13).contains(&read), "{read}");
        let fma = f32_fma();
        assert!((1e8..1e14).contains(&fma.flops), "{fma:?}");
        let dot = bf16_dot();
        assert!((1e8..1e16).contains(&dot.flops), "{dot:?}");
        let matmul = candle_matmul(DType::BF16, 256).unwrap();
        assert!((1e7..1e14).contains(&matmul), "{matmul}");
    }
}
