//! When the waves of a compute unit issue what: an in-order estimate from executed traces.
//!
//! Every wave issues its instructions in order, at most one in [`Machine::issue`] cycles, when its operands are there, its SIMD's or compute
//! unit's unit is free, and, at an `s_waitcnt`, enough loads have come back. The wave that can issue first goes first. Vector memory comes back in
//! order: a line of K, V or their scales that the compute unit has not seen lately takes [`Machine::memory_latency`], any other such line
//! [`Machine::l2_latency`], both at [`Machine::fill`]; one that it has seen [`Machine::l1_latency`]. Scalar loads have a cache and a way of their own. A barrier lets its workgroup go when the last wave has arrived.
//!
//! Left out: instruction fetch, register bank conflicts, TLB misses, and what other compute units do beyond the bandwidth they leave.

use std::collections::{BTreeMap, VecDeque};

use cdna_sim::operand::{REGISTERS, Regs};
use cdna_sim::trace::LINE;
use cdna_sim::{Class, Counter, Event, Program, Touched, Trace};
use serde::Serialize;

use crate::constants::Machine;
use crate::op::{self, Unit};
use crate::tag::{Tag, Tags};

/// What waves wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stall {
    /// Loads from global memory, at an `s_waitcnt`.
    Memory,
    /// LDS results, at an `s_waitcnt`.
    Lds,
    /// Scalar loads.
    Scalar,
    /// The other waves, at a barrier.
    Barrier,
    /// A unit that is busy.
    Unit,
    /// Results of earlier instructions.
    Result,
}

/// An estimate. Cycles of the compute units' clock.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Timing {
    /// Until the last wave has ended.
    pub cycles: f64,
    /// Cycles that waves spent issuing, mean over the waves.
    pub issuing: f64,
    /// Cycles that waves waited, mean over the waves.
    pub stalls: BTreeMap<Stall, f64>,
}

impl Timing {
    /// What `self` takes longer than `other`, over `parts` tiles.
    pub fn per(&self, other: &Self, parts: f64) -> Self {
        let keys = self.stalls.keys().chain(other.stalls.keys());
        let of = |timing: &Self, stall| timing.stalls.get(stall).copied().unwrap_or(0.0);
        Self {
            cycles: (self.cycles - other.cycles) / parts,
            issuing: (self.issuing - other.issuing) / parts,
            stalls: keys.map(|stall| (*stall, (of(self, stall) - of(other, stall)) / parts)).collect(),
        }
    }
}

/// Four SIMDs a compute unit.
const SIMDS: usize = 4;

/// Estimates `workgroups` workgroups, each with the waves of `trace`, that share one compute unit. `fill`: bytes of new lines a cycle that the
/// compute unit gets, at most [`Machine::fill`].
pub fn time(program: &Program, trace: &Trace, tags: &Tags, workgroups: usize, machine: &Machine, fill: f64) -> Timing {
    let costs: Vec<Cost> = program.insts.iter().map(|inst| Cost::new(inst, program, machine)).collect();
    let mut unit = ComputeUnit::new(machine, tags, fill.min(machine.fill));
    let mut waves: Vec<Wave> = vec![];
    for group in 0..workgroups {
        waves.extend(trace.waves.iter().enumerate().map(|(index, events)| Wave::new(events, group, index % SIMDS)));
    }
    loop {
        let next = (0..waves.len()).filter_map(|w| Some((waves[w].candidate(&costs, &unit, machine)?, w)));
        let Some((start, w)) = next.min_by(|a, b| a.0.at.total_cmp(&b.0.at)) else { break };
        waves[w].issue(start, &costs, &mut unit, machine);
        release_barrier(&mut waves, w, machine);
    }
    let count = waves.len().max(1) as f64;
    let mut timing = Timing { cycles: waves.iter().map(|wave| wave.next).fold(0.0, f64::max), ..Timing::default() };
    for wave in &waves {
        timing.issuing += wave.issuing / count;
        wave.stalls.iter().for_each(|(&stall, cycles)| *timing.stalls.entry(stall).or_default() += cycles / count);
    }
    timing
}

