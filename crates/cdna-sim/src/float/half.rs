//! BF16 and F16 against f32.

use super::Round;

/// The value of a BF16, exact; a NaN keeps its bits.
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// `x` rounded to the nearest BF16, ties to even; overflow gives infinity, a NaN is quieted and keeps its sign and upper payload.
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// The value of an F16, exact, denormals included; a NaN is quieted and keeps its payload.
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    if bits & 0x7c00 == 0x7c00 {
        let quiet = if bits & 0x3ff != 0 { 0x40_0000 } else { 0 };
        return f32::from_bits(sign | magnitude | 0x7f80_0000 | quiet);
    }
    // Rebiasing by a multiplication normalizes denormals as well; both factors and the product are exact.
    let rebias = f32::from_bits((127 + 127 - 15) << 23);
    f32::from_bits(sign | (f32::from_bits(magnitude) * rebias).to_bits())
}

/// `x` rounded to F16, denormal results included.
///
/// An infinity stays one and a NaN is quieted. A finite value that overflows becomes infinity or the largest finite value as `round`
/// says; with `fp16_ovfl` (MODE.FP16_OVFL) always the largest finite value.
pub fn f32_to_f16(x: f32, round: Round, fp16_ovfl: bool) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    if x.is_nan() {
        return sign | 0x7e00 | (bits >> 13 & 0x3ff) as u16;
    }
    if x.is_infinite() {
        return sign | 0x7c00;
    }
    let exponent = ((bits >> 23 & 0xff) as i32 - 127).max(-14);
    // A multiple of the F16 spacing at this exponent: exact in f64, so the one rounding below is the only one.
    let steps = f64::from(x.abs()) * f64::from_bits(((1023 + 10 - exponent) as u64) << 52);
    let rounded = match round {
        Round::NearestEven => steps.round_ties_even(),
        Round::TowardZero => steps.floor(),
        Round::Up if sign == 0 => steps.ceil(),
        Round::Down if sign != 0 => steps.ceil(),
        Round::Up | Round::Down => steps.floor(),
    };
    let code = ((exponent + 14) as u32) * 1024 + rounded as u32;
    if code < 0x7c00 {
        return sign | code as u16;
    }
    let to_infinity = match round {
        Round::NearestEven => true,
        Round::TowardZero => false,
        Round::Up => sign == 0,
        Round::Down => sign != 0,
    };
    sign | if to_infinity && !fp16_ovfl { 0x7c00 } else { 0x7bff }
}

/// `x` rounded to the nearest F16, ties to even, in one step.
pub fn f64_to_f16(x: f64) -> u16 {
    let sign = (x.to_bits() >> 48 & 0x8000) as u16;
    if x.is_nan() {
        return sign | 0x7e00;
    }
    // From 65520 on the nearest is infinity.
    if x.abs() >= 65520.0 {
        return sign | 0x7c00;
    }
    let exponent = ((x.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(-14);
    // A multiple of the spacing at this exponent; only what is far below it is lost in f64's own denormals.
    let steps = x.abs() * f64::from_bits(((1023 + 10 - exponent) as u64) << 52);
    sign | (((exponent + 14) as u32) * 1024 + steps.round_ties_even() as u32) as u16
}

/// `bits` with a denormal replaced by a zero of the same sign.
pub fn flush_f16(bits: u16) -> u16 {
    if bits & 0x7c00 == 0 { bits & 0x8000 } else { bits }
}
