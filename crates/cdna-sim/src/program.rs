//! The decoded program: instructions in a form that executes quickly.

use crate::elf::Arch;
use crate::error::Result;
use crate::exec::lanes::{CompareFn, PackedOp, RowOp, Ty, WideOp};
use crate::exec::scalar::ScalarOp;
use crate::float::{MiniFloat, Wide};
use crate::mfma::MfmaOp;
use crate::operand::Regs;
use crate::waits::Counter;

/// A scalar source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalarSrc {
    /// A register (or the first of two).
    Reg(u16),
    /// A constant.
    Const(u64),
    /// SCC, VCC == 0, EXEC == 0 as numbers.
    Scc,
    /// See `Scc`.
    VccZ,
    /// See `Scc`.
    ExecZ,
}

/// A vector source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VectorSrc {
    /// A row of the vector register file (or the first of two).
    Row(u16),
    /// A scalar, the same in all lanes.
    Scalar(ScalarSrc),
}

/// A vector source with its modifiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Input {
    pub src: VectorSrc,
    pub ty: Ty,
    pub neg: bool,
    pub abs: bool,
}

/// Data-parallel primitives: where each lane's first source comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dpp {
    /// Source lane of each lane, 255 outside the row.
    pub map: [u8; 64],
    /// Lanes that the row and bank masks enable.
    pub enabled: u64,
    /// Lanes without a valid source read 0 instead of staying unchanged.
    pub bound_zero: bool,
}

/// A sub-dword selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Select {
    pub shift: u32,
    pub bits: u32,
    pub sext: bool,
}

/// Sub-dword addressing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sdwa {
    pub dst: Select,
    /// What the rest of the destination gets.
    pub unused: Unused,
    pub src: [Select; 2],
}

/// See [`Sdwa`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unused {
    Zero,
    SignExtend,
    Preserve,
}

/// What vector ALU instructions have in common.
#[derive(Debug, Clone)]
pub struct Vector {
    /// First row of the destination.
    pub dst: u16,
    pub inputs: [Input; 3],
    pub clamp: bool,
    /// Output multiplier, 1 where there is none.
    pub omod: f32,
    /// Half selection of 16-bit operands: sources 0-2, destination 3.
    pub op_sel: u32,
    pub dpp: Option<Box<Dpp>>,
    pub sdwa: Option<Sdwa>,
}

/// Carry arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CarryOp {
    Add,
    Sub,
    SubRev,
}

/// Instructions that cross lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneOp {
    ReadFirst {
        dst: u16,
        row: u16,
    },
    Read {
        dst: u16,
        row: u16,
        lane: ScalarSrc,
    },
    Write {
        row: u16,
        value: ScalarSrc,
        lane: ScalarSrc,
    },
    Swap {
        a: u16,
        b: u16,
    },
    /// Exchanges the upper half of each `2 * width` lanes of `a` with the lower half of `b`'s.
    PermuteSwap {
        a: u16,
        b: u16,
        width: u32,
    },
    MaskCount {
        dst: u16,
        mask: Input,
        base: Input,
        high: bool,
    },
}

/// MFMA operands.
#[derive(Debug, Clone)]
pub struct Mfma {
    pub op: MfmaOp,
    pub dst: Regs,
    pub a: Regs,
    pub b: Regs,
    /// The addend: registers, or a constant's bits.
    pub c: std::result::Result<Regs, u32>,
    pub cbsz: u32,
    pub abid: u32,
    pub blgp: u32,
    /// E8M0 scales of A and B and the byte of each that counts.
    pub scales: Option<[(VectorSrc, u32); 2]>,
}

/// What an LDS instruction does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DsOp {
    /// `parts` accesses of `bytes` each; sub-dword loads extend or fill a half.
    Read {
        bytes: u16,
        parts: u16,
        convert: Convert,
    },
    Write {
        bytes: u16,
        parts: u16,
        high: bool,
    },
    Atomic {
        op: AtomicOp,
        bytes: u16,
    },
    BPermute,
    Permute,
    Swizzle(Swizzle),
    /// Transposing read of elements with this many bits.
    ReadTransposed {
        bits: u16,
    },
}

/// How loaded bytes become a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Convert {
    /// Whole dwords.
    Dwords,
    Zero,
    Sign,
    /// Into the low or high half, keeping the other.
    HalfZero {
        high: bool,
    },
    HalfSign {
        high: bool,
    },
}

/// Read-modify-write operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomicOp {
    Add,
    Sub,
    MinI,
    MaxI,
    MinU,
    MaxU,
    And,
    Or,
    Xor,
    Swap,
    CmpSwap,
    AddF32,
    AddPkF16,
    AddPkBf16,
    AddF64,
    Inc,
    Dec,
}

/// `ds_swizzle_b32` patterns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swizzle {
    Quad([u8; 4]),
    Mask { and: u8, or: u8, xor: u8 },
}

/// An LDS instruction.
#[derive(Debug, Clone, Copy)]
pub struct Ds {
    pub op: DsOp,
    /// Row of the address.
    pub addr: u16,
    /// First row of the destination.
    pub dst: Option<u16>,
    /// First rows of the data.
    pub data: [u16; 2],
    /// Byte offsets of the parts.
    pub offsets: [u32; 2],
}

