//! FP8 E4M3: one sign, four exponent and three mantissa bits.
//!
//! | | OCP | FNUZ |
//! |---|---|---|
//! | exponent bias | 7 | 8 |
//! | largest value | 448 (`0x7E`) | 240 (`0x7F`) |
//! | NaN | `0x7F`, `0xFF` | `0x80` |
//! | negative zero | `0x80` | none |
//!
//! Neither has infinities.

use super::{magnitude, round_magnitude};

/// The largest finite OCP E4M3 value.
pub const E4M3_MAX: f32 = 448.0;

/// The largest finite FNUZ E4M3 value.
pub const E4M3_FNUZ_MAX: f32 = 240.0;

/// The value of every OCP E4M3 code.
pub static E4M3_VALUES: [f32; 256] = ocp_values();

/// The value of every FNUZ E4M3 code.
pub static E4M3_FNUZ_VALUES: [f32; 256] = fnuz_values();

const NAN: u8 = 0x7F;
const FNUZ_NAN: u8 = 0x80;

const fn ocp_values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 128 {
        let value = if code == NAN as usize { f32::NAN } else { magnitude::<3, 7>(code as u32) };
        values[code] = value;
        values[code + 128] = -value;
        code += 1;
    }
    values
}

const fn fnuz_values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 128 {
        values[code] = magnitude::<3, 8>(code as u32);
        values[code + 128] = -values[code];
        code += 1;
    }
    values[FNUZ_NAN as usize] = f32::NAN;
    values
}

/// The OCP E4M3 code nearest to `value`, ties to even. Magnitudes above 448, infinities too, saturate to 448; NaN gives `0x7F`.
#[inline]
pub const fn encode_e4m3(value: f32) -> u8 {
    if value.is_nan() {
        return NAN;
    }
    let sign = ((value.to_bits() >> 24) & 0x80) as u8;
    sign | round_magnitude::<3, 7>(value.abs(), 0x7E) as u8
}

/// The value of an OCP E4M3 code.
#[inline]
pub fn decode_e4m3(code: u8) -> f32 {
    E4M3_VALUES[usize::from(code)]
}

/// The FNUZ E4M3 code nearest to `value`, ties to even. Magnitudes above 240, infinities too, saturate to 240; NaN gives `0x80`;
/// what rounds to zero gives `0x00` whatever its sign.
#[inline]
pub const fn encode_e4m3_fnuz(value: f32) -> u8 {
    if value.is_nan() {
        return FNUZ_NAN;
    }
    match round_magnitude::<3, 8>(value.abs(), 0x7F) as u8 {
        0 => 0,
        code => code | ((value.to_bits() >> 24) & 0x80) as u8,
    }
}

/// The value of an FNUZ E4M3 code.
#[inline]
pub fn decode_e4m3_fnuz(code: u8) -> f32 {
    E4M3_FNUZ_VALUES[usize::from(code)]
}

/// The FNUZ code whose value is half that of the OCP code: the same byte, save that negative zero becomes zero and NaN becomes
/// FNUZ's NaN. An OCP cache moves to gfx942 without loss by this and twice its scales ([`FNUZ_SCALE_FACTOR`]).
#[inline]
pub const fn ocp_to_fnuz(code: u8) -> u8 {
    match code {
        0x80 => 0,
        0x7F | 0xFF => FNUZ_NAN,
        same => same,
    }
}

/// What a scale is multiplied by where bytes went through [`ocp_to_fnuz`].
pub const FNUZ_SCALE_FACTOR: f32 = 2.0;

/// The OCP E4M3 scale of a token whose largest magnitude is `absmax`: `absmax / 448`, 1 for a token of zeros.
///
/// Never less than the smallest normal f32, so that dividing by it cannot overflow. An infinite `absmax` gives an infinite scale: all
/// of that token reads back as NaN.
pub fn token_scale(absmax: f32) -> f32 {
    scale_to(absmax, E4M3_MAX)
}

/// The FNUZ E4M3 scale of a token whose largest magnitude is `absmax`: as [`token_scale`], with 240 for 448.
pub fn token_scale_fnuz(absmax: f32) -> f32 {
    scale_to(absmax, E4M3_FNUZ_MAX)
}

fn scale_to(absmax: f32, largest: f32) -> f32 {
    if absmax == 0.0 { 1.0 } else { (absmax / largest).max(f32::MIN_POSITIVE) }
}
