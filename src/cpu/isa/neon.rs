//! NEON (aarch64).

use std::arch::aarch64::*;

use super::{Isa, Portable};
use crate::cpu::ahead::Ahead;
use crate::cpu::decode;
use crate::cpu::gemm::{Scores, Weighted, score_rows, weighted_rows};
use crate::cpu::math::Math;

#[derive(Clone, Copy)]
pub(in crate::cpu) struct Neon;

impl Isa for Neon {
    const LANES: usize = 4;
    type V = float32x4_t;
    type Mask = uint32x4_t;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        unsafe { vst1q_f32(to, v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        unsafe { vrndnq_f32(a) }
    }
    #[inline(always)]
    unsafe fn scale2(a: Self::V, n: Self::V) -> Self::V {
        unsafe {
            // In two steps, so that neither factor leaves f32's range. NaN converts to 0 and stays in `a`.
            let n = vcvtq_s32_f32(n);
            let half = vshrq_n_s32::<1>(n);
            let power = |n| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))));
            vmulq_f32(vmulq_f32(a, power(half)), power(vsubq_s32(n, half)))
        }
    }
    #[inline(always)]
    unsafe fn less(a: Self::V, b: Self::V) -> Self::Mask {
        unsafe { vcltq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn and(a: Self::Mask, b: Self::Mask) -> Self::Mask {
        unsafe { vandq_u32(a, b) }
    }
    #[inline(always)]
    unsafe fn any(m: Self::Mask) -> bool {
        unsafe { vmaxvq_u32(m) != 0 }
    }
    #[inline(always)]
    unsafe fn select(m: Self::Mask, a: Self::V, b: Self::V) -> Self::V {
        unsafe { vbslq_f32(m, a, b) }
    }
    #[inline(always)]
    unsafe fn pairs(low: Self::V, high: Self::V) -> Self::V {
        lane_by_lane(low, high, low, |low, high, _| unsafe { Portable::pairs(low, high) })
    }
    #[inline(always)]
    unsafe fn dot_pairs(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lane_by_lane(a, b, c, |a, b, c| unsafe { Portable::dot_pairs(a, b, c) })
    }

    #[inline(always)]
    unsafe fn scores<A: Math>(job: &Scores, ahead: &mut Ahead) {
        unsafe { score_rows::<Self, A, 4, 4>(job, ahead, 0, job.rows) }
    }
    #[inline(always)]
    unsafe fn weighted<A: Math>(job: &Weighted, ahead: &mut Ahead) {
        unsafe { weighted_rows::<Self, A, 4, 4>(job, ahead, 0, job.width) }
    }

    #[inline(always)]
    unsafe fn f16_to_f32(from: *const u16, to: *mut f32, n: usize) {
        let whole = n / 4 * 4;
        for i in (0..whole).step_by(4) {
            unsafe { vst1q_f32(to.add(i), vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from.add(i))))) }
        }
        unsafe { decode::f16_to_f32(from.add(whole), to.add(whole), n - whole) }
    }
}

/// No BF16 arithmetic here: the kernels run this set in f32, and only tests come this way.
#[inline(always)]
fn lane_by_lane(a: float32x4_t, b: float32x4_t, c: float32x4_t, f: impl Fn([f32; 16], [f32; 16], [f32; 16]) -> [f32; 16]) -> float32x4_t {
    let widen = |v: float32x4_t| {
        let mut wide = [0.0; 16];
        // SAFETY: the array holds more than the vector's four lanes.
        unsafe { vst1q_f32(wide.as_mut_ptr(), v) };
        wide
    };
    let out = f(widen(a), widen(b), widen(c));
    // SAFETY: as above.
    unsafe { vld1q_f32(out.as_ptr()) }
}
