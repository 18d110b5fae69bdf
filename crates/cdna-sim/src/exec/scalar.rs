//! Scalar ALU: one line an instruction.

/// Result and the new SCC, where the instruction writes it.
pub type Out = (u64, Option<bool>);

/// A scalar instruction: registers of destination (0: none) and sources, and its function of the sources and SCC.
#[derive(Clone, Copy)]
pub struct ScalarOp {
    /// Registers of the destination.
    pub dst: u16,
    /// Registers of each source.
    pub src: [u16; 2],
    /// Sources.
    pub arity: usize,
    /// The function.
    pub f: fn(u64, u64, bool) -> Out,
}

fn nonzero32(value: u32) -> Out {
    (value.into(), Some(value != 0))
}

fn nonzero(value: u64) -> Out {
    (value, Some(value != 0))
}

fn signed_overflow(a: u64, b: u64, subtract: bool) -> Out {
    let (a, b) = (a as i32, b as i32);
    let (value, overflow) = if subtract { a.overflowing_sub(b) } else { a.overflowing_add(b) };
    (u64::from(value as u32), Some(overflow))
}

/// The scalar ALU instruction called `name`.
pub fn scalar_op(name: &str) -> Option<ScalarOp> {
    let two = |f| ScalarOp { dst: 1, src: [1, 1], arity: 2, f };
    let two64 = |f| ScalarOp { dst: 2, src: [2, 2], arity: 2, f };
    let shift64 = |f| ScalarOp { dst: 2, src: [2, 1], arity: 2, f };
    let one = |f| ScalarOp { dst: 1, src: [1, 0], arity: 1, f };
    let one64 = |f| ScalarOp { dst: 2, src: [2, 0], arity: 1, f };
    let from64 = |f| ScalarOp { dst: 1, src: [2, 0], arity: 1, f };
    let cmp = |f| ScalarOp { dst: 0, src: [1, 1], arity: 2, f };
    let cmp64 = |f| ScalarOp { dst: 0, src: [2, 2], arity: 2, f };
    Some(match name {
        "s_mov_b32" => one(|a, _, _| (a, None)),
        "s_mov_b64" => one64(|a, _, _| (a, None)),
        "s_not_b32" => one(|a, _, _| nonzero32(!(a as u32))),
        "s_not_b64" => one64(|a, _, _| nonzero(!a)),
        "s_brev_b32" => one(|a, _, _| ((a as u32).reverse_bits().into(), None)),
        "s_bcnt1_i32_b32" => one(|a, _, _| nonzero32((a as u32).count_ones())),
        "s_bcnt0_i32_b32" => one(|a, _, _| nonzero32((a as u32).count_zeros())),
        "s_bcnt1_i32_b64" => from64(|a, _, _| nonzero32(a.count_ones())),
        "s_bcnt0_i32_b64" => from64(|a, _, _| nonzero32(a.count_zeros())),
        "s_ff1_i32_b32" => one(|a, _, _| (if a == 0 { u32::MAX } else { (a as u32).trailing_zeros() }.into(), None)),
        "s_ff1_i32_b64" => from64(|a, _, _| (if a == 0 { u32::MAX } else { a.trailing_zeros() }.into(), None)),
        "s_flbit_i32_b32" => one(|a, _, _| (if a == 0 { u32::MAX } else { (a as u32).leading_zeros() }.into(), None)),
        "s_flbit_i32" => one(|a, _, _| {
            let folded = (a as i32 ^ (a as i32 >> 31)) as u32;
            (if folded == 0 { u32::MAX } else { folded.leading_zeros() }.into(), None)
        }),
        "s_flbit_i32_i64" => from64(|a, _, _| {
            let folded = (a as i64 ^ (a as i64 >> 63)) as u64;
            (if folded == 0 { u32::MAX } else { folded.leading_zeros() }.into(), None)
        }),
        "s_flbit_i32_b64" => from64(|a, _, _| (if a == 0 { u32::MAX } else { a.leading_zeros() }.into(), None)),
        "s_sext_i32_i8" => one(|a, _, _| ((a as i8 as i32 as u32).into(), None)),
        "s_sext_i32_i16" => one(|a, _, _| ((a as i16 as i32 as u32).into(), None)),
        "s_abs_i32" => one(|a, _, _| nonzero32((a as i32).wrapping_abs() as u32)),
        "s_add_u32" => two(|a, b, _| ((a + b) as u32 as u64, Some(a + b > u64::from(u32::MAX)))),
        "s_addc_u32" => two(|a, b, c| {
            let sum = a + b + u64::from(c);
            (sum as u32 as u64, Some(sum > u64::from(u32::MAX)))
        }),
        "s_sub_u32" => two(|a, b, _| ((a as u32).wrapping_sub(b as u32).into(), Some(b > a))),
        "s_subb_u32" => two(|a, b, c| {
            let borrowed = b + u64::from(c);
            ((a as u32).wrapping_sub(borrowed as u32).into(), Some(borrowed > a))
        }),
        "s_add_i32" => two(|a, b, _| signed_overflow(a, b, false)),
        "s_sub_i32" => two(|a, b, _| signed_overflow(a, b, true)),
        "s_absdiff_i32" => two(|a, b, _| nonzero32((a as i32).wrapping_sub(b as i32).wrapping_abs() as u32)),
        "s_mul_i32" => two(|a, b, _| ((a as u32).wrapping_mul(b as u32).into(), None)),
        "s_mul_hi_u32" => two(|a, b, _| ((a * b) >> 32, None)),
        "s_mul_hi_i32" => two(|a, b, _| (((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32 as u64, None)),
        "s_min_u32" => two(|a, b, _| (a.min(b), Some(a < b))),
        "s_max_u32" => two(|a, b, _| (a.max(b), Some(a > b))),
        "s_min_i32" => two(|a, b, _| ((a as i32).min(b as i32) as u32 as u64, Some((a as i32) < b as i32))),
        "s_max_i32" => two(|a, b, _| ((a as i32).max(b as i32) as u32 as u64, Some(a as i32 > b as i32))),
        "s_and_b32" => two(|a, b, _| nonzero(a & b)),
        "s_or_b32" => two(|a, b, _| nonzero(a | b)),
        "s_xor_b32" => two(|a, b, _| nonzero(a ^ b)),
        "s_andn2_b32" => two(|a, b, _| nonzero(a & !b)),
        "s_orn2_b32" => two(|a, b, _| nonzero32(a as u32 | !(b as u32))),
        "s_nand_b32" => two(|a, b, _| nonzero32(!(a & b) as u32)),
        "s_nor_b32" => two(|a, b, _| nonzero32(!(a | b) as u32)),
        "s_xnor_b32" => two(|a, b, _| nonzero32(!(a ^ b) as u32)),
        "s_and_b64" => two64(|a, b, _| nonzero(a & b)),
        "s_or_b64" => two64(|a, b, _| nonzero(a | b)),
        "s_xor_b64" => two64(|a, b, _| nonzero(a ^ b)),
        "s_andn2_b64" => two64(|a, b, _| nonzero(a & !b)),
        "s_orn2_b64" => two64(|a, b, _| nonzero(a | !b)),
        "s_nand_b64" => two64(|a, b, _| nonzero(!(a & b))),
        "s_nor_b64" => two64(|a, b, _| nonzero(!(a | b))),
        "s_xnor_b64" => two64(|a, b, _| nonzero(!(a ^ b))),
        "s_lshl_b32" => two(|a, b, _| nonzero32((a as u32) << (b & 31))),
        "s_lshr_b32" => two(|a, b, _| nonzero32(a as u32 >> (b & 31))),
        "s_ashr_i32" => two(|a, b, _| nonzero32((a as i32 >> (b & 31)) as u32)),
        "s_lshl_b64" => shift64(|a, b, _| nonzero(a << (b & 63))),
        "s_lshr_b64" => shift64(|a, b, _| nonzero(a >> (b & 63))),
        "s_ashr_i64" => shift64(|a, b, _| nonzero((a as i64 >> (b & 63)) as u64)),
        "s_lshl1_add_u32" => two(|a, b, _| shift_add(a, b, 1)),
        "s_lshl2_add_u32" => two(|a, b, _| shift_add(a, b, 2)),
        "s_lshl3_add_u32" => two(|a, b, _| shift_add(a, b, 3)),
        "s_lshl4_add_u32" => two(|a, b, _| shift_add(a, b, 4)),
        "s_bfm_b32" => two(|a, b, _| ((((1u32 << (a & 31)) - 1) << (b & 31)).into(), None)),
        "s_bfe_u32" => two(|a, b, _| nonzero32(field(a, b, 31) as u32)),
        "s_bfe_i32" => two(|a, b, _| {
            let width = (b >> 16 & 0x7f).min(32) as u32;
            let value = field(a, b, 31) as u32;
            nonzero32(if width == 0 { 0 } else { ((value << (32 - width)) as i32 >> (32 - width)) as u32 })
        }),
        "s_bfe_u64" => shift64(|a, b, _| nonzero(field(a, b, 63))),
        "s_pack_ll_b32_b16" => two(|a, b, _| (a & 0xffff | (b & 0xffff) << 16, None)),
        "s_pack_lh_b32_b16" => two(|a, b, _| (a & 0xffff | b & 0xffff_0000, None)),
        "s_pack_hh_b32_b16" => two(|a, b, _| (a >> 16 | b & 0xffff_0000, None)),
        "s_cselect_b32" => two(|a, b, c| (if c { a } else { b }, None)),
        "s_cselect_b64" => two64(|a, b, c| (if c { a } else { b }, None)),
        "s_cmp_eq_u32" | "s_cmp_eq_i32" => cmp(|a, b, _| (0, Some(a == b))),
        "s_cmp_lg_u32" | "s_cmp_lg_i32" => cmp(|a, b, _| (0, Some(a != b))),
        "s_cmp_gt_u32" => cmp(|a, b, _| (0, Some(a > b))),
        "s_cmp_ge_u32" => cmp(|a, b, _| (0, Some(a >= b))),
        "s_cmp_lt_u32" => cmp(|a, b, _| (0, Some(a < b))),
        "s_cmp_le_u32" => cmp(|a, b, _| (0, Some(a <= b))),
        "s_cmp_gt_i32" => cmp(|a, b, _| (0, Some(a as i32 > b as i32))),
        "s_cmp_ge_i32" => cmp(|a, b, _| (0, Some(a as i32 >= b as i32))),
        "s_cmp_lt_i32" => cmp(|a, b, _| (0, Some((a as i32) < b as i32))),
        "s_cmp_le_i32" => cmp(|a, b, _| (0, Some(a as i32 <= b as i32))),
        "s_cmp_eq_u64" => cmp64(|a, b, _| (0, Some(a == b))),
        "s_cmp_lg_u64" => cmp64(|a, b, _| (0, Some(a != b))),
        "s_bitcmp0_b32" => cmp(|a, b, _| (0, Some(a >> (b & 31) & 1 == 0))),
        "s_bitcmp1_b32" => cmp(|a, b, _| (0, Some(a >> (b & 31) & 1 == 1))),
        "s_bitcmp0_b64" => ScalarOp { dst: 0, src: [2, 1], arity: 2, f: |a, b, _| (0, Some(a >> (b & 63) & 1 == 0)) },
        "s_bitcmp1_b64" => ScalarOp { dst: 0, src: [2, 1], arity: 2, f: |a, b, _| (0, Some(a >> (b & 63) & 1 == 1)) },
        _ => return None,
    })
}

/// `s_*k_*` instructions: the destination is the first source, a sign- or zero-extended 16-bit constant the second.
pub fn constant_form(name: &str) -> Option<(&'static str, bool)> {
    Some(match name {
        "s_addk_i32" => ("s_add_i32", true),
        "s_mulk_i32" => ("s_mul_i32", true),
        "s_cmpk_eq_i32" => ("s_cmp_eq_i32", true),
        "s_cmpk_lg_i32" => ("s_cmp_lg_i32", true),
        "s_cmpk_gt_i32" => ("s_cmp_gt_i32", true),
        "s_cmpk_ge_i32" => ("s_cmp_ge_i32", true),
        "s_cmpk_lt_i32" => ("s_cmp_lt_i32", true),
        "s_cmpk_le_i32" => ("s_cmp_le_i32", true),
        "s_cmpk_eq_u32" => ("s_cmp_eq_u32", false),
        "s_cmpk_lg_u32" => ("s_cmp_lg_u32", false),
        "s_cmpk_gt_u32" => ("s_cmp_gt_u32", false),
        "s_cmpk_ge_u32" => ("s_cmp_ge_u32", false),
        "s_cmpk_lt_u32" => ("s_cmp_lt_u32", false),
        "s_cmpk_le_u32" => ("s_cmp_le_u32", false),
        _ => return None,
    })
}

/// `s_*_saveexec_b64`: the new EXEC from the source and the old EXEC.
pub fn save_exec(name: &str) -> Option<fn(u64, u64) -> u64> {
    Some(match name {
        "s_and_saveexec_b64" => |s, e| s & e,
        "s_or_saveexec_b64" => |s, e| s | e,
        "s_xor_saveexec_b64" => |s, e| s ^ e,
        "s_andn2_saveexec_b64" => |s, e| s & !e,
        "s_andn1_saveexec_b64" => |s, e| !s & e,
        "s_orn2_saveexec_b64" => |s, e| s | !e,
        _ => return None,
    })
}

fn shift_add(a: u64, b: u64, shift: u32) -> Out {
    let sum = (a << shift) + b;
    (sum as u32 as u64, Some(sum > u64::from(u32::MAX)))
}

fn field(a: u64, b: u64, mask: u64) -> u64 {
    let width = b >> 16 & 0x7f;
    let shifted = a >> (b & mask);
    if width > mask { shifted } else { shifted & ((1u64 << width) - 1) }
}
