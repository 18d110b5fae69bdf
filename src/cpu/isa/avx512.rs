//! AVX-512 (F, BW, DQ, VL); the pair functions and the 8- and 4-bit decoders to BF16 need BF16 and VBMI too.

use std::arch::x86_64::*;

use super::Isa;
use crate::cpu::ahead::Ahead;
use crate::cpu::decode::{self, E2M1, e8m0, fp8_table};
use crate::cpu::gemm::{BLOCK, KeyBlock, Scores, Stored, StoredRows, Units, Weighted, score_rows, weighted_fresh, weighted_rows};
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

    /// With one vector of rows a multiplication would need a load of its own for every token's unit, and loads would limit the rate.
    #[inline(always)]
    fn twins(rows: usize) -> bool {
        rows == Self::LANES
    }
    const WEIGHS_STORED: bool = true;
    #[inline(always)]
    unsafe fn weighted_stored<A: Math>(job: &Weighted, stored: &StoredRows, ahead: &mut Ahead) {
        let (to, width) = (job.values.cast_mut().cast(), job.width);
        unsafe {
            match stored.kind {
                Stored::F16 => weighted_fresh::<Self, A, _, 4, 4>(job, &F16Rows { stored, to, width }, ahead),
                Stored::Bf16 => weighted_fresh::<Self, A, _, 4, 4>(job, &Bf16Rows { stored, to, width }, ahead),
                Stored::Fp8 => weighted_fresh::<Self, A, _, 4, 4>(job, &Fp8Rows { stored, to, width }, ahead),
                Stored::Mxfp4 => weighted_fresh::<Self, A, _, 4, 4>(job, &Mxfp4Rows { stored, to, width }, ahead),
            }
        }
    }

    #[inline(always)]
    unsafe fn scores<A: Math>(job: &Scores, ahead: &mut Ahead) {
        unsafe {
            if job.twins {
                score_twins::<A>(job, ahead);
                return;
            }
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
        let whole = n / 16 * 16;
        for i in (0..whole).step_by(16) {
            unsafe { _mm512_storeu_ps(to.add(i), _mm512_cvtph_ps(_mm256_loadu_si256(from.add(i).cast()))) }
        }
        for i in (whole..n).step_by(16) {
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
            // Quadwords in an order that the byte interleave below turns back into memory order.
            let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
            let whole = n / 64 * 64;
            for i in (0..whole).step_by(64) {
                let codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from.add(i).cast()));
                let [first, second] = fp8_words(codes);
                _mm512_storeu_ps(to.add(i).cast(), first);
                _mm512_storeu_ps(to.add(i + 32).cast(), second);
            }
            for i in (whole..n).step_by(64) {
                let left = n - i;
                let mask = if left >= 64 { !0 } else { (1u64 << left) - 1 };
                let codes = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(mask, from.add(i).cast()));
                let [first, second] = fp8_words(codes);
                _mm512_mask_storeu_epi16(to.add(i).cast(), mask32(left), _mm512_castps_si512(first));
                if left > 32 {
                    _mm512_mask_storeu_epi16(to.add(i + 32).cast(), mask32(left - 32), _mm512_castps_si512(second));
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn mxfp4_to_bf16(from: *const u8, scales: *const u8, to: *mut u16, n: usize) {
        for block in 0..n / 32 {
            unsafe { _mm512_storeu_si512(to.add(block * 32).cast(), mxfp4_words(from, scales, block)) }
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

/// [`Scores`] of 16 rows: a token's two units meet eight rows' two units at once, and the halves are added at the end.
#[inline(always)]
unsafe fn score_twins<A: Math>(job: &Scores, ahead: &mut Ahead) {
    for (b, block) in job.blocks.iter().enumerate() {
        for t in (0..BLOCK).step_by(8) {
            unsafe {
                let keys = KeyBlock { data: block.data.add(t * block.token), ..*block };
                score_twins_tile::<A>(job, ahead, keys, job.out.add((b * BLOCK + t) * 16));
            }
        }
    }
}

/// Eight tokens.
#[inline(always)]
unsafe fn score_twins_tile<A: Math>(job: &Scores, ahead: &mut Ahead, keys: KeyBlock, out: *mut f32) {
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; 8];
        let mut query = job.query.cast::<f32>();
        for _ in 0..job.terms {
            let mut chunk = keys.data;
            for _ in 0..job.chunks {
                let mut at = chunk;
                for twin in 0..job.chunk_units / 2 {
                    if twin % 2 == 0 {
                        ahead.ask::<Avx512>();
                    }
                    let q = [_mm512_loadu_ps(query), _mm512_loadu_ps(query.add(16))];
                    for (t, acc) in acc.iter_mut().enumerate() {
                        let k = _mm512_castpd_ps(_mm512_set1_pd(at.add(t * keys.token).cast::<f64>().read_unaligned()));
                        acc[0] = A::dot::<Avx512>(q[0], k, acc[0]);
                        acc[1] = A::dot::<Avx512>(q[1], k, acc[1]);
                    }
                    query = query.add(32);
                    at = at.add(8);
                }
                chunk = chunk.add(keys.chunk);
            }
        }
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        for (t, [a, b]) in acc.into_iter().enumerate() {
            let halves = (_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
            _mm512_storeu_ps(out.add(t * 16), _mm512_add_ps(halves.0, halves.1));
        }
    }
}

/// Units of 64 dims made from stored rows, and kept at `to` (rows of `width`) for whoever needs them again.
macro_rules! fresh {
    ($name:ident, |$stored:ident, $unit:ident, $dim:ident| $units:expr) => {
        struct $name<'a> {
            stored: &'a StoredRows,
            to: *mut u32,
            width: usize,
        }

        impl Units<Avx512, 4> for $name<'_> {
            #[inline(always)]
            unsafe fn load(&self, $unit: usize, $dim: usize) -> [__m512; 4] {
                unsafe {
                    let $stored = self.stored;
                    let units: [__m512; 4] = $units;
                    let to = self.to.add($unit * self.width + $dim).cast::<f32>();
                    for (i, &v) in units.iter().enumerate() {
                        _mm512_storeu_ps(to.add(16 * i), v);
                    }
                    units
                }
            }
        }
    };
}

fresh!(F16Rows, |stored, unit, dim| {
    let at = stored.rows.get_unchecked(unit).cast::<u16>().add(dim);
    let mut units = [_mm512_setzero_ps(); 4];
    for (i, v) in units.iter_mut().enumerate() {
        *v = _mm512_cvtph_ps(_mm256_loadu_si256(at.add(16 * i).cast()));
    }
    units
});

fresh!(Bf16Rows, |stored, unit, dim| {
    let row = |t: usize| {
        let at = stored.rows.get_unchecked(t).cast::<u16>().add(dim);
        [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(32).cast())]
    };
    word_units(row(2 * unit), row(2 * unit + 1))
});

