//! Per-lane functions of the vector instructions: one line an instruction, no state.

use half::f16;

use crate::elf::Arch;
use crate::exec::math;
use crate::float::{self, MiniFloat, special};

/// One 32-bit register: a value a lane.
pub type Row = [u32; 64];

/// What an operand's bits mean: decides inline constants, sign modifiers and denormal flushing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ty {
    /// 32-bit integer or bits.
    B32,
    /// 16-bit integer or bits in the low half.
    B16,
    /// Single precision.
    F32,
    /// Half precision in the low half.
    F16,
    /// 64-bit integer or bits.
    B64,
    /// Double precision.
    F64,
}

impl Ty {
    /// Registers of an operand of the type.
    pub fn registers(self) -> u16 {
        if matches!(self, Ty::B64 | Ty::F64) { 2 } else { 1 }
    }

    /// Whether it has a sign bit to modify.
    pub fn is_float(self) -> bool {
        matches!(self, Ty::F32 | Ty::F16 | Ty::F64)
    }

    /// Whether it is 16 bits wide.
    pub fn is_half(self) -> bool {
        matches!(self, Ty::B16 | Ty::F16)
    }
}

/// A function of whole registers.
#[derive(Clone, Copy)]
pub enum RowFn {
    /// One source.
    One(fn(&Row, &mut Row)),
    /// Two sources.
    Two(fn(&Row, &Row, &mut Row)),
    /// Three sources.
    Three(fn(&Row, &Row, &Row, &mut Row)),
}

impl RowFn {
    /// Sources.
    pub fn arity(self) -> usize {
        match self {
            RowFn::One(_) => 1,
            RowFn::Two(_) => 2,
            RowFn::Three(_) => 3,
        }
    }

    /// Applies it.
    #[inline]
    pub fn call(self, src: [&Row; 3], out: &mut Row) {
        match self {
            RowFn::One(f) => f(src[0], out),
            RowFn::Two(f) => f(src[0], src[1], out),
            RowFn::Three(f) => f(src[0], src[1], src[2], out),
        }
    }
}

/// A vector instruction on 32-bit registers.
#[derive(Clone, Copy)]
pub struct RowOp {
    /// Type of the result.
    pub dst: Ty,
    /// Types of the sources.
    pub src: [Ty; 3],
    /// The function.
    pub f: RowFn,
    /// Whether the last source is the destination itself (fmac, dot2c).
    pub accumulates: bool,
    /// The function where MODE asks 8-bit conversions to saturate, if it differs.
    pub saturating: Option<RowFn>,
    /// Whether a 16-bit result leaves the upper half alone (else it becomes zero).
    pub keeps_half: bool,
}

/// A vector instruction with 64-bit operands.
#[derive(Clone, Copy)]
pub struct WideOp {
    /// Type of the result.
    pub dst: Ty,
    /// Types of the sources.
    pub src: [Ty; 3],
    /// Sources.
    pub arity: usize,
    /// The function of one lane.
    pub f: fn(u64, u64, u64) -> u64,
}

/// A packed instruction: the same function on both halves.
#[derive(Clone, Copy)]
pub enum PackedOp {
    /// Two 16-bit halves of a register.
    Half { float: bool, arity: usize, f: fn(u16, u16, u16) -> u16 },
    /// Two single-precision registers.
    Single(RowFn),
}

macro_rules! row {
    (|$a:ident| $e:expr) => {
        RowFn::One(|x, o| {
            (0..64).for_each(|i| {
                let $a = x[i];
                o[i] = $e;
            })
        })
    };
    (|$a:ident, $b:ident| $e:expr) => {
        RowFn::Two(|x, y, o| {
            (0..64).for_each(|i| {
                let ($a, $b) = (x[i], y[i]);
                o[i] = $e;
            })
        })
    };
    (|$a:ident, $b:ident, $c:ident| $e:expr) => {
        RowFn::Three(|x, y, z, o| {
            (0..64).for_each(|i| {
                let ($a, $b, $c) = (x[i], y[i], z[i]);
                o[i] = $e;
            })
        })
    };
}

macro_rules! row_f32 {
    (|$a:ident| $e:expr) => {
        row!(|$a| {
            let $a = f32::from_bits($a);
            f32::to_bits($e)
        })
    };
    (|$a:ident, $b:ident| $e:expr) => {
        row!(|$a, $b| {
            let ($a, $b) = (f32::from_bits($a), f32::from_bits($b));
            f32::to_bits($e)
        })
    };
    (|$a:ident, $b:ident, $c:ident| $e:expr) => {
        row!(|$a, $b, $c| {
            let ($a, $b, $c) = (f32::from_bits($a), f32::from_bits($b), f32::from_bits($c));
            f32::to_bits($e)
        })
    };
}

