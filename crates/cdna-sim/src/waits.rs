//! Which registers a load may still write, and what `s_waitcnt` proves.
//!
//! - vmcnt counts vector memory in order; stores count too.
//! - lgkmcnt counts LDS in order; scalar loads come back in any order, so only lgkmcnt(0) proves them.
//! - FLAT counts in both and is proven by its place in vmcnt together with lgkmcnt(0).

use std::collections::VecDeque;

use crate::operand::{REGISTERS, Regs};

/// Which counters an operation is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counter {
    /// Vector memory.
    Vector,
    /// LDS.
    Lds,
    /// Scalar memory.
    Scalar,
    /// FLAT.
    Flat,
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    inst: u32,
    regs: Regs,
    counter: Counter,
    vector_done: bool,
    lgkm_done: bool,
}

/// In flight and first uses share a byte a register: the low bits count loads in flight, the top bit marks a loaded value not read yet.
const FRESH: u8 = 0x80;

/// What the counters hold at most: 6 and 4 bits.
const VECTOR_MAX: usize = 63;
const LGKM_MAX: usize = 15;

/// The scoreboard of one wave.
pub struct Waits {
    vector: VecDeque<Pending>,
    lds: VecDeque<Pending>,
    scalar: Vec<Pending>,
    flat: Vec<Pending>,
    /// Vector memory operations issued; those numbered up to `vector_done` are proven done.
    pub vector_issued: u32,
    /// See `vector_issued`.
    pub vector_done: u32,
    /// LDS operations issued.
    pub lds_issued: u32,
    /// See `lds_issued`.
    pub lds_done: u32,
    state: Box<[u8; REGISTERS]>,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            vector: VecDeque::new(),
            lds: VecDeque::new(),
            scalar: Vec::new(),
            flat: Vec::new(),
            vector_issued: 0,
            vector_done: 0,
            lds_issued: 0,
            lds_done: 0,
            state: Box::new([0; REGISTERS]),
        }
    }
}

/// What touching a register found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// Nothing in the way.
    Free,
    /// A loaded value is used for the first time.
    FirstUse,
    /// The load by instruction `inst` may still write `register`.
    InFlight { inst: u32, register: u16 },
}

impl Waits {
    /// Issues an operation that loads `regs` (none for stores). A full counter holds the issue up until its oldest operation is done, which
    /// compilers take as proof.
    pub fn issue(&mut self, counter: Counter, inst: u32, regs: Regs) {
        match counter {
            Counter::Vector | Counter::Flat => self.wait(VECTOR_MAX - 1, usize::MAX),
            Counter::Lds => self.wait(usize::MAX, LGKM_MAX - 1),
            Counter::Scalar => {}
        }
        let pending = Pending { inst, regs, counter, vector_done: false, lgkm_done: false };
        for register in regs.first..regs.first + regs.count {
            let state = &mut self.state[usize::from(register)];
            *state = (*state & !FRESH) + 1;
        }
        match counter {
            Counter::Vector => self.vector.push_back(pending),
            Counter::Lds => self.lds.push_back(pending),
            Counter::Scalar => self.scalar.push(pending),
            Counter::Flat => {
                self.flat.push(pending);
                // It holds a place in the in-order queue without registers of its own.
                self.vector.push_back(Pending { regs: Regs::new(0, 0), ..pending });
            }
        }
        match counter {
            Counter::Vector | Counter::Flat => self.vector_issued += 1,
            Counter::Lds => self.lds_issued += 1,
            Counter::Scalar => {}
        }
    }

    /// Looks at the registers an instruction reads.
    #[inline]
    pub fn read(&mut self, regs: Regs) -> Touch {
        let range = usize::from(regs.first)..usize::from(regs.first + regs.count);
        let mut touch = Touch::Free;
        for register in range {
            let state = self.state[register];
            if state == 0 {
                continue;
            }
            if state & !FRESH != 0 {
                return self.blame(register as u16);
            }
            self.state[register] = 0;
            touch = Touch::FirstUse;
        }
        touch
    }

    /// Looks at the registers an instruction writes; a later load by the same in-order counter may overwrite an earlier one's.
    #[inline]
    pub fn write(&mut self, regs: Regs, by: Option<Counter>) -> Touch {
        for register in usize::from(regs.first)..usize::from(regs.first + regs.count) {
            let state = self.state[register];
            if state & !FRESH != 0 {
                let in_order = matches!(by, Some(Counter::Vector | Counter::Lds));
                if !in_order || !self.only_in(by, register as u16) {
                    return self.blame(register as u16);
                }
            }
            self.state[register] &= !FRESH;
        }
        Touch::Free
    }

    /// Vector memory operations in flight.
    pub fn vector_in_flight(&self) -> usize {
        self.vector.len()
    }