fresh!(Fp8Rows, |stored, unit, dim| {
    // Lane l of the unpacked vector j comes from doubleword 4j + l.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let row = |t: usize| _mm512_permutexvar_epi32(order, _mm512_loadu_si512(stored.rows.get_unchecked(t).add(dim).cast()));
    let (a, b) = (row(2 * unit), row(2 * unit + 1));
    let left = fp8_words(_mm512_unpacklo_epi8(a, b));
    let right = fp8_words(_mm512_unpackhi_epi8(a, b));
    [left[0], left[1], right[0], right[1]]
});

fresh!(Mxfp4Rows, |stored, unit, dim| { word_units(mxfp4_64(stored, 2 * unit, dim / 32), mxfp4_64(stored, 2 * unit + 1, dim / 32)) });

/// Blocks `block` and `block + 1` of token `t`.
#[inline(always)]
unsafe fn mxfp4_64(stored: &StoredRows, t: usize, block: usize) -> [__m512i; 2] {
    unsafe {
        let (from, scales) = (*stored.rows.get_unchecked(t), *stored.scales.get_unchecked(t));
        [mxfp4_words(from, scales, block), mxfp4_words(from, scales, block + 1)]
    }
}

/// Words of two rows side by side.
#[inline(always)]
unsafe fn word_units(a: [__m512i; 2], b: [__m512i; 2]) -> [__m512; 4] {
    unsafe {
        let low = _mm512_loadu_si512(INTERLEAVE[0].as_ptr().cast());
        let high = _mm512_loadu_si512(INTERLEAVE[1].as_ptr().cast());
        [
            _mm512_castsi512_ps(_mm512_permutex2var_epi16(a[0], low, b[0])),
            _mm512_castsi512_ps(_mm512_permutex2var_epi16(a[0], high, b[0])),
            _mm512_castsi512_ps(_mm512_permutex2var_epi16(a[1], low, b[1])),
            _mm512_castsi512_ps(_mm512_permutex2var_epi16(a[1], high, b[1])),
        ]
    }
}

