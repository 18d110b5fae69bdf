//! Vector ALU instructions.

use super::{Decoded, Decoder, EXEC_PAIR, VCC_PAIR, constant32, constant64, special};
use crate::exec::lanes::{PackedOp, Ty, compare_op, packed_op, row_op, saturating_op, saturating_packed_op, wide_op};
use crate::float::{MiniFloat, Wide};
use crate::mfma::{MfmaOp, Modifiers, Scale};
use crate::operand::{Imm, Operand, Place, Regs, VGPR};
use crate::program::{CarryOp, Class, Dpp, Input, Kind, LaneOp, Mfma, ScalarSrc, Sdwa, Select, Unused, Vector, VectorSrc};

const NO_INPUT: Input = Input { src: VectorSrc::Scalar(ScalarSrc::Const(0)), ty: Ty::B32, neg: false, abs: false };

impl Decoder<'_> {
    pub(super) fn vector(&mut self) -> Decoded {
        let class = match self.name.split('_').nth(1) {
            Some("exp" | "log" | "rcp" | "rsq" | "sqrt" | "sin" | "cos") => Class::Transcendental,
            Some("mfma") => Class::Matrix,
            _ => Class::Vector,
        };
        Ok((self.vector_kind()?, class))
    }

    fn vector_kind(&mut self) -> Result<Kind, String> {
        let name = self.name;
        if name == "v_nop" {
            return Ok(Kind::Nop);
        }
        if name.starts_with("v_mfma_") {
            return self.mfma();
        }
        self.reads.push(EXEC_PAIR);
        if let Some(rest) = name.strip_prefix("v_cmpx_") {
            return self.compare(&format!("v_cmp_{rest}"), true);
        }
        if name.starts_with("v_cmp_") {
            return self.compare(name, false);
        }
        if let Some(op) = self.saturating(saturating_op).or_else(|| row_op(name, self.arch)) {
            let arity = op.f.arity() - usize::from(op.accumulates);
            let mut v = self.common(op.dst, &op.src[..arity], 1)?;
            if op.accumulates {
                v.inputs[arity] = Input { src: VectorSrc::Row(v.dst), ty: op.src[arity], neg: false, abs: false };
                self.reads.push(Regs::new(VGPR + v.dst, 1));
            }
            if op.keeps_half {
                self.reads.push(Regs::new(VGPR + v.dst, 1));
            }
            return Ok(Kind::Row { op, v });
        }
        if let Some(op) = wide_op(name, self.arch) {
            let accumulates = name == "v_fmac_f64";
            let arity = op.arity - usize::from(accumulates);
            let mut v = self.common(op.dst, &op.src[..arity], 1)?;
            if accumulates {
                v.inputs[arity] = Input { src: VectorSrc::Row(v.dst), ty: op.src[arity], neg: false, abs: false };
                self.reads.push(Regs::new(VGPR + v.dst, 2));
            }
            return Ok(Kind::Wide { op, v });
        }
        if let Some(op) = self.saturating(saturating_packed_op).or_else(|| packed_op(name)) {
            return self.packed(op);
        }
        self.special_vector()
    }

    /// What `find` knows for an integer instruction with `clamp`, which is then done with.
    fn saturating<T>(&mut self, find: fn(&str) -> Option<T>) -> Option<T> {
        let found = find(self.name).filter(|_| self.parsed.has("clamp"));
        if found.is_some() {
            self.parsed.flag("clamp");
        }
        found
    }

    fn special_vector(&mut self) -> Result<Kind, String> {
        match self.name {
            "v_cndmask_b32" => {
                let mask = if self.suffix == "_e64" || self.suffix == "_e64_dpp" || self.parsed.operands.len() == 4 {
                    let Some(regs) = self.operand(3)?.regs().filter(|regs| regs.count == 2 && !regs.is_vector()) else {
                        return Err("mask is no register pair".into());
                    };
                    self.parsed.operands.truncate(3);
                    regs
                } else {
                    VCC_PAIR
                };
                self.reads.push(mask);
                let v = self.common(Ty::F32, &[Ty::F32, Ty::F32], 1)?;
                Ok(Kind::Select { v, mask: mask.first })
            }
            "v_add_co_u32" => self.carry(CarryOp::Add, false),
            "v_sub_co_u32" => self.carry(CarryOp::Sub, false),
            "v_subrev_co_u32" => self.carry(CarryOp::SubRev, false),
            "v_addc_co_u32" => self.carry(CarryOp::Add, true),
            "v_subb_co_u32" => self.carry(CarryOp::Sub, true),
            "v_subbrev_co_u32" => self.carry(CarryOp::SubRev, true),
            "v_mad_u64_u32" | "v_mad_i64_i32" => {
                let out = self.sdst(1)?;
                let signed = self.name == "v_mad_i64_i32";
                let v = self.common(Ty::B64, &[Ty::B32, Ty::B32, Ty::B64], 2)?;
                Ok(Kind::MulAdd64 { v, signed, out })
            }
            "v_div_scale_f32" => {
                let out = self.sdst(1)?;
                Ok(Kind::DivScale { v: self.common(Ty::F32, &[Ty::F32; 3], 2)?, out })
            }
            "v_div_fmas_f32" => {
                self.reads.push(VCC_PAIR);
                Ok(Kind::DivFmas { v: self.common(Ty::F32, &[Ty::F32; 3], 1)? })
            }
            "v_readfirstlane_b32" => Ok(Kind::Lane(LaneOp::ReadFirst { dst: self.write(0, 1)?, row: self.row(1, 1)? })),
            "v_readlane_b32" => Ok(Kind::Lane(LaneOp::Read { dst: self.write(0, 1)?, row: self.row(1, 1)?, lane: self.scalar_src(2, 1)? })),
            "v_writelane_b32" => {
                let (value, lane) = (self.scalar_src(1, 1)?, self.scalar_src(2, 1)?);
                Ok(Kind::Lane(LaneOp::Write { row: self.row_written(0, 1)?, value, lane }))
            }
            "v_swap_b32" => Ok(Kind::Lane(LaneOp::Swap { a: self.row_swapped(0)?, b: self.row_swapped(1)? })),
            "v_permlane32_swap_b32" | "v_permlane16_swap_b32" => {
                let width = if self.name.contains("32_swap") { 32 } else { 16 };
                Ok(Kind::Lane(LaneOp::PermuteSwap { a: self.row_swapped(0)?, b: self.row_swapped(1)?, width }))
            }
            "v_mbcnt_lo_u32_b32" | "v_mbcnt_hi_u32_b32" => {
                let v = self.common(Ty::B32, &[Ty::B32; 2], 1)?;
                let high = self.name.contains("_hi_");
                Ok(Kind::Lane(LaneOp::MaskCount { dst: v.dst, mask: v.inputs[0], base: v.inputs[1], high }))
            }
            "v_bitop3_b32" | "v_bitop3_b16" => {
                let table = self.parsed.int("bitop3")?.unwrap_or(0) as u32;
                let ty = if self.name == "v_bitop3_b16" { Ty::B16 } else { Ty::B32 };
                let v = self.common(ty, &[ty; 3], 1)?;
                if ty == Ty::B16 {
                    self.reads.push(Regs::new(VGPR + v.dst, 1));
                }
                Ok(Kind::Bit3 { v, table })
            }
            "v_fma_mix_f32" | "v_fma_mixlo_f16" | "v_fma_mixhi_f16" => {
                let sel = self.parsed.bits("op_sel")?.unwrap_or(0);
                let half = self.parsed.bits("op_sel_hi")?.unwrap_or(0);
                let v = self.common(Ty::F32, &[Ty::F32; 3], 1)?;
                let constant = v
                    .inputs
                    .iter()
                    .enumerate()
                    .any(|(i, input)| half >> i & 1 == 1 && matches!(input.src, VectorSrc::Scalar(ScalarSrc::Const(c)) if c != 0));
                if constant {
                    return Err("constant as a half".into());
                }
                let dst_half = match self.name {
                    "v_fma_mixlo_f16" => Some(false),
                    "v_fma_mixhi_f16" => Some(true),
                    _ => None,
                };
                Ok(Kind::FmaMix { v, sel, half, dst_half })
            }
            "v_pk_mov_b32" => {
                // `op_sel` alone selects: a half of the first source for the low result, of the second for the high one.
                let sel = self.parsed.bits("op_sel")?.unwrap_or(0);
                self.parsed.take("op_sel_hi");
                let v = self.common(Ty::B64, &[Ty::B64; 2], 1)?;
                Ok(Kind::PackedMove { v, sel })
            }
            name if name.starts_with("v_cvt_scalef32_pk_") => self.scaled_conversion(),
            _ => Err("unknown instruction".into()),
        }
    }

    /// `v_cvt_scalef32_pk_TO_FROM`, one of the two an 8- or 4-bit format.
    fn scaled_conversion(&mut self) -> Result<Kind, String> {
        let types = self.name.trim_start_matches("v_cvt_scalef32_pk_").split_once('_');
        let (to, from) = types.ok_or("unknown conversion")?;
        let wide = |name: &str| match name {
            "f32" => Some(Wide::F32),
            "f16" => Some(Wide::F16),
            "bf16" => Some(Wide::Bf16),
            _ => None,
        };
        let mini = |name: &str| match name {
            "fp8" => Some(self.arch.fp8().fp8()),
            "bf8" => Some(self.arch.fp8().bf8()),
            "fp4" => Some(MiniFloat::E2m1),
            _ => None,
        };
        // The printed list's length varies with the operands: the encoding has op_sel at one place.
        self.parsed.take("op_sel");
        let op_sel = self.line.words[0] >> 11 & 15;
        match (wide(from), mini(to), mini(from), wide(to)) {
            (Some(from), Some(to), _, _) => {
                let types: &[Ty] = if from == Wide::F32 { &[Ty::F32, Ty::F32, Ty::B32] } else { &[Ty::B32; 2] };
                let v = self.common(Ty::B32, types, 1)?;
                self.reads.push(Regs::new(VGPR + v.dst, 1));
                let part = if to == MiniFloat::E2m1 { op_sel >> 2 } else { op_sel >> 3 };
                Ok(Kind::ScaledTo { v, from, to, part })
            }
            (_, _, Some(from), Some(to)) => {
                let v = self.common(if to == Wide::F32 { Ty::B64 } else { Ty::B32 }, &[Ty::B32; 2], 1)?;
                Ok(Kind::ScaledFrom { v, from, to, part: if from == MiniFloat::E2m1 { op_sel & 3 } else { op_sel & 1 } })
            }
            _ => Err("unknown conversion".into()),
        }
    }

    /// Destination, sources from operand `first` on, and the modifiers.
    pub(super) fn common(&mut self, dst: Ty, src: &[Ty], first: usize) -> Result<Vector, String> {
        self.expect_operands(first + src.len())?;
        let mut inputs = [NO_INPUT; 3];
        for (i, &ty) in src.iter().enumerate() {
            inputs[i] = self.input(first + i, ty)?;
        }
        let registers = self.operand(0)?.regs().ok_or("destination is no register")?;
        if !registers.is_vector() || registers.count != dst.registers() {
            return Err("destination has the wrong size".into());
        }
        self.writes.push(registers);
        let clamp = self.parsed.flag("clamp");
        let omod = match (self.parsed.int("mul")?, self.parsed.int("div")?) {
            (None, None) => 1.0,
            (Some(2), None) => 2.0,
            (Some(4), None) => 4.0,
            (None, Some(2)) => 0.5,
            _ => return Err("output modifier".into()),
        };
        if (clamp || omod != 1.0) && dst != Ty::F32 {
            return Err("clamp or output modifier on this type".into());
        }
        let halves = dst.is_half() || src.iter().any(|ty| ty.is_half());
        let op_sel = match self.parsed.list("op_sel")? {
            None => 0,
            Some(_) if !halves => return Err("op_sel on this type".into()),
            // The destination's bit comes last, whatever the number of sources.
            Some(bits) => bits.iter().enumerate().fold(0, |mask, (i, &bit)| {
                let at = if i == src.len() { 3 } else { i };
                mask | u32::from(bit != 0) << at
            }),
        };
        let dpp = self.dpp()?;
        let sdwa = self.sdwa(first)?;
        // A partial write keeps what it does not write.
        if op_sel & 8 != 0 || sdwa.is_some_and(|s| s.unused == Unused::Preserve) {
            self.reads.push(registers);
        }
        Ok(Vector { dst: registers.vector() as u16, inputs, clamp, omod, op_sel, dpp, sdwa })
    }

    fn input(&mut self, i: usize, ty: Ty) -> Result<Input, String> {
        let operand = self.operand(i)?.clone();
        if (operand.neg || operand.abs) && !ty.is_float() {
            return Err(format!("sign modifier on operand {i}"));
        }
        let src = self.vector_src(&operand, i, ty)?;
        Ok(Input { src, ty, neg: operand.neg, abs: operand.abs })
    }

    fn vector_src(&mut self, operand: &Operand, i: usize, ty: Ty) -> Result<VectorSrc, String> {
        Ok(match &operand.place {
            Place::Regs(regs) if regs.count == ty.registers() => {
                self.reads.push(*regs);
                if regs.is_vector() { VectorSrc::Row(regs.vector() as u16) } else { VectorSrc::Scalar(ScalarSrc::Reg(regs.first)) }
            }
            Place::Imm(imm) => VectorSrc::Scalar(ScalarSrc::Const(typed_constant(*imm, ty))),
            Place::Other(text) => VectorSrc::Scalar(special(text).ok_or_else(|| format!("operand {text}"))?),
            _ => return Err(format!("operand {i} has the wrong size")),
        })
    }

    /// A vector register that is read.
    pub(super) fn row(&mut self, i: usize, count: u16) -> Result<u16, String> {
        self.read(i, count)?.checked_sub(VGPR).ok_or_else(|| format!("operand {i} is no vector register"))
    }

    pub(super) fn row_written(&mut self, i: usize, count: u16) -> Result<u16, String> {
        self.write(i, count)?.checked_sub(VGPR).ok_or_else(|| format!("operand {i} is no vector register"))
    }

    fn row_swapped(&mut self, i: usize) -> Result<u16, String> {
        self.row(i, 1)?;
        self.row_written(i, 1)
    }

    /// A scalar destination pair.
    fn sdst(&mut self, i: usize) -> Result<u16, String> {
        self.write(i, 2)
    }

    fn compare(&mut self, name: &str, exec: bool) -> Result<Kind, String> {
        let dst = self.sdst(0)?;
        if exec {
            self.writes.push(EXEC_PAIR);
        }
        let class = matches!(name, "v_cmp_class_f32");
        let (ty, f) = match compare_op(name) {
            Some(found) => found,
            None if class => (Ty::F32, (|_, _| 0) as crate::exec::lanes::CompareFn),
            None => return Err("unknown comparison".into()),
        };
        self.expect_operands(3)?;
        let mut inputs = [NO_INPUT; 3];
        inputs[0] = self.input(1, ty)?;
        inputs[1] = self.input(2, if class { Ty::B32 } else { ty })?;
        let (dpp, sdwa) = (self.dpp()?, self.sdwa(1)?);
        if dpp.is_some() {
            return Err("DPP on a comparison".into());
        }
        let v = Vector { dst: 0, inputs, clamp: false, omod: 1.0, op_sel: 0, dpp, sdwa };
        if class && exec {
            return Err("v_cmpx_class".into());
        }
        Ok(if class { Kind::CompareClass { v, dst } } else { Kind::Compare { f, v, dst, exec } })
    }

    fn carry(&mut self, op: CarryOp, with_carry: bool) -> Result<Kind, String> {
        let out = self.sdst(1)?;
        let carry = if with_carry { Some(self.read(4, 2)?) } else { None };
        if with_carry {
            self.parsed.operands.truncate(4);
        }
        let v = self.common(Ty::B32, &[Ty::B32; 2], 2)?;
        if v.dpp.is_some() {
            return Err("DPP on carry arithmetic".into());
        }
        Ok(Kind::Carry { op, v, out, carry })
    }

    fn packed(&mut self, op: PackedOp) -> Result<Kind, String> {
        let (arity, ty) = match op {
            PackedOp::Half { arity, .. } => (arity, Ty::B32),
            PackedOp::Single(f) => (f.arity(), Ty::B64),
        };
        let all = (1 << arity) - 1;
        let sel_lo = self.parsed.bits("op_sel")?.unwrap_or(0);
        let sel_hi = self.parsed.bits("op_sel_hi")?.unwrap_or(all);
        let neg_lo = self.parsed.bits("neg_lo")?.unwrap_or(0);
        let neg_hi = self.parsed.bits("neg_hi")?.unwrap_or(0);
        for i in 1..=arity {
            let operand = self.operand(i)?;
            if operand.neg || operand.abs {
                return Err(format!("sign modifier on operand {i}"));
            }
            let zero = matches!(operand.place, Place::Imm(Imm::Int(0)));
            // Integer instructions take an integer constant as 32 bits, as LLVM has it.
            let whole = matches!((op, &operand.place), (PackedOp::Half { float: false, .. }, Place::Imm(Imm::Int(_))));
            let bit = 1 << (i - 1);
            // A constant's upper half is not the same on all chips: accept only uses that do not look at it.
            if matches!(operand.place, Place::Imm(_)) && !zero && !whole && (sel_hi & bit != 0 || sel_lo & bit != 0) {
                return Err(format!("upper half of constant operand {i}"));
            }
        }
        self.packed_constants(op)?;
        let v = self.common(ty, &[ty; 3][..arity], 1)?;
        Ok(Kind::Packed { op, v, sel_lo, sel_hi, neg_lo, neg_hi })
    }

    /// Inline floating-point constants of packed instructions take the element's format.
    fn packed_constants(&mut self, op: PackedOp) -> Result<(), String> {
        for operand in self.parsed.operands.iter_mut().skip(1) {
            let Place::Imm(imm) = operand.place else { continue };
            let ty = match op {
                PackedOp::Half { float: true, .. } => Ty::F16,
                PackedOp::Half { .. } => Ty::B32,
                PackedOp::Single(_) => Ty::F32,
            };
            operand.place = Place::Imm(Imm::Literal(typed_constant(imm, ty) as u32));
        }
        Ok(())
    }

    fn mfma(&mut self) -> Result<Kind, String> {
        let scaled = self.name.starts_with("v_mfma_scale_");
        let op = MfmaOp::from_mnemonic(self.name).ok_or("unknown MFMA")?;
        let mut modifier = |name: &str| -> Result<u32, String> { Ok(self.parsed.int(name)?.unwrap_or(0) as u32) };
        let (cbsz, abid, blgp) = (modifier("cbsz")?, modifier("abid")?, modifier("blgp")?);
        self.expect_operands(if scaled { 6 } else { 4 })?;
        let vector = |operand: &Operand| operand.regs().filter(|regs| regs.is_vector()).ok_or("MFMA operand is no vector register");
        let dst = vector(self.operand(0)?)?;
        let a = vector(self.operand(1)?)?;
        let b = vector(self.operand(2)?)?;
        let c = match &self.operand(3)?.place {
            Place::Imm(imm) => Err(constant32(*imm)),
            Place::Regs(regs) if regs.is_vector() => Ok(*regs),
            other => return Err(format!("addend {other:?}")),
        };
        let fp8 = self.arch.fp8();
        let scales_given = scaled.then(|| [Scale::constant(0), Scale::constant(0)]);
        let modifiers = Modifiers { cbsz, abid, blgp, scales: scales_given, ..Modifiers::none(fp8) };
        op.check(&modifiers).map_err(|e| e.0)?;
        let wanted = [op.c_registers(), op.a_registers(&modifiers).map_err(|e| e.0)?, op.b_registers(&modifiers).map_err(|e| e.0)?];
        if [dst, a, b].map(|regs| usize::from(regs.count)) != wanted || c.is_ok_and(|c| usize::from(c.count) != wanted[0]) {
            return Err("MFMA register counts".into());
        }
        self.reads.extend([a, b]);
        self.reads.extend(c.ok());
        self.writes.push(dst);
        let scales = if scaled {
            let low = self.parsed.bits("op_sel")?.unwrap_or(0);
            let high = self.parsed.bits("op_sel_hi")?.unwrap_or(0);
            let byte = |i: u32| (low >> i & 1) | (high >> i & 1) << 1;
            let (x, y) = (self.operand(4)?.clone(), self.operand(5)?.clone());
            Some([(self.vector_src(&x, 4, Ty::B32)?, byte(0)), (self.vector_src(&y, 5, Ty::B32)?, byte(1))])
        } else {
            None
        };
        Ok(Kind::Mfma(Box::new(Mfma { op, dst, a, b, c, cbsz, abid, blgp, scales })))
    }

    fn dpp(&mut self) -> Result<Option<Box<Dpp>>, String> {
        if !self.suffix.ends_with("_dpp") {
            return Ok(None);
        }
        let map = self.dpp_map()?;
        let rows = self.parsed.int("row_mask")?.unwrap_or(15);
        let banks = self.parsed.int("bank_mask")?.unwrap_or(15);
        // Printed as 1 by newer and 0 by older tools; present means set.
        let bound_zero = self.parsed.flag("bound_ctrl");
        let enabled =
            (0..64).filter(|lane| rows >> (lane / 16) & 1 == 1 && banks >> (lane % 16 / 4) & 1 == 1).fold(0, |mask, lane| mask | 1 << lane);
        // Lanes that stay unchanged keep the destination's value, but a pending load into it is still a hazard by the write.
        Ok(Some(Box::new(Dpp { map, enabled, bound_zero })))
    }

    fn dpp_map(&mut self) -> Result<[u8; 64], String> {
        let in_row = |f: &dyn Fn(i64) -> i64| {
            std::array::from_fn(|lane| {
                let source = f(lane as i64 % 16);
                if (0..16).contains(&source) { (lane as i64 / 16 * 16 + source) as u8 } else { 255 }
            })
        };
        let in_wave = |f: &dyn Fn(i64) -> i64| {
            std::array::from_fn(|lane| {
                let source = f(lane as i64);
                if (0..64).contains(&source) { source as u8 } else { 255 }
            })
        };
        if let Some(perm) = self.parsed.list("quad_perm")? {
            if perm.len() != 4 || perm.iter().any(|p| !(0..4).contains(p)) {
                return Err("quad_perm".into());
            }
            return Ok(in_row(&|i| i / 4 * 4 + perm[(i % 4) as usize]));
        }
        if let Some(n) = self.parsed.int("row_shl")? {
            return Ok(in_row(&|i| i + n));
        }
        if let Some(n) = self.parsed.int("row_shr")? {
            return Ok(in_row(&|i| i - n));
        }
        if let Some(n) = self.parsed.int("row_ror")? {
            return Ok(in_row(&|i| (i - n).rem_euclid(16)));
        }
        if let Some(n) = self.parsed.int("row_newbcast")? {
            return Ok(in_row(&|_| n));
        }
        if self.parsed.flag("row_mirror") {
            return Ok(in_row(&|i| 15 - i));
        }
        if self.parsed.flag("row_half_mirror") {
            return Ok(in_row(&|i| i / 8 * 8 + 7 - i % 8));
        }
        match self.parsed.int("row_bcast")? {
            // Lane 15 of each row goes to the whole next row.
            Some(15) => return Ok(in_wave(&|i| i / 16 * 16 - 1)),
            // Lane 31 goes to rows 2 and 3.
            Some(31) => return Ok(in_wave(&|i| if i >= 32 { 31 } else { -1 })),
            Some(n) => return Err(format!("row_bcast:{n}")),
            None => {}
        }
        for (name, shift, wrap) in [("wave_shl", 1, false), ("wave_shr", -1, false), ("wave_rol", 1, true), ("wave_ror", -1, true)] {
            if self.parsed.int(name)? == Some(1) {
                return Ok(in_wave(&|i| if wrap { (i + shift).rem_euclid(64) } else { i + shift }));
            }
        }
        Err("DPP control".into())
    }

    /// Selections of the sources, which are operands `source` on, and of the destination.
    fn sdwa(&mut self, source: usize) -> Result<Option<Sdwa>, String> {
        if self.suffix != "_sdwa" {
            return Ok(None);
        }
        let dst = self.select("dst_sel", false)?;
        let unused = match self.parsed.take("dst_unused").as_deref() {
            None | Some("UNUSED_PAD") => Unused::Zero,
            Some("UNUSED_SEXT") => Unused::SignExtend,
            Some("UNUSED_PRESERVE") => Unused::Preserve,
            Some(other) => return Err(format!("dst_unused:{other}")),
        };
        let sext = |i: usize| self.parsed.operands.get(source + i).is_some_and(|o| o.sext);
        let (first, second) = (sext(0), sext(1));
        let src = [self.select("src0_sel", first)?, self.select("src1_sel", second)?];
        Ok(Some(Sdwa { dst, unused, src }))
    }

    fn select(&mut self, name: &str, sext: bool) -> Result<Select, String> {
        let (shift, bits) = match self.parsed.take(name).as_deref() {
            None | Some("DWORD") => (0, 32),
            Some("WORD_0") => (0, 16),
            Some("WORD_1") => (16, 16),
            Some("BYTE_0") => (0, 8),
            Some("BYTE_1") => (8, 8),
            Some("BYTE_2") => (16, 8),
            Some("BYTE_3") => (24, 8),
            Some(other) => return Err(format!("{name}:{other}")),
        };
        Ok(Select { shift, bits, sext })
    }
}

/// A constant's bits for an operand type.
fn typed_constant(imm: Imm, ty: Ty) -> u64 {
    match (ty, imm) {
        (Ty::B64, _) => constant64(imm),
        // A literal is the upper half of a double.
        (Ty::F64, Imm::Literal(bits)) => u64::from(bits) << 32,
        (Ty::F64, _) => constant64(imm),
        (Ty::F16 | Ty::B16, Imm::Float(value)) => half::f16::from_f64(value).to_bits().into(),
        (Ty::F16 | Ty::B16, Imm::InvTwoPi) => 0x3118,
        (Ty::F16 | Ty::B16, _) => u64::from(constant32(imm) & 0xffff),
        _ => constant32(imm).into(),
    }
}