    /// `s_waitcnt` with these limits.
    pub fn wait(&mut self, vector: usize, lgkm: usize) {
        while self.vector.len() > vector {
            let Some(done) = self.vector.pop_front() else { break };
            self.vector_done += 1;
            if done.counter == Counter::Flat {
                if let Some(flat) = self.flat.iter_mut().find(|flat| !flat.vector_done) {
                    flat.vector_done = true;
                }
            } else {
                self.land(done.regs);
            }
        }
        while self.lds.len() > lgkm {
            let Some(done) = self.lds.pop_front() else { break };
            self.lds_done += 1;
            self.land(done.regs);
        }
        if lgkm == 0 {
            for done in std::mem::take(&mut self.scalar) {
                self.land(done.regs);
            }
            self.flat.iter_mut().for_each(|flat| flat.lgkm_done = true);
        }
        if !self.flat.is_empty() {
            let (done, pending) = std::mem::take(&mut self.flat).into_iter().partition(|flat| flat.vector_done && flat.lgkm_done);
            self.flat = pending;
            let done: Vec<Pending> = done;
            done.iter().for_each(|flat| self.land(flat.regs));
        }
    }

    fn land(&mut self, regs: Regs) {
        for register in regs.first..regs.first + regs.count {
            let state = &mut self.state[usize::from(register)];
            *state = ((*state & !FRESH) - 1) | FRESH;
        }
    }

    fn all(&self) -> impl Iterator<Item = &Pending> {
        self.vector.iter().chain(&self.lds).chain(&self.scalar).chain(&self.flat)
    }

    fn holds(pending: &Pending, register: u16) -> bool {
        (pending.regs.first..pending.regs.first + pending.regs.count).contains(&register)
    }

    fn only_in(&self, counter: Option<Counter>, register: u16) -> bool {
        self.all().filter(|pending| Self::holds(pending, register)).all(|pending| Some(pending.counter) == counter)
    }

    fn blame(&self, register: u16) -> Touch {
        let inst = self.all().find(|pending| Self::holds(pending, register)).map_or(0, |pending| pending.inst);
        Touch::InFlight { inst, register }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vector_loads_land_in_order() {
        let mut waits = Waits::default();
        let (a, b) = (Regs::new(130, 2), Regs::new(140, 1));
        waits.issue(Counter::Vector, 7, a);
        waits.issue(Counter::Vector, 8, b);
        assert_eq!(waits.read(a), Touch::InFlight { inst: 7, register: 130 });
        waits.wait(1, 15);
        assert_eq!(waits.read(a), Touch::FirstUse);
        assert_eq!(waits.read(a), Touch::Free);
        assert_eq!(waits.read(b), Touch::InFlight { inst: 8, register: 140 });
        waits.wait(0, 15);
        assert_eq!(waits.write(b, None), Touch::Free);
    }

    #[test]
    fn full_counters_hold_the_issue_up() {
        let mut waits = Waits::default();
        let r = |i: usize| Regs::new(130 + i as u16, 1);
        (0..VECTOR_MAX).for_each(|i| waits.issue(Counter::Vector, 1, r(i)));
        assert!(matches!(waits.read(r(0)), Touch::InFlight { .. }));
        waits.issue(Counter::Vector, 1, r(VECTOR_MAX));
        assert_eq!(waits.read(r(0)), Touch::FirstUse);
        assert!(matches!(waits.read(r(1)), Touch::InFlight { .. }));
        let l = |i: usize| Regs::new(300 + i as u16, 1);
        (0..=LGKM_MAX).for_each(|i| waits.issue(Counter::Lds, 1, l(i)));
        assert_eq!(waits.read(l(0)), Touch::FirstUse);
        assert!(matches!(waits.read(l(1)), Touch::InFlight { .. }));
    }

    #[test]
    fn scalar_loads_need_zero_and_do_not_disturb_lds_order() {
        let mut waits = Waits::default();
        let (s, l1, l2) = (Regs::new(4, 2), Regs::new(150, 1), Regs::new(151, 1));
        waits.issue(Counter::Lds, 1, l1);
        waits.issue(Counter::Scalar, 2, s);
        waits.issue(Counter::Lds, 3, l2);
        waits.wait(63, 1);
        assert_eq!(waits.read(l1), Touch::FirstUse);
        assert_eq!(waits.read(s), Touch::InFlight { inst: 2, register: 4 });
        assert_eq!(waits.read(l2), Touch::InFlight { inst: 3, register: 151 });
        waits.wait(63, 0);
        assert_eq!(waits.read(s), Touch::FirstUse);
    }

    #[test]
    fn flat_needs_both_counters() {
        let mut waits = Waits::default();
        let r = Regs::new(128, 1);
        waits.issue(Counter::Flat, 1, r);
        waits.wait(0, 15);
        assert!(matches!(waits.read(r), Touch::InFlight { .. }));
        waits.wait(0, 0);
        assert_eq!(waits.read(r), Touch::FirstUse);
    }
}
