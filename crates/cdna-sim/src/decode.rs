//! From the disassembler's text to [`Inst`]; whatever is not known for sure becomes [`Kind::Unsupported`].

mod memory;
mod vector;

use crate::disasm::Line;
use crate::elf::Arch;
use crate::exec::scalar::{constant_form, save_exec, scalar_op};
use crate::operand::{EXEC, Imm, M0, Operand, Parsed, Place, Regs, VCC, integer};
use crate::program::{Class, Condition, Inst, Kind, ScalarSrc};

/// Decoding one instruction: what is left of its text and the registers it uses.
struct Decoder<'a> {
    line: &'a Line,
    arch: Arch,
    /// Mnemonic without encoding suffix, and the suffix.
    name: &'a str,
    suffix: &'a str,
    parsed: Parsed<'a>,
    reads: Vec<Regs>,
    writes: Vec<Regs>,
}

type Decoded = Result<(Kind, Class), String>;

/// Decodes a line.
pub fn decode(line: &Line, arch: Arch) -> Inst {
    let parsed = Parsed::new(&line.text);
    let (name, suffix) = split_suffix(parsed.mnemonic);
    let mut decoder = Decoder { line, arch, name, suffix, parsed, reads: Vec::new(), writes: Vec::new() };
    let (kind, class) = decoder.instruction().unwrap_or_else(|reason| (Kind::Unsupported(reason.into()), Class::Other));
    let Decoder { reads, writes, .. } = decoder;
    Inst {
        address: line.address,
        size: 4 * line.words.len() as u64,
        text: line.text.as_str().into(),
        kind,
        class,
        reads: reads.into(),
        writes: writes.into(),
    }
}

fn split_suffix(mnemonic: &str) -> (&str, &str) {
    for suffix in ["_e64_dpp", "_e32", "_e64", "_dpp", "_sdwa"] {
        if let Some(name) = mnemonic.strip_suffix(suffix) {
            return (name, suffix);
        }
    }
    (mnemonic, "")
}

impl<'a> Decoder<'a> {
    fn instruction(&mut self) -> Decoded {
        let decoded = if self.name.starts_with("s_") { self.scalar() } else { self.not_scalar() }?;
        self.parsed.finish()?;
        Ok(decoded)
    }

    fn not_scalar(&mut self) -> Decoded {
        if self.name.starts_with("v_") {
            return self.vector();
        }
        if self.name.starts_with("ds_") {
            return self.lds().map(|kind| (kind, Class::Lds));
        }
        let memory = ["global_", "flat_", "scratch_", "buffer_"].iter().any(|prefix| self.name.starts_with(prefix));
        if memory { self.vector_memory() } else { Err("unknown instruction".into()) }
    }

    fn simm(&self) -> i64 {
        i64::from(self.line.words[0] as u16 as i16)
    }

    fn operand(&self, i: usize) -> Result<&Operand, String> {
        self.parsed.operands.get(i).ok_or_else(|| format!("operand {i} is missing"))
    }

    fn expect_operands(&self, count: usize) -> Result<(), String> {
        let found = self.parsed.operands.len();
        if found == count { Ok(()) } else { Err(format!("{found} operands where {count} are expected")) }
    }

    /// A register operand of `count` registers that is read.
    fn read(&mut self, i: usize, count: u16) -> Result<u16, String> {
        let first = self.registers(i, count)?;
        self.reads.push(Regs::new(first, count));
        Ok(first)
    }

    /// A register operand of `count` registers that is written.
    fn write(&mut self, i: usize, count: u16) -> Result<u16, String> {
        let first = self.registers(i, count)?;
        self.writes.push(Regs::new(first, count));
        Ok(first)
    }

    fn registers(&self, i: usize, count: u16) -> Result<u16, String> {
        let operand = self.operand(i)?;
        match operand.regs() {
            Some(regs) if regs.count == count && !operand.neg && !operand.abs && !operand.sext => Ok(regs.first),
            _ => Err(format!("operand {i} is not {count} plain registers")),
        }
    }

    /// A scalar source of `count` registers.
    fn scalar_src(&mut self, i: usize, count: u16) -> Result<ScalarSrc, String> {
        let operand = self.operand(i)?.clone();
        if operand.neg || operand.abs || operand.sext {
            return Err(format!("modifier on scalar operand {i}"));
        }
        match operand.place {
            Place::Regs(regs) if !regs.is_vector() && regs.count == count => {
                self.reads.push(regs);
                Ok(ScalarSrc::Reg(regs.first))
            }
            Place::Imm(imm) => Ok(ScalarSrc::Const(if count == 2 { constant64(imm) } else { constant32(imm).into() })),
            Place::Other(ref text) => special(text).ok_or_else(|| format!("operand {text}")),
            _ => Err(format!("operand {i} is not {count} scalar registers")),
        }
    }

