//! Transcendental functions, scaling, and rounding to integral values.
//!
//! `exp`, `log`, `rcp`, `rsq`, `sqrt`, `sin` and `cos` are computed in f64 and rounded to nearest: hardware is documented to be within
//! 1 ulp, not to the bit. As LLVM's code generator assumes of the f32 forms, they do not handle denormals whatever MODE says: a
//! denormal source counts as zero and a denormal result is flushed to zero.

use super::{Mode, flush_f32};

fn without_denormals(x: u32, function: impl Fn(f64) -> f64) -> u32 {
    let result = function(f64::from(f32::from_bits(flush_f32(x)))) as f32;
    flush_f32(result.to_bits())
}

/// `v_exp_f32`: 2 to the power `x`.
pub fn exp_f32(x: u32) -> u32 {
    without_denormals(x, f64::exp2)
}

/// `v_log_f32`: the base-2 logarithm; -infinity of zeros, NaN of negative numbers.
pub fn log_f32(x: u32) -> u32 {
    without_denormals(x, f64::log2)
}

/// `v_rcp_f32` and `v_rcp_iflag_f32`: infinities of zeros.
pub fn rcp_f32(x: u32) -> u32 {
    without_denormals(x, |x| 1.0 / x)
}

/// `v_rsq_f32`: infinities of zeros, NaN of negative numbers.
pub fn rsq_f32(x: u32) -> u32 {
    without_denormals(x, |x| if x == 0.0 { 1.0 / x } else { 1.0 / x.sqrt() })
}

/// `v_sqrt_f32`: -0 of -0, NaN of negative numbers.
pub fn sqrt_f32(x: u32) -> u32 {
    without_denormals(x, f64::sqrt)
}

/// `v_sin_f32`: the sine of `x` revolutions; 0 outside \[-256, 256\].
pub fn sin_f32(x: u32) -> u32 {
    without_denormals(x, |x| trigonometric(x, 0.0, f64::sin))
}

/// `v_cos_f32`: the cosine of `x` revolutions; 1 outside \[-256, 256\].
pub fn cos_f32(x: u32) -> u32 {
    without_denormals(x, |x| trigonometric(x, 1.0, f64::cos))
}

fn trigonometric(revolutions: f64, out_of_range: f64, function: impl Fn(f64) -> f64) -> f64 {
    if !revolutions.is_finite() {
        return f64::NAN;
    }
    if revolutions.abs() > 256.0 {
        return out_of_range;
    }
    function((revolutions - revolutions.round()) * std::f64::consts::TAU)
}

/// `v_ldexp_f32`: `x` times 2 to the power `exponent`, rounded once.
pub fn ldexp_f32(x: u32, exponent: i32, mode: &Mode) -> u32 {
    let x = f64::from(f32::from_bits(mode.source_f32(x)));
    mode.result_f32(((x * 2f64.powi(exponent.clamp(-320, 320))) as f32).to_bits())
}

/// `v_fract_f32`: `x` minus its floor, at most the largest f32 below 1; NaN of infinities.
pub fn fract_f32(x: u32, mode: &Mode) -> u32 {
    const BELOW_ONE: f32 = 1.0 - f32::EPSILON / 2.0;
    let x = f32::from_bits(mode.source_f32(x));
    let fraction = x - x.floor();
    mode.result_f32(if fraction > BELOW_ONE { BELOW_ONE } else { fraction }.to_bits())
}

/// `v_frexp_exp_i32_f32`: the exponent for which the mantissa lies in \[0.5, 1); 0 for zeros, infinities and NaN.
pub fn frexp_exp_f32(x: u32) -> i32 {
    let x = f32::from_bits(x);
    if x == 0.0 || !x.is_finite() {
        return 0;
    }
    (f64::from(x.abs()).to_bits() >> 52) as i32 - 1022
}

/// `v_frexp_mant_f32`: the mantissa in \[0.5, 1) with the sign of `x`; zeros, infinities and NaN give themselves.
pub fn frexp_mant_f32(x: u32) -> u32 {
    let value = f32::from_bits(x);
    if value == 0.0 || !value.is_finite() {
        return x;
    }
    ((f64::from(value) * 2f64.powi(-frexp_exp_f32(x))) as f32).to_bits()
}

/// `v_rndne_f32`: to the nearest integral value, ties to even; keeps the sign of zeros.
pub fn rndne_f32(x: u32, mode: &Mode) -> u32 {
    f32::from_bits(mode.source_f32(x)).round_ties_even().to_bits()
}

/// `v_floor_f32`.
pub fn floor_f32(x: u32, mode: &Mode) -> u32 {
    f32::from_bits(mode.source_f32(x)).floor().to_bits()
}

/// `v_ceil_f32`.
pub fn ceil_f32(x: u32, mode: &Mode) -> u32 {
    f32::from_bits(mode.source_f32(x)).ceil().to_bits()
}

/// `v_trunc_f32`.
pub fn trunc_f32(x: u32, mode: &Mode) -> u32 {
    f32::from_bits(mode.source_f32(x)).trunc().to_bits()
}
