//! AVX-512 (F, BW, DQ, VL); the pair functions and the 8- and 4-bit decoders to BF16 need BF16 and VBMI too.

use std::arch::x86_64::*;

use super::Isa;
use crate::cpu::ahead::Ahead;
use crate::cpu::decode::{self, E2M1, e8m0, fp8_table};
use crate::cpu::gemm::{Scores, Weighted, score_rows, weighted_rows};
use crate::cpu::math::Math;

#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512;

/// Byte `shift / 8` of the BF16 value of each E4M3 magnitude.
const fn fp8_bytes(shift: u32) -> [u8; 128] {
    let mut bytes = [0; 128];
    let mut code = 0;
    while code < 128 {
        bytes[code] = (FP8_AS_BF16[code] >> shift) as u8;
        code += 1;
    }
    bytes
}

const FP8_AS_BF16: [u16; 256] = fp8_table();
static FP8_LOW: [u8; 128] = fp8_bytes(0);
static FP8_HIGH: [u8; 128] = fp8_bytes(8);

/// Puts the two halves of a `cvtne2` result (low half, high half) side by side: lane i becomes (low i, high i).
static PAIR_UP: [u16; 32] = {
    let mut index = [0; 32];
    let mut i = 0;
    while i < 16 {
        index[2 * i] = i as u16;
        index[2 * i + 1] = i as u16 + 16;
        i += 1;
    }
    index
};

/// Selectors for two vectors of 32 words: words 0..16 of both interleaved, and words 16..32.
static INTERLEAVE: [[u16; 32]; 2] = {
    let mut index = [[0; 32]; 2];
    let mut i = 0;
    while i < 16 {
        index[0][2 * i] = i as u16;
        index[0][2 * i + 1] = i as u16 + 32;
        index[1][2 * i] = i as u16 + 16;
        index[1][2 * i + 1] = i as u16 + 48;
        i += 1;
    }
    index
};

#[inline(always)]
fn mask16(n: usize) -> __mmask16 {
    if n >= 16 { !0 } else { (1 << n) - 1 }
}

#[inline(always)]
fn mask32(n: usize) -> __mmask32 {
    if n >= 32 { !0 } else { (1 << n) - 1 }
}