fn h(bits: u32) -> f32 {
    f16::from_bits(bits as u16).to_f32()
}

fn to_h(value: f32) -> u32 {
    u32::from(f16::from_f32(value).to_bits())
}

/// A half operation through double precision, which is exact for one addition, product or fused pair of halves.
fn half_op(value: f64) -> u32 {
    float::f64_to_f16(value).into()
}

fn d(bits: u64) -> f64 {
    f64::from_bits(bits)
}

fn sext24(x: u32) -> i32 {
    (x << 8) as i32 >> 8
}

const PLAIN: RowOp =
    RowOp { dst: Ty::B32, src: [Ty::B32; 3], f: RowFn::One(|x, o| *o = *x), accumulates: false, saturating: None, keeps_half: false };

/// Instructions on 32-bit registers by mnemonic without its encoding suffix.
pub fn row_op(name: &str, arch: Arch) -> Option<RowOp> {
    use Ty::*;
    let same = |ty, f| RowOp { dst: ty, src: [ty; 3], f, accumulates: false, ..PLAIN };
    let to = |dst, src, f| RowOp { dst, src: [src; 3], f, accumulates: false, ..PLAIN };
    let acc = |ty, f| RowOp { dst: ty, src: [ty; 3], f, accumulates: true, ..PLAIN };
    let found = match name {
        "v_mov_b32" | "v_accvgpr_read_b32" | "v_accvgpr_write_b32" | "v_accvgpr_mov_b32" => same(B32, row!(|a| a)),
        // Single precision.
        "v_add_f32" => same(F32, row_f32!(|a, b| a + b)),
        "v_sub_f32" => same(F32, row_f32!(|a, b| a - b)),
        "v_subrev_f32" => same(F32, row_f32!(|a, b| b - a)),
        "v_mul_f32" => same(F32, row_f32!(|a, b| a * b)),
        "v_mul_legacy_f32" => same(F32, row_f32!(|a, b| if a == 0.0 || b == 0.0 { 0.0 } else { a * b })),
        "v_max_f32" => same(F32, row_f32!(|a, b| math::max(a, b))),
        "v_min_f32" => same(F32, row_f32!(|a, b| math::min(a, b))),
        "v_max3_f32" => same(F32, row_f32!(|a, b, c| math::max(math::max(a, b), c))),
        "v_min3_f32" => same(F32, row_f32!(|a, b, c| math::min(math::min(a, b), c))),
        "v_maximum3_f32" => same(F32, row!(|a, b, c| float::maximum_f32(float::maximum_f32(a, b, &math::KEEP), c, &math::KEEP))),
        "v_minimum3_f32" => same(F32, row!(|a, b, c| float::minimum_f32(float::minimum_f32(a, b, &math::KEEP), c, &math::KEEP))),
        "v_med3_f32" => same(F32, row!(|a, b, c| float::med3_f32(a, b, c, &math::KEEP))),
        "v_fma_f32" => same(F32, RowFn::Three(math::fma)),
        "v_fmac_f32" => acc(F32, RowFn::Three(math::fma)),
        // v_fmaak d, a, b, K and v_fmamk d, a, K, b: the literal stands where the operand list has it.
        "v_fmaak_f32" => same(F32, RowFn::Three(math::fma)),
        "v_fmamk_f32" => same(F32, RowFn::Three(math::fma)),
        "v_rcp_f32" | "v_rcp_iflag_f32" => same(F32, row!(|a| special::rcp_f32(a))),
        "v_rsq_f32" => same(F32, row!(|a| special::rsq_f32(a))),
        "v_sqrt_f32" => same(F32, row!(|a| special::sqrt_f32(a))),
        "v_exp_f32" => same(F32, row!(|a| special::exp_f32(a))),
        "v_log_f32" => same(F32, row!(|a| special::log_f32(a))),
        "v_sin_f32" => same(F32, row!(|a| special::sin_f32(a))),
        "v_cos_f32" => same(F32, row!(|a| special::cos_f32(a))),
        "v_trunc_f32" => same(F32, row_f32!(|a| a.trunc())),
        "v_ceil_f32" => same(F32, row_f32!(|a| a.ceil())),
        "v_floor_f32" => same(F32, row_f32!(|a| a.floor())),
        "v_rndne_f32" => same(F32, row_f32!(|a| a.round_ties_even())),
        "v_fract_f32" => same(F32, row!(|a| special::fract_f32(a, &math::KEEP))),
        "v_ldexp_f32" => RowOp {
            dst: F32,
            src: [F32, B32, B32],
            f: row!(|a, b| special::ldexp_f32(a, b as i32, &math::KEEP)),
            accumulates: false,
            ..PLAIN
        },
        "v_frexp_exp_i32_f32" => to(B32, F32, row!(|a| special::frexp_exp_f32(a) as u32)),
        "v_frexp_mant_f32" => same(F32, row!(|a| special::frexp_mant_f32(a))),
        "v_div_fixup_f32" => same(F32, row_f32!(|a, b, c| math::div_fixup(a, b, c))),
        // Conversions.
        "v_cvt_f32_i32" => to(F32, B32, row!(|a| (a as i32 as f32).to_bits())),
        "v_cvt_f32_u32" => to(F32, B32, row!(|a| (a as f32).to_bits())),
        "v_cvt_i32_f32" => to(B32, F32, row!(|a| f32::from_bits(a) as i32 as u32)),
        "v_cvt_u32_f32" => to(B32, F32, row!(|a| f32::from_bits(a) as u32)),
        "v_cvt_rpi_i32_f32" => to(B32, F32, row!(|a| (f32::from_bits(a) + 0.5).floor() as i32 as u32)),
        "v_cvt_flr_i32_f32" => to(B32, F32, row!(|a| f32::from_bits(a).floor() as i32 as u32)),
        "v_cvt_f32_ubyte0" => to(F32, B32, row!(|a| ((a & 0xff) as f32).to_bits())),
        "v_cvt_f32_ubyte1" => to(F32, B32, row!(|a| ((a >> 8 & 0xff) as f32).to_bits())),
        "v_cvt_f32_ubyte2" => to(F32, B32, row!(|a| ((a >> 16 & 0xff) as f32).to_bits())),
        "v_cvt_f32_ubyte3" => to(F32, B32, row!(|a| ((a >> 24) as f32).to_bits())),
        "v_cvt_f32_f16" => to(F32, F16, row!(|a| h(a).to_bits())),
        "v_cvt_f16_f32" => to(F16, F32, row!(|a| to_h(f32::from_bits(a)))),
        "v_cvt_f32_bf16" => to(F32, B16, row!(|a| a << 16)),
        "v_cvt_pkrtz_f16_f32" => to(B32, F32, row!(|a, b| float::cvt_pkrtz_f16_f32(a, b, &math::KEEP))),
        "v_cvt_pk_bf16_f32" => to(B32, F32, row!(|a, b| float::cvt_pk_bf16_f32(a, b, &math::KEEP))),
        "v_cvt_pk_f16_f32" => to(B32, F32, row!(|a, b| float::cvt_pk_f16_f32(a, b, &math::KEEP))),
        "v_cvt_pk_u16_u32" => same(B32, row!(|a, b| a.min(0xffff) | b.min(0xffff) << 16)),
        "v_cvt_pk_i16_i32" => same(
            B32,
            row!(|a, b| {
                let clip = |x: u32| (x as i32).clamp(-32768, 32767) as u32 & 0xffff;
                clip(a) | clip(b) << 16
            }),
        ),
        "v_cvt_u16_f16" => to(B16, F16, row!(|a| u32::from(h(a) as u16))),
        "v_cvt_i16_f16" => to(B16, F16, row!(|a| u32::from(h(a) as i16 as u16))),
        "v_cvt_f16_u16" => to(F16, B16, row!(|a| to_h((a as u16).into()))),
        "v_cvt_f16_i16" => to(F16, B16, row!(|a| to_h((a as i16).into()))),
        "v_cvt_pk_fp8_f32" | "v_cvt_pk_bf8_f32" | "v_cvt_f32_fp8" | "v_cvt_f32_bf8" => return eight_bit(name, arch),
        // 32-bit integers.
        "v_add_u32" | "v_add_i32" => same(B32, row!(|a, b| a.wrapping_add(b))),
        "v_sub_u32" | "v_sub_i32" => same(B32, row!(|a, b| a.wrapping_sub(b))),
        "v_subrev_u32" => same(B32, row!(|a, b| b.wrapping_sub(a))),
        "v_add3_u32" => same(B32, row!(|a, b, c| a.wrapping_add(b).wrapping_add(c))),
        "v_mul_lo_u32" | "v_mul_lo_i32" => same(B32, row!(|a, b| a.wrapping_mul(b))),
        "v_mul_hi_u32" => same(B32, row!(|a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32)),
        "v_mul_hi_i32" => same(B32, row!(|a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32)),
        "v_mul_u32_u24" => same(B32, row!(|a, b| (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff))),
        "v_mul_i32_i24" => same(B32, row!(|a, b| sext24(a).wrapping_mul(sext24(b)) as u32)),
        "v_mul_hi_u32_u24" => same(B32, row!(|a, b| ((u64::from(a & 0xff_ffff) * u64::from(b & 0xff_ffff)) >> 32) as u32)),
        "v_mul_hi_i32_i24" => same(B32, row!(|a, b| ((i64::from(sext24(a)) * i64::from(sext24(b))) >> 32) as u32)),
        "v_mad_u32_u24" => same(B32, row!(|a, b, c| (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff).wrapping_add(c))),
        "v_mad_i32_i24" => same(B32, row!(|a, b, c| (sext24(a).wrapping_mul(sext24(b)) as u32).wrapping_add(c))),
        "v_max_u32" => same(B32, row!(|a, b| a.max(b))),
        "v_min_u32" => same(B32, row!(|a, b| a.min(b))),
        "v_max_i32" => same(B32, row!(|a, b| (a as i32).max(b as i32) as u32)),
        "v_min_i32" => same(B32, row!(|a, b| (a as i32).min(b as i32) as u32)),
        "v_max3_u32" => same(B32, row!(|a, b, c| a.max(b).max(c))),
        "v_min3_u32" => same(B32, row!(|a, b, c| a.min(b).min(c))),
        "v_max3_i32" => same(B32, row!(|a, b, c| (a as i32).max(b as i32).max(c as i32) as u32)),
        "v_min3_i32" => same(B32, row!(|a, b, c| (a as i32).min(b as i32).min(c as i32) as u32)),
        "v_med3_u32" => same(B32, row!(|a, b, c| a.min(b).max(a.max(b).min(c)))),
        "v_med3_i32" => same(
            B32,
            row!(|a, b, c| {
                let (a, b, c) = (a as i32, b as i32, c as i32);
                a.min(b).max(a.max(b).min(c)) as u32
            }),
        ),
        "v_and_b32" => same(B32, row!(|a, b| a & b)),
        "v_or_b32" => same(B32, row!(|a, b| a | b)),
        "v_xor_b32" => same(B32, row!(|a, b| a ^ b)),
        "v_xnor_b32" => same(B32, row!(|a, b| !(a ^ b))),
        "v_not_b32" => same(B32, row!(|a| !a)),
        "v_or3_b32" => same(B32, row!(|a, b, c| a | b | c)),
        "v_and_or_b32" => same(B32, row!(|a, b, c| a & b | c)),
        "v_xad_u32" => same(B32, row!(|a, b, c| (a ^ b).wrapping_add(c))),
        "v_bfi_b32" => same(B32, row!(|a, b, c| a & b | !a & c)),
        "v_bfm_b32" => same(B32, row!(|a, b| ((1u32 << (a & 31)) - 1) << (b & 31))),
        "v_bfe_u32" => same(B32, row!(|a, b, c| a >> (b & 31) & ((1u32 << (c & 31)) - 1))),
        "v_bfe_i32" => same(B32, row!(|a, b, c| math::bfe_signed(a, b & 31, c & 31))),
        "v_bfrev_b32" => same(B32, row!(|a| a.reverse_bits())),
        "v_bcnt_u32_b32" => same(B32, row!(|a, b| a.count_ones().wrapping_add(b))),
        "v_ffbh_u32" => same(B32, row!(|a| if a == 0 { u32::MAX } else { a.leading_zeros() })),
        "v_ffbl_b32" => same(B32, row!(|a| if a == 0 { u32::MAX } else { a.trailing_zeros() })),
        "v_ffbh_i32" => same(
            B32,
            row!(|a| {
                let folded = a ^ ((a as i32 >> 31) as u32);
                if folded == 0 { u32::MAX } else { folded.leading_zeros() }
            }),
        ),
        "v_lshlrev_b32" => same(B32, row!(|a, b| b << (a & 31))),
        "v_lshrrev_b32" => same(B32, row!(|a, b| b >> (a & 31))),
        "v_ashrrev_i32" => same(B32, row!(|a, b| (b as i32 >> (a & 31)) as u32)),
        "v_lshl_add_u32" => same(B32, row!(|a, b, c| (a << (b & 31)).wrapping_add(c))),
        "v_add_lshl_u32" => same(B32, row!(|a, b, c| a.wrapping_add(b) << (c & 31))),
        "v_lshl_or_b32" => same(B32, row!(|a, b, c| a << (b & 31) | c)),
        "v_alignbit_b32" => same(B32, row!(|a, b, c| ((u64::from(a) << 32 | u64::from(b)) >> (c & 31)) as u32)),
        "v_alignbyte_b32" => same(B32, row!(|a, b, c| ((u64::from(a) << 32 | u64::from(b)) >> (8 * (c & 3))) as u32)),
        "v_perm_b32" => same(B32, row!(|a, b, c| math::perm(a, b, c))),
        "v_sad_u8" => same(
            B32,
            row!(|a, b, c| a.to_le_bytes().iter().zip(b.to_le_bytes()).fold(c, |sum, (&x, y)| sum.wrapping_add(x.abs_diff(y).into()))),
        ),
        // 16 bits.
        "v_add_f16" => same(F16, row!(|a, b| half_op(f64::from(h(a)) + f64::from(h(b))))),
        "v_sub_f16" => same(F16, row!(|a, b| half_op(f64::from(h(a)) - f64::from(h(b))))),
        "v_subrev_f16" => same(F16, row!(|a, b| half_op(f64::from(h(b)) - f64::from(h(a))))),
        "v_mul_f16" => same(F16, row!(|a, b| half_op(f64::from(h(a)) * f64::from(h(b))))),
        "v_max_f16" => same(F16, row!(|a, b| to_h(math::max(h(a), h(b))))),
        "v_min_f16" => same(F16, row!(|a, b| to_h(math::min(h(a), h(b))))),
        "v_fma_f16" => same(F16, row!(|a, b, c| float::fma_f16(a as u16, b as u16, c as u16, &math::KEEP).into())),
        "v_fmac_f16" => acc(F16, row!(|a, b, c| float::fma_f16(a as u16, b as u16, c as u16, &math::KEEP).into())),
        "v_rcp_f16" => same(F16, row!(|a| half_op(1.0 / f64::from(h(a))))),
        "v_floor_f16" => same(F16, row!(|a| to_h(h(a).floor()))),
        "v_ceil_f16" => same(F16, row!(|a| to_h(h(a).ceil()))),
        "v_trunc_f16" => same(F16, row!(|a| to_h(h(a).trunc()))),
        "v_rndne_f16" => same(F16, row!(|a| to_h(h(a).round_ties_even()))),
        "v_subrev_u16" => same(B16, row!(|a, b| b.wrapping_sub(a) & 0xffff)),
        "v_min3_u16" => same(B16, row!(|a, b, c| (a as u16).min(b as u16).min(c as u16).into())),
        "v_max3_u16" => same(B16, row!(|a, b, c| (a as u16).max(b as u16).max(c as u16).into())),
        "v_min3_i16" => same(B16, row!(|a, b, c| (a as i16).min(b as i16).min(c as i16) as u16 as u32)),
        "v_max3_i16" => same(B16, row!(|a, b, c| (a as i16).max(b as i16).max(c as i16) as u16 as u32)),
        "v_med3_u16" => same(
            B16,
            row!(|a, b, c| {
                let (a, b, c) = (a as u16, b as u16, c as u16);
                a.min(b).max(a.max(b).min(c)).into()
            }),
        ),
        "v_med3_i16" => same(
            B16,
            row!(|a, b, c| {
                let (a, b, c) = (a as i16, b as i16, c as i16);
                a.min(b).max(a.max(b).min(c)) as u16 as u32
            }),
        ),
        "v_add_u16" => same(B16, row!(|a, b| a.wrapping_add(b) & 0xffff)),
        "v_sub_u16" => same(B16, row!(|a, b| a.wrapping_sub(b) & 0xffff)),
        "v_mul_lo_u16" => same(B16, row!(|a, b| (a & 0xffff).wrapping_mul(b & 0xffff) & 0xffff)),
        "v_mad_u16" | "v_mad_legacy_u16" => same(B16, row!(|a, b, c| (a & 0xffff).wrapping_mul(b & 0xffff).wrapping_add(c) & 0xffff)),
        "v_lshlrev_b16" => same(B16, row!(|a, b| b << (a & 15) & 0xffff)),
        "v_lshrrev_b16" => same(B16, row!(|a, b| (b & 0xffff) >> (a & 15))),
        "v_ashrrev_i16" => same(B16, row!(|a, b| (b as i16 >> (a & 15)) as u16 as u32)),
        "v_max_u16" => same(B16, row!(|a, b| (a as u16).max(b as u16).into())),
        "v_min_u16" => same(B16, row!(|a, b| (a as u16).min(b as u16).into())),
        "v_max_i16" => same(B16, row!(|a, b| (a as i16).max(b as i16) as u16 as u32)),
        "v_min_i16" => same(B16, row!(|a, b| (a as i16).min(b as i16) as u16 as u32)),
        "v_pack_b32_f16" => to(B32, F16, row!(|a, b| a & 0xffff | b << 16)),
        "v_dot4_i32_i8" => same(B32, row!(|a, b, c| math::dot4_i8(a, b, c))),
        "v_dot4c_i32_i8" => acc(B32, row!(|a, b, c| math::dot4_i8(a, b, c))),
        "v_dot2_f32_f16" => {
            RowOp { dst: F32, src: [B32, B32, F32], f: row!(|a, b, c| math::dot2_f16(a, b, c)), accumulates: false, ..PLAIN }
        }
        "v_dot2c_f32_f16" => {
            RowOp { dst: F32, src: [B32, B32, F32], f: row!(|a, b, c| math::dot2_f16(a, b, c)), accumulates: true, ..PLAIN }
        }
        "v_dot2_f32_bf16" => {
            RowOp { dst: F32, src: [B32, B32, F32], f: row!(|a, b, c| math::dot2_bf16(a, b, c)), accumulates: false, ..PLAIN }
        }
        "v_dot2c_f32_bf16" => {
            RowOp { dst: F32, src: [B32, B32, F32], f: row!(|a, b, c| math::dot2_bf16(a, b, c)), accumulates: true, ..PLAIN }
        }
        _ => return None,
    };
    // These exist in the VOP3 encoding alone and select a half of their destination; the others clear the upper half.
    let keeps_half = matches!(name, "v_fma_f16" | "v_mad_u16" | "v_mad_i16") || (name.ends_with("16") && name.contains("3_"));
    Some(RowOp { keeps_half, ..found })
}

