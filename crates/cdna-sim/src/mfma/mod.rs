//! Matrix fused multiply-add: D = C + A x B over a wave's registers, one instruction at a time.
//!
//! Shapes, register layouts, broadcasts and scales are those of the CDNA4 ISA document (chapter "Matrix Arithmetic", which contains CDNA3's
//! instructions); mnemonics are what `llvm-objdump` prints. A register is `[u32; 64]`, one word a lane; EXEC does not matter.
//!
//! # Rounding
//! AMD does not document the order and width of accumulation. Here, with f32 results:
//! - F32 inputs: a chain of f32 fused multiply-adds over k in rising order.
//! - 16-bit inputs: products are summed in f64 over eight consecutive k, then added to the accumulator and rounded to f32 (nearest even).
//! - 8-bit inputs: the same over sixteen k; F8F6F4 over thirty-two, one scale block, multiplied by its scales before the addition.
//!
//! The groups are those that measurements on MI300 were published to show (MMA-Sim), where hardware also truncates products far below the
//! largest of their group; that truncation, some 2^-24 of the largest product, is not modelled. Integer results are exact modulo 2^32.
//! Denormals are kept everywhere, as documented for all but F32 inputs (see [`Modifiers::flush_f32_sources`]).

mod layout;
mod multiply;

use std::fmt;

use crate::float::{Fp8Encoding, MiniFloat, e8m0_to_f64, f32_scale_exponent};

/// One VGPR of a wave: a word for each lane.
pub type Register = [u32; 64];

/// What A or B consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    F32,
    F16,
    Bf16,
    I8,
    /// E4M3 in the architecture's encoding.
    Fp8,
    /// E5M2 in the architecture's encoding.
    Bf8,
    /// E4M3, E5M2 or E2M1 as CBSZ (A) or BLGP (B) says.
    F8F6F4,
}

/// A dense MFMA instruction. M and N are equal in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MfmaOp {
    /// Rows of A and columns of B in a block.
    pub m: usize,
    /// Length of the sums.
    pub k: usize,
    /// Independent products.
    pub blocks: usize,
    pub a: Input,
    pub b: Input,
    /// Whether two scale operands follow C (`v_mfma_scale_*`).
    pub scaled: bool,
}

/// A scale operand of `v_mfma_scale_*`: an E8M0 byte a lane.
#[derive(Clone, Debug)]
pub struct Scale {
    pub register: Register,
    /// Which byte of the register, 0..4: op_sel_hi and op_sel of the operand as a two-bit number.
    pub byte: u32,
}

impl Scale {
    /// A scale given as an inline constant: the exponent field of the f32 whose bits these are, in every lane.
    pub fn constant(bits: u32) -> Scale {
        Scale { register: [u32::from(f32_scale_exponent(bits)); 64], byte: 0 }
    }

    fn factor(&self, lane: usize) -> f64 {
        e8m0_to_f64((self.register[lane] >> (8 * (self.byte & 3))) as u8)
    }
}

/// Everything but the registers that changes what an MFMA computes.
#[derive(Clone, Debug)]
pub struct Modifiers {
    /// Broadcast of A: 2^cbsz lane groups read one of them. For F8F6F4 the format of A.
    pub cbsz: u32,
    /// Which lane group A is broadcast from.
    pub abid: u32,
    /// Lane permutation of B. For F8F6F4 the format of B.
    pub blgp: u32,
    /// The architecture's encoding of FP8 and BF8.
    pub fp8: Fp8Encoding,
    /// MODE.FP16_OVFL: f32 results that overflow become the largest finite value, i32 results saturate instead of wrapping.
    pub fp16_ovfl: bool,
    /// Denormal F32 sources count as zero. The ISA document says in one place that F32 inputs follow MODE.fp_denorm and in another
    /// that every MFMA ignores it.
    pub flush_f32_sources: bool,
    /// The scales of A and B, for `v_mfma_scale_*`.
    pub scales: Option<[Scale; 2]>,
}

impl Modifiers {
    /// No modifiers, on an architecture with this FP8 encoding.
    pub fn none(fp8: Fp8Encoding) -> Modifiers {
        Modifiers { cbsz: 0, abid: 0, blgp: 0, fp8, fp16_ovfl: false, flush_f32_sources: false, scales: None }
    }
}