impl Isa for Avx512 {
    const LANES: usize = 16;
    type V = __m512;
    type Mask = __mmask16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        unsafe { _mm512_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn scale2(a: Self::V, n: Self::V) -> Self::V {
        unsafe { _mm512_scalef_ps(a, n) }
    }
    #[inline(always)]
    unsafe fn less(a: Self::V, b: Self::V) -> Self::Mask {
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
    }
    #[inline(always)]
    unsafe fn and(a: Self::Mask, b: Self::Mask) -> Self::Mask {
        a & b
    }
    #[inline(always)]
    unsafe fn any(m: Self::Mask) -> bool {
        m != 0
    }
    #[inline(always)]
    unsafe fn select(m: Self::Mask, a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_mask_blend_ps(m, b, a) }
    }
    #[inline(always)]
    unsafe fn pairs(low: Self::V, high: Self::V) -> Self::V {
        unsafe {
            let both: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_loadu_si512(PAIR_UP.as_ptr().cast()), both))
        }
    }
    #[inline(always)]
    unsafe fn dot_pairs(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { _mm512_dpbf16_ps(c, std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b)) }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn scores<A: Math>(job: &Scores, ahead: &mut Ahead) {
        unsafe {
            let fours = job.rows / 64 * 64;
            let twos = fours + (job.rows - fours) / 32 * 32;
            score_rows::<Self, A, 4, 4>(job, ahead, 0, fours);
            score_rows::<Self, A, 2, 8>(job, ahead, fours, twos);
            score_rows::<Self, A, 1, 16>(job, ahead, twos, job.rows);
        }
    }
    #[inline(always)]
    unsafe fn weighted<A: Math>(job: &Weighted, ahead: &mut Ahead) {
        unsafe {
            let fours = job.width / 64 * 64;
            weighted_rows::<Self, A, 4, 4>(job, ahead, 0, fours);
            weighted_rows::<Self, A, 8, 1>(job, ahead, fours, job.width);
        }
    }

    #[inline(always)]
    unsafe fn f16_to_f32(from: *const u16, to: *mut f32, n: usize) {
        for i in (0..n).step_by(16) {
            unsafe {
                let m = mask16(n - i);
                let half = _mm256_maskz_loadu_epi16(m, from.add(i).cast());
                _mm512_mask_storeu_ps(to.add(i), m, _mm512_cvtph_ps(half));
            }
        }
    }
    #[inline(always)]
    unsafe fn bf16_to_f32(from: *const u16, to: *mut f32, n: usize) {
        for i in (0..n).step_by(16) {
            unsafe {
                let m = mask16(n - i);
                let wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, from.add(i).cast()));
                _mm512_mask_storeu_epi32(to.add(i).cast(), m, _mm512_slli_epi32::<16>(wide));
            }
        }
    }
    #[inline(always)]
    unsafe fn fp8_to_f32(from: *const u8, to: *mut f32, n: usize) {
        for i in (0..n).step_by(16) {
            unsafe {
                let m = mask16(n - i);
                // Exponent and mantissa slide into place, and 2^120 corrects the bias, subnormals included; the sign follows; NaN is named.
                let code = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(m, from.add(i).cast()));
                let magnitude = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
                let nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
                let value = _mm512_castsi512_ps(_mm512_slli_epi32::<20>(magnitude));
                let value = _mm512_mul_ps(value, _mm512_castsi512_ps(_mm512_set1_epi32((127 + 120) << 23)));
                let value = _mm512_mask_blend_ps(nan, value, _mm512_set1_ps(f32::NAN));
                let sign = _mm512_and_si512(code, _mm512_set1_epi32(i32::MIN));
                _mm512_mask_storeu_epi32(to.add(i).cast(), m, _mm512_or_si512(_mm512_castps_si512(value), sign));
            }
        }
    }
    #[inline(always)]
    unsafe fn fp8_to_bf16(from: *const u8, to: *mut u16, n: usize) {
        unsafe {
            let table = |bytes: &[u8; 128]| (_mm512_loadu_si512(bytes.as_ptr().cast()), _mm512_loadu_si512(bytes.as_ptr().add(64).cast()));
            let ((low0, low1), (high0, high1)) = (table(&FP8_LOW), table(&FP8_HIGH));
            let signs = _mm512_set1_epi8(i8::MIN);
            // Quadwords in an order that the byte interleave below turns back into memory order.
            let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
            for i in (0..n).step_by(64) {
                let left = n - i;
                let mask = if left >= 64 { !0 } else { (1u64 << left) - 1 };
                let codes = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(mask, from.add(i).cast()));
                let low = _mm512_permutex2var_epi8(low0, codes, low1);
                let high = _mm512_permutex2var_epi8(high0, codes, high1);
                let high = _mm512_or_si512(high, _mm512_and_si512(codes, signs));
                _mm512_mask_storeu_epi16(to.add(i).cast(), mask32(left), _mm512_unpacklo_epi8(low, high));
                if left > 32 {
                    _mm512_mask_storeu_epi16(to.add(i + 32).cast(), mask32(left - 32), _mm512_unpackhi_epi8(low, high));
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn mxfp4_to_bf16(from: *const u8, scales: *const u8, to: *mut u16, n: usize) {
        for block in 0..n / 32 {
            unsafe {
                let (even, odd) = mxfp4_block(from, scales, block);
                Self::store(to.add(block * 32).cast(), Self::pairs(even, odd));
            }
        }
    }
    #[inline(always)]
    unsafe fn mxfp4_to_f32(from: *const u8, scales: *const u8, to: *mut f32, n: usize) {
        unsafe {
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            for block in 0..n / 32 {
                let (even, odd) = mxfp4_block(from, scales, block);
                Self::store(to.add(block * 32), _mm512_permutex2var_ps(even, low, odd));
                Self::store(to.add(block * 32 + 16), _mm512_permutex2var_ps(even, high, odd));
            }
        }
    }
    #[inline(always)]
    unsafe fn interleave(a: *const u16, b: *const u16, to: *mut u32, n: usize) {
        unsafe {
            let low = _mm512_loadu_si512(INTERLEAVE[0].as_ptr().cast());
            let high = _mm512_loadu_si512(INTERLEAVE[1].as_ptr().cast());
            for i in (0..n).step_by(32) {
                let left = n - i;
                let m = mask32(left);
                let x = _mm512_maskz_loadu_epi16(m, a.add(i).cast());
                let y = _mm512_maskz_loadu_epi16(m, b.add(i).cast());
                _mm512_mask_storeu_epi32(to.add(i).cast(), mask16(left), _mm512_permutex2var_epi16(x, low, y));
                if left > 16 {
                    _mm512_mask_storeu_epi32(to.add(i + 16).cast(), mask16(left - 16), _mm512_permutex2var_epi16(x, high, y));
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const u32, from_stride: usize, to: *mut u32, to_stride: usize, rows: usize, columns: usize) {
        let (whole_rows, whole_columns) = (rows / 16 * 16, columns / 4 * 4);
        unsafe {
            for c in (0..whole_columns).step_by(4) {
                for r in (0..whole_rows).step_by(16) {
                    transpose_16x4(from.byte_add(r * from_stride).add(c), from_stride, to.add(c * to_stride + r), to_stride);
                }
            }
            let right = (from.add(whole_columns), to.add(whole_columns * to_stride));
            decode::transpose(right.0, from_stride, right.1, to_stride, whole_rows, columns - whole_columns);
            let below = (from.byte_add(whole_rows * from_stride), to.add(whole_rows));
            decode::transpose(below.0, from_stride, below.1, to_stride, rows - whole_rows, columns);
        }
    }
}

/// Sixteen rows of four units become four rows of sixteen.
#[inline(always)]
unsafe fn transpose_16x4(from: *const u32, from_stride: usize, to: *mut u32, to_stride: usize) {
    unsafe {
        let row = |r: usize| _mm_loadu_si128(from.byte_add(r * from_stride).cast());
        // 128-bit lane l holds row 4l + k.
        let lanes = |k: usize| {
            let v = _mm512_broadcast_i32x4(row(k));
            let v = _mm512_mask_broadcast_i32x4(v, 0x00f0, row(k + 4));
            let v = _mm512_mask_broadcast_i32x4(v, 0x0f00, row(k + 8));
            _mm512_mask_broadcast_i32x4(v, 0xf000, row(k + 12))
        };
        let (a, b, c, d) = (lanes(0), lanes(1), lanes(2), lanes(3));
        let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        _mm512_storeu_si512(to.cast(), _mm512_unpacklo_epi64(ab, cd));
        _mm512_storeu_si512(to.add(to_stride).cast(), _mm512_unpackhi_epi64(ab, cd));
        let (ab, cd) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        _mm512_storeu_si512(to.add(2 * to_stride).cast(), _mm512_unpacklo_epi64(ab, cd));
        _mm512_storeu_si512(to.add(3 * to_stride).cast(), _mm512_unpackhi_epi64(ab, cd));
    }
}

/// The even and odd elements of one MXFP4 block as f32.
#[inline(always)]
unsafe fn mxfp4_block(from: *const u8, scales: *const u8, block: usize) -> (__m512, __m512) {
    unsafe {
        let values = _mm512_loadu_ps(E2M1.as_ptr());
        let scale = _mm512_set1_ps(if scales.is_null() { 1.0 } else { e8m0(*scales.add(block)) });
        let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.add(block * 16).cast()));
        let even = _mm512_permutexvar_ps(bytes, values);
        let odd = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), values);
        (_mm512_mul_ps(even, scale), _mm512_mul_ps(odd, scale))
    }
}
