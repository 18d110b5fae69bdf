//! What an instruction costs, from its mnemonic.

use cdna_sim::{Arch, Class, Counter, Inst};

/// The unit that executes an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    Scalar,
    Vector,
    Matrix,
    Lds,
    Memory,
    /// Waits, barriers, nops: no unit.
    None,
}

pub(crate) fn unit(inst: &Inst) -> Unit {
    match inst.class {
        Class::Scalar | Class::ScalarMemory | Class::Branch => Unit::Scalar,
        Class::Vector | Class::Transcendental => Unit::Vector,
        Class::Matrix => Unit::Matrix,
        Class::Lds => Unit::Lds,
        Class::VectorMemory => Unit::Memory,
        Class::Wait | Class::Barrier | Class::Other => Unit::None,
    }
}

/// A conversion: `v_cvt_*` and gfx950's scaled ones.
pub(crate) fn is_conversion(inst: &Inst) -> bool {
    inst.mnemonic().starts_with("v_cvt_")
}

/// Packed F32 arithmetic, which uses the matrix unit's operand path.
pub(crate) fn is_packed_f32(inst: &Inst) -> bool {
    let mnemonic = inst.mnemonic();
    mnemonic.starts_with("v_pk_") && mnemonic.contains("_f32") || mnemonic.starts_with("v_pk_mov_b32") || mnemonic.starts_with("v_dot")
}

/// Integer multiplications of 32 bits, at a quarter of the rate.
pub(crate) fn is_quarter_rate(inst: &Inst) -> bool {
    let mnemonic = inst.mnemonic();
    inst.class == Class::Transcendental
        || ["v_mul_lo_u32", "v_mul_hi_u32", "v_mul_hi_i32", "v_mad_u64_u32", "v_mad_i64_i32"].iter().any(|name| mnemonic.starts_with(name))
}

/// An LDS instruction that only exchanges registers.
pub(crate) fn is_exchange(inst: &Inst) -> bool {
    ["ds_bpermute", "ds_permute", "ds_swizzle"].iter().any(|name| inst.mnemonic().starts_with(name))
}

/// The shape of an MFMA: `16x16x32_bf16`.
pub(crate) fn mfma_shape(inst: &Inst) -> String {
    let mnemonic = inst.mnemonic();
    let name = mnemonic.trim_end_matches("_e64");
    ["v_mfma_scale_f32_", "v_mfma_f32_", "v_smfmac_f32_", "v_mfma_"]
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(name)
        .to_string()
}

/// Passes of four cycles that an MFMA occupies its matrix unit for.
pub(crate) fn mfma_passes(inst: &Inst, arch: Arch) -> u64 {
    // Formats 2, 3 (6 bits) and 4 (4 bits) on both sides.
    let narrow =
        ["cbsz:", "blgp:"].iter().all(|name| inst.text.split(name).nth(1).is_some_and(|format| format.starts_with(['2', '3', '4'])));
    passes(&mfma_shape(inst), narrow, arch)
}

/// Passes of a shape: its floating-point operations over the arch's peak rate for the dtype, a SIMD and cycle. `narrow`: 4- or 6-bit operands
/// where the shape leaves that open.
pub(crate) fn passes(shape: &str, narrow: bool, arch: Arch) -> u64 {
    let sizes: Vec<u64> = shape.split('_').next().unwrap_or_default().split('x').map(|n| n.parse().unwrap_or(1)).collect();
    let flops = 2 * sizes.iter().product::<u64>();
    let eight = shape.contains("fp8") || shape.contains("bf8");
    let sixteen = shape.contains("f16");
    // gfx950's 16-bit instructions of twice gfx942's K have twice its rate; the older shapes keep theirs.
    let doubled = arch == Arch::Gfx950 && sixteen && flops > if sizes[0] == 32 { 32 * 32 * 8 * 2 } else { 16 * 16 * 16 * 2 };
    let rate = match (shape.contains("f8f6f4"), eight || doubled, sixteen) {
        (true, ..) if narrow => 4096,
        (true, ..) => 2048,
        (_, true, _) => 1024,
        (_, _, true) => 512,
        _ => 64,
    };
    (flops / rate / 4).max(1)
}

/// Bytes of the widest of A and B.
pub(crate) fn mfma_operand_bytes(inst: &Inst) -> u64 {
    inst.reads().iter().take(2).map(|regs| u64::from(regs.count) * 4).max().unwrap_or(0)
}

/// Wait states of an `s_nop`.
pub(crate) fn nop_states(inst: &Inst) -> Option<u64> {
    let rest = inst.text.strip_prefix("s_nop")?;
    rest.trim().parse::<u64>().ok().map(|n| n + 1)
}

pub(crate) fn is_vector_counter(counter: Counter) -> bool {
    matches!(counter, Counter::Vector | Counter::Flat)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Peak rates: 2048 (16-bit) and 4096 (8-bit) operations a cycle and compute unit on gfx942, twice those on gfx950 and four times for 4 bits.
    #[test]
    fn passes_follow_from_peak_rates() {
        let cases = [
            ("16x16x16_bf16", false, [4, 4]),
            ("16x16x16_f16", false, [4, 4]),
            ("16x16x32_bf16", false, [8, 4]),
            ("32x32x8_f16", false, [8, 8]),
            ("32x32x16_bf16", false, [16, 8]),
            ("16x16x32_fp8_fp8", false, [4, 4]),
            ("32x32x16_fp8_fp8", false, [8, 8]),
            ("16x16x128_f8f6f4", false, [8, 8]),
            ("16x16x128_f8f6f4", true, [4, 4]),
            ("32x32x64_f8f6f4", false, [16, 16]),
        ];
        for (shape, narrow, want) in cases {
            assert_eq!([Arch::Gfx942, Arch::Gfx950].map(|arch| passes(shape, narrow, arch)), want, "{shape}");
        }
    }
}
