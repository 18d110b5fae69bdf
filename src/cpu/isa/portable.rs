//! Sixteen f32 lanes in plain Rust, vectorized by the compiler for whatever the build targets.

use half::bf16;

use super::Isa;
use crate::cpu::ahead::Ahead;
use crate::cpu::gemm::{Scores, Weighted, score_rows, weighted_rows};
use crate::cpu::math::Math;

#[derive(Clone, Copy)]
pub(in crate::cpu) struct Portable;

const N: usize = 16;

#[inline(always)]
fn map(a: [f32; N], f: impl Fn(f32) -> f32) -> [f32; N] {
    let mut out = [0.0; N];
    for i in 0..N {
        out[i] = f(a[i]);
    }
    out
}

#[inline(always)]
fn zip(a: [f32; N], b: [f32; N], f: impl Fn(f32, f32) -> f32) -> [f32; N] {
    let mut out = [0.0; N];
    for i in 0..N {
        out[i] = f(a[i], b[i]);
    }
    out
}

/// The halves of a BF16 pair, BF16 subnormals read as zero (as the x86 instructions do).
#[inline(always)]
pub(in crate::cpu) fn halves(pair: f32) -> (f32, f32) {
    let flush = |bits: u32| f32::from_bits(if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits });
    (flush(pair.to_bits() << 16), flush(pair.to_bits() & 0xffff_0000))
}

impl Isa for Portable {
    const LANES: usize = N;
    type V = [f32; N];
    type Mask = [bool; N];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        unsafe { to.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        let mut out = c;
        for i in 0..N {
            out[i] += a[i] * b[i];
        }
        out
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        // Adding 1.5 * 2^23 leaves no fraction bits; inputs are scores' exponents, far below 2^22.
        const MAGIC: f32 = 12_582_912.0;
        map(a, |a| (a + MAGIC) - MAGIC)
    }
    #[inline(always)]
    unsafe fn scale2(a: Self::V, n: Self::V) -> Self::V {
        // In two steps, so that neither factor leaves f32's range. NaN casts to 0 and stays in `a`.
        zip(a, n, |a, n| {
            let n = n as i32;
            let half = n >> 1;
            let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
            a * power(half) * power(n - half)
        })
    }
    #[inline(always)]
    unsafe fn less(a: Self::V, b: Self::V) -> Self::Mask {
        let mut out = [false; N];
        for i in 0..N {
            out[i] = a[i] < b[i];
        }
        out
    }
    #[inline(always)]
    unsafe fn and(a: Self::Mask, b: Self::Mask) -> Self::Mask {
        let mut out = a;
        for i in 0..N {
            out[i] &= b[i];
        }
        out
    }
    #[inline(always)]
    unsafe fn any(m: Self::Mask) -> bool {
        m.iter().any(|&m| m)
    }
    #[inline(always)]
    unsafe fn select(m: Self::Mask, a: Self::V, b: Self::V) -> Self::V {
        let mut out = b;
        for i in 0..N {
            if m[i] {
                out[i] = a[i];
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn pairs(low: Self::V, high: Self::V) -> Self::V {
        zip(low, high, |low, high| {
            f32::from_bits(u32::from(bf16::from_f32(low).to_bits()) | u32::from(bf16::from_f32(high).to_bits()) << 16)
        })
    }
    #[inline(always)]
    unsafe fn dot_pairs(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        let mut out = c;
        for i in 0..N {
            let ((a0, a1), (b0, b1)) = (halves(a[i]), halves(b[i]));
            out[i] = out[i] + a1 * b1 + a0 * b0;
        }
        out
    }
    #[inline(always)]
    unsafe fn scores<A: Math>(job: &Scores, ahead: &mut Ahead) {
        unsafe { score_rows::<Self, A, 1, 2>(job, ahead, 0, job.rows) }
    }
    #[inline(always)]
    unsafe fn weighted<A: Math>(job: &Weighted, ahead: &mut Ahead) {
        unsafe { weighted_rows::<Self, A, 2, 1>(job, ahead, 0, job.width) }
    }
}
