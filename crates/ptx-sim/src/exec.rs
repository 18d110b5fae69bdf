//! Executes a warp's instructions until it waits or ends.

mod matrix;
mod memory;
mod sync;

use crate::alu;
use crate::cluster::Cluster;
use crate::error::Fault;
use crate::inst::{Inst, LANES, Op, Operand, Shuffle, Special, Ty, Vote};
use crate::parse::Program;
use crate::warp::{Choice, Lanes, State, Warp, lanes_of};

/// What all warps of a CTA share and nobody changes.
pub struct Env<'a> {
    pub program: &'a Program,
    pub params: &'a [u8],
    pub grid: [u32; 3],
    pub cta: [u32; 3],
    pub threads: u32,
    /// The CTA's place in its cluster.
    pub rank: u32,
    /// Whether it may let the next kernel start before it has waited itself.
    pub starts_next_early: bool,
}

/// Most instructions of one warp.
const LIMIT: u64 = 1 << 32;

/// Runs a warp until it waits, ends, or looks at an mbarrier in vain.
pub fn run(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>) -> Result<(), Fault> {
    warp.polls = false;
    while warp.state == State::Runs {
        match warp.choose() {
            Choice::Goes => {}
            Choice::Waits => return Err(Fault::Divergence { lanes: warp.here.lanes, missing: warp.alive() & !warp.here.lanes }),
            Choice::Polls => {
                warp.polls = true;
                return Ok(());
            }
        }
        let Some(inst) = env.program.insts.get(warp.here.pc as usize) else {
            return Err(Fault::Misuse("the kernel goes on past its last instruction".to_string()));
        };
        warp.executed += 1;
        if warp.executed > LIMIT {
            return Err(Fault::Runaway(LIMIT));
        }
        step(warp, cluster, env, inst)?;
    }
    Ok(())
}

fn step(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst) -> Result<(), Fault> {
    let lanes = warp.here.lanes & guard(warp, inst);
    match (inst.op, inst.operands.last()) {
        (Op::Branch, Some(&Operand::Target(target))) => {
            warp.branch(lanes, target);
            return Ok(());
        }
        (Op::Exit, _) => {
            warp.end(lanes);
            return Ok(());
        }
        _ if lanes == 0 => {}
        _ if inst.op.is_aligned() && lanes != u32::MAX => {
            warp.wait(lanes);
            return Ok(());
        }
        _ => {
            matrix::leaves_products(warp, inst)?;
            if inst.op.names_lanes() {
                return by_masks(warp, cluster, env, inst, lanes);
            }
            execute(warp, cluster, env, inst, lanes)?;
        }
    }
    warp.here.pc += 1;
    Ok(())
}

/// Executes it for each set of lanes that a mask names and that are all here; the others wait. Lanes that have ended are not waited for.
fn by_masks(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst, lanes: u32) -> Result<(), Fault> {
    let masks = inst.operands.last().map_or([0; LANES], |mask| value(warp, env, mask)).map(|mask| mask as u32);
    let (mut left, mut waiting) = (lanes, 0);
    while left != 0 {
        let mask = masks[left.trailing_zeros() as usize];
        let alike = lanes_of(left).filter(|&lane| masks[lane] == mask).fold(0, |all, lane| all | 1 << lane);
        // A barrier orders all that it names, and who ended has not come to it.
        let wanted = if inst.op == Op::SyncWarp { mask } else { mask & warp.alive() };
        if alike & !mask != 0 || wanted & lanes & !alike != 0 {
            return Err(Fault::Misuse(format!("lanes {alike:#010x} execute it with the mask {mask:#010x}")));
        }
        if wanted == alike {
            execute(warp, cluster, env, inst, alike)?;
        } else {
            waiting |= alike;
        }
        left &= !alike;
    }
    if waiting == 0 {
        warp.here.pc += 1;
    } else {
        warp.wait(waiting);
    }
    Ok(())
}

/// Lanes whose guard holds.
fn guard(warp: &Warp, inst: &Inst) -> u32 {
    let Some((register, negated)) = inst.guard else { return u32::MAX };
    let lanes = &warp.regs[register as usize];
    (0..LANES).filter(|&lane| (lanes[lane] & 1 == 1) != negated).fold(0, |mask, lane| mask | 1 << lane)
}

