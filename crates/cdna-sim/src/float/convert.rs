//! Conversion instructions: packing, halves and bytes, scales, integers.

use super::{MiniFloat, Mode, Round, bf16_to_f32, e8m0_to_f64, f16_to_f32, f32_scale_exponent, f32_to_bf16, f32_to_f16};

/// The wide side of a conversion to or from a [`MiniFloat`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wide {
    F32,
    F16,
    Bf16,
}

/// `v_cvt_pk_bf16_f32`.
pub fn cvt_pk_bf16_f32(s0: u32, s1: u32, mode: &Mode) -> u32 {
    let convert = |bits| u32::from(f32_to_bf16(f32::from_bits(mode.source_f32(bits))));
    convert(s0) | convert(s1) << 16
}

/// `v_cvt_pk_f16_f32`: to nearest even whatever MODE says; denormal results follow MODE.
pub fn cvt_pk_f16_f32(s0: u32, s1: u32, mode: &Mode) -> u32 {
    pack_f16(s0, s1, Round::NearestEven, mode)
}

/// `v_cvt_pkrtz_f16_f32`: toward zero whatever MODE says; denormal results follow MODE.
pub fn cvt_pkrtz_f16_f32(s0: u32, s1: u32, mode: &Mode) -> u32 {
    pack_f16(s0, s1, Round::TowardZero, mode)
}

fn pack_f16(s0: u32, s1: u32, round: Round, mode: &Mode) -> u32 {
    let convert = |bits| {
        let x = f32::from_bits(mode.source_f32(bits));
        u32::from(mode.result_f16(f32_to_f16(x, round, mode.fp16_ovfl)))
    };
    convert(s0) | convert(s1) << 16
}

/// `v_cvt_pk_fp8_f32` and `v_cvt_pk_bf8_f32`: `old` with its low half, or with `high` (op_sel\[3\]) its high half, replaced by the two codes.
pub fn cvt_pk_fp8_f32(old: u32, s0: u32, s1: u32, high: bool, to: MiniFloat, mode: &Mode) -> u32 {
    let convert = |bits| u32::from(to.encode(f64::from(f32::from_bits(mode.source_f32(bits))), mode.fp16_ovfl));
    replace(old, convert(s0) | convert(s1) << 8, u32::from(high), 16)
}

/// `v_cvt_pk_f32_fp8` and `v_cvt_pk_f32_bf8`: the two codes of the low, or with `high` (op_sel\[0\] or SDWA WORD_1) the high half of `src`.
pub fn cvt_pk_f32_fp8(src: u32, high: bool, from: MiniFloat) -> [u32; 2] {
    let first = if high { 2 } else { 0 };
    [cvt_f32_fp8(src, first, from), cvt_f32_fp8(src, first + 1, from)]
}

/// `v_cvt_f32_fp8` and `v_cvt_f32_bf8` of byte `byte` of `src`.
pub fn cvt_f32_fp8(src: u32, byte: u32, from: MiniFloat) -> u32 {
    from.decode((src >> (8 * (byte & 3))) as u8).to_bits()
}

/// `v_cvt_scalef32_pk_{fp8,bf8,fp4}_{f32,f16,bf16}`: both values divided by the power of two in the exponent of `scale`, rounded once.
///
/// `s` holds two f32, or in its first word two packed halves. The result replaces half `part` (op_sel\[3\]: 0 or 1) of `old` for FP8 and
/// BF8, byte `part` (op_sel\[3:2\]) for FP4. A scale exponent of 255 makes NaN.
pub fn cvt_scalef32_pk_to(old: u32, s: [u32; 2], scale: u32, part: u32, from: Wide, to: MiniFloat, mode: &Mode) -> u32 {
    let divisor = e8m0_to_f64(f32_scale_exponent(scale));
    let codes = wide_values(s, from, mode).map(|x| u32::from(to.encode(x / divisor, mode.fp16_ovfl)));
    replace(old, codes[0] | codes[1] << to.bits(), part, 2 * to.bits())
}

/// `v_cvt_scalef32_pk_{f32,f16,bf16}_{fp8,bf8,fp4}`: both codes of half (FP8, BF8; op_sel\[0\]) or byte (FP4; op_sel\[1:0\]) `part` of `src`
/// times the power of two in the exponent of `scale`. F32 gives two words, F16 and BF16 one packed word and a zero.
pub fn cvt_scalef32_pk_from(src: u32, scale: u32, part: u32, from: MiniFloat, to: Wide, mode: &Mode) -> [u32; 2] {
    let factor = e8m0_to_f64(f32_scale_exponent(scale));
    let codes = src >> (part * 2 * from.bits());
    // The product has at most four significant bits and lies above the smallest f32 denormal: exact, or an overflow to infinity.
    let [x, y] = [codes, codes >> from.bits()].map(|code| (f64::from(from.decode(code as u8 & from.mask())) * factor) as f32);
    let f16 = |x| u32::from(f32_to_f16(x, Round::NearestEven, mode.fp16_ovfl));
    let bf16 = |x| u32::from(f32_to_bf16(x));
    match to {
        Wide::F32 => [x.to_bits(), y.to_bits()],
        Wide::F16 => [f16(x) | f16(y) << 16, 0],
        Wide::Bf16 => [bf16(x) | bf16(y) << 16, 0],
    }
}

fn wide_values(s: [u32; 2], from: Wide, mode: &Mode) -> [f64; 2] {
    let halves = [s[0] as u16, (s[0] >> 16) as u16];
    match from {
        Wide::F32 => s.map(|bits| f64::from(f32::from_bits(mode.source_f32(bits)))),
        Wide::F16 => halves.map(|bits| f64::from(f16_to_f32(bits))),
        Wide::Bf16 => halves.map(|bits| f64::from(bf16_to_f32(bits))),
    }
}

/// `old` with field `index` of `width` bits replaced by `value`.
fn replace(old: u32, value: u32, index: u32, width: u32) -> u32 {
    let shift = index * width;
    let mask = ((1 << width) - 1) << shift;
    old & !mask | value << shift
}

/// `v_cvt_i32_f32`: toward zero, saturating; NaN gives 0.
pub fn f32_to_i32(x: f32) -> i32 {
    x as i32
}

/// `v_cvt_u32_f32`: toward zero, saturating, negative gives 0; NaN gives 0.
pub fn f32_to_u32(x: f32) -> u32 {
    x as u32
}
