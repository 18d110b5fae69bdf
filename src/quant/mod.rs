//! Exact conversions between f32 and the 8-bit and 4-bit KV formats.
//!
//! - [`fp8`]: E4M3 in the OCP encoding (every device but gfx942) and in the FNUZ encoding (gfx942), and the scale of one token.
//! - [`mxfp4`]: E2M1 elements, E8M0 scales, and blocks of 32 elements under one scale.
//!
//! Formats: "OCP 8-bit Floating Point Specification" 1.0 and "OCP Microscaling Formats (MX) Specification" 1.0.

pub mod fp8;
pub mod mxfp4;

/// `2^exponent` for an exponent in `-127..=127`; the smallest one is an f32 subnormal.
pub(crate) const fn exp2(exponent: i32) -> f32 {
    if exponent == -127 { f32::from_bits(1 << 22) } else { f32::from_bits(((exponent + 127) as u32) << 23) }
}

/// The code (sign apart) of the value nearest to `magnitude` in a format of `MANTISSA` mantissa bits and exponent bias `BIAS`,
/// ties to even, at most `largest`. `magnitude` is not negative and not NaN.
#[inline]
const fn round_magnitude<const MANTISSA: u32, const BIAS: i32>(magnitude: f32, largest: u32) -> u32 {
    let code = if magnitude < exp2(1 - BIAS) {
        // Adding this power of two leaves the sum's last bit worth one subnormal step, so the addition itself rounds to even.
        let anchor = exp2(1 - BIAS - MANTISSA as i32 + 23);
        (magnitude + anchor).to_bits() - anchor.to_bits()
    } else {
        let dropped = 23 - MANTISSA;
        let bits = magnitude.to_bits();
        let odd = (bits >> dropped) & 1;
        ((bits + (1 << (dropped - 1)) - 1 + odd) >> dropped) - (((127 - BIAS) as u32) << MANTISSA)
    };
    if code > largest { largest } else { code }
}

/// The value of a magnitude code, special codes apart.
const fn magnitude<const MANTISSA: u32, const BIAS: i32>(code: u32) -> f32 {
    let exponent = (code >> MANTISSA) as i32;
    let fraction = (code & ((1 << MANTISSA) - 1)) as f32;
    let step = exp2(if exponent == 0 { 1 } else { exponent } - BIAS - MANTISSA as i32);
    let implicit = if exponent == 0 { 0.0 } else { (1 << MANTISSA) as f32 };
    (implicit + fraction) * step
}
