//! Vector clocks: what of the others' work happened before. An agent is a warp of the cluster, or an mbarrier that sent bytes complete.

/// How far an agent's work is known. Its own entry is its present epoch, from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clocks {
    /// Latest epoch of each agent that happened before.
    pub seen: Vec<u32>,
    /// The same of writes that a fence made visible to the tensor cores.
    pub fenced: Vec<u32>,
}

impl Clocks {
    /// Nothing is known.
    pub fn new(agents: usize) -> Self {
        Self { seen: vec![0; agents], fenced: vec![0; agents] }
    }

    /// Learns what `other` knows.
    pub fn join(&mut self, other: &Clocks) {
        let max = |to: &mut Vec<u32>, from: &Vec<u32>| to.iter_mut().zip(from).for_each(|(to, from)| *to = (*to).max(*from));
        max(&mut self.seen, &other.seen);
        max(&mut self.fenced, &other.fenced);
    }

    /// Makes what is known visible to the tensor cores.
    pub fn fence(&mut self) {
        self.fenced.clone_from(&self.seen);
    }
}

/// A warp's place among the agents.
#[derive(Debug, Clone)]
pub struct Agent {
    pub index: usize,
    pub clocks: Clocks,
    /// The epoch since which its lanes have not waited for each other.
    pub together: u32,
}

impl Agent {
    pub fn new(index: usize, agents: usize) -> Self {
        let mut clocks = Clocks::new(agents);
        clocks.seen[index] = 1;
        Self { index, clocks, together: 1 }
    }

    /// The present epoch.
    pub fn now(&self) -> u32 {
        self.clocks.seen[self.index]
    }

    /// Begins an epoch: what was done is told apart from what follows.
    pub fn advance(&mut self) {
        self.clocks.seen[self.index] += 1;
    }

    /// The lanes have waited for each other.
    pub fn converge(&mut self) {
        self.advance();
        self.together = self.now();
    }

    /// What some lanes release that have not waited for the others: what they all knew.
    pub fn released(&self, lanes: u32) -> Clocks {
        let mut known = self.clocks.clone();
        if lanes != u32::MAX {
            known.seen[self.index] = self.together - 1;
        }
        known
    }

    /// Whether an access of `agent`'s `lane` at `epoch` is ordered before one of this warp's `own` lane.
    pub fn is_after(&self, agent: usize, lane: u8, epoch: u32, own: u8) -> bool {
        if agent != self.index {
            return self.clocks.seen[agent] >= epoch;
        }
        epoch < self.together || lane == WARP || lane == own && lane != SEVERAL
    }
}

/// In place of a lane: the warp as one, whose lanes go on together after the access.
pub const WARP: u8 = 62;
/// In place of a lane: more than one.
pub const SEVERAL: u8 = 63;