fn execute(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst, lanes: u32) -> Result<(), Fault> {
    let operands = &inst.operands;
    let unsupported = || Fault::Misuse("not supported for this type".to_string());
    let v = |warp: &Warp, i: usize| value(warp, env, &operands[i]);
    match inst.op {
        Op::Unary(op, ty) => {
            let f = alu::unary(op, ty).ok_or_else(unsupported)?;
            let result = f(&v(warp, 1), ty);
            set(warp, &operands[0], lanes, ty, |lane| result[lane]);
        }
        Op::Flushed(op) => {
            let f = alu::unary(op, Ty::F32).ok_or_else(unsupported)?;
            let result = f(&v(warp, 1).map(alu::flushed), Ty::F32);
            set(warp, &operands[0], lanes, Ty::F32, |lane| alu::flushed(result[lane]));
        }
        Op::Binary(op, ty) => {
            let f = alu::binary(op, ty).ok_or_else(unsupported)?;
            let result = f(&v(warp, 1), &v(warp, 2), ty);
            let to = if op == crate::inst::Binary::MulWide { Ty::Bits(2 * ty.bytes() as u8) } else { ty };
            set(warp, &operands[0], lanes, to, |lane| result[lane]);
        }
        Op::Ternary(op, ty) => {
            let f = alu::ternary(op, ty).ok_or_else(unsupported)?;
            let result = f(&v(warp, 1), &v(warp, 2), &v(warp, 3), ty);
            let to = if op == crate::inst::Ternary::MadWide { Ty::Bits(2 * ty.bytes() as u8) } else { ty };
            set(warp, &operands[0], lanes, to, |lane| result[lane]);
        }
        Op::Bfi(ty) => {
            let [a, b, at, length] = [1, 2, 3, 4].map(|i| v(warp, i));
            set(warp, &operands[0], lanes, ty, |lane| alu::bfi(a[lane], b[lane], at[lane], length[lane], ty));
        }
        Op::Bfe(ty) => {
            let [a, at, length] = [1, 2, 3].map(|i| v(warp, i));
            set(warp, &operands[0], lanes, ty, |lane| alu::bfe(a[lane], at[lane], length[lane], ty));
        }
        Op::Select(ty) => {
            let [a, b, p] = [1, 2, 3].map(|i| v(warp, i));
            set(warp, &operands[0], lanes, ty, |lane| if p[lane] & 1 == 1 { a[lane] } else { b[lane] });
        }
        Op::Setp { compare, ty, combine } => {
            let (a, b) = (v(warp, 1), v(warp, 2));
            let other = if combine.is_some() { v(warp, 3) } else { [0; LANES] };
            let found = |lane: usize| alu::combine(combine, alu::compare(compare, a[lane], b[lane], ty), other[lane] & 1 == 1);
            set(warp, &operands[0], lanes, Ty::Pred, |lane| found(lane).into());
        }
        Op::Cvt { to, from, round } => {
            let a = v(warp, 1);
            let b = operands.get(2).map(|b| value(warp, env, b));
            alu::convert(to, from, round, 0, b.map(|_| 0)).ok_or_else(unsupported)?;
            set(warp, &operands[0], lanes, to, |lane| alu::convert(to, from, round, a[lane], b.map(|b| b[lane])).unwrap_or_default());
        }
        Op::Pack(ty) => {
            let parts = vector(warp, env, &operands[1]);
            let bits = 8 * ty.bytes() / parts.len();
            set(warp, &operands[0], lanes, ty, |lane| (0..parts.len()).fold(0, |all, i| all | (parts[i][lane] & ones(bits)) << (i * bits)));
        }
        Op::Unpack(ty) => {
            let (a, parts) = (v(warp, 1), elements(&operands[0]));
            let bits = 8 * ty.bytes() / parts.len();
            parts.iter().enumerate().for_each(|(i, part)| set(warp, part, lanes, ty, |lane| a[lane] >> (i * bits) & ones(bits)));
        }
        Op::Shuffle(shuffle) => shuffled(warp, env, inst, lanes, shuffle),
        Op::Vote(vote) => {
            let p = v(warp, 1);
            let ballot = lanes_of(lanes).filter(|&lane| p[lane] & 1 == 1).fold(0u32, |all, lane| all | 1 << lane);
            let (result, ty) = match vote {
                Vote::Any => (u64::from(ballot != 0), Ty::Pred),
                Vote::All => (u64::from(ballot == lanes), Ty::Pred),
                Vote::Ballot => (ballot.into(), Ty::Bits(4)),
            };
            set(warp, &operands[0], lanes, ty, |_| result);
        }
        Op::Reduce(op, ty) => {
            let f = alu::binary(op, ty).ok_or_else(unsupported)?;
            let a = v(warp, 1);
            let result = lanes_of(lanes).map(|lane| a[lane]).reduce(|a, b| f(&[a; LANES], &[b; LANES], ty)[0]).unwrap_or_default();
            set(warp, &operands[0], lanes, ty, |_| result);
        }
        Op::Load { space, ty, register } => memory::load(warp, cluster, env, inst, lanes, space, (ty, register))?,
        Op::Store { space, ty } => memory::store(warp, cluster, env, inst, lanes, space, ty)?,
        Op::Copy => memory::copy(warp, cluster, env, inst, lanes)?,
        Op::CopyCommit => lanes_of(lanes).for_each(|lane| warp.copies[lane].commit()),
        Op::CopyWait => memory::copy_wait(warp, cluster, env, inst, lanes),
        Op::LoadMatrix { transposed } => memory::load_matrix(warp, cluster, inst, transposed)?,
        Op::Mma(element) => matrix::mma(warp, env, inst, element),
        Op::Wgmma { columns, element } => matrix::wgmma(warp, cluster, env, inst, columns.into(), element)?,
        Op::ProductsFence => warp.has_fenced_products = true,
        Op::ProductsCommit => warp.products.commit(),
        Op::ProductsWait => matrix::wait(warp, cluster, env, inst),
        Op::WaitForKernel => warp.waited |= lanes,
        Op::StartNextKernel if warp.settled.is_some() && lanes & !warp.waited != 0 && !env.starts_next_early => {
            return Err(Fault::Misuse("the next kernel may start before this one has waited for the one before".to_string()));
        }
        Op::StartNextKernel => {}
        Op::Branch | Op::Exit | Op::Hint | Op::HintOfWarp => {}
        _ => sync::execute(warp, cluster, env, inst, lanes)?,
    }
    Ok(())
}