/// An MFMA that the simulator does not execute, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsupported(pub String);

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unsupported {}

macro_rules! refuse {
    ($($message:tt)*) => { return Err(Unsupported(format!($($message)*))) };
}

impl MfmaOp {
    /// The instruction with this mnemonic, as `llvm-objdump` prints it, or with the older `..._1k` ending; `None` for what is not a dense
    /// MFMA with f32 or i32 results (f64, xf32, `v_smfmac_*`).
    pub fn from_mnemonic(mnemonic: &str) -> Option<MfmaOp> {
        let name = mnemonic.strip_prefix("v_mfma_")?;
        let (scaled, name) = match name.strip_prefix("scale_") {
            Some(name) => (true, name),
            None => (false, name),
        };
        let (result, name) = name.split_once('_')?;
        let (shape, types) = name.split_once('_')?;
        let (blocks, types) = match types.split_once("b_") {
            Some((blocks, types)) if blocks.chars().all(|c| c.is_ascii_digit()) => (blocks.parse().ok()?, types),
            _ => (1, types),
        };
        let (a, b) = inputs(types.strip_suffix("_1k").unwrap_or(types))?;
        let mut sizes = shape.split('x').map(|size| size.parse().ok());
        let (m, n, k): (usize, usize, usize) = (sizes.next()??, sizes.next()??, sizes.next()??);
        let op = MfmaOp { m, k, blocks, a, b, scaled };
        let fits = n == m && sizes.next().is_none() && result == op.result() && (!scaled || a == Input::F8F6F4);
        (fits && op.shapes().contains(&(m, k, blocks))).then_some(op)
    }

    /// The shapes (M, K, blocks) that exist for these inputs.
    fn shapes(&self) -> &'static [(usize, usize, usize)] {
        match self.a {
            Input::F32 => &[(32, 1, 2), (16, 1, 4), (4, 1, 16), (32, 2, 1), (16, 4, 1)],
            Input::F16 | Input::Bf16 => &[(32, 4, 2), (16, 4, 4), (4, 4, 16), (32, 8, 1), (16, 16, 1), (32, 16, 1), (16, 32, 1)],
            Input::I8 => &[(32, 4, 2), (16, 4, 4), (4, 4, 16), (32, 16, 1), (16, 32, 1), (32, 32, 1), (16, 64, 1)],
            Input::Fp8 | Input::Bf8 => &[(32, 16, 1), (16, 32, 1)],
            Input::F8F6F4 => &[(32, 64, 1), (16, 128, 1)],
        }
    }

    fn result(&self) -> &'static str {
        if self.a == Input::I8 { "i32" } else { "f32" }
    }

    /// Registers of A.
    pub fn a_registers(&self, modifiers: &Modifiers) -> Result<usize, Unsupported> {
        Ok(self.input_registers(self.element(self.a, modifiers.cbsz, modifiers.fp8)?))
    }

    /// Registers of B.
    pub fn b_registers(&self, modifiers: &Modifiers) -> Result<usize, Unsupported> {
        Ok(self.input_registers(self.element(self.b, modifiers.blgp, modifiers.fp8)?))
    }

    /// Registers of C and of D.
    pub fn c_registers(&self) -> usize {
        self.m * self.m * self.blocks / 64
    }

    fn input_registers(&self, element: Element) -> usize {
        self.m * self.k * self.blocks * element.bits() / (64 * 32)
    }

    /// What an input consists of, given the modifier that selects the format of an F8F6F4 input.
    fn element(&self, input: Input, selector: u32, fp8: Fp8Encoding) -> Result<Element, Unsupported> {
        Ok(match input {
            Input::F32 => Element::F32,
            Input::F16 => Element::F16,
            Input::Bf16 => Element::Bf16,
            Input::I8 => Element::I8,
            Input::Fp8 => Element::Mini(fp8.fp8()),
            Input::Bf8 => Element::Mini(fp8.bf8()),
            Input::F8F6F4 => match selector {
                0 => Element::Mini(MiniFloat::E4m3),
                1 => Element::Mini(MiniFloat::E5m2),
                2 | 3 => refuse!("an F8F6F4 MFMA with an FP6 or BF6 input (cbsz or blgp {selector})"),
                4 => Element::Mini(MiniFloat::E2m1),
                _ => refuse!("cbsz or blgp {selector} names no F8F6F4 format"),
            },
        })
    }

    /// Whether the modifiers are ones that this instruction has; everything that [`execute`] refuses but wrong register counts.
    pub fn check(&self, modifiers: &Modifiers) -> Result<(), Unsupported> {
        self.a_registers(modifiers)?;
        self.b_registers(modifiers)?;
        if self.scaled != modifiers.scales.is_some() {
            refuse!("an MFMA with scale operands where the instruction has none, or the reverse");
        }
        if self.a == Input::F8F6F4 {
            return Ok(());
        }
        let Modifiers { cbsz, abid, blgp, .. } = *modifiers;
        if cbsz > 4 || 1 << cbsz > self.blocks || abid >= 1 << cbsz {
            refuse!("cbsz {cbsz} abid {abid} of an MFMA with {} blocks", self.blocks);
        }
        if blgp > 7 {
            refuse!("blgp {blgp} is beyond 7");
        }
        Ok(())
    }
}

