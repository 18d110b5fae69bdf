//! Instructions as they are executed: names are resolved, types and modifiers are data.

/// Lanes of a warp.
pub const LANES: usize = 32;

/// An operand's type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ty {
    Pred,
    /// Bits or an unsigned integer of this many bytes.
    Bits(u8),
    /// A signed integer of this many bytes.
    Signed(u8),
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    F32,
    E4m3x2,
}

impl Ty {
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "pred" => Ty::Pred,
            "b8" | "u8" => Ty::Bits(1),
            "b16" | "u16" => Ty::Bits(2),
            "b32" | "u32" => Ty::Bits(4),
            "b64" | "u64" => Ty::Bits(8),
            "s8" => Ty::Signed(1),
            "s16" => Ty::Signed(2),
            "s32" => Ty::Signed(4),
            "s64" => Ty::Signed(8),
            "f16" => Ty::F16,
            "f16x2" => Ty::F16x2,
            "bf16" => Ty::Bf16,
            "bf16x2" => Ty::Bf16x2,
            "f32" => Ty::F32,
            "e4m3x2" => Ty::E4m3x2,
            _ => return None,
        })
    }

    pub fn bytes(self) -> usize {
        match self {
            Ty::Pred => 1,
            Ty::Bits(bytes) | Ty::Signed(bytes) => bytes.into(),
            Ty::F16 | Ty::Bf16 | Ty::E4m3x2 => 2,
            Ty::F16x2 | Ty::Bf16x2 | Ty::F32 => 4,
        }
    }

    /// The register's bits that hold a value of the type.
    pub fn mask(self) -> u64 {
        if self == Ty::Pred { 1 } else { u64::MAX >> (64 - 8 * self.bytes()) }
    }

    /// A number that orders integers of the type.
    #[inline]
    pub fn rank(self, bits: u64) -> i64 {
        let high = bits << (64 - 8 * self.bytes());
        if matches!(self, Ty::Signed(_)) { high as i64 } else { (high ^ 1 << 63) as i64 }
    }

    /// The value of an integer's bits.
    #[inline]
    pub fn extend(self, bits: u64) -> i128 {
        let shift = 64 - 8 * self.bytes();
        match self {
            Ty::Signed(_) => i128::from(((bits << shift) as i64) >> shift),
            _ => i128::from(bits & self.mask()),
        }
    }
}

/// What a lane can read of its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    /// SMs that the machine could have.
    Nsmid,
    ClusterCtaRank,
}

/// An operand.
#[derive(Debug, Clone, PartialEq)]
pub enum Operand {
    Reg(u32),
    Imm(u64),
    Special(Special),
    /// `{a, b, ...}`, or a register and the predicate beside it, `a|p`.
    Vector(Vec<Operand>),
    /// `[base + offset]`; the base is absent in a constant address.
    Address {
        base: Option<u32>,
        offset: i64,
    },
    /// An instruction's index.
    Target(u32),
    /// `_`: a result that nobody wants.
    Sink,
}

/// A memory that instructions address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    Param,
    Global,
    Shared,
    Local,
}

/// Of one operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unary {
    Mov,
    Abs,
    Neg,
    Not,
    Exp2,
    Log2,
    Rcp,
    Sqrt,
    Popc,
    Clz,
    Brev,
}

/// Of two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binary {
    Add,
    Sub,
    /// The product's low half, for floats all of it.
    Mul,
    MulHi,
    /// Twice as wide as its operands.
    MulWide,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    CopySign,
}

/// Of three operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ternary {
    /// `a * b + c`, low half.
    Mad,
    /// The same, as wide as `c`.
    MadWide,
    Prmt,
}

/// A comparison; the `u` ones are true of NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Equ,
    Neu,
    Ltu,
    Leu,
    Gtu,
    Geu,
    Num,
    Nan,
}

/// What a comparison is combined with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bool {
    And,
    Or,
    Xor,
}

/// How a conversion rounds to integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// Nearest, ties to even.
    Nearest,
    /// Towards zero.
    Zero,
    Down,
    Up,
}