/// Address of a vector memory instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Addressing {
    /// 64-bit addresses a lane.
    Lanes { row: u16 },
    /// A scalar base and an optional 32-bit offset a lane.
    Scalar { base: u16, row: Option<u16> },
    /// Scratch: optional row, optional scalar.
    Scratch { row: Option<u16>, scalar: Option<ScalarSrc> },
    /// A buffer descriptor.
    Buffer { descriptor: u16, scalar: ScalarSrc, index: Option<u16>, offset: Option<u16> },
}

/// What a vector memory instruction does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemOp {
    Load { bytes: u16, convert: Convert },
    LoadToLds { bytes: u16 },
    Store { bytes: u16, high: bool },
    Atomic { op: AtomicOp, bytes: u16, returns: bool },
}

/// A vector memory instruction.
#[derive(Debug, Clone, Copy)]
pub struct Mem {
    pub op: MemOp,
    pub addressing: Addressing,
    /// First row of the data.
    pub data: u16,
    /// First row of the destination.
    pub dst: u16,
    pub offset: i32,
    pub nontemporal: bool,
    pub flat: bool,
}

/// Branch conditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    Always,
    Scc(bool),
    VccZero(bool),
    ExecZero(bool),
}

/// A decoded instruction's action.
#[derive(Clone)]
pub enum Kind {
    Nop,
    End,
    Barrier,
    Wait {
        vector: usize,
        lgkm: usize,
    },
    Branch {
        condition: Condition,
        target: u64,
    },
    Scalar {
        op: ScalarOp,
        dst: u16,
        src: [ScalarSrc; 2],
    },
    /// Moves only where SCC is set.
    ConditionalMove {
        dst: u16,
        src: ScalarSrc,
        wide: bool,
    },
    SaveExec {
        f: fn(u64, u64) -> u64,
        dst: u16,
        src: ScalarSrc,
    },
    GetPc {
        dst: u16,
    },
    SetPc {
        src: u16,
        link: Option<u16>,
    },
    /// Bit range of MODE.
    SetMode {
        offset: u32,
        width: u32,
        src: ScalarSrc,
    },
    ReadConstant {
        dst: u16,
        value: u32,
    },
    Clock {
        dst: u16,
    },
    ScalarLoad {
        dst: Regs,
        base: u16,
        offset: i64,
        scalar: Option<ScalarSrc>,
        buffer: bool,
    },
    Row {
        op: RowOp,
        v: Vector,
    },
    Wide {
        op: WideOp,
        v: Vector,
    },
    Packed {
        op: PackedOp,
        v: Vector,
        sel_lo: u32,
        sel_hi: u32,
        neg_lo: u32,
        neg_hi: u32,
    },
    PackedMove {
        v: Vector,
        sel: u32,
    },
    FmaMix {
        v: Vector,
        sel: u32,
        half: u32,
        dst_half: Option<bool>,
    },
    Bit3 {
        v: Vector,
        table: u32,
    },
    /// To an 8- or 4-bit format with a scale, into part `part` of the destination.
    ScaledTo {
        v: Vector,
        from: Wide,
        to: MiniFloat,
        part: u32,
    },
    /// From part `part` of the source.
    ScaledFrom {
        v: Vector,
        from: MiniFloat,
        to: Wide,
        part: u32,
    },
    Compare {
        f: CompareFn,
        v: Vector,
        dst: u16,
        exec: bool,
    },
    CompareClass {
        v: Vector,
        dst: u16,
    },
    Select {
        v: Vector,
        mask: u16,
    },
    Carry {
        op: CarryOp,
        v: Vector,
        out: u16,
        carry: Option<u16>,
    },
    MulAdd64 {
        v: Vector,
        signed: bool,
        out: u16,
    },
    DivScale {
        v: Vector,
        out: u16,
    },
    DivFmas {
        v: Vector,
    },
    Lane(LaneOp),
    Mfma(Box<Mfma>),
    Ds(Ds),
    Mem(Mem),
    /// Not known: the run stops here.
    Unsupported(Box<str>),
}

/// Instruction classes that are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Scalar ALU.
    Scalar,
    /// Scalar loads.
    ScalarMemory,
    /// Vector ALU.
    Vector,
    /// Vector ALU at a quarter of the rate: exponentials, logarithms, reciprocals, roots, sines.
    Transcendental,
    /// MFMA.
    Matrix,
    /// LDS, and exchanges through its crossbar.
    Lds,
    /// Global, flat, scratch and buffer accesses.
    VectorMemory,
    /// Branches.
    Branch,
    /// `s_waitcnt`.
    Wait,
    /// `s_barrier`.
    Barrier,
    /// `s_nop`, `s_endpgm` and what does nothing here.
    Other,
}

/// How many classes there are.
pub const CLASSES: usize = Class::Other as usize + 1;

