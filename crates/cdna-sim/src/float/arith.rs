//! Adds, multiplies and fused multiply-adds under MODE's denormal rules, rounded to nearest even.
//!
//! `v_fma_f32`, `v_fmac_f32`, `v_pk_fma_f32`, `v_add_f32`, `v_mul_f32` and their packed forms all follow MODE.fp_denorm; the unfused `v_mad_f32`
//! and `v_mac_f32`, which always flush, do not exist on gfx90a and later.

use super::{Mode, Round, f16_to_f32, f32_to_f16};

/// `v_add_f32` and each half of `v_pk_add_f32`.
pub fn add_f32(a: u32, b: u32, mode: &Mode) -> u32 {
    let [a, b] = [a, b].map(|bits| f32::from_bits(mode.source_f32(bits)));
    mode.result_f32((a + b).to_bits())
}

/// `v_mul_f32` and each half of `v_pk_mul_f32`.
pub fn mul_f32(a: u32, b: u32, mode: &Mode) -> u32 {
    let [a, b] = [a, b].map(|bits| f32::from_bits(mode.source_f32(bits)));
    mode.result_f32((a * b).to_bits())
}

/// `v_mul_legacy_f32`: zero times anything is positive zero.
pub fn mul_legacy_f32(a: u32, b: u32, mode: &Mode) -> u32 {
    let zero = |bits| f32::from_bits(mode.source_f32(bits)) == 0.0;
    if zero(a) || zero(b) { 0 } else { mul_f32(a, b, mode) }
}

/// `v_fma_f32`, `v_fmac_f32` and each half of `v_pk_fma_f32`: one rounding.
pub fn fma_f32(a: u32, b: u32, c: u32, mode: &Mode) -> u32 {
    let [a, b, c] = [a, b, c].map(|bits| f32::from_bits(mode.source_f32(bits)));
    mode.result_f32(a.mul_add(b, c).to_bits())
}

/// `v_fma_f16` and each half of `v_pk_fma_f16`: one rounding.
pub fn fma_f16(a: u16, b: u16, c: u16, mode: &Mode) -> u16 {
    let [a, b, c] = [a, b, c].map(|bits| f64::from(f16_to_f32(mode.source_f16(bits))));
    mode.result_f16(f32_to_f16(round_to_odd(a * b, c), Round::NearestEven, mode.fp16_ovfl))
}

/// `x + y` rounded to f32 so that a later rounding to F16 gives what rounding the exact sum would: truncated, its last bit set if
/// anything was lost.
fn round_to_odd(x: f64, y: f64) -> f32 {
    let sum = x + y;
    if !sum.is_finite() || sum == 0.0 {
        return sum as f32;
    }
    // Knuth's two-sum: what the f64 addition lost.
    let back = sum - x;
    let lost = (x - (sum - back)) + (y - back);
    let nearest = sum as f32;
    if f64::from(nearest) == sum && lost == 0.0 {
        return nearest;
    }
    // Toward zero of the exact sum, then odd.
    let overshoot = f64::from(nearest) - sum - lost;
    let beyond = if sum > 0.0 { overshoot > 0.0 } else { overshoot < 0.0 };
    f32::from_bits((nearest.to_bits() - u32::from(beyond)) | 1)
}
