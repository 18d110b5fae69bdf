//! A warp: its registers, where its lanes are, and what it has under way.

use sim_memory::View;

use crate::clock::Agent;
use crate::inst::LANES;
use crate::parse::Program;

/// A register of all lanes.
pub type Lanes = [u64; LANES];

/// Lanes that are at the same instruction.
#[derive(Debug, Clone, Copy)]
pub struct Group {
    pub pc: u32,
    pub lanes: u32,
    /// Whether they wait there for other lanes.
    pub waits: bool,
}

/// What a warp waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Runs,
    /// A round of a named barrier.
    AtBarrier(usize, u32),
    /// A round of the cluster's barrier.
    AtCluster(u32),
    Ended,
}

/// A lane's copy into shared memory.
#[derive(Debug, Clone, Copy)]
pub struct Copying {
    pub address: u32,
    pub bytes: usize,
}

/// Things that are under way in the order of their groups; the last group is open.
#[derive(Debug, Clone)]
pub struct Groups<T>(Vec<Vec<T>>);

impl<T> Default for Groups<T> {
    fn default() -> Self {
        Self(vec![vec![]])
    }
}

impl<T> Groups<T> {
    pub fn push(&mut self, item: T) {
        if let Some(open) = self.0.last_mut() {
            open.push(item);
        }
    }

    pub fn commit(&mut self) {
        self.0.push(vec![]);
    }

    /// All of the groups but the last `left` that were committed, and the open one.
    pub fn take_done(&mut self, left: usize) -> Vec<T> {
        let done = (self.0.len() - 1).saturating_sub(left);
        self.0.drain(..done).flatten().collect()
    }

    /// What is under way.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flatten()
    }
}

/// A warp.
pub struct Warp {
    /// Its CTA in the cluster.
    pub cta: usize,
    /// Its place in the CTA.
    pub index: usize,
    pub regs: Vec<Lanes>,
    /// Each lane's own memory.
    pub local: Vec<Vec<u8>>,
    /// The lanes that execute.
    pub here: Group,
    /// Lanes that are elsewhere.
    pub others: Vec<Group>,
    pub state: State,
    pub agent: Agent,
    pub view: View,
    /// Copies of each lane.
    pub copies: Vec<Groups<Copying>>,
    /// Shared memory that the tensor cores read.
    pub products: Groups<u32>,
    /// Whether a fence made its mbarriers known to the cluster.
    pub made_known: bool,
    /// Whether it has waited for the cluster.
    pub has_met_cluster: bool,
    pub executed: u64,
    /// Whether it looked at an mbarrier in vain since it last did anything else.
    pub polls: bool,
}

impl Warp {
    pub fn new(cta: usize, index: usize, program: &Program, agent: Agent, view: View) -> Self {
        Self {
            cta,
            index,
            // Zeros cost nothing where no register is touched.
            regs: vec![[0; LANES]; program.registers],
            local: vec![vec![0xff; program.local_bytes]; LANES],
            here: Group { pc: 0, lanes: u32::MAX, waits: false },
            others: vec![],
            state: State::Runs,
            agent,
            view,
            copies: vec![Groups::default(); LANES],
            products: Groups::default(),
            made_known: false,
            has_met_cluster: false,
            executed: 0,
            polls: false,
        }
    }

    /// Lanes that have not ended.
    pub fn alive(&self) -> u32 {
        self.others.iter().fold(self.here.lanes, |all, group| all | group.lanes)
    }

    /// Goes on with the lanes that are least far and do not wait, joined by all at the same place. False: all wait.
    pub fn choose(&mut self) -> bool {
        if self.others.is_empty() && !self.here.waits {
            return self.here.lanes != 0;
        }
        if self.here.lanes != 0 {
            self.others.push(self.here);
        }
        let Some(pc) = self.others.iter().filter(|group| !group.waits).map(|group| group.pc).min() else {
            if let Some(last) = self.others.pop() {
                self.here = last;
            }
            return false;
        };
        let lanes = self.others.iter().filter(|group| group.pc == pc).fold(0, |all, group| all | group.lanes);
        self.others.retain(|group| group.pc != pc);
        self.here = Group { pc, lanes, waits: false };
        true
    }

    /// Sends `taken` of the lanes here to `target`; the rest go on.
    pub fn branch(&mut self, taken: u32, target: u32) {
        let rest = self.here.lanes & !taken;
        if rest == 0 {
            self.here.pc = target;
            return;
        }
        self.here = Group { pc: self.here.pc + 1, lanes: rest, waits: false };
        if taken != 0 {
            self.others.push(Group { pc: target, lanes: taken, waits: false });
        }
    }

    /// Ends lanes.
    pub fn end(&mut self, lanes: u32) {
        self.here.lanes &= !lanes;
        self.here.pc += 1;
        if self.alive() == 0 {
            self.state = State::Ended;
        }
    }
}

/// Indices of a mask's lanes.
pub fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 == 1)
}