/// BF16 words of 64 E4M3 codes: of the low and of the high eight codes of each 128-bit lane.
#[inline(always)]
unsafe fn fp8_words(codes: __m512i) -> [__m512; 2] {
    unsafe {
        let look_up = |bytes: &[u8; 128]| {
            let (first, second) = (_mm512_loadu_si512(bytes.as_ptr().cast()), _mm512_loadu_si512(bytes.as_ptr().add(64).cast()));
            _mm512_permutex2var_epi8(first, codes, second)
        };
        let low = look_up(&FP8_LOW);
        let high = _mm512_or_si512(look_up(&FP8_HIGH), _mm512_and_si512(codes, _mm512_set1_epi8(i8::MIN)));
        [_mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high)), _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high))]
    }
}

/// E2M1 codes as BF16 words, twice: a selector's fifth bit belongs to a neighbour.
static E2M1_WORDS: [u16; 32] = {
    let mut words = [0; 32];
    let mut i = 0;
    while i < 32 {
        words[i] = (E2M1[i % 16].to_bits() >> 16) as u16;
        i += 1;
    }
    words
};

/// As [`mxfp4_words`], for scales that leave the normal range.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")]
unsafe fn mxfp4_wild_words(from: *const u8, scales: *const u8, block: usize) -> __m512i {
    unsafe {
        let (even, odd) = mxfp4_block(from, scales, block);
        _mm512_castps_si512(Avx512::pairs(even, odd))
    }
}

/// The 32 elements of one MXFP4 block as BF16 words.
#[inline(always)]
unsafe fn mxfp4_words(from: *const u8, scales: *const u8, block: usize) -> __m512i {
    unsafe {
        let code = if scales.is_null() { 127 } else { *scales.add(block) };
        if !(2..=252).contains(&code) {
            return mxfp4_wild_words(from, scales, block);
        }
        let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.add(block * 16).cast()));
        let nibbles = _mm512_or_si512(bytes, _mm512_slli_epi32::<12>(bytes));
        let words = _mm512_permutexvar_epi16(nibbles, _mm512_loadu_si512(E2M1_WORDS.as_ptr().cast()));
        // No exponent leaves the normal range, so the scale is a sum; zeros stay.
        let nonzero = _mm512_test_epi16_mask(words, _mm512_set1_epi16(0x7fff));
        _mm512_mask_add_epi16(words, nonzero, words, _mm512_set1_epi16((code as i16 - 127) << 7))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")]
    unsafe fn decode_mxfp4(from: &[u8; 16], scale: u8, to: &mut [u16; 32]) {
        unsafe { Avx512::mxfp4_to_bf16(from.as_ptr(), &scale, to.as_mut_ptr(), 32) }
    }

    #[test]
    fn every_mxfp4_scale_decodes_as_in_plain_code() {
        if !crate::cpu::isa::available(crate::registry::CpuIsa::Avx512Bf16) {
            return;
        }
        let codes = std::array::from_fn(|i| (i | (15 - i) << 4) as u8);
        for scale in 0..=255 {
            let (mut got, mut expected) = ([1; 32], [2; 32]);
            // SAFETY: the instruction set is there; the arrays hold one block.
            unsafe {
                decode_mxfp4(&codes, scale, &mut got);
                decode::mxfp4_to_bf16(codes.as_ptr(), &scale, expected.as_mut_ptr(), 32);
            }
            for (got, expected) in got.map(half::bf16::from_bits).into_iter().zip(expected.map(half::bf16::from_bits)) {
                // The multiplier takes a subnormal for zero, and so may the decoder.
                let flushed = expected.to_f32().abs() < f32::MIN_POSITIVE && got.to_f32() == 0.0;
                assert!(got == expected || got.is_nan() && expected.is_nan() || flushed, "scale {scale}: {got} for {expected}");
            }
        }
    }
}