/// Lets the workgroup of wave `w` pass its barrier if all its waves wait there or have ended.
fn release_barrier(waves: &mut [Wave], w: usize, machine: &Machine) {
    let group = waves[w].group;
    let mine = || waves.iter().filter(|wave| wave.group == group);
    if waves[w].arrived.is_none() || !mine().all(|wave| wave.arrived.is_some() || wave.ended()) {
        return;
    }
    let last = mine().filter_map(|wave| wave.arrived).fold(0.0, f64::max) + machine.barrier;
    for wave in waves.iter_mut().filter(|wave| wave.group == group) {
        if let Some(arrived) = wave.arrived.take() {
            wave.stall(Stall::Barrier, last - arrived);
            wave.next = last;
        }
    }
}

/// What an instruction costs wherever it is executed.
struct Cost {
    unit: Unit,
    /// Cycles until the wave's next instruction.
    issue: f64,
    /// Cycles that the unit is busy.
    busy: f64,
    /// From issue to a result in registers; loads have theirs when they come back.
    latency: f64,
    /// MFMA: cycles after its issue until a vector instruction of the SIMD, and until packed F32 arithmetic.
    hold: [f64; 2],
    packed: bool,
    counter: Option<Counter>,
    wait: Option<(usize, usize)>,
    barrier: bool,
    /// The addend of an MFMA, which the matrix unit forwards.
    forwarded: Option<Regs>,
    reads: Vec<Regs>,
    writes: Vec<Regs>,
}

impl Cost {
    fn new(inst: &cdna_sim::Inst, program: &Program, m: &Machine) -> Self {
        let unit = op::unit(inst);
        let slot = m.issue;
        let mut cost = Self {
            unit,
            issue: op::nop_states(inst).map_or(slot, |states| states as f64 * slot),
            busy: slot,
            latency: slot,
            hold: [0.0; 2],
            packed: op::is_packed_f32(inst),
            counter: inst.counter(),
            wait: inst.wait(),
            barrier: inst.class == Class::Barrier,
            forwarded: None,
            reads: inst.reads().to_vec(),
            writes: inst.writes().to_vec(),
        };
        match unit {
            Unit::Vector => {
                cost.busy = if op::is_quarter_rate(inst) { m.quarter_rate } else { m.valu };
                cost.latency = cost.busy;
            }
            Unit::Matrix => {
                let passes = op::mfma_passes(inst, program.arch) as f64;
                let width = op::mfma_operand_bytes(inst) as f64;
                cost.busy = passes * m.mfma_pass;
                cost.latency = cost.busy + m.mfma_result * slot;
                let wide = if width >= 16.0 { 1.0 } else { 0.0 };
                cost.hold = [(m.mfma_hold + (width / 16.0).floor()) * slot, (passes + m.mfma_packed_hold + wide) * slot];
                // The addend is the third operand read.
                cost.forwarded = inst.reads().get(2).copied();
            }
            Unit::Lds => {
                let rate = if cost.writes.is_empty() { m.lds_write } else { m.lds_read };
                cost.busy = f64::from(inst.lds_bytes().unwrap_or(4)) * 64.0 / rate;
            }
            Unit::Memory | Unit::Scalar | Unit::None => {}
        }
        cost
    }
}

/// What waves of a compute unit share.
struct ComputeUnit<'a> {
    tags: &'a Tags,
    vector: [f64; SIMDS],
    packed: [f64; SIMDS],
    matrix: [f64; SIMDS],
    scalar: [f64; SIMDS],
    lds: f64,
    memory: f64,
    /// When the last new line has come in.
    filled: f64,
    fill: f64,
    l1: Cache,
    /// The scalar data cache, whose lines come from L2 by a way of their own.
    scalar_lines: Cache,
}

/// The lines that an access touches. Workgroups of one trace stand for different ones.
fn lines_of(touched: &Touched, group: usize) -> Vec<u64> {
    touched.lines.iter().map(|line| line | (group as u64) << 58).collect()
}

impl<'a> ComputeUnit<'a> {
    fn new(machine: &Machine, tags: &'a Tags, fill: f64) -> Self {
        let free = [0.0; SIMDS];
        Self {
            tags,
            vector: free,
            packed: free,
            matrix: free,
            scalar: free,
            lds: 0.0,
            memory: 0.0,
            filled: 0.0,
            fill,
            l1: Cache::new(machine),
            scalar_lines: Cache::new(machine),
        }
    }