fn ones(bits: usize) -> u64 {
    u64::MAX >> (64 - bits)
}

/// An operand's value in every lane.
fn value(warp: &Warp, env: &Env<'_>, operand: &Operand) -> Lanes {
    match operand {
        Operand::Reg(register) => warp.regs[*register as usize],
        Operand::Imm(bits) => [*bits; LANES],
        Operand::Special(special) => std::array::from_fn(|lane| self::special(warp, env, *special, lane).into()),
        Operand::Vector(_) | Operand::Address { .. } | Operand::Target(_) | Operand::Sink => [0; LANES],
    }
}

/// An operand that all lanes have to have alike.
fn uniform(warp: &Warp, env: &Env<'_>, operand: &Operand) -> Result<u64, Fault> {
    let lanes = value(warp, env, operand);
    let is_uniform = lanes.iter().all(|lane| *lane == lanes[0]);
    is_uniform.then_some(lanes[0]).ok_or_else(|| Fault::Misuse("an operand differs between the lanes of a warp".to_string()))
}

fn special(warp: &Warp, env: &Env<'_>, special: Special, lane: usize) -> u32 {
    let of = |values: [u32; 3], axis: u8| values[usize::from(axis)];
    match special {
        Special::Tid(axis) => of([(warp.index * LANES + lane) as u32, 0, 0], axis),
        Special::Ntid(axis) => of([env.threads, 1, 1], axis),
        Special::Ctaid(axis) => of(env.cta, axis),
        Special::Nctaid(axis) => of(env.grid, axis),
        Special::LaneId => lane as u32,
        Special::Nsmid => 132,
        Special::ClusterCtaRank => env.rank,
    }
}

/// A vector's elements; a single operand is a vector of one.
fn elements(operand: &Operand) -> &[Operand] {
    match operand {
        Operand::Vector(elements) => elements,
        one => std::slice::from_ref(one),
    }
}

fn vector(warp: &Warp, env: &Env<'_>, operand: &Operand) -> Vec<Lanes> {
    elements(operand).iter().map(|element| value(warp, env, element)).collect()
}

/// Sets a register's lanes to `f`, cut to the type's width.
fn set(warp: &mut Warp, operand: &Operand, lanes: u32, ty: Ty, f: impl Fn(usize) -> u64) {
    let Operand::Reg(register) = operand else { return };
    let (to, mask) = (&mut warp.regs[*register as usize], ty.mask());
    if lanes == u32::MAX {
        (0..LANES).for_each(|lane| to[lane] = f(lane) & mask);
    } else {
        lanes_of(lanes).for_each(|lane| to[lane] = f(lane) & mask);
    }
}

/// `shfl.sync d|p, a, b, c`: `c` has the most (or least) lane in its low five bits, and above them the mask of the lanes' segments.
fn shuffled(warp: &mut Warp, env: &Env<'_>, inst: &Inst, lanes: u32, shuffle: Shuffle) {
    let [a, b, c] = [1, 2, 3].map(|i| value(warp, env, &inst.operands[i]));
    let from = |lane: usize| {
        let (b, clamp, segments) = (b[lane] as i64 & 31, c[lane] as i64 & 31, c[lane] as i64 >> 8 & 31);
        let own = lane as i64;
        let (least, most) = (own & segments, own & segments | clamp & !segments);
        let (from, inside) = match shuffle {
            Shuffle::Up => (own - b, own - b >= most),
            Shuffle::Down => (own + b, own + b <= most),
            Shuffle::Butterfly => (own ^ b, own ^ b <= most),
            Shuffle::Index => (least | b & !segments, least | b & !segments <= most),
        };
        if inside { (from as usize, true) } else { (lane, false) }
    };
    let to = elements(&inst.operands[0]);
    // What a lane has that does not take part is undefined.
    set(warp, &to[0], lanes, Ty::Bits(4), |lane| if lanes >> from(lane).0 & 1 == 1 { a[from(lane).0] } else { u64::MAX });
    if let Some(valid) = to.get(1) {
        set(warp, valid, lanes, Ty::Pred, |lane| from(lane).1.into());
    }
}
