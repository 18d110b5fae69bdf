//! AVX2 with FMA and F16C.

use std::arch::x86_64::*;

use super::{Isa, Portable};
use crate::cpu::ahead::Ahead;
use crate::cpu::decode;
use crate::cpu::gemm::{Scores, Weighted, score_rows, weighted_rows};
use crate::cpu::math::Math;

#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx2;

impl Isa for Avx2 {
    const LANES: usize = 8;
    type V = __m256;
    type Mask = __m256;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        unsafe { _mm256_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn scale2(a: Self::V, n: Self::V) -> Self::V {
        unsafe {
            // In two steps, so that neither factor leaves f32's range.
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            let power = |n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))));
            // A NaN's n is i32::MIN: both factors are garbage, and NaN stays NaN.
            _mm256_mul_ps(_mm256_mul_ps(a, power(half)), power(_mm256_sub_epi32(n, half)))
        }
    }
    #[inline(always)]
    unsafe fn less(a: Self::V, b: Self::V) -> Self::Mask {
        unsafe { _mm256_cmp_ps::<_CMP_LT_OQ>(a, b) }
    }
    #[inline(always)]
    unsafe fn and(a: Self::Mask, b: Self::Mask) -> Self::Mask {
        unsafe { _mm256_and_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn any(m: Self::Mask) -> bool {
        unsafe { _mm256_movemask_ps(m) != 0 }
    }
    #[inline(always)]
    unsafe fn select(m: Self::Mask, a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_blendv_ps(b, a, m) }
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
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn scores<A: Math>(job: &Scores, ahead: &mut Ahead) {
        unsafe { score_rows::<Self, A, 2, 4>(job, ahead, 0, job.rows) }
    }
    #[inline(always)]
    unsafe fn weighted<A: Math>(job: &Weighted, ahead: &mut Ahead) {
        unsafe { weighted_rows::<Self, A, 4, 2>(job, ahead, 0, job.width) }
    }

    #[inline(always)]
    unsafe fn f16_to_f32(from: *const u16, to: *mut f32, n: usize) {
        let whole = n / 8 * 8;
        for i in (0..whole).step_by(8) {
            unsafe { _mm256_storeu_ps(to.add(i), _mm256_cvtph_ps(_mm_loadu_si128(from.add(i).cast()))) }
        }
        unsafe { decode::f16_to_f32(from.add(whole), to.add(whole), n - whole) }
    }
}

/// No BF16 arithmetic here: the kernels run this set in f32, and only tests come this way.
#[inline(always)]
fn lane_by_lane(a: __m256, b: __m256, c: __m256, f: impl Fn([f32; 16], [f32; 16], [f32; 16]) -> [f32; 16]) -> __m256 {
    let widen = |v: __m256| {
        let mut wide = [0.0; 16];
        wide[..8].copy_from_slice(&unsafe { std::mem::transmute::<__m256, [f32; 8]>(v) });
        wide
    };
    let mut out = [0.0; 8];
    out.copy_from_slice(&f(widen(a), widen(b), widen(c))[..8]);
    unsafe { std::mem::transmute(out) }
}