    fn scalar(&mut self) -> Decoded {
        if let Some(decoded) = self.control()? {
            return Ok(decoded);
        }
        if self.name.starts_with("s_load_dword") || self.name.starts_with("s_buffer_load_dword") {
            return self.scalar_load().map(|kind| (kind, Class::ScalarMemory));
        }
        if let Some((base, signed)) = constant_form(self.name) {
            let op = scalar_op(base).ok_or("unknown constant form")?;
            self.expect_operands(2)?;
            let src = self.scalar_src(0, 1)?;
            let dst = if op.dst == 0 { 0 } else { self.write(0, 1)? };
            let value = if signed { self.simm() as u32 } else { self.line.words[0] & 0xffff };
            return Ok((Kind::Scalar { op, dst, src: [src, ScalarSrc::Const(value.into())] }, Class::Scalar));
        }
        if let Some(f) = save_exec(self.name) {
            let (dst, src) = (self.write(0, 2)?, self.scalar_src(1, 2)?);
            return Ok((Kind::SaveExec { f, dst, src }, Class::Scalar));
        }
        let op = scalar_op(self.name).ok_or("unknown instruction")?;
        let shift = usize::from(op.dst > 0);
        self.expect_operands(shift + op.arity)?;
        let mut src = [ScalarSrc::Const(0); 2];
        for (i, slot) in src.iter_mut().enumerate().take(op.arity) {
            *slot = self.scalar_src(i + shift, op.src[i])?;
        }
        let dst = if op.dst == 0 { 0 } else { self.write(0, op.dst)? };
        Ok((Kind::Scalar { op, dst, src }, Class::Scalar))
    }

    /// Program control, waits and the scalar instructions that are more than an ALU function.
    fn control(&mut self) -> Result<Option<(Kind, Class)>, String> {
        let target = self.line.address.wrapping_add(4).wrapping_add_signed(4 * self.simm());
        let branch = |condition| Some((Kind::Branch { condition, target }, Class::Branch));
        Ok(match self.name {
            "s_nop" | "s_sleep" | "s_setprio" | "s_sethalt" | "s_icache_inv" | "s_dcache_inv" | "s_dcache_wb" | "s_inst_prefetch"
            | "s_set_gpr_idx_off" | "s_incperflevel" | "s_decperflevel" | "s_ttracedata" => Some((Kind::Nop, Class::Other)),
            "s_endpgm" => Some((Kind::End, Class::Other)),
            "s_barrier" => Some((Kind::Barrier, Class::Barrier)),
            "s_waitcnt" => {
                let bits = self.line.words[0];
                let vector = (bits & 15 | bits >> 10 & 0x30) as usize;
                // The operands are spelled out in the encoding.
                self.parsed.operands.clear();
                self.forget_wait_words();
                // A counter's largest value means that it is not waited for.
                let limit = |value: usize, most: usize| if value == most { usize::MAX } else { value };
                Some((Kind::Wait { vector: limit(vector, 63), lgkm: limit((bits >> 8 & 15) as usize, 15) }, Class::Wait))
            }
            "s_branch" => branch(Condition::Always),
            "s_cbranch_scc0" => branch(Condition::Scc(false)),
            "s_cbranch_scc1" => branch(Condition::Scc(true)),
            "s_cbranch_vccz" => branch(Condition::VccZero(true)),
            "s_cbranch_vccnz" => branch(Condition::VccZero(false)),
            "s_cbranch_execz" => branch(Condition::ExecZero(true)),
            "s_cbranch_execnz" => branch(Condition::ExecZero(false)),
            "s_movk_i32" => {
                let dst = self.write(0, 1)?;
                let op = scalar_op("s_mov_b32").ok_or("s_mov_b32")?;
                Some((Kind::Scalar { op, dst, src: [ScalarSrc::Const((self.simm() as u32).into()); 2] }, Class::Scalar))
            }
            "s_cmov_b32" | "s_cmov_b64" => {
                let wide = self.name.ends_with("64");
                let count = if wide { 2 } else { 1 };
                Some((Kind::ConditionalMove { src: self.scalar_src(1, count)?, dst: self.write(0, count)?, wide }, Class::Scalar))
            }
            "s_getpc_b64" => Some((Kind::GetPc { dst: self.write(0, 2)? }, Class::Scalar)),
            "s_setpc_b64" => Some((Kind::SetPc { src: self.read(0, 2)?, link: None }, Class::Branch)),
            "s_swappc_b64" => Some((Kind::SetPc { src: self.read(1, 2)?, link: Some(self.write(0, 2)?) }, Class::Branch)),
            "s_setreg_imm32_b32" | "s_setreg_b32" => {
                let register = self.operand(0)?.clone();
                let Place::Other(text) = register.place else { return Err("hardware register".into()) };
                let (offset, width) = mode_field(&text).ok_or_else(|| format!("write of {text}"))?;
                Some((Kind::SetMode { offset, width, src: self.scalar_src(1, 1)? }, Class::Scalar))
            }
            "s_getreg_b32" => {
                let register = self.operand(1)?.clone();
                match register.place {
                    // The XCC and the hardware slot never change a result.
                    Place::Other(text) if text.contains("HW_REG_XCC_ID") || text.contains("HW_REG_HW_ID") => {
                        Some((Kind::ReadConstant { dst: self.write(0, 1)?, value: 0 }, Class::Scalar))
                    }
                    other => return Err(format!("read of {other:?}")),
                }
            }
            "s_memtime" | "s_memrealtime" => Some((Kind::Clock { dst: self.write(0, 2)? }, Class::ScalarMemory)),
            _ => None,
        })
    }