/// Which lane a lane reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shuffle {
    Index,
    Up,
    Down,
    Butterfly,
}

/// What a warp votes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vote {
    Any,
    All,
    Ballot,
}

/// Elements of a matrix product's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    F16,
    Bf16,
    E4m3,
}

impl Element {
    pub fn bytes(self) -> usize {
        if self == Element::E4m3 { 1 } else { 2 }
    }

    /// The inner dim of a product: 32 bytes.
    pub fn k(self) -> usize {
        32 / self.bytes()
    }
}

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Unary(Unary, Ty),
    /// Of F32, with subnormals as zeros on both sides.
    Flushed(Unary),
    Binary(Binary, Ty),
    Ternary(Ternary, Ty),
    /// A vector of registers into one of this type.
    Pack(Ty),
    /// One register of this type into a vector of them.
    Unpack(Ty),
    /// `d = a` with bits of `b` in its place: value, base, position, length.
    Bfi(Ty),
    /// Bits of a value: value, position, length.
    Bfe(Ty),
    Select(Ty),
    Setp {
        compare: Compare,
        ty: Ty,
        combine: Option<Bool>,
    },
    Cvt {
        to: Ty,
        from: Ty,
        round: Round,
    },
    /// Into registers of this type, to whose width a signed value is extended.
    Load {
        space: Space,
        ty: Ty,
        register: Ty,
    },
    Store {
        space: Space,
        ty: Ty,
    },
    Branch,
    Exit,
    Shuffle(Shuffle),
    Vote(Vote),
    /// One result of all lanes' values.
    Reduce(Binary, Ty),
    SyncWarp,
    /// `bar.sync`, `bar.arrive`.
    Barrier {
        waits: bool,
    },
    /// `.relaxed`: it orders nothing but the mbarriers that a fence released before.
    ClusterArrive,
    ClusterWait,
    /// `cp.async`.
    Copy,
    CopyCommit,
    CopyWait,
    LoadMatrix {
        transposed: bool,
    },
    Mma(Element),
    ProductsFence,
    ProductsCommit,
    ProductsWait,
    /// `wgmma` with this many columns.
    Wgmma {
        columns: u16,
        element: Element,
    },
    FenceAsyncProxy,
    FenceMbarrierInit,
    MbarrierInit,
    MbarrierExpect,
    MbarrierTryWait,
    MapShared,
    /// `st.async`.
    Send {
        ty: Ty,
    },
    /// `griddepcontrol.wait`.
    WaitForKernel,
    /// `griddepcontrol.launch_dependents`.
    StartNextKernel,
    /// Hints, and what has no meaning without time.
    Hint,
    /// The same of a warp's lanes together.
    HintOfWarp,
}

impl Op {
    /// Whether all lanes of a warp have to execute it together; `shfl` and its like name the lanes themselves.
    pub fn is_aligned(self) -> bool {
        matches!(
            self,
            Op::Barrier { .. }
                | Op::ClusterArrive
                | Op::ClusterWait
                | Op::LoadMatrix { .. }
                | Op::Mma(_)
                | Op::ProductsFence
                | Op::ProductsCommit
                | Op::ProductsWait
                | Op::Wgmma { .. }
                | Op::HintOfWarp
                // A lane that fences or waits alone orders its own accesses alone: clocks are a warp's.
                | Op::FenceAsyncProxy
                | Op::MbarrierTryWait
        )
    }

    /// Whether the last operand is the mask of the lanes that execute it together.
    pub fn names_lanes(self) -> bool {
        matches!(self, Op::Shuffle(_) | Op::Vote(_) | Op::Reduce(..) | Op::SyncWarp)
    }
}

/// An instruction.
#[derive(Debug, Clone)]
pub struct Inst {
    /// The predicate it depends on, and whether that has to be false.
    pub guard: Option<(u32, bool)>,
    pub op: Op,
    /// Destination first, as written.
    pub operands: Vec<Operand>,
    pub line: u32,
    pub text: Box<str>,
}