/// Integer instructions whose `clamp` saturates the result.
pub fn saturating_op(name: &str) -> Option<RowOp> {
    use Ty::*;
    let op = |ty, f| Some(RowOp { dst: ty, src: [ty; 3], f, ..PLAIN });
    match name {
        "v_add_u32" => op(B32, row!(|a, b| a.saturating_add(b))),
        "v_sub_u32" => op(B32, row!(|a, b| a.saturating_sub(b))),
        "v_subrev_u32" => op(B32, row!(|a, b| b.saturating_sub(a))),
        "v_add_i32" => op(B32, row!(|a, b| (a as i32).saturating_add(b as i32) as u32)),
        "v_sub_i32" => op(B32, row!(|a, b| (a as i32).saturating_sub(b as i32) as u32)),
        "v_add_u16" => op(B16, row!(|a, b| (a as u16).saturating_add(b as u16).into())),
        "v_sub_u16" => op(B16, row!(|a, b| (a as u16).saturating_sub(b as u16).into())),
        "v_subrev_u16" => op(B16, row!(|a, b| (b as u16).saturating_sub(a as u16).into())),
        "v_add_i16" => op(B16, row!(|a, b| (a as i16).saturating_add(b as i16) as u16 as u32)),
        "v_sub_i16" => op(B16, row!(|a, b| (a as i16).saturating_sub(b as i16) as u16 as u32)),
        _ => None,
    }
}

