//! Executes a wave's instructions.

pub mod lanes;
pub mod math;
mod memory;
pub mod scalar;
mod vector;

use sim_memory::OutOfBounds;

use crate::counters::Counters;
use crate::error::Fault;
use crate::lds::{Lds, LdsFault};
use crate::mfma;
use crate::operand::{Regs, register_name};
use crate::program::{Condition, Inst, Kind, Mfma, Program, ScalarSrc, VectorSrc};
use crate::trace::{Event, Recorder};
use crate::waits::{Counter, Touch};
use crate::wave::{Mode, State, Wave};

/// What all waves of a launch share.
pub struct Env<'a> {
    pub program: &'a Program,
    /// Load address minus address in the code object.
    pub image: u64,
    /// Most instructions of one wave.
    pub limit: u64,
    /// Whether the use of an unfinished load is an error.
    pub proven_loads: bool,
    /// Scratch bytes a lane.
    pub scratch: usize,
}

/// What the waves of a workgroup share.
pub struct Group {
    pub lds: Lds,
    pub counters: Counters,
    /// Executions by instruction.
    pub executions: Vec<u64>,
    /// What the waves did, where somebody asked.
    pub recorder: Option<Recorder>,
}

/// A fault and the lane to blame.
pub type Stop = (Box<Fault>, Option<usize>);

type Step = Result<(), Stop>;

fn fault(fault: Fault) -> Stop {
    (Box::new(fault), None)
}

fn stray(access: OutOfBounds, lane: Option<usize>) -> Stop {
    (Box::new(access.into()), lane)
}

fn unsupported(what: impl Into<String>) -> Stop {
    fault(Fault::Unsupported(what.into()))
}

/// Runs `wave` until it ends, waits at a barrier or has executed `quantum` more instructions. On a fault, `wave.pc` is at the instruction to blame.
pub fn run(wave: &mut Wave, env: &Env, group: &mut Group, quantum: u64) -> Step {
    let stop_at = wave.executed.saturating_add(quantum);
    while wave.state == State::Running && wave.executed < stop_at {
        let inst = &env.program.insts[wave.pc];
        if wave.executed >= env.limit {
            return Err(fault(Fault::Runaway(env.limit)));
        }
        wave.executed += 1;
        group.executions[wave.pc] += 1;
        if let Some(recorder) = &mut group.recorder {
            recorder.waves[wave.index].push(Event::new(wave.pc as u32));
        }
        hazards(wave, env, group, inst)?;
        let here = wave.pc;
        step(wave, env, group, inst)?;
        if wave.pc == here && wave.state != State::Ended {
            let next = inst.address + inst.size;
            wave.pc = if branched_to_itself(wave, inst) { here } else { following(env, here, next)? };
        }
    }
    Ok(())
}

/// A taken branch whose target is itself leaves the program counter alone on purpose.
fn branched_to_itself(wave: &Wave, inst: &Inst) -> bool {
    matches!(inst.kind, Kind::Branch { condition, target } if target == inst.address && taken(wave, condition))
}

fn taken(wave: &Wave, condition: Condition) -> bool {
    match condition {
        Condition::Always => true,
        Condition::Scc(value) => wave.scc == value,
        Condition::VccZero(zero) => (wave.vcc() == 0) == zero,
        Condition::ExecZero(zero) => (wave.exec() == 0) == zero,
    }
}

fn following(env: &Env, here: usize, next: u64) -> Result<usize, Stop> {
    match env.program.insts.get(here + 1) {
        Some(inst) if inst.address == next => Ok(here + 1),
        _ => Err(fault(Fault::BadTarget(next))),
    }
}

#[inline]
fn hazards(wave: &mut Wave, env: &Env, group: &mut Group, inst: &Inst) -> Step {
    let mut first_use = false;
    for &regs in &inst.reads {
        match wave.waits.read(regs) {
            Touch::Free => {}
            Touch::FirstUse => first_use = true,
            Touch::InFlight { inst: load, register } => unfinished(env, group, load, register, inst)?,
        }
    }
    if first_use {
        *group.counters.in_flight.entry(wave.waits.vector_in_flight()).or_default() += 1;
    }
    if inst.writes.is_empty() {
        return Ok(());
    }
    let by = inst.counter();
    for &regs in &inst.writes {
        if let Touch::InFlight { inst: load, register } = wave.waits.write(regs, by) {
            unfinished(env, group, load, register, inst)?;
        }
    }
    Ok(())
}

#[cold]
fn unfinished(env: &Env, group: &mut Group, load: u32, register: u16, used: &Inst) -> Step {
    let load = &env.program.insts[load as usize];
    if !env.proven_loads {
        *group.counters.unproven.entry((load.address, used.address)).or_default() += 1;
        return Ok(());
    }
    Err(fault(Fault::UnfinishedLoad { register: register_name(register), load: load.text.to_string(), load_address: load.address }))
}

/// Completes an LDS fault with the other instruction's text.
#[cold]
fn lds_fault(env: &Env, found: LdsFault, lane: usize) -> Stop {
    let fault = match found {
        LdsFault::Bounds(fault) => fault,
        LdsFault::Race(race) => {
            let other = &env.program.insts[race.other_inst as usize];
            Fault::LdsRace {
                offset: race.offset,
                access: race.access,
                other_wave: race.other_wave,
                other_access: race.other_access,
                other: other.text.to_string(),
                other_address: other.address,
                hint: if race.own { " (no wait for it in between)" } else { " (no wait for it before a barrier in between)" },
            }
        }
    };
    (Box::new(fault), Some(lane))
}

