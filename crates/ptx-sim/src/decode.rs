//! From a mnemonic, written like one of the supported forms (`forms.rs`), to its operation.

use crate::inst::{Binary, Bool, Compare, Element, Op, Operand, Round, Shuffle, Space, Ternary, Ty, Unary, Vote};

/// What a mnemonic means.
pub fn op(mnemonic: &str) -> Result<Op, String> {
    let parts: Vec<&str> = mnemonic.split('.').collect();
    let name = parts[0];
    let types: Vec<Ty> = parts[1..].iter().filter_map(|part| Ty::parse(part)).collect();
    let ty = types.last().copied();
    let has = |part: &str| parts.contains(&part);
    let typed = |make: &dyn Fn(Ty) -> Op| ty.map(make).ok_or_else(|| format!("{mnemonic} has no type that is supported"));
    if let Some(op) = synchronizing(&parts, ty) {
        return Ok(op);
    }
    let unary = unary(name);
    if let (Some(unary), true) = (unary, has("ftz")) {
        return Ok(Op::Flushed(unary));
    }
    if let Some(unary) = unary {
        return typed(&|ty| Op::Unary(unary, ty));
    }
    if let Some(binary) = binary(name, &parts) {
        return typed(&|ty| Op::Binary(binary, ty));
    }
    match name {
        "mad" if has("wide") => typed(&|ty| Op::Ternary(Ternary::MadWide, ty)),
        "mad" | "fma" => typed(&|ty| Op::Ternary(Ternary::Mad, ty)),
        "prmt" => typed(&|ty| Op::Ternary(Ternary::Prmt, ty)),
        "bfi" => typed(&|ty| Op::Bfi(ty)),
        "bfe" => typed(&|ty| Op::Bfe(ty)),
        "selp" => typed(&|ty| Op::Select(ty)),
        "setp" => {
            let compare = parts.get(1).and_then(|part| compare(part)).ok_or_else(|| format!("{mnemonic}: comparison"))?;
            let combine = [("and", Bool::And), ("or", Bool::Or), ("xor", Bool::Xor)].iter().find(|(name, _)| has(name)).map(|(_, b)| *b);
            typed(&|ty| Op::Setp { compare, ty, combine })
        }
        "cvt" => match types[..] {
            [to, from] => Ok(Op::Cvt { to, from, round: round(&parts) }),
            _ => Err(format!("{mnemonic}: two types are wanted")),
        },
        "ld" | "st" => {
            let space = if has("global") {
                Space::Global
            } else if has("shared") {
                Space::Shared
            } else if has("local") {
                Space::Local
            } else {
                Space::Param
            };
            typed(&|ty| if name == "ld" { Op::Load { space, ty, register: ty } } else { Op::Store { space, ty } })
        }
        "bra" => Ok(Op::Branch),
        "ret" | "exit" => Ok(Op::Exit),
        "cvta" => Ok(Op::Unary(Unary::Mov, Ty::Bits(8))),
        "griddepcontrol" => Ok(if has("wait") { Op::WaitForKernel } else { Op::StartNextKernel }),
        "createpolicy" | "prefetch" => Ok(Op::Hint),
        "setmaxnreg" => Ok(Op::HintOfWarp),
        _ => Err(format!("{mnemonic} is not supported")),
    }
}

/// What can only be told from the operands: a move of several registers into one or out of one, and the registers that a load extends to.
pub fn with_operands(op: Op, operands: &[Operand], widths: &[u8]) -> Op {
    let is_vector = |i: usize| matches!(operands.get(i), Some(Operand::Vector(_)));
    match op {
        Op::Unary(Unary::Mov, ty) if is_vector(1) => Op::Pack(ty),
        Op::Unary(Unary::Mov, ty) if is_vector(0) => Op::Unpack(ty),
        Op::Load { space, ty, register } => {
            let first = match operands.first() {
                Some(Operand::Vector(all)) => all.iter().find(|one| matches!(one, Operand::Reg(_))),
                one => one,
            };
            let register = if let Some(Operand::Reg(to)) = first { Ty::Bits(widths[*to as usize]) } else { register };
            Op::Load { space, ty, register }
        }
        op => op,
    }
}