    fn forget_wait_words(&mut self) {
        let text = self.line.text.clone();
        for word in text.split_whitespace().skip(1) {
            self.parsed.take(word);
        }
    }

    fn scalar_load(&mut self) -> Result<Kind, String> {
        let buffer = self.name.starts_with("s_buffer");
        let count = match self.name.rsplit_once("dword").map(|(_, n)| n) {
            Some("") => 1,
            Some(n) => n.trim_start_matches('x').parse::<u16>().map_err(|e| e.to_string())?,
            None => return Err("unknown scalar load".into()),
        };
        // The caches are coherent here.
        self.parsed.flag("glc");
        let base = self.read(1, if buffer { 4 } else { 2 })?;
        let written = self.parsed.int("offset")?.unwrap_or(0);
        let (scalar, offset) = match self.operand(2)?.place.clone() {
            Place::Regs(_) => (Some(self.scalar_src(2, 1)?), written),
            Place::Imm(Imm::Literal(bits)) => (None, i64::from(bits)),
            Place::Imm(Imm::Int(value)) => (None, value),
            Place::Other(text) => (None, signed_hex(&text).ok_or_else(|| format!("offset {text}"))?),
            other => return Err(format!("offset {other:?}")),
        };
        let dst = Regs::new(self.write(0, count)?, count);
        Ok(Kind::ScalarLoad { dst, base, offset, scalar, buffer })
    }
}

fn signed_hex(text: &str) -> Option<i64> {
    match text.strip_prefix('-') {
        Some(rest) => integer(rest).map(|value| -value),
        None => integer(text),
    }
}

/// `hwreg(HW_REG_MODE, offset, width)`.
fn mode_field(text: &str) -> Option<(u32, u32)> {
    let inner = text.strip_prefix("hwreg(")?.strip_suffix(')')?;
    let mut fields = inner.split(',').map(str::trim);
    if fields.next()? != "HW_REG_MODE" {
        return None;
    }
    let offset = fields.next().map_or(Some(0), |f| f.parse().ok())?;
    let width = fields.next().map_or(Some(32), |f| f.parse().ok())?;
    Some((offset, width))
}

fn special(text: &str) -> Option<ScalarSrc> {
    match text {
        "scc" | "src_scc" => Some(ScalarSrc::Scc),
        "vccz" | "src_vccz" => Some(ScalarSrc::VccZ),
        "execz" | "src_execz" => Some(ScalarSrc::ExecZ),
        _ => None,
    }
}

/// A constant as 32 bits.
fn constant32(imm: Imm) -> u32 {
    match imm {
        Imm::Int(value) => value as u32,
        Imm::Literal(bits) => bits,
        Imm::Float(value) => (value as f32).to_bits(),
        Imm::InvTwoPi => 0x3e22_f983,
    }
}

/// A constant as a 64-bit integer operand.
fn constant64(imm: Imm) -> u64 {
    match imm {
        Imm::Int(value) => value as u64,
        Imm::Literal(bits) => bits.into(),
        Imm::Float(value) => value.to_bits(),
        Imm::InvTwoPi => 0x3fc4_5f30_6dc9_c882,
    }
}

/// Registers that every vector instruction reads.
const EXEC_PAIR: Regs = Regs { first: EXEC, count: 2 };
const M0_ONE: Regs = Regs { first: M0, count: 1 };
const VCC_PAIR: Regs = Regs { first: VCC, count: 2 };