fn step(wave: &mut Wave, env: &Env, group: &mut Group, inst: &Inst) -> Step {
    match &inst.kind {
        Kind::Nop => Ok(()),
        Kind::End => {
            wave.state = State::Ended;
            Ok(())
        }
        Kind::Barrier => {
            wave.state = State::AtBarrier;
            Ok(())
        }
        Kind::Wait { vector, lgkm } => {
            wave.waits.wait(*vector, *lgkm);
            Ok(())
        }
        Kind::Branch { condition, target } => {
            if taken(wave, *condition) {
                jump(wave, env, *target)
            } else {
                Ok(())
            }
        }
        Kind::Mfma(mfma) => matrix(wave, env, mfma),
        Kind::Ds(ds) => memory::lds(wave, env, group, ds),
        Kind::Mem(mem) => memory::vector(wave, env, group, mem),
        Kind::ScalarLoad { .. } => memory::scalar_load(wave, group, &inst.kind),
        Kind::Unsupported(reason) => Err(unsupported(&**reason)),
        other => {
            if scalar_step(wave, env, inst, other)? {
                return Ok(());
            }
            vector::step(wave, other)
        }
    }
}

fn jump(wave: &mut Wave, env: &Env, target: u64) -> Step {
    wave.pc = env.program.at(target).ok_or_else(|| fault(Fault::BadTarget(target)))?;
    Ok(())
}

/// Scalar instructions; false where it is none.
fn scalar_step(wave: &mut Wave, env: &Env, inst: &Inst, kind: &Kind) -> Result<bool, Stop> {
    match *kind {
        Kind::Scalar { op, dst, src } => {
            let (a, b) = (wave.scalar(src[0], op.src[0]), wave.scalar(src[1], op.src[1]));
            let (value, scc) = (op.f)(a, b, wave.scc);
            match op.dst {
                0 => {}
                1 => wave.s[usize::from(dst)] = value as u32,
                _ => wave.set_pair(dst, value),
            }
            if let Some(scc) = scc {
                wave.scc = scc;
            }
        }
        Kind::ConditionalMove { dst, src, wide } => {
            if wave.scc && wide {
                wave.set_pair(dst, wave.scalar(src, 2));
            } else if wave.scc {
                wave.s[usize::from(dst)] = wave.scalar(src, 1) as u32;
            }
        }
        Kind::SaveExec { f, dst, src } => {
            let (source, old) = (wave.scalar(src, 2), wave.exec());
            let new = f(source, old);
            wave.set_pair(dst, old);
            wave.set_pair(crate::operand::EXEC, new);
            wave.scc = new != 0;
        }
        Kind::GetPc { dst } => wave.set_pair(dst, (inst.address + inst.size).wrapping_add(env.image)),
        Kind::SetPc { src, link } => {
            let target = wave.pair(src).wrapping_sub(env.image);
            if let Some(link) = link {
                wave.set_pair(link, (inst.address + inst.size).wrapping_add(env.image));
            }
            jump(wave, env, target)?;
        }
        Kind::SetMode { offset, width, src } => {
            let field = if width >= 32 { u32::MAX } else { ((1u32 << width) - 1) << offset };
            let value = (wave.scalar(src, 1) as u32) << offset;
            wave.mode = Mode(wave.mode.0 & !field | value & field);
            if wave.mode.unsupported() {
                return Err(unsupported(format!("rounding or denormal mode {:#x}", wave.mode.0 & 0xff)));
            }
        }
        Kind::ReadConstant { dst, value } => wave.s[usize::from(dst)] = value,
        Kind::Clock { dst } => {
            wave.set_pair(dst, wave.executed);
            wave.waits.issue(Counter::Scalar, wave.pc as u32, crate::operand::Regs::new(dst, 2));
        }
        _ => return Ok(false),
    }
    Ok(true)
}

fn matrix(wave: &mut Wave, env: &Env, m: &Mfma) -> Step {
    let rows = |regs: Regs| &wave.v[regs.vector()..regs.vector() + usize::from(regs.count)];
    let constant;
    let c = match m.c {
        Ok(c) => rows(c),
        Err(bits) => {
            constant = vec![[bits; 64]; usize::from(m.dst.count)];
            &constant
        }
    };
    let scale = |&(src, byte): &(VectorSrc, u32)| match src {
        VectorSrc::Row(row) => mfma::Scale { register: wave.v[usize::from(row)], byte },
        VectorSrc::Scalar(ScalarSrc::Const(bits)) => mfma::Scale::constant(bits as u32),
        VectorSrc::Scalar(src) => mfma::Scale { register: [wave.scalar(src, 1) as u32; 64], byte },
    };
    let modifiers = mfma::Modifiers {
        cbsz: m.cbsz,
        abid: m.abid,
        blgp: m.blgp,
        fp8: env.program.arch.fp8(),
        fp16_ovfl: wave.mode.saturates(),
        flush_f32_sources: wave.mode.flushes_f32(),
        scales: m.scales.as_ref().map(|[a, b]| [scale(a), scale(b)]),
    };
    let result = mfma::execute(m.op, rows(m.a), rows(m.b), c, &modifiers).map_err(|e| unsupported(e.0))?;
    let dst = m.dst.vector();
    wave.v[dst..dst + result.len()].copy_from_slice(&result);
    Ok(())
}
