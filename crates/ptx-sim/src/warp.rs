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
    /// Whether they looked at an mbarrier in vain, and the others go first.
    pub polls: bool,
}

impl Group {
    fn new(pc: u32, lanes: u32) -> Self {
        Self { pc, lanes, waits: false, polls: false }
    }
}

/// What becomes of a warp's lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Those here go on.
    Goes,
    /// All wait for others of the warp.
    Waits,
    /// All that do not wait have looked at an mbarrier in vain.
    Polls,
}

/// What the tensor cores read or write until they are waited for.
#[derive(Debug, Clone, Copy)]
pub enum Product {
    /// 16 bytes of shared memory.
    Shared(u32),
    Register(u32),
}

/// What products do with a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Busy {
    No,
    Read,
    Summed,
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
    /// What lanes may access that have not waited for the kernel before; all of `view` where there is none.
    pub settled: Option<View>,
    /// Lanes that have waited for the kernel before.
    pub waited: u32,
    /// Copies of each lane.
    pub copies: Vec<Groups<Copying>>,
    /// What the tensor cores read and write.
    pub products: Groups<Product>,
    /// The same by register; empty while they do nothing.
    pub busy: Vec<Busy>,
    pub has_fenced_products: bool,
    /// Which `wgmma`s it executed on what, as a number that the others of its warpgroup have too.
    pub products_executed: u64,
    /// The round of the cluster's barrier that it came to and has not waited for.
    pub arrived: Option<u32>,
    /// The last round that it has waited for.
    pub met: Option<u32>,
    pub executed: u64,
    /// Whether all its lanes looked at an mbarrier in vain.
    pub polls: bool,
}

impl Warp {
    pub fn new(cta: usize, index: usize, program: &Program, agent: Agent, view: View, settled: Option<View>) -> Self {
        Self {
            cta,
            index,
            // Zeros cost nothing where no register is touched.
            regs: vec![[0; LANES]; program.registers.len()],
            local: vec![vec![0xff; program.local_bytes]; LANES],
            here: Group::new(0, u32::MAX),
            others: vec![],
            state: State::Runs,
            agent,
            view,
            settled,
            waited: 0,
            copies: vec![Groups::default(); LANES],
            products: Groups::default(),
            busy: vec![],
            has_fenced_products: false,
            products_executed: 0,
            arrived: None,
            met: None,
            executed: 0,
            polls: false,
        }
    }

    /// Lanes that have not ended.
    pub fn alive(&self) -> u32 {
        self.others.iter().fold(self.here.lanes, |all, group| all | group.lanes)
    }

    /// Goes on with the lanes that are least far and neither wait nor poll, joined by all at the same place.
    pub fn choose(&mut self) -> Choice {
        if self.others.is_empty() && !self.here.waits && !self.here.polls {
            return Choice::Goes;
        }
        if self.here.lanes != 0 {
            self.others.push(self.here);
        }
        let Some(pc) = self.others.iter().filter(|group| !group.waits && !group.polls).map(|group| group.pc).min() else {
            return self.look_again();
        };
        let lanes = self.others.iter().filter(|group| group.pc == pc).fold(0, |all, group| all | group.lanes);
        self.others.retain(|group| group.pc != pc);
        self.here = Group::new(pc, lanes);
        Choice::Goes
    }

    /// Where no lanes can go on now: those that poll may later.
    fn look_again(&mut self) -> Choice {
        let polls = self.others.iter().any(|group| group.polls);
        self.others.iter_mut().for_each(|group| group.polls = false);
        if let Some(last) = self.others.pop() {
            self.here = last;
        }
        if polls { Choice::Polls } else { Choice::Waits }
    }

    /// `lanes` of those here wait for others; the rest, whose guard is off, go on.
    pub fn wait(&mut self, lanes: u32) {
        let rest = self.here.lanes & !lanes;
        if rest == 0 {
            self.here.waits = true;
            return;
        }
        self.others.push(Group { waits: true, ..Group::new(self.here.pc, lanes) });
        self.here = Group::new(self.here.pc + 1, rest);
    }

    /// Sends `taken` of the lanes here to `target`; the rest go on.
    pub fn branch(&mut self, taken: u32, target: u32) {
        let rest = self.here.lanes & !taken;
        if rest == 0 {
            self.here.pc = target;
            return;
        }
        self.here = Group::new(self.here.pc + 1, rest);
        if taken != 0 {
            self.others.push(Group::new(target, taken));
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