/// As [`saturating_op`], packed.
pub fn saturating_packed_op(name: &str) -> Option<PackedOp> {
    let int = |f| Some(PackedOp::Half { float: false, arity: 2, f });
    match name {
        "v_pk_add_u16" => int(|a, b, _| a.saturating_add(b)),
        "v_pk_sub_u16" => int(|a, b, _| a.saturating_sub(b)),
        "v_pk_add_i16" => int(|a, b, _| (a as i16).saturating_add(b as i16) as u16),
        "v_pk_sub_i16" => int(|a, b, _| (a as i16).saturating_sub(b as i16) as u16),
        _ => None,
    }
}

/// The 8-bit format that a mnemonic means on an architecture.
fn format(name: &str, arch: Arch) -> Option<MiniFloat> {
    if name.contains("fp8") {
        Some(arch.fp8().fp8())
    } else if name.contains("bf8") {
        Some(arch.fp8().bf8())
    } else {
        None
    }
}

fn pair_from(codes: u64, format: MiniFloat) -> u64 {
    let [low, high] = float::cvt_pk_f32_fp8(codes as u32, false, format);
    u64::from(low) | u64::from(high) << 32
}

/// Conversions to and from 8-bit formats.
fn eight_bit(name: &str, arch: Arch) -> Option<RowOp> {
    macro_rules! formats {
        ($($format:ident),*) => {
            match format(name, arch)? {
                $(MiniFloat::$format => (
                    row!(|a, b| float::cvt_pk_fp8_f32(0, a, b, false, MiniFloat::$format, &math::KEEP)),
                    row!(|a, b| float::cvt_pk_fp8_f32(0, a, b, false, MiniFloat::$format, &math::SATURATE)),
                    row!(|a| float::cvt_f32_fp8(a, 0, MiniFloat::$format)),
                ),)*
                MiniFloat::E2m1 => return None,
            }
        };
    }
    let (to, saturating, from) = formats!(E4m3, E5m2, E4m3Fnuz, E5m2Fnuz);
    Some(if name.starts_with("v_cvt_pk") {
        RowOp { dst: Ty::B16, src: [Ty::F32; 3], f: to, saturating: Some(saturating), keeps_half: true, accumulates: false }
    } else {
        RowOp { dst: Ty::F32, f: from, ..PLAIN }
    })
}