    /// When the lines that a vector access issued at cycle `at` touches are there.
    fn vector_lines(&mut self, touched: &Touched, group: usize, at: f64, m: &Machine) -> f64 {
        let lines = lines_of(touched, group);
        let streamed = matches!(self.tags.of(touched.address), Tag::Key | Tag::Value | Tag::KeyScales | Tag::ValueScales);
        let (misses, there) = self.l1.look(&lines);
        let mut done = there.max(at + m.l1_latency);
        if misses > 0 {
            let first = at + if streamed { m.memory_latency } else { m.l2_latency };
            self.filled = self.filled.max(first) + misses as f64 * LINE as f64 / self.fill;
            done = done.max(self.filled);
            self.l1.put(&lines, self.filled);
        }
        done
    }

    /// When what a scalar load issued at cycle `at` touches is there.
    fn scalar_load(&mut self, touched: &Touched, group: usize, at: f64, m: &Machine) -> f64 {
        let lines = lines_of(touched, group);
        let (misses, there) = self.scalar_lines.look(&lines);
        let done = there.max(at + if misses > 0 { m.l2_latency } else { m.scalar_latency });
        self.scalar_lines.put(&lines, done);
        done
    }

    /// When the unit that an instruction needs is free.
    fn free(&self, cost: &Cost, simd: usize) -> f64 {
        match cost.unit {
            Unit::Vector if cost.packed => self.vector[simd].max(self.packed[simd]),
            Unit::Vector => self.vector[simd],
            Unit::Matrix => self.vector[simd].max(self.matrix[simd]),
            Unit::Scalar => self.scalar[simd],
            Unit::Memory => self.memory,
            Unit::Lds | Unit::None => 0.0,
        }
    }
}

/// Lines seen lately.
struct Cache {
    capacity: usize,
    clock: u64,
    lines: BTreeMap<u64, Line>,
}

struct Line {
    /// The cache's clock at the last use.
    used: u64,
    /// Cycle at which it is there.
    there: f64,
}

impl Cache {
    fn new(machine: &Machine) -> Self {
        Self { capacity: machine.l1_lines as usize, clock: 0, lines: BTreeMap::new() }
    }

    /// How many of `lines` are not in the cache, and when the last of the others is there.
    fn look(&mut self, lines: &[u64]) -> (usize, f64) {
        let (mut misses, mut there) = (0, 0.0f64);
        for line in lines {
            self.clock += 1;
            match self.lines.get_mut(line) {
                Some(line) => {
                    line.used = self.clock;
                    there = there.max(line.there);
                }
                None => misses += 1,
            }
        }
        (misses, there)
    }

    /// Puts those of `lines` in that were missing, to be there at cycle `there`.
    fn put(&mut self, lines: &[u64], there: f64) {
        for &line in lines {
            self.clock += 1;
            self.lines.entry(line).or_insert(Line { used: self.clock, there });
            if self.lines.len() > self.capacity {
                let oldest = self.lines.iter().min_by_key(|(_, line)| line.used).map(|(&line, _)| line);
                oldest.map(|line| self.lines.remove(&line));
            }
        }
    }
}

/// A possible issue: when, and what it waited for.
#[derive(Clone, Copy)]
struct Start {
    at: f64,
    stall: Stall,
}

struct Wave<'a> {
    events: &'a [Event],
    group: usize,
    simd: usize,
    at: usize,
    /// Earliest cycle of the next issue.
    next: f64,
    ready: Vec<f64>,
    vector: VecDeque<f64>,
    lds: VecDeque<f64>,
    scalar: f64,
    /// When the wave came to the barrier it waits at.
    arrived: Option<f64>,
    issuing: f64,
    stalls: BTreeMap<Stall, f64>,
}

impl<'a> Wave<'a> {
    fn new(events: &'a [Event], group: usize, simd: usize) -> Self {
        Self {
            events,
            group,
            simd,
            at: 0,
            next: 0.0,
            ready: vec![0.0; REGISTERS],
            vector: VecDeque::new(),
            lds: VecDeque::new(),
            scalar: 0.0,
            arrived: None,
            issuing: 0.0,
            stalls: BTreeMap::new(),
        }
    }

    fn ended(&self) -> bool {
        self.at == self.events.len()
    }

