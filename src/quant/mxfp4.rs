//! MXFP4: E2M1 elements (one sign, two exponent bits, one mantissa bit), 32 of them under one E8M0 scale.

use super::{exp2, magnitude, round_magnitude};
use crate::cache::MXFP4_BLOCK;

/// Bytes of the 32 elements of a block, scale apart.
pub const BLOCK_BYTES: usize = MXFP4_BLOCK / 2;

/// The largest E2M1 value.
pub const E2M1_MAX: f32 = 6.0;

/// The E8M0 code of NaN.
pub const E8M0_NAN: u8 = 0xFF;

/// The value of every E2M1 code: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
pub static E2M1_VALUES: [f32; 16] = e2m1_values();

/// The exponent of E2M1's largest binade, 4 to 6.
const E2M1_MAX_EXPONENT: i32 = 2;

const fn e2m1_values() -> [f32; 16] {
    let mut values = [0.0; 16];
    let mut code = 0;
    while code < 8 {
        values[code] = magnitude::<1, 1>(code as u32);
        values[code + 8] = -values[code];
        code += 1;
    }
    values
}

/// The E2M1 code (the low four bits) nearest to `value`, ties to even. Magnitudes above 6 saturate to 6. E2M1 has no NaN: one gives
/// +6, and a block that holds one is marked by its scale ([`block_scale`]).
#[inline]
pub const fn encode_e2m1(value: f32) -> u8 {
    if value.is_nan() {
        return 7;
    }
    let sign = ((value.to_bits() >> 28) & 8) as u8;
    sign | round_magnitude::<1, 1>(value.abs(), 7) as u8
}

/// The value of the E2M1 code in the low four bits of `code`.
#[inline]
pub fn decode_e2m1(code: u8) -> f32 {
    E2M1_VALUES[usize::from(code & 0xF)]
}

/// The value of an E8M0 code: `2^(code - 127)`; `0xFF` is NaN.
#[inline]
pub const fn decode_e8m0(code: u8) -> f32 {
    if code == E8M0_NAN { f32::NAN } else { exp2(code as i32 - 127) }
}

/// The E8M0 scale of a block: `2^(floor(log2(absmax)) - 2)`, at least 2^-127 (the MX specification's conversion), 1 for a block of zeros,
/// NaN for a block that holds a NaN or an infinity.
pub fn block_scale(values: &[f32]) -> u8 {
    let absmax_bits = values.iter().map(|v| v.abs().to_bits()).max().unwrap_or(0);
    // Magnitudes order like their bits, and infinity and NaN lie above every finite value.
    match absmax_bits {
        0 => 127,
        bits if bits >= f32::INFINITY.to_bits() => E8M0_NAN,
        // A subnormal's exponent is below -126, and any such scale is clamped to 2^-127.
        bits => ((bits >> 23) as i32 - E2M1_MAX_EXPONENT).max(0) as u8,
    }
}

/// Packs 32 values, two a byte with the even-numbered one in the low nibble, and returns their [`block_scale`].
/// A value of the block is `decode_e2m1(nibble) * decode_e8m0(scale)`.
pub fn quantize_block(values: &[f32; MXFP4_BLOCK], packed: &mut [u8; BLOCK_BYTES]) -> u8 {
    let scale = block_scale(values);
    pack_block(values, scale, packed);
    scale
}

/// Packs 32 values under a scale chosen before, as [`quantize_block`].
pub fn pack_block(values: &[f32; MXFP4_BLOCK], scale: u8, packed: &mut [u8; BLOCK_BYTES]) {
    // Powers of two: multiplying by the reciprocal is exact down to where everything rounds to zero.
    let inverse = if scale == E8M0_NAN { 0.0 } else { exp2(127 - i32::from(scale)) };
    for (byte, pair) in packed.iter_mut().zip(values.as_chunks::<2>().0) {
        *byte = encode_e2m1(pair[0] * inverse) | (encode_e2m1(pair[1] * inverse) << 4);
    }
}

/// The 32 values of a packed block.
pub fn dequantize_block(packed: &[u8; BLOCK_BYTES], scale: u8, values: &mut [f32; MXFP4_BLOCK]) {
    let scale = decode_e8m0(scale);
    for (pair, &byte) in values.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
        *pair = [decode_e2m1(byte) * scale, decode_e2m1(byte >> 4) * scale];
    }
}
