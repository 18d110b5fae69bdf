//! What the kernels need of an instruction set: a vector of f32 lanes, the dot product of BF16 pairs, and conversions of runs.
//!
//! A *unit* is 32 bits: one f32, or two neighbouring BF16 elements (a *pair*, first element in the low half). Units travel in the same
//! vectors as f32 lanes.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod detect;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
pub(crate) use detect::available;
pub(crate) use detect::detect;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::Neon;
pub(super) use portable::Portable;

use super::ahead::Ahead;
use super::decode;
use super::gemm::{Scores, StoredRows, Weighted};
use super::math::Math;

/// An instruction set.
///
/// # Safety
/// Every function requires that the machine has the instruction set, that pointers are valid for the lanes or elements named, and (for speed)
/// that the caller is compiled with the set's target features: all of them are inlined into the entry points in `schedule`.
pub(super) trait Isa: Copy + 'static {
    /// f32 lanes of a vector.
    const LANES: usize;
    type V: Copy;
    type Mask: Copy;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn round(a: Self::V) -> Self::V;
    /// `a * 2^n` for whole `n` in -200..=128, without an intermediate overflow; what falls below the smallest f32 is 0.
    unsafe fn scale2(a: Self::V, n: Self::V) -> Self::V;
    /// Lanes where `a < b`; false where either is NaN.
    unsafe fn less(a: Self::V, b: Self::V) -> Self::Mask;
    unsafe fn and(a: Self::Mask, b: Self::Mask) -> Self::Mask;
    unsafe fn any(m: Self::Mask) -> bool;
    /// `a` where the mask is set, else `b`.
    unsafe fn select(m: Self::Mask, a: Self::V, b: Self::V) -> Self::V;

    /// Pairs of `low` and `high` rounded to BF16 (nearest, ties to even), lane by lane.
    unsafe fn pairs(low: Self::V, high: Self::V) -> Self::V;
    /// `c + a.low*b.low + a.high*b.high`, lane by lane over BF16 pairs.
    unsafe fn dot_pairs(a: Self::V, b: Self::V, c: Self::V) -> Self::V;

    /// Asks for the cache line of `at`, which may be any address.
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}

    /// Whether `scores` wants the queries of a block of `rows` packed with two units side by side.
    #[inline(always)]
    fn twins(_rows: usize) -> bool {
        false
    }
    /// Whether `weighted_stored` is there.
    const WEIGHS_STORED: bool = false;
    /// As `weighted` with the values in `stored`; `job.values` is room for their units. Width is a multiple of 64.
    unsafe fn weighted_stored<A: Math>(_job: &Weighted, _stored: &StoredRows, _ahead: &mut Ahead) {
        unreachable!("asked for only where WEIGHS_STORED")
    }

    /// Scores of a step (see [`Scores`]), in register tiles of this set's size.
    unsafe fn scores<A: Math>(job: &Scores, ahead: &mut Ahead);
    /// Adds a run's weighted values to the output rows (see [`Weighted`]), likewise.
    unsafe fn weighted<A: Math>(job: &Weighted, ahead: &mut Ahead);

    #[inline(always)]
    unsafe fn f16_to_f32(from: *const u16, to: *mut f32, n: usize) {
        unsafe { decode::f16_to_f32(from, to, n) }
    }
    #[inline(always)]
    unsafe fn bf16_to_f32(from: *const u16, to: *mut f32, n: usize) {
        unsafe { decode::bf16_to_f32(from, to, n) }
    }
    #[inline(always)]
    unsafe fn fp8_to_f32(from: *const u8, to: *mut f32, n: usize) {
        unsafe { decode::fp8_to_f32(from, to, n) }
    }
    #[inline(always)]
    unsafe fn fp8_to_bf16(from: *const u8, to: *mut u16, n: usize) {
        unsafe { decode::fp8_to_bf16(from, to, n) }
    }
    /// `n` elements of E2M1, a multiple of 32; one E8M0 scale per 32, or none.
    #[inline(always)]
    unsafe fn mxfp4_to_f32(from: *const u8, scales: *const u8, to: *mut f32, n: usize) {
        unsafe { decode::mxfp4_to_f32(from, scales, to, n) }
    }
    #[inline(always)]
    unsafe fn mxfp4_to_bf16(from: *const u8, scales: *const u8, to: *mut u16, n: usize) {
        unsafe { decode::mxfp4_to_bf16(from, scales, to, n) }
    }
    /// `to[i] = (a[i], b[i])` for `n` BF16 elements.
    #[inline(always)]
    unsafe fn interleave(a: *const u16, b: *const u16, to: *mut u32, n: usize) {
        unsafe { decode::interleave(a, b, to, n) }
    }
    /// Units: `to[c * to_stride + r]` is unit `c` of the row `r * from_stride` bytes into `from` (alignment 2 will do), `r < rows`, `c < columns`.
    #[inline(always)]
    unsafe fn transpose(from: *const u32, from_stride: usize, to: *mut u32, to_stride: usize, rows: usize, columns: usize) {
        unsafe { decode::transpose(from, from_stride, to, to_stride, rows, columns) }
    }
}

/// `2^x` to below 3e-7 relative; 0 below -151, NaN for NaN. Minimax polynomial (Remez) on [-1/2, 1/2] with the constant term set to 1.
#[inline(always)]
pub(super) unsafe fn exp2<I: Isa>(x: I::V) -> I::V {
    unsafe {
        let x = I::max(I::splat(-152.0), x);
        let n = I::round(x);
        let f = I::sub(x, n);
        let mut p = I::splat(0.001_327_647_2);
        for c in [0.009_675_541, 0.055_507_13, 0.240_221_2, 0.693_146_94, 1.0] {
            p = I::mul_add(p, f, I::splat(c));
        }
        I::scale2(p, n)
    }
}

/// `tanh(x)` to about 3e-7 relative: an odd minimax polynomial for small x, else `1 - 2 / (e^2x + 1)`.
#[inline(always)]
pub(super) unsafe fn tanh<I: Isa>(x: I::V) -> I::V {
    unsafe {
        let z = I::mul(x, x);
        let mut p = I::splat(-0.006_045_401);
        for c in [0.020_961_52, -0.053_843_312, 0.133_327_19, -0.333_333_28] {
            p = I::mul_add(p, z, I::splat(c));
        }
        let small = I::mul_add(I::mul(x, z), p, x);
        let capped = I::max(I::splat(-30.0), I::sub(I::splat(0.0), I::max(I::splat(-30.0), I::sub(I::splat(0.0), x))));
        let e = exp2::<I>(I::mul(capped, I::splat(2.0 * std::f32::consts::LOG2_E)));
        let large = I::sub(I::splat(1.0), I::div(I::splat(2.0), I::add(e, I::splat(1.0))));
        I::select(I::less(z, I::splat(0.4)), small, large)
    }
}