fn inputs(types: &str) -> Option<(Input, Input)> {
    Some(match types {
        "f32" => (Input::F32, Input::F32),
        "f16" => (Input::F16, Input::F16),
        "bf16" => (Input::Bf16, Input::Bf16),
        "i8" => (Input::I8, Input::I8),
        "fp8_fp8" => (Input::Fp8, Input::Fp8),
        "fp8_bf8" => (Input::Fp8, Input::Bf8),
        "bf8_fp8" => (Input::Bf8, Input::Fp8),
        "bf8_bf8" => (Input::Bf8, Input::Bf8),
        "f8f6f4" => (Input::F8F6F4, Input::F8F6F4),
        _ => return None,
    })
}

/// The format of an input once the modifiers are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    F32,
    F16,
    Bf16,
    I8,
    Mini(MiniFloat),
}

impl Element {
    fn bits(self) -> usize {
        match self {
            Element::F32 => 32,
            Element::F16 | Element::Bf16 => 16,
            Element::I8 => 8,
            Element::Mini(format) => format.bits() as usize,
        }
    }
}

/// D = C + A x B. `a`, `b` and `c` hold as many registers as [`MfmaOp::a_registers`], [`MfmaOp::b_registers`] and [`MfmaOp::c_registers`]
/// say; the result as many as `c`.
pub fn execute(op: MfmaOp, a: &[Register], b: &[Register], c: &[Register], modifiers: &Modifiers) -> Result<Vec<Register>, Unsupported> {
    op.check(modifiers)?;
    let given = [a.len(), b.len(), c.len()];
    let wanted = [op.a_registers(modifiers)?, op.b_registers(modifiers)?, op.c_registers()];
    if given != wanted {
        refuse!("an MFMA given {given:?} registers of A, B and C where it has {wanted:?}");
    }
    let broadcasts = op.a != Input::F8F6F4;
    let a_lanes = |lane| if broadcasts { layout::broadcast_a(lane, modifiers.cbsz, modifiers.abid) } else { lane };
    let b_lanes = |lane| if broadcasts { layout::permute_b(lane, modifiers.blgp) } else { lane };
    let a = layout::permuted(a, a_lanes, broadcasts && modifiers.cbsz > 0);
    let b = layout::permuted(b, b_lanes, broadcasts && modifiers.blgp > 0);
    let a_element = op.element(op.a, modifiers.cbsz, modifiers.fp8)?;
    let b_element = op.element(op.b, modifiers.blgp, modifiers.fp8)?;
    let mut d = vec![[0; 64]; c.len()];
    if op.a == Input::I8 {
        let [a, b] = [&a, &b].map(|registers| layout::unpack_i8(&op, registers));
        multiply::integers(&op, &a, &b, c, &mut d, modifiers.fp16_ovfl);
    } else {
        let a = layout::unpack(&op, a_element, &a, modifiers.flush_f32_sources);
        let b = layout::unpack(&op, b_element, &b, modifiers.flush_f32_sources);
        multiply::floats(&op, &a, &b, c, &mut d, modifiers);
    }
    Ok(d)
}
