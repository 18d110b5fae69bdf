//! What each `s_waitcnt` forces: vector memory operations come back in the order they were issued in, so that a wait for one is a wait for all
//! that are older.

use std::collections::{BTreeMap, VecDeque};

use cdna_sim::operand::Regs;
use cdna_sim::{Class, Event, Program, Trace};

use crate::op::is_vector_counter;
use crate::tag::{Tag, Tags};

/// One executed `s_waitcnt`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wait {
    /// Index among the wave's events.
    pub event: usize,
    /// Vector memory loads that were in flight and had to come back, by what they load.
    pub forced: BTreeMap<Tag, usize>,
    /// Of these kinds, the ones of which no instruction reads anything before the wave comes to a barrier or has waited for another kind: they
    /// came in earlier than they had to.
    pub early: Vec<Tag>,
    /// Vector memory loads still in flight after the wait.
    pub left: BTreeMap<Tag, usize>,
}

/// The waits of each wave, in order. Those that force nothing are among them.
pub fn waits(program: &Program, trace: &Trace, tags: &Tags) -> Vec<Vec<Wait>> {
    trace.waves.iter().map(|events| waits_of_wave(program, events, tags)).collect()
}

struct Load {
    /// `None`: a store, or a load without active lanes.
    tag: Option<Tag>,
    regs: Option<Regs>,
}

/// A forced load that nothing has read yet.
struct Unread {
    wait: usize,
    tag: Tag,
    regs: Regs,
}

#[derive(Default)]
struct Scan {
    flight: VecDeque<Load>,
    unread: Vec<Unread>,
    waits: Vec<Wait>,
}

impl Scan {
    /// An instruction reads `regs`: the kinds that it reads of were not early.
    fn read(&mut self, regs: &[Regs]) {
        let overlaps = |a: Regs, b: Regs| a.first < b.first + b.count && b.first < a.first + a.count;
        while let Some(i) = self.unread.iter().position(|load| regs.iter().any(|&regs| overlaps(regs, load.regs))) {
            let Unread { wait, tag, .. } = self.unread[i];
            self.unread.retain(|load| (load.wait, load.tag) != (wait, tag));
        }
    }

    /// What is unread and satisfies `gone` was early.
    fn give_up(&mut self, gone: impl Fn(&Unread) -> bool) {
        for load in self.unread.extract_if(.., |load| gone(load)) {
            let early = &mut self.waits[load.wait].early;
            if !early.contains(&load.tag) {
                early.push(load.tag);
            }
        }
    }

    fn wait(&mut self, event: usize, vector: usize) {
        let mut wait = Wait { event, ..Wait::default() };
        let forced: Vec<Load> = self.flight.drain(..self.flight.len().saturating_sub(vector)).collect();
        forced.iter().filter_map(|load| load.tag).for_each(|tag| *wait.forced.entry(tag).or_default() += 1);
        self.flight.iter().filter_map(|load| load.tag).for_each(|tag| *wait.left.entry(tag).or_default() += 1);
        self.give_up(|load| wait.forced.keys().any(|&tag| tag != load.tag));
        let number = self.waits.len();
        let unread = forced.iter().filter_map(|load| Some(Unread { wait: number, tag: load.tag?, regs: load.regs? }));
        self.unread.extend(unread);
        self.waits.push(wait);
    }
}

fn waits_of_wave(program: &Program, events: &[Event], tags: &Tags) -> Vec<Wait> {
    let mut scan = Scan::default();
    for (number, event) in events.iter().enumerate() {
        let inst = &program.insts[event.inst as usize];
        scan.read(inst.reads());
        if inst.class == Class::Barrier {
            scan.give_up(|_| true);
        }
        if let Some((vector, _)) = inst.wait() {
            scan.wait(number, vector);
        }
        if inst.counter().is_some_and(is_vector_counter) {
            let tag = event.touched.as_deref().filter(|touched| !touched.store).map(|touched| tags.of(touched.address));
            scan.flight.push_back(Load { tag, regs: inst.writes().iter().copied().find(|regs| regs.is_vector()) });
        }
    }
    scan.give_up(|_| true);
    scan.waits
}
