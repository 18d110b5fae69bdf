//! Minimum, maximum, median, clamping and classification: NaN and signed-zero rules of the instructions' pseudocode.

use super::{Mode, f16_to_f32};

/// What the rules need to know about a format.
#[derive(Clone, Copy)]
struct Operand {
    bits: u32,
    value: f32,
    signaling: bool,
    quiet_bit: u32,
}

fn f32_operand(bits: u32, mode: &Mode) -> Operand {
    let bits = mode.source_f32(bits);
    let value = f32::from_bits(bits);
    Operand { bits, value, signaling: value.is_nan() && bits & 0x40_0000 == 0, quiet_bit: 0x40_0000 }
}

fn f16_operand(bits: u16, mode: &Mode) -> Operand {
    let bits = mode.source_f16(bits);
    let value = f16_to_f32(bits);
    Operand { bits: u32::from(bits), value, signaling: value.is_nan() && bits & 0x200 == 0, quiet_bit: 0x200 }
}

/// The operand that `v_min_*` or `v_max_*` returns: a number before a NaN, -0 below +0; in IEEE mode a signaling NaN is quieted and wins.
fn number_extreme(a: Operand, b: Operand, ieee: bool, maximum: bool) -> u32 {
    if let Some(nan) = [a, b].into_iter().find(|x| ieee && x.signaling) {
        return nan.bits | nan.quiet_bit;
    }
    if a.value.is_nan() {
        return b.bits;
    }
    if b.value.is_nan() {
        return a.bits;
    }
    if (b.value.total_cmp(&a.value).is_gt()) == maximum { b.bits } else { a.bits }
}

/// `v_min_f32`.
pub fn min_f32(a: u32, b: u32, mode: &Mode) -> u32 {
    mode.result_f32(number_extreme(f32_operand(a, mode), f32_operand(b, mode), mode.ieee, false))
}

/// `v_max_f32`.
pub fn max_f32(a: u32, b: u32, mode: &Mode) -> u32 {
    mode.result_f32(number_extreme(f32_operand(a, mode), f32_operand(b, mode), mode.ieee, true))
}

/// `v_min_f16` and each half of `v_pk_min_f16`.
pub fn min_f16(a: u16, b: u16, mode: &Mode) -> u16 {
    mode.result_f16(number_extreme(f16_operand(a, mode), f16_operand(b, mode), mode.ieee, false) as u16)
}

/// `v_max_f16` and each half of `v_pk_max_f16`.
pub fn max_f16(a: u16, b: u16, mode: &Mode) -> u16 {
    mode.result_f16(number_extreme(f16_operand(a, mode), f16_operand(b, mode), mode.ieee, true) as u16)
}

/// `v_med3_f32`: the median, or `v_min3_f32` where an operand is NaN.
pub fn med3_f32(a: u32, b: u32, c: u32, mode: &Mode) -> u32 {
    let value = |bits| f32_operand(bits, mode).value;
    if [a, b, c].into_iter().any(|bits| value(bits).is_nan()) {
        return min_f32(min_f32(a, b, mode), c, mode);
    }
    let largest = value(max_f32(max_f32(a, b, mode), c, mode));
    if largest == value(a) {
        max_f32(b, c, mode)
    } else if largest == value(b) {
        max_f32(a, c, mode)
    } else {
        max_f32(a, b, mode)
    }
}

/// A step of `v_minimum3_f32` (gfx950): NaN wins and is quieted, -0 is below +0.
pub fn minimum_f32(a: u32, b: u32, mode: &Mode) -> u32 {
    propagating_extreme(a, b, mode, false)
}

/// A step of `v_maximum3_f32` (gfx950): NaN wins and is quieted, -0 is below +0.
pub fn maximum_f32(a: u32, b: u32, mode: &Mode) -> u32 {
    propagating_extreme(a, b, mode, true)
}

fn propagating_extreme(a: u32, b: u32, mode: &Mode, maximum: bool) -> u32 {
    let [a, b] = [a, b].map(|bits| f32_operand(bits, mode));
    match [a, b].into_iter().find(|x| x.value.is_nan()) {
        Some(nan) => nan.bits | nan.quiet_bit,
        None => mode.result_f32(number_extreme(a, b, mode.ieee, maximum)),
    }
}

/// The clamp modifier on an f32 result: into \[0, 1\]; NaN becomes 0 if MODE.dx10_clamp, else stays; -0 becomes +0.
pub fn clamp_f32(x: f32, mode: &Mode) -> f32 {
    if x.is_nan() {
        return if mode.dx10_clamp { 0.0 } else { x };
    }
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

/// The clamp modifier on an f16 result, as [`clamp_f32`].
pub fn clamp_f16(bits: u16, mode: &Mode) -> u16 {
    let x = f16_to_f32(bits);
    if x.is_nan() {
        return if mode.dx10_clamp { 0 } else { bits };
    }
    if x >= 1.0 {
        0x3c00
    } else if x > 0.0 {
        bits
    } else {
        0
    }
}

/// `v_cmp_class_f32`: whether `x` is of one of the classes of `mask`, from bit 0: signaling NaN, quiet NaN, -infinity, -normal, -denormal,
/// -0, +0, +denormal, +normal, +infinity.
pub fn class_f32(x: u32, mask: u32) -> bool {
    let value = f32::from_bits(x);
    let positive = x >> 31 == 0;
    let bit = if value.is_nan() {
        u32::from(x & 0x40_0000 != 0)
    } else {
        let negative_bit = if value.is_infinite() {
            2
        } else if value.is_normal() {
            3
        } else if value != 0.0 {
            4
        } else {
            5
        };
        if positive { 11 - negative_bit } else { negative_bit }
    };
    mask >> bit & 1 == 1
}
