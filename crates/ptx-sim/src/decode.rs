//! From a mnemonic to an operation. What is not listed is not supported, and says so.

use crate::inst::{Binary, Bool, Compare, Element, Op, Operand, Round, Shuffle, Space, Ternary, Ty, Unary, Vote};

/// What a mnemonic means.
pub fn op(mnemonic: &str) -> Result<Op, String> {
    let parts: Vec<&str> = mnemonic.split('.').collect();
    let name = parts[0];
    let types: Vec<Ty> = parts[1..].iter().filter_map(|part| Ty::parse(part)).collect();
    let ty = types.last().copied();
    let has = |part: &str| parts.contains(&part);
    let typed = |make: &dyn Fn(Ty) -> Op| ty.map(make).ok_or_else(|| format!("{mnemonic} has no type that is supported"));
    let synchronizing = synchronizing(&parts, ty);
    if let Some(op) = synchronizing {
        return op.map_err(|reason| format!("{mnemonic}: {reason}"));
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
        "createpolicy" | "prefetch" | "griddepcontrol" => Ok(Op::Hint),
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
fn synchronizing(parts: &[&str], ty: Option<Ty>) -> Option<Result<Op, String>> {
    let has = |part: &str| parts.contains(&part);
    let no = || Err("not supported".to_string());
    Some(Ok(match (parts[0], parts.get(1).copied().unwrap_or_default()) {
        ("bar", "warp") => Op::SyncWarp,
        ("barrier", "cluster") if has("wait") => Op::ClusterWait,
        ("barrier", "cluster") => Op::ClusterArrive,
        ("bar", "sync") => Op::Barrier { waits: true },
        ("bar", "arrive") => Op::Barrier { waits: false },
        ("cp", "async") if has("commit_group") => Op::CopyCommit,
        ("cp", "async") if has("wait_group") => Op::CopyWait,
        ("cp", "async") => Op::Copy,
        ("shfl", "sync") => Op::Shuffle(match *parts.get(2)? {
            "idx" => Shuffle::Index,
            "up" => Shuffle::Up,
            "down" => Shuffle::Down,
            "bfly" => Shuffle::Butterfly,
            _ => return Some(no()),
        }),
        ("vote", "sync") => Op::Vote(match *parts.get(2)? {
            "any" => Vote::Any,
            "all" => Vote::All,
            "ballot" => Vote::Ballot,
            _ => return Some(no()),
        }),
        ("redux", "sync") => match (binary(parts.get(2)?, &[]), ty) {
            (Some(op @ (Binary::Add | Binary::Min | Binary::Max | Binary::And | Binary::Or | Binary::Xor)), Some(ty)) => Op::Reduce(op, ty),
            _ => return Some(no()),
        },
        ("ldmatrix", _) if has("x4") && has("m8n8") => Op::LoadMatrix { transposed: has("trans") },
        ("mma", "sync") => {
            return Some(element(parts).filter(|e| has(&format!("m16n8k{}", e.k()))).map(Op::Mma).ok_or("shape".to_string()));
        }
        ("wgmma", "fence") => Op::ProductsFence,
        ("wgmma", "commit_group") => Op::ProductsCommit,
        ("wgmma", "wait_group") => Op::ProductsWait,
        ("wgmma", "mma_async") => return Some(wgmma(parts)),
        ("fence", "proxy") if has("async") => Op::FenceAsyncProxy,
        ("fence", "mbarrier_init") => Op::FenceMbarrierInit,
        ("mbarrier", "init") => Op::MbarrierInit,
        ("mbarrier", "arrive") if has("expect_tx") => Op::MbarrierExpect,
        ("mbarrier", "try_wait") if has("parity") => Op::MbarrierTryWait,
        ("mapa", _) if ty == Some(Ty::Bits(4)) => Op::MapShared,
        ("st", "async") if has("mbarrier::complete_tx::bytes") => Op::Send { ty: ty? },
        ("bar" | "barrier" | "cp" | "ldmatrix" | "wgmma" | "fence" | "mbarrier" | "mapa", _) | ("st" | "red", "async") => return Some(no()),
        _ => return None,
    }))
}

fn element(parts: &[&str]) -> Option<Element> {
    let named = |name: &str| parts.iter().filter(|part| **part == name).count() >= 2;
    let elements = [("e4m3", Element::E4m3), ("bf16", Element::Bf16), ("f16", Element::F16)];
    elements.iter().find(|(name, _)| named(name)).map(|(_, element)| *element)
}

fn wgmma(parts: &[&str]) -> Result<Op, String> {
    let element = element(parts).ok_or("elements")?;
    let shape = parts.iter().find_map(|part| part.strip_prefix("m64n")).ok_or("shape")?;
    let (columns, k) = shape.split_once('k').ok_or("shape")?;
    let columns = columns.parse().map_err(|_| "columns")?;
    if k == element.k().to_string() { Ok(Op::Wgmma { columns, element }) } else { Err(format!("k of {k}")) }
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
        "min" if !parts.contains(&"NaN") => Binary::Min,
        "max" if !parts.contains(&"NaN") => Binary::Max,
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
    if has("rzi") || has("rz") {
        Round::Zero
    } else if has("rmi") || has("rm") {
        Round::Down
    } else if has("rpi") || has("rp") {
        Round::Up
    } else {
        Round::Nearest
    }
}
