//! LDS and vector memory instructions.

use super::{Decoded, Decoder, EXEC_PAIR, M0_ONE};
use crate::elf::Arch;
use crate::operand::{Place, Regs, VGPR};
use crate::program::{Addressing, AtomicOp, Class, Convert, Ds, DsOp, Kind, Mem, MemOp, ScalarSrc, Swizzle};

impl Decoder<'_> {
    pub(super) fn lds(&mut self) -> Result<Kind, String> {
        self.reads.push(EXEC_PAIR);
        let name = self.name.trim_start_matches("ds_");
        if self.parsed.flag("gds") {
            return Err("gds".into());
        }
        if let Some(rest) = name.strip_prefix("read2") {
            return self.lds_pair(rest, true);
        }
        if let Some(rest) = name.strip_prefix("write2") {
            return self.lds_pair(rest, false);
        }
        if name == "swizzle_b32" {
            let op = DsOp::Swizzle(self.swizzle()?);
            return self.lds_cross(op);
        }
        let offset = self.parsed.int("offset")?.unwrap_or(0) as u32;
        let offsets = [offset, 0];
        match name {
            "bpermute_b32" => return self.lds_cross_at(DsOp::BPermute, offset),
            "permute_b32" => return self.lds_cross_at(DsOp::Permute, offset),
            _ => {}
        }
        if let Some(rest) = name.strip_prefix("read_") {
            if let Some(bits) = rest.split_once("_tr_b").map(|(_, bits)| bits) {
                let bits = bits.parse::<u16>().map_err(|e| e.to_string())?;
                if self.arch != Arch::Gfx950 || !rest.starts_with("b64") || !matches!(bits, 4 | 8 | 16) {
                    return Err("transposing read".into());
                }
                let (dst, addr) = (self.row_written(0, 2)?, self.row(1, 1)?);
                return Ok(Kind::Ds(Ds { op: DsOp::ReadTransposed { bits }, addr, dst: Some(dst), data: [0; 2], offsets }));
            }
            let (bytes, convert) = load_shape(rest).ok_or("unknown LDS read")?;
            let count = bytes.div_ceil(4);
            let (dst, addr) = (self.row_written(0, count)?, self.row(1, 1)?);
            self.keep_half(convert, dst);
            return Ok(Kind::Ds(Ds { op: DsOp::Read { bytes, parts: 1, convert }, addr, dst: Some(dst), data: [0; 2], offsets }));
        }
        if let Some(rest) = name.strip_prefix("write_") {
            let (bytes, high) = store_shape(rest).ok_or("unknown LDS write")?;
            let (addr, data) = (self.row(0, 1)?, self.row(1, bytes.div_ceil(4))?);
            return Ok(Kind::Ds(Ds { op: DsOp::Write { bytes, parts: 1, high }, addr, dst: None, data: [data, 0], offsets }));
        }
        self.lds_atomic(name, offsets)
    }

    fn lds_atomic(&mut self, name: &str, offsets: [u32; 2]) -> Result<Kind, String> {
        let returns = name.contains("_rtn");
        let (op, bytes) = match name.replace("_rtn", "").as_str() {
            "add_u32" => (AtomicOp::Add, 4),
            "sub_u32" => (AtomicOp::Sub, 4),
            "min_i32" => (AtomicOp::MinI, 4),
            "max_i32" => (AtomicOp::MaxI, 4),
            "min_u32" => (AtomicOp::MinU, 4),
            "max_u32" => (AtomicOp::MaxU, 4),
            "and_b32" => (AtomicOp::And, 4),
            "or_b32" => (AtomicOp::Or, 4),
            "xor_b32" => (AtomicOp::Xor, 4),
            "wrxchg_b32" => (AtomicOp::Swap, 4),
            "add_f32" => (AtomicOp::AddF32, 4),
            "add_u64" => (AtomicOp::Add, 8),
            _ => return Err("unknown LDS instruction".into()),
        };
        let shift = usize::from(returns);
        let dst = if returns { Some(self.row_written(0, bytes / 4)?) } else { None };
        let (addr, data) = (self.row(shift, 1)?, self.row(shift + 1, bytes / 4)?);
        Ok(Kind::Ds(Ds { op: DsOp::Atomic { op, bytes }, addr, dst, data: [data, 0], offsets }))
    }

    fn lds_pair(&mut self, rest: &str, read: bool) -> Result<Kind, String> {
        let strided = rest.starts_with("st64");
        let bytes: u16 = match rest.trim_start_matches("st64") {
            "_b32" => 4,
            "_b64" => 8,
            _ => return Err("unknown LDS pair".into()),
        };
        let unit = u32::from(bytes) * if strided { 64 } else { 1 };
        let mut offset = |name: &str| -> Result<u32, String> { Ok(self.parsed.int(name)?.unwrap_or(0) as u32 * unit) };
        let offsets = [offset("offset0")?, offset("offset1")?];
        let count = bytes / 4;
        Ok(Kind::Ds(if read {
            let (dst, addr) = (self.row_written(0, 2 * count)?, self.row(1, 1)?);
            Ds { op: DsOp::Read { bytes, parts: 2, convert: Convert::Dwords }, addr, dst: Some(dst), data: [0; 2], offsets }
        } else {
            let (addr, data) = (self.row(0, 1)?, [self.row(1, count)?, self.row(2, count)?]);
            Ds { op: DsOp::Write { bytes, parts: 2, high: false }, addr, dst: None, data, offsets }
        }))
    }

    fn lds_cross_at(&mut self, op: DsOp, offset: u32) -> Result<Kind, String> {
        self.expect_operands(3)?;
        let (dst, addr, data) = (self.row_written(0, 1)?, self.row(1, 1)?, self.row(2, 1)?);
        Ok(Kind::Ds(Ds { op, addr, dst: Some(dst), data: [data, 0], offsets: [offset, 0] }))
    }

    fn lds_cross(&mut self, op: DsOp) -> Result<Kind, String> {
        self.expect_operands(2)?;
        let (dst, data) = (self.row_written(0, 1)?, self.row(1, 1)?);
        Ok(Kind::Ds(Ds { op, addr: data, dst: Some(dst), data: [data, 0], offsets: [0; 2] }))
    }

    /// The pattern comes from the encoding: the text has many spellings of it.
    fn swizzle(&mut self) -> Result<Swizzle, String> {
        self.parsed.take("offset");
        let bits = self.line.words[0] & 0xffff;
        if bits >> 15 == 1 {
            if bits >= 0xc000 {
                return Err("swizzle mode".into());
            }
            return Ok(Swizzle::Quad(std::array::from_fn(|i| (bits >> (2 * i) & 3) as u8)));
        }
        Ok(Swizzle::Mask { and: (bits & 31) as u8, or: (bits >> 5 & 31) as u8, xor: (bits >> 10 & 31) as u8 })
    }

    /// Half loads keep the other half, so they read their destination.
    fn keep_half(&mut self, convert: Convert, row: u16) {
        if matches!(convert, Convert::HalfZero { .. } | Convert::HalfSign { .. }) {
            self.reads.push(Regs::new(VGPR + row, 1));
        }
    }

    pub(super) fn vector_memory(&mut self) -> Decoded {
        let (space, rest) = self.name.split_once('_').ok_or("unknown instruction")?;
        // Cache and write-back control changes no result on a coherent machine.
        if matches!(rest, "wbl2" | "inv" | "wbinvl1" | "wbinvl1_vol") && space == "buffer" {
            ["sc0", "sc1", "nt"].iter().for_each(|flag| {
                self.parsed.flag(flag);
            });
            return Ok((Kind::Nop, Class::Other));
        }
        self.reads.push(EXEC_PAIR);
        let sc0 = self.parsed.flag("sc0");
        self.parsed.flag("sc1");
        let nontemporal = self.parsed.flag("nt");
        let lds = self.parsed.flag("lds");
        let op = self.memory_op(rest, lds, sc0)?;
        let mut next = 0;
        let mut mem = Mem {
            op,
            addressing: Addressing::Scratch { row: None, scalar: None },
            data: 0,
            dst: 0,
            offset: 0,
            nontemporal,
            flat: space == "flat",
        };
        match op {
            MemOp::Load { bytes, convert } => {
                mem.dst = self.row_written(0, bytes.div_ceil(4))?;
                self.keep_half(convert, mem.dst);
                next = 1;
            }
            MemOp::LoadToLds { .. } => self.reads.push(M0_ONE),
            MemOp::Store { .. } | MemOp::Atomic { .. } => {}
        }
        let data_first = space == "buffer";
        if data_first && !matches!(op, MemOp::Load { .. } | MemOp::LoadToLds { .. }) {
            self.memory_data(&mut mem, 0)?;
            next = 1;
        } else if matches!(op, MemOp::Atomic { returns: true, .. }) {
            next = 1;
        }
        self.addressing(space, &mut mem, next)?;
        if !data_first && matches!(op, MemOp::Store { .. } | MemOp::Atomic { .. }) {
            self.memory_tail(&mut mem)?;
        }
        mem.offset = self.parsed.int("offset")?.unwrap_or(0) as i32;
        Ok((Kind::Mem(mem), Class::VectorMemory))
    }

    fn memory_op(&mut self, rest: &str, lds: bool, sc0: bool) -> Result<MemOp, String> {
        if let Some(shape) = rest.strip_prefix("load_lds_") {
            let (bytes, convert) = load_shape(shape).ok_or("unknown load to LDS")?;
            return if convert == Convert::Dwords { Ok(MemOp::LoadToLds { bytes }) } else { Err("sub-dword load to LDS".into()) };
        }
        if let Some(shape) = rest.strip_prefix("load_") {
            let (bytes, convert) = load_shape(shape).ok_or("unknown load")?;
            return match (lds, convert) {
                (false, _) => Ok(MemOp::Load { bytes, convert }),
                (true, Convert::Dwords) => Ok(MemOp::LoadToLds { bytes }),
                _ => Err("sub-dword load to LDS".into()),
            };
        }
        if lds {
            return Err("lds on this instruction".into());
        }
        if let Some(shape) = rest.strip_prefix("store_") {
            let (bytes, high) = store_shape(shape).ok_or("unknown store")?;
            return Ok(MemOp::Store { bytes, high });
        }
        let atomic = rest.strip_prefix("atomic_").ok_or("unknown instruction")?;
        let (name, bytes) = match atomic.strip_suffix("_x2") {
            Some(name) => (name, 8),
            None => (atomic, 4),
        };
        let op = match name {
            "add" => AtomicOp::Add,
            "sub" => AtomicOp::Sub,
            "smin" => AtomicOp::MinI,
            "smax" => AtomicOp::MaxI,
            "umin" => AtomicOp::MinU,
            "umax" => AtomicOp::MaxU,
            "and" => AtomicOp::And,
            "or" => AtomicOp::Or,
            "xor" => AtomicOp::Xor,
            "swap" => AtomicOp::Swap,
            "cmpswap" => AtomicOp::CmpSwap,
            "inc" => AtomicOp::Inc,
            "dec" => AtomicOp::Dec,
            "add_f32" => AtomicOp::AddF32,
            "pk_add_f16" => AtomicOp::AddPkF16,
            "pk_add_bf16" => AtomicOp::AddPkBf16,
            "add_f64" => return Ok(MemOp::Atomic { op: AtomicOp::AddF64, bytes: 8, returns: sc0 }),
            _ => return Err("unknown atomic".into()),
        };
        Ok(MemOp::Atomic { op, bytes, returns: sc0 })
    }

    /// Data of a store or atomic at operand `i`.
    fn memory_data(&mut self, mem: &mut Mem, i: usize) -> Result<(), String> {
        match mem.op {
            MemOp::Store { bytes, .. } => mem.data = self.row(i, bytes.div_ceil(4))?,
            MemOp::Atomic { op, bytes, returns } => {
                let count = bytes / 4 * if op == AtomicOp::CmpSwap { 2 } else { 1 };
                mem.data = self.row(i, count)?;
                if returns && self.name.starts_with("buffer") {
                    mem.dst = mem.data;
                    self.writes.push(Regs::new(VGPR + mem.dst, bytes / 4));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Stores and atomics in the global, flat and scratch spaces: `[dst,] address, data[, base]`.
    fn memory_tail(&mut self, mem: &mut Mem) -> Result<(), String> {
        let shift = match mem.op {
            MemOp::Atomic { returns: true, bytes, .. } => {
                mem.dst = self.row_written(0, bytes / 4)?;
                1
            }
            _ => 0,
        };
        self.memory_data(mem, shift + 1)
    }

    /// Address operands from `first` on.
    fn addressing(&mut self, space: &str, mem: &mut Mem, first: usize) -> Result<(), String> {
        // In stores and atomics the data stands between the address and the base.
        let gap = usize::from(matches!(mem.op, MemOp::Store { .. } | MemOp::Atomic { .. }));
        mem.addressing = match space {
            "global" | "flat" => {
                let base = self.parsed.operands.get(first + 1 + gap).map(|operand| operand.place.clone());
                match base {
                    None | Some(Place::Off) => Addressing::Lanes { row: self.row(first, 2)? },
                    Some(Place::Regs(_)) => {
                        let base = self.read(first + 1 + gap, 2)?;
                        let row = if self.operand(first)?.place == Place::Off { None } else { Some(self.row(first, 1)?) };
                        Addressing::Scalar { base, row }
                    }
                    Some(other) => return Err(format!("address {other:?}")),
                }
            }
            "scratch" => {
                let row = if self.operand(first)?.place == Place::Off { None } else { Some(self.row(first, 1)?) };
                let at = first + 1 + gap;
                let scalar = match self.operand(at)?.place {
                    Place::Off => None,
                    _ => Some(self.scalar_src(at, 1)?),
                };
                Addressing::Scratch { row, scalar }
            }
            _ => return self.buffer(mem, first),
        };
        Ok(())
    }

    fn buffer(&mut self, mem: &mut Mem, first: usize) -> Result<(), String> {
        let (offen, idxen) = (self.parsed.flag("offen"), self.parsed.flag("idxen"));
        let (index, offset) = match (idxen, offen) {
            (false, false) => {
                if self.operand(first)?.place != Place::Off {
                    return Err("address of a buffer without one".into());
                }
                (None, None)
            }
            (true, true) => {
                let row = self.row(first, 2)?;
                (Some(row), Some(row + 1))
            }
            (true, false) => (Some(self.row(first, 1)?), None),
            (false, true) => (None, Some(self.row(first, 1)?)),
        };
        let descriptor = self.read(first + 1, 4)?;
        let scalar: ScalarSrc = self.scalar_src(first + 2, 1)?;
        mem.addressing = Addressing::Buffer { descriptor, scalar, index, offset };
        Ok(())
    }
}

/// Bytes and conversion of a load by the end of its mnemonic.
fn load_shape(name: &str) -> Option<(u16, Convert)> {
    let dwords = |count: u16| Some((4 * count, Convert::Dwords));
    match name {
        "dword" | "b32" => dwords(1),
        "dwordx2" | "b64" => dwords(2),
        "dwordx3" | "b96" => dwords(3),
        "dwordx4" | "b128" => dwords(4),
        "ubyte" | "u8" => Some((1, Convert::Zero)),
        "sbyte" | "i8" => Some((1, Convert::Sign)),
        "ushort" | "u16" => Some((2, Convert::Zero)),
        "sshort" | "i16" => Some((2, Convert::Sign)),
        "ubyte_d16" | "u8_d16" => Some((1, Convert::HalfZero { high: false })),
        "ubyte_d16_hi" | "u8_d16_hi" => Some((1, Convert::HalfZero { high: true })),
        "sbyte_d16" | "i8_d16" => Some((1, Convert::HalfSign { high: false })),
        "sbyte_d16_hi" | "i8_d16_hi" => Some((1, Convert::HalfSign { high: true })),
        "short_d16" | "u16_d16" => Some((2, Convert::HalfZero { high: false })),
        "short_d16_hi" | "u16_d16_hi" => Some((2, Convert::HalfZero { high: true })),
        _ => None,
    }
}

/// Bytes of a store, and whether they come from the upper half.
fn store_shape(name: &str) -> Option<(u16, bool)> {
    match name {
        "dword" | "b32" => Some((4, false)),
        "dwordx2" | "b64" => Some((8, false)),
        "dwordx3" | "b96" => Some((12, false)),
        "dwordx4" | "b128" => Some((16, false)),
        "byte" | "b8" => Some((1, false)),
        "short" | "b16" => Some((2, false)),
        "byte_d16_hi" | "b8_d16_hi" => Some((1, true)),
        "short_d16_hi" | "b16_d16_hi" => Some((2, true)),
        _ => None,
    }
}