/// Instructions that threads, copies or tensor cores meet in.
fn synchronizing(parts: &[&str], ty: Option<Ty>) -> Option<Op> {
    let has = |part: &str| parts.contains(&part);
    let kind = parts.get(2).copied().unwrap_or_default();
    Some(match (parts[0], parts.get(1).copied().unwrap_or_default()) {
        ("bar", "warp") => Op::SyncWarp,
        ("bar", "sync") => Op::Barrier { waits: true },
        ("bar", "arrive") => Op::Barrier { waits: false },
        ("barrier", "cluster") if kind == "wait" => Op::ClusterWait,
        ("barrier", "cluster") => Op::ClusterArrive,
        ("cp", "async") if kind == "commit_group" => Op::CopyCommit,
        ("cp", "async") if kind == "wait_group" => Op::CopyWait,
        ("cp", "async") => Op::Copy,
        ("shfl", "sync") => Op::Shuffle(match kind {
            "idx" => Shuffle::Index,
            "up" => Shuffle::Up,
            "down" => Shuffle::Down,
            _ => Shuffle::Butterfly,
        }),
        ("vote", "sync") => Op::Vote(match kind {
            "any" => Vote::Any,
            "all" => Vote::All,
            _ => Vote::Ballot,
        }),
        ("redux", "sync") => Op::Reduce(binary(kind, &[])?, ty?),
        ("ldmatrix", _) => Op::LoadMatrix { transposed: has("trans") },
        ("mma", "sync") => Op::Mma(element(parts)?),
        ("wgmma", "fence") => Op::ProductsFence,
        ("wgmma", "commit_group") => Op::ProductsCommit,
        ("wgmma", "wait_group") => Op::ProductsWait,
        ("wgmma", "mma_async") => Op::Wgmma { columns: columns(parts)?, element: element(parts)? },
        ("fence", "proxy") => Op::FenceAsyncProxy,
        ("fence", "mbarrier_init") => Op::FenceMbarrierInit,
        ("mbarrier", "init") => Op::MbarrierInit,
        ("mbarrier", "arrive") => Op::MbarrierExpect,
        ("mbarrier", "try_wait") => Op::MbarrierTryWait,
        ("mapa", _) => Op::MapShared,
        ("st", "async") => Op::Send { ty: ty? },
        _ => return None,
    })
}

/// The elements of a product's A and B, which are of one type; its sums are F32.
fn element(parts: &[&str]) -> Option<Element> {
    let elements = [("e4m3", Element::E4m3), ("bf16", Element::Bf16), ("f16", Element::F16)];
    elements.iter().find(|(name, _)| parts.contains(name)).map(|(_, element)| *element)
}

/// The columns of a `wgmma`, `m64nNkK`.
fn columns(parts: &[&str]) -> Option<u16> {
    let shape = parts.iter().find_map(|part| part.strip_prefix("m64n"))?;
    shape.split('k').next()?.parse().ok()
}

fn unary(name: &str) -> Option<Unary> {
    Some(match name {
        "mov" => Unary::Mov,
        "abs" => Unary::Abs,
        "neg" => Unary::Neg,
        "not" => Unary::Not,
        "ex2" => Unary::Exp2,
        "lg2" => Unary::Log2,
        "rcp" => Unary::Rcp,
        "sqrt" => Unary::Sqrt,
        "popc" => Unary::Popc,
        "clz" => Unary::Clz,
        "brev" => Unary::Brev,
        _ => return None,
    })
}

fn binary(name: &str, parts: &[&str]) -> Option<Binary> {
    Some(match name {
        "add" => Binary::Add,
        "sub" => Binary::Sub,
        "mul" if parts.contains(&"wide") => Binary::MulWide,
        "mul" if parts.contains(&"hi") => Binary::MulHi,
        "mul" => Binary::Mul,
        "div" => Binary::Div,
        "rem" => Binary::Rem,
        "min" => Binary::Min,
        "max" => Binary::Max,
        "and" => Binary::And,
        "or" => Binary::Or,
        "xor" => Binary::Xor,
        "shl" => Binary::Shl,
        "shr" => Binary::Shr,
        "copysign" => Binary::CopySign,
        _ => return None,
    })
}

fn compare(name: &str) -> Option<Compare> {
    Some(match name {
        "eq" => Compare::Eq,
        "ne" => Compare::Ne,
        "lt" => Compare::Lt,
        "le" => Compare::Le,
        "gt" => Compare::Gt,
        "ge" => Compare::Ge,
        "equ" => Compare::Equ,
        "neu" => Compare::Neu,
        "ltu" => Compare::Ltu,
        "leu" => Compare::Leu,
        "gtu" => Compare::Gtu,
        "geu" => Compare::Geu,
        "num" => Compare::Num,
        "nan" => Compare::Nan,
        _ => return None,
    })
}

fn round(parts: &[&str]) -> Round {
    let has = |part: &str| parts.contains(&part);
    if has("rzi") {
        Round::Zero
    } else if has("rmi") {
        Round::Down
    } else if has("rpi") {
        Round::Up
    } else {
        Round::Nearest
    }
}