impl Class {
    /// All classes in order.
    pub const ALL: [Class; CLASSES] = [
        Class::Scalar,
        Class::ScalarMemory,
        Class::Vector,
        Class::Transcendental,
        Class::Matrix,
        Class::Lds,
        Class::VectorMemory,
        Class::Branch,
        Class::Wait,
        Class::Barrier,
        Class::Other,
    ];
}

/// A decoded instruction.
#[derive(Clone)]
pub struct Inst {
    /// Address in the code object.
    pub address: u64,
    /// Bytes of its encoding.
    pub size: u64,
    /// Mnemonic and operands as the disassembler prints them.
    pub text: Box<str>,
    pub(crate) kind: Kind,
    /// What it is counted as.
    pub class: Class,
    /// Registers read and written.
    pub(crate) reads: Box<[Regs]>,
    pub(crate) writes: Box<[Regs]>,
}

impl Inst {
    /// The mnemonic, encoding suffix included.
    pub fn mnemonic(&self) -> &str {
        self.text.split_whitespace().next().unwrap_or_default()
    }

    /// Registers read.
    pub fn reads(&self) -> &[Regs] {
        &self.reads
    }

    /// Registers written.
    pub fn writes(&self) -> &[Regs] {
        &self.writes
    }

    /// The operation that `s_waitcnt` later counts, where the instruction issues one.
    pub fn counter(&self) -> Option<Counter> {
        match &self.kind {
            Kind::Mem(mem) if mem.flat => Some(Counter::Flat),
            Kind::Mem(_) => Some(Counter::Vector),
            Kind::Ds(_) => Some(Counter::Lds),
            Kind::ScalarLoad { .. } | Kind::Clock { .. } => Some(Counter::Scalar),
            _ => None,
        }
    }

    /// Most vector memory and most LDS and scalar operations that an `s_waitcnt` leaves in flight; `usize::MAX`: any number.
    pub fn wait(&self) -> Option<(usize, usize)> {
        match self.kind {
            Kind::Wait { vector, lgkm } => Some((vector, lgkm)),
            _ => None,
        }
    }

    /// Bytes that each lane moves in an LDS access (as exchanges through the crossbar do, 4).
    pub fn lds_bytes(&self) -> Option<u32> {
        let Kind::Ds(ds) = &self.kind else { return None };
        Some(match ds.op {
            DsOp::Read { bytes, parts, .. } | DsOp::Write { bytes, parts, .. } => u32::from(bytes) * u32::from(parts),
            DsOp::Atomic { bytes, .. } => bytes.into(),
            DsOp::ReadTransposed { .. } => 8,
            DsOp::BPermute | DsOp::Permute | DsOp::Swizzle(_) => 4,
        })
    }
}

/// A code object's instructions.
pub struct Program {
    /// What it runs on.
    pub arch: Arch,
    /// Instructions by address.
    pub insts: Vec<Inst>,
    base: u64,
    /// Instruction index by dword of the text.
    index: Vec<u32>,
    /// Smallest LDS access as a power of two, 2 at most: the unit of race tracking.
    pub(crate) lds_shift: u32,
    /// Vector registers up to the last one that an instruction names.
    pub(crate) vector_rows: usize,
}

impl Program {
    /// Decodes a disassembly.
    pub fn new(lines: &[crate::disasm::Line], arch: Arch) -> Result<Self> {
        let insts: Vec<Inst> = lines.iter().map(|line| crate::decode::decode(line, arch)).collect();
        let base = insts.first().map_or(0, |inst| inst.address);
        let end = insts.last().map_or(0, |inst| inst.address + inst.size);
        let mut index = vec![u32::MAX; ((end - base) / 4) as usize + 1];
        for (i, inst) in insts.iter().enumerate() {
            index[((inst.address - base) / 4) as usize] = i as u32;
        }
        let narrowest = |inst: &Inst| match inst.kind {
            Kind::Ds(Ds { op: DsOp::Read { bytes, .. } | DsOp::Write { bytes, .. }, .. }) => bytes,
            _ => 4,
        };
        let lds_shift = insts.iter().map(narrowest).min().unwrap_or(4).min(4).trailing_zeros();
        let named = insts.iter().flat_map(|inst| inst.reads.iter().chain(&*inst.writes)).filter(|regs| regs.is_vector());
        // v0 holds the work item's number in any case.
        let vector_rows = named.map(|regs| regs.vector() + usize::from(regs.count)).max().unwrap_or(0).max(1);
        Ok(Self { arch, insts, base, index, lds_shift, vector_rows })
    }

    /// The instruction at `address`.
    #[inline]
    pub fn at(&self, address: u64) -> Option<usize> {
        let offset = address.checked_sub(self.base)?;
        let found = *self.index.get((offset / 4) as usize)?;
        (offset % 4 == 0 && found != u32::MAX).then_some(found as usize)
    }

    /// Instructions that would stop a run, with the reasons.
    pub fn unsupported(&self) -> impl Iterator<Item = (&Inst, &str)> {
        self.insts.iter().filter_map(|inst| match &inst.kind {
            Kind::Unsupported(reason) => Some((inst, &**reason)),
            _ => None,
        })
    }
}