/// Instructions with 64-bit operands.
pub fn wide_op(name: &str, arch: Arch) -> Option<WideOp> {
    use Ty::*;
    let op = |dst, src: [Ty; 3], arity, f| WideOp { dst, src, arity, f };
    Some(match name {
        "v_mov_b64" => op(B64, [B64; 3], 1, |a, _, _| a),
        "v_lshlrev_b64" => op(B64, [B32, B64, B64], 2, |a, b, _| b << (a & 63)),
        "v_lshrrev_b64" => op(B64, [B32, B64, B64], 2, |a, b, _| b >> (a & 63)),
        "v_ashrrev_i64" => op(B64, [B32, B64, B64], 2, |a, b, _| (b as i64 >> (a & 63)) as u64),
        "v_lshl_add_u64" => op(B64, [B64, B32, B64], 3, |a, b, c| (a << (b & 7)).wrapping_add(c)),
        "v_add_f64" => op(F64, [F64; 3], 2, |a, b, _| (d(a) + d(b)).to_bits()),
        "v_mul_f64" => op(F64, [F64; 3], 2, |a, b, _| (d(a) * d(b)).to_bits()),
        "v_fma_f64" => op(F64, [F64; 3], 3, |a, b, c| d(a).mul_add(d(b), d(c)).to_bits()),
        "v_max_f64" => op(F64, [F64; 3], 2, |a, b, _| d(a).max(d(b)).to_bits()),
        "v_min_f64" => op(F64, [F64; 3], 2, |a, b, _| d(a).min(d(b)).to_bits()),
        "v_cvt_f64_f32" => op(F64, [F32; 3], 1, |a, _, _| f64::from(f32::from_bits(a as u32)).to_bits()),
        "v_cvt_f64_i32" => op(F64, [B32; 3], 1, |a, _, _| f64::from(a as i32).to_bits()),
        "v_cvt_f64_u32" => op(F64, [B32; 3], 1, |a, _, _| f64::from(a as u32).to_bits()),
        "v_cvt_f32_f64" => op(F32, [F64; 3], 1, |a, _, _| (d(a) as f32).to_bits().into()),
        "v_cvt_i32_f64" => op(B32, [F64; 3], 1, |a, _, _| (d(a) as i32 as u32).into()),
        "v_cvt_u32_f64" => op(B32, [F64; 3], 1, |a, _, _| (d(a) as u32).into()),
        "v_cvt_pk_f32_fp8" | "v_cvt_pk_f32_bf8" => {
            let f: fn(u64, u64, u64) -> u64 = match format(name, arch)? {
                MiniFloat::E4m3 => |a, _, _| pair_from(a, MiniFloat::E4m3),
                MiniFloat::E5m2 => |a, _, _| pair_from(a, MiniFloat::E5m2),
                MiniFloat::E4m3Fnuz => |a, _, _| pair_from(a, MiniFloat::E4m3Fnuz),
                MiniFloat::E5m2Fnuz => |a, _, _| pair_from(a, MiniFloat::E5m2Fnuz),
                MiniFloat::E2m1 => return None,
            };
            op(B64, [B16; 3], 1, f)
        }
        "v_fmac_f64" => op(F64, [F64; 3], 3, |a, b, c| d(a).mul_add(d(b), d(c)).to_bits()),
        "v_trunc_f64" => op(F64, [F64; 3], 1, |a, _, _| d(a).trunc().to_bits()),
        "v_ceil_f64" => op(F64, [F64; 3], 1, |a, _, _| d(a).ceil().to_bits()),
        "v_rndne_f64" => op(F64, [F64; 3], 1, |a, _, _| d(a).round_ties_even().to_bits()),
        "v_floor_f64" => op(F64, [F64; 3], 1, |a, _, _| d(a).floor().to_bits()),
        "v_ldexp_f64" => op(F64, [F64, B32, B32], 2, |a, b, _| (d(a) * 2f64.powi((b as i32).clamp(-1200, 1200))).to_bits()),
        _ => return None,
    })
}