    fn stall(&mut self, stall: Stall, cycles: f64) {
        *self.stalls.entry(stall).or_default() += cycles;
    }

    /// When the next instruction can issue; `None` at a barrier and at the end.
    fn candidate(&self, costs: &[Cost], unit: &ComputeUnit, m: &Machine) -> Option<Start> {
        if self.arrived.is_some() {
            return None;
        }
        let cost = &costs[self.events.get(self.at)?.inst as usize];
        let mut start = Start { at: self.next, stall: Stall::Result };
        let mut later = |at: f64, stall| {
            if at > start.at {
                start = Start { at, stall };
            }
        };
        if let Some((vector, lgkm)) = cost.wait {
            if let Some(&at) = self.vector.len().checked_sub(vector.saturating_add(1)).and_then(|i| self.vector.get(i)) {
                later(at, Stall::Memory);
            }
            if let Some(&at) = self.lds.len().checked_sub(lgkm.saturating_add(1)).and_then(|i| self.lds.get(i)) {
                later(at, Stall::Lds);
            }
            if lgkm == 0 {
                later(self.scalar, Stall::Scalar);
            }
        }
        for regs in &cost.reads {
            // An addend that the matrix unit has just made costs nothing.
            let early = if cost.forwarded == Some(*regs) { m.mfma_result * m.issue } else { 0.0 };
            for register in regs.first..regs.first + regs.count {
                later(self.ready[usize::from(register)] - early, Stall::Result);
            }
        }
        later(unit.free(cost, self.simd), Stall::Unit);
        Some(start)
    }

    fn issue(&mut self, start: Start, costs: &[Cost], unit: &mut ComputeUnit, m: &Machine) {
        let event = &self.events[self.at];
        let cost = &costs[event.inst as usize];
        self.at += 1;
        self.stall(start.stall, start.at - self.next);
        self.issuing += cost.issue;
        self.next = start.at + cost.issue;
        if let Some((vector, lgkm)) = cost.wait {
            self.vector.drain(..self.vector.len().saturating_sub(vector));
            self.lds.drain(..self.lds.len().saturating_sub(lgkm));
        }
        if cost.barrier {
            self.arrived = Some(self.next);
        }
        let done = self.occupy(start.at, event, cost, unit, m);
        for regs in &cost.writes {
            for register in regs.first..regs.first + regs.count {
                self.ready[usize::from(register)] = done;
            }
        }
    }

    /// Occupies the instruction's unit from cycle `at`; gives when its result is there.
    fn occupy(&mut self, at: f64, event: &Event, cost: &Cost, unit: &mut ComputeUnit, m: &Machine) -> f64 {
        let simd = self.simd;
        match cost.unit {
            Unit::Scalar => unit.scalar[simd] = at + cost.busy,
            Unit::Vector => unit.vector[simd] = at + cost.busy,
            Unit::Matrix => {
                unit.matrix[simd] = at + cost.busy;
                unit.vector[simd] = at + cost.hold[0];
                unit.packed[simd] = at + cost.hold[1];
            }
            Unit::Lds => {
                unit.lds = unit.lds.max(at) + cost.busy + f64::from(event.conflicts);
                let done = unit.lds + m.lds_latency;
                self.lds.push_back(done);
                return done;
            }
            Unit::Memory => return self.access(at, event, unit, m),
            Unit::None => {}
        }
        if cost.counter == Some(Counter::Scalar) {
            let done = event.touched.as_deref().map_or(at + m.scalar_latency, |t| unit.scalar_load(t, self.group, at, m));
            self.scalar = self.scalar.max(done);
            return done;
        }
        at + cost.latency
    }

    /// A vector memory instruction.
    fn access(&mut self, at: f64, event: &Event, unit: &mut ComputeUnit, m: &Machine) -> f64 {
        let bytes = event.touched.as_deref().map_or(0, |touched| touched.bytes);
        unit.memory = at + (f64::from(bytes) / m.vmem).max(m.vmem_least);
        let issued = unit.memory;
        let mut done = event.touched.as_deref().map_or(issued, |t| unit.vector_lines(t, self.group, issued, m));
        done = done.max(self.vector.back().copied().unwrap_or(0.0));
        self.vector.push_back(done);
        done
    }
}
