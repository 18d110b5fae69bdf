//! What threads wait at: the CTA's named barriers, the cluster's barrier, mbarriers.

use crate::clock::{Agent, Clocks};
use crate::error::Fault;

/// A barrier that counts arrivals and then begins anew.
#[derive(Debug, Default)]
pub struct Barrier {
    /// Threads that the present round is for; 0 before anyone came.
    expected: u32,
    arrived: u32,
    /// Whether that is all threads of the CTA that have not ended.
    is_of_all: bool,
    arriving: Option<Clocks>,
    /// Rounds that ended.
    rounds: u32,
    /// What those knew who came to a round that ended, and how many warps have yet to learn it.
    ended: Vec<(u32, Clocks, u32)>,
    waiting: u32,
    /// Who came to the present round and to the one before it, and when.
    came: Vec<(usize, u32)>,
    before: Vec<(usize, u32)>,
}

impl Barrier {
    /// `threads` more come to a round of `expected`, or of `all` that have not ended; the round they are in.
    ///
    /// Who comes must know of all arrivals of the round before: else it could have come first, and in their place.
    pub fn arrive(&mut self, threads: u32, expected: Option<u32>, all: u32, agent: &Agent, waits: bool) -> Result<u32, Fault> {
        let (clocks, is_of_all, expected) = (&agent.clocks, expected.is_none(), expected.unwrap_or(all));
        if self.before.iter().any(|&(other, epoch)| clocks.seen[other] < epoch) {
            return Err(Fault::Misuse("an arrival at a barrier that could have come to the round before".to_string()));
        }
        self.came.push((agent.index, agent.now()));
        if self.expected != 0 && self.expected != expected {
            return Err(Fault::Misuse(format!("a barrier of {} threads, where others came to it as one of {expected}", self.expected)));
        }
        (self.expected, self.is_of_all) = (expected, is_of_all);
        self.arrived += threads;
        self.waiting += u32::from(waits);
        match &mut self.arriving {
            Some(arriving) => arriving.join(clocks),
            None => self.arriving = Some(clocks.clone()),
        }
        let round = self.rounds;
        if self.arrived > expected {
            return Err(Fault::Misuse(format!("{} threads at a barrier of {expected}", self.arrived)));
        }
        self.maybe_end();
        Ok(round)
    }

    /// Threads of the CTA ended: a round of all threads goes on without them.
    pub fn end(&mut self, threads: u32) {
        if self.is_of_all && self.arrived > 0 {
            self.expected -= threads;
            self.maybe_end();
        }
    }

    fn maybe_end(&mut self) {
        if self.arrived != self.expected {
            return;
        }
        let round = self.rounds;
        self.rounds += 1;
        (self.expected, self.arrived) = (0, 0);
        self.before = std::mem::take(&mut self.came);
        let waiting = std::mem::take(&mut self.waiting);
        if let Some(clocks) = self.arriving.take()
            && waiting > 0
        {
            self.ended.push((round, clocks, waiting));
        }
    }

    /// What a warp that waits in `round` learns, once that has ended.
    pub fn leave(&mut self, round: u32) -> Option<Clocks> {
        let at = self.ended.iter().position(|(ended, ..)| *ended == round)?;
        self.ended[at].2 -= 1;
        let clocks = self.ended[at].1.clone();
        if self.ended[at].2 == 0 {
            self.ended.remove(at);
        }
        Some(clocks)
    }
}

/// The cluster's barrier: a round ends when all warps have come to it that have not ended.
#[derive(Debug)]
pub struct Meeting {
    /// Warps that have not ended, and of those the ones that came to the present round.
    alive: usize,
    arrived: usize,
    /// Rounds that ended.
    pub rounds: u32,
}

impl Meeting {
    pub fn new(warps: usize) -> Self {
        Self { alive: warps, arrived: 0, rounds: 0 }
    }

    /// One more came; the round it is in.
    pub fn arrive(&mut self) -> u32 {
        let round = self.rounds;
        self.arrived += 1;
        self.maybe_end();
        round
    }

    /// A warp ended that came to `arrived` last.
    pub fn end(&mut self, arrived: Option<u32>) {
        self.alive -= 1;
        self.arrived -= usize::from(arrived == Some(self.rounds));
        self.maybe_end();
    }

    fn maybe_end(&mut self) {
        if self.arrived == self.alive && self.alive > 0 {
            (self.arrived, self.rounds) = (0, self.rounds + 1);
        }
    }
}

/// An mbarrier, in a CTA's shared memory.
#[derive(Debug)]
pub struct Mbarrier {
    /// Its number among the agents: who has waited for it has seen what was sent to it.
    pub agent: usize,
    /// Who made it: agent, lane and epoch.
    pub made: (usize, u8, u32),
    /// Whether a fence released it to the cluster, and the round of the cluster's barrier from which on it is known.
    pub released: bool,
    pub known_from: Option<u32>,
    /// Arrivals a phase.
    count: u32,
    pending: u32,
    /// Bytes that are expected, less those that came.
    bytes: i64,
    /// Phases that ended.
    pub phase: u32,
    /// The last phase that bytes were sent in, and the last that was waited for, both from 1.
    sent: u32,
    waited: u32,
    arriving: Clocks,
    ended: Clocks,
}

/// Most arrivals, or bytes, that an mbarrier counts.
const MOST_COUNTED: i64 = (1 << 20) - 1;

impl Mbarrier {
    pub fn new(agent: usize, made: (usize, u8, u32), count: u32, agents: usize) -> Self {
        let [arriving, ended] = [(); 2].map(|()| Clocks::new(agents));
        let (released, known_from) = (false, None);
        Self { agent, made, released, known_from, count, pending: count, bytes: 0, phase: 0, sent: 0, waited: 0, arriving, ended }
    }

    /// An arrival that expects `bytes`.
    pub fn expect(&mut self, bytes: u32, clocks: &Clocks) -> Result<(), Fault> {
        self.bytes += i64::from(bytes);
        if self.bytes > MOST_COUNTED {
            return Err(Fault::Misuse(format!("{} bytes at an mbarrier, which counts {MOST_COUNTED}", self.bytes)));
        }
        self.pending =
            self.pending.checked_sub(1).ok_or_else(|| Fault::Misuse("more arrivals at an mbarrier than it counts".to_string()))?;
        self.arriving.join(clocks);
        self.maybe_end();
        Ok(())
    }

    /// `bytes` came; the epoch, as the barrier's agent, that they are seen from.
    pub fn complete(&mut self, bytes: usize) -> u32 {
        let epoch = self.phase + 1;
        self.sent = epoch;
        self.bytes -= bytes as i64;
        self.maybe_end();
        epoch
    }

    fn maybe_end(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.phase += 1;
            self.pending = self.count;
            self.ended.join(&self.arriving);
            self.ended.seen[self.agent] = self.phase;
        }
    }

    /// What is known once the phase of this parity has ended, if it has.
    pub fn wait(&mut self, parity: u32) -> Option<&Clocks> {
        let is_over = self.phase % 2 != parity % 2;
        if is_over {
            self.waited = self.phase;
        }
        is_over.then_some(&self.ended)
    }

    /// Whether what was, or is to be, sent to it has been waited for.
    pub fn is_done(&self) -> bool {
        self.bytes == 0 && self.sent <= self.waited
    }
}