/// Packed instructions.
pub fn packed_op(name: &str) -> Option<PackedOp> {
    fn x(bits: u16) -> f64 {
        f16::from_bits(bits).to_f64()
    }
    fn r(value: f64) -> u16 {
        float::f64_to_f16(value)
    }
    let half = |arity, f| PackedOp::Half { float: true, arity, f };
    let int = |arity, f| PackedOp::Half { float: false, arity, f };
    Some(match name {
        "v_pk_add_f32" => PackedOp::Single(row_f32!(|a, b| a + b)),
        "v_pk_mul_f32" => PackedOp::Single(row_f32!(|a, b| a * b)),
        "v_pk_fma_f32" => PackedOp::Single(RowFn::Three(math::fma)),
        "v_pk_mov_b32" => return None,
        "v_pk_add_f16" => half(2, |a, b, _| r(x(a) + x(b))),
        "v_pk_mul_f16" => half(2, |a, b, _| r(x(a) * x(b))),
        "v_pk_fma_f16" => half(3, |a, b, c| float::fma_f16(a, b, c, &math::KEEP)),
        "v_pk_max_f16" => half(2, |a, b, _| to_h(math::max(h(a.into()), h(b.into()))) as u16),
        "v_pk_min_f16" => half(2, |a, b, _| to_h(math::min(h(a.into()), h(b.into()))) as u16),
        "v_pk_add_u16" | "v_pk_add_i16" => int(2, |a, b, _| a.wrapping_add(b)),
        "v_pk_sub_u16" | "v_pk_sub_i16" => int(2, |a, b, _| a.wrapping_sub(b)),
        "v_pk_mul_lo_u16" => int(2, |a, b, _| a.wrapping_mul(b)),
        "v_pk_mad_u16" | "v_pk_mad_i16" => int(3, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        "v_pk_lshlrev_b16" => int(2, |a, b, _| b << (a & 15)),
        "v_pk_lshrrev_b16" => int(2, |a, b, _| b >> (a & 15)),
        "v_pk_ashrrev_i16" => int(2, |a, b, _| (b as i16 >> (a & 15)) as u16),
        "v_pk_max_u16" => int(2, |a, b, _| a.max(b)),
        "v_pk_min_u16" => int(2, |a, b, _| a.min(b)),
        "v_pk_max_i16" => int(2, |a, b, _| (a as i16).max(b as i16) as u16),
        "v_pk_min_i16" => int(2, |a, b, _| (a as i16).min(b as i16) as u16),
        _ => return None,
    })
}

/// A comparison of whole registers.
pub type CompareFn = fn(&[u64; 64], &[u64; 64]) -> u64;

/// Comparisons: operand types and function of `v_cmp_*` (also `v_cmpx_*`, without the x).
// The negated comparisons are true where an operand is NaN.
#[allow(clippy::neg_cmp_op_on_partial_ord)]
pub fn compare_op(name: &str) -> Option<(Ty, CompareFn)> {
    macro_rules! mask {
        (|$a:ident, $b:ident| $e:expr) => {
            |x, y| {
                (0..64).fold(0u64, |mask, i| {
                    let ($a, $b) = (x[i], y[i]);
                    mask | u64::from($e) << i
                })
            }
        };
    }
    macro_rules! family {
        ($cond:expr, $ty:expr, $conv:expr) => {{
            let f: CompareFn = match $cond {
                "f" => mask!(|a, b| {
                    let _ = (a, b);
                    false
                }),
                "lt" => mask!(|a, b| $conv(a) < $conv(b)),
                "eq" => mask!(|a, b| $conv(a) == $conv(b)),
                "le" => mask!(|a, b| $conv(a) <= $conv(b)),
                "gt" => mask!(|a, b| $conv(a) > $conv(b)),
                "ge" => mask!(|a, b| $conv(a) >= $conv(b)),
                "ne" => mask!(|a, b| $conv(a) != $conv(b)),
                "lg" => mask!(|a, b| $conv(a) < $conv(b) || $conv(a) > $conv(b)),
                "o" => mask!(|a, b| {
                    let (a, b) = ($conv(a), $conv(b));
                    a == a && b == b
                }),
                "u" => mask!(|a, b| {
                    let (a, b) = ($conv(a), $conv(b));
                    a != a || b != b
                }),
                "nge" => mask!(|a, b| !($conv(a) >= $conv(b))),
                "nlg" => mask!(|a, b| !($conv(a) < $conv(b) || $conv(a) > $conv(b))),
                "ngt" => mask!(|a, b| !($conv(a) > $conv(b))),
                "nle" => mask!(|a, b| !($conv(a) <= $conv(b))),
                "neq" => mask!(|a, b| $conv(a) != $conv(b)),
                "nlt" => mask!(|a, b| !($conv(a) < $conv(b))),
                "t" | "tru" => mask!(|a, b| {
                    let _ = (a, b);
                    true
                }),
                _ => return None,
            };
            Some(($ty, f))
        }};
    }
    let (cond, ty) = name.strip_prefix("v_cmp_")?.rsplit_once('_')?;
    match ty {
        "f32" => family!(cond, Ty::F32, |x: u64| f32::from_bits(x as u32)),
        "f64" => family!(cond, Ty::F64, d),
        "f16" => family!(cond, Ty::F16, |x: u64| h(x as u32)),
        "u32" => family!(cond, Ty::B32, |x: u64| x as u32),
        "i32" => family!(cond, Ty::B32, |x: u64| x as i32),
        "u64" => family!(cond, Ty::B64, |x: u64| x),
        "i64" => family!(cond, Ty::B64, |x: u64| x as i64),
        "u16" => family!(cond, Ty::B16, |x: u64| x as u16),
        "i16" => family!(cond, Ty::B16, |x: u64| x as i16),
        _ => None,
    }
}
