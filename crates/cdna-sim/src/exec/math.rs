//! Numerics of single lanes that need more than an operator.

use half::{bf16 as Bf16, f16};

use crate::exec::lanes::Row;
use crate::float::{Denorm, Mode, Round};

/// Denormals kept: rows are flushed as a whole before and after an instruction, where MODE says so.
pub const KEEP: Mode = mode(false);
/// The same with FP16_OVFL.
pub const SATURATE: Mode = mode(true);

const fn mode(fp16_ovfl: bool) -> Mode {
    Mode {
        round_32: Round::NearestEven,
        round_16_64: Round::NearestEven,
        denorm_32: Denorm::Keep,
        denorm_16_64: Denorm::Keep,
        dx10_clamp: true,
        ieee: false,
        fp16_ovfl,
    }
}

/// maxNum: a number beats NaN, +0 beats -0.
#[inline(always)]
pub fn max(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a > b || (a == b && b.is_sign_negative()) {
        a
    } else {
        b
    }
}

/// minNum: a number beats NaN, -0 beats +0.
#[inline(always)]
pub fn min(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a < b || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}

/// Fused multiply-add of a register.
pub fn fma(a: &Row, b: &Row, c: &Row, o: &mut Row) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the feature that the function is compiled for was just found.
        return unsafe { fma_native(a, b, c, o) };
    }
    fma_lanes(a, b, c, o);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "fma,avx2")]
fn fma_native(a: &Row, b: &Row, c: &Row, o: &mut Row) {
    fma_lanes(a, b, c, o);
}

#[inline(always)]
fn fma_lanes(a: &Row, b: &Row, c: &Row, o: &mut Row) {
    for i in 0..64 {
        o[i] = f32::from_bits(a[i]).mul_add(f32::from_bits(b[i]), f32::from_bits(c[i])).to_bits();
    }
}

/// `(a * b + c) * 2^power` of singles, rounded to single once, so that a quotient among the denormals is the nearest one.
pub fn scaled_fma(a: f64, b: f64, c: f64, power: i32) -> f32 {
    // Exact: twice 24 bits.
    let product = a * b;
    let sum = product + c;
    let back = sum - product;
    let lost = (product - (sum - back)) + (c - back);
    let scale = 2f64.powi(power);
    if !sum.is_finite() || lost == 0.0 || sum.to_bits() & 1 == 1 {
        return (sum * scale) as f32;
    }
    // Made odd, the sum rounds as the exact one does.
    let away = (lost > 0.0) == (sum > 0.0);
    (f64::from_bits(if away { sum.to_bits() + 1 } else { sum.to_bits() - 1 }) * scale) as f32
}

/// The last step of a division: `quotient` of `numerator / denominator` with the special cases put right.
pub fn div_fixup(quotient: f32, denominator: f32, numerator: f32) -> f32 {
    let sign = (denominator.to_bits() ^ numerator.to_bits()) & 1 << 31;
    let signed = |magnitude: f32| f32::from_bits(magnitude.to_bits() & !(1 << 31) | sign);
    let exponent = |x: f32| (x.to_bits() >> 23 & 0xff) as i32;
    if numerator.is_nan() {
        numerator
    } else if denominator.is_nan() {
        denominator
    } else if (numerator == 0.0 && denominator == 0.0) || (numerator.is_infinite() && denominator.is_infinite()) {
        f32::NAN
    } else if denominator == 0.0 || numerator.is_infinite() {
        signed(f32::INFINITY)
    } else if denominator.is_infinite() || numerator == 0.0 || exponent(numerator) - exponent(denominator) < -150 {
        signed(0.0)
    } else if quotient.is_nan() {
        // What overflowed on the way.
        signed(f32::INFINITY)
    } else {
        signed(quotient)
    }
}

/// Sign-extended bit field.
pub fn bfe_signed(x: u32, offset: u32, width: u32) -> u32 {
    if width == 0 {
        return 0;
    }
    let field = x >> offset & ((1u32 << width) - 1);
    ((field << (32 - width)) as i32 >> (32 - width)) as u32
}

/// Byte permutation: `b` holds bytes 0-3 and `a` bytes 4-7; selectors from 8 on give signs and constants.
pub fn perm(a: u32, b: u32, select: u32) -> u32 {
    let bytes = (u64::from(a) << 32 | u64::from(b)).to_le_bytes();
    let pick = |s: u8| match s {
        0..=7 => bytes[s as usize],
        8..=11 => (bytes[2 * (s as usize - 8) + 1] as i8 >> 7) as u8,
        12 => 0,
        _ => 0xff,
    };
    u32::from_le_bytes(select.to_le_bytes().map(pick))
}

/// Four signed byte products and an addend.
pub fn dot4_i8(a: u32, b: u32, c: u32) -> u32 {
    a.to_le_bytes().iter().zip(b.to_le_bytes()).fold(c, |sum, (&x, y)| sum.wrapping_add((i32::from(x as i8) * i32::from(y as i8)) as u32))
}

/// Two half products added to a single.
pub fn dot2_f16(a: u32, b: u32, c: u32) -> u32 {
    let x = |bits: u32| f16::from_bits(bits as u16).to_f64();
    ((x(a) * x(b) + x(a >> 16) * x(b >> 16) + f64::from(f32::from_bits(c))) as f32).to_bits()
}

/// Two bfloat16 products added to a single.
pub fn dot2_bf16(a: u32, b: u32, c: u32) -> u32 {
    let x = |bits: u32| Bf16::from_bits(bits as u16).to_f64();
    ((x(a) * x(b) + x(a >> 16) * x(b >> 16) + f64::from(f32::from_bits(c))) as f32).to_bits()
}
