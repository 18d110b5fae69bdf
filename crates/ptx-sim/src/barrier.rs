//! What threads wait at: the CTA's named barriers, the cluster's barrier, mbarriers.

use crate::clock::Clocks;
use crate::error::Fault;

/// A barrier that counts arrivals and then begins anew.
#[derive(Debug, Default)]
pub struct Barrier {
    /// Threads that the present round is for; 0 before anyone came.
    expected: u32,
    arrived: u32,
    arriving: Option<Clocks>,
    /// Rounds that ended.
    rounds: u32,
    /// What those knew who came to a round that ended, and how many warps have yet to learn it.
    ended: Vec<(u32, Clocks, u32)>,
    waiting: u32,
}

impl Barrier {
    /// `threads` more come to a round of `expected`; the round they are in.
    pub fn arrive(&mut self, threads: u32, expected: u32, clocks: &Clocks, waits: bool) -> Result<u32, Fault> {
        if self.expected != 0 && self.expected != expected {
            return Err(Fault::Misuse(format!("a barrier of {} threads, where others came to it as one of {expected}", self.expected)));
        }
        self.expected = expected;
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
        if self.arrived == expected {
            self.rounds += 1;
            (self.expected, self.arrived) = (0, 0);
            let waiting = std::mem::take(&mut self.waiting);
            if let Some(clocks) = self.arriving.take()
                && waiting > 0
            {
                self.ended.push((round, clocks, waiting));
            }
        }
        Ok(round)
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

/// An mbarrier, in a CTA's shared memory.
#[derive(Debug)]
pub struct Mbarrier {
    /// Its number among the agents: who has waited for it has seen what was sent to it.
    pub agent: usize,
    /// Who made it, and when.
    pub made: (usize, u32),
    /// Whether a fence made it known to all who then wait for the cluster.
    pub known_in_cluster: bool,
    /// Arrivals a phase.
    count: u32,
    pending: u32,
    /// Bytes that are expected, less those that came.
    bytes: i64,
    /// Phases that ended.
    pub phase: u32,
    arriving: Clocks,
    ended: Clocks,
}

impl Mbarrier {
    pub fn new(agent: usize, made: (usize, u32), count: u32, agents: usize) -> Self {
        let [arriving, ended] = [(); 2].map(|()| Clocks::new(agents));
        Self { agent, made, known_in_cluster: false, count, pending: count, bytes: 0, phase: 0, arriving, ended }
    }

    /// An arrival that expects `bytes`.
    pub fn expect(&mut self, bytes: u32, clocks: &Clocks) -> Result<(), Fault> {
        self.bytes += i64::from(bytes);
        self.pending =
            self.pending.checked_sub(1).ok_or_else(|| Fault::Misuse("more arrivals at an mbarrier than it counts".to_string()))?;
        self.arriving.join(clocks);
        self.maybe_end();
        Ok(())
    }

    /// `bytes` came; the epoch, as the barrier's agent, that they are seen from.
    pub fn complete(&mut self, bytes: usize) -> u32 {
        let epoch = self.phase + 1;
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
    pub fn wait(&self, parity: u32) -> Option<&Clocks> {
        (self.phase % 2 != parity % 2).then_some(&self.ended)
    }
}
