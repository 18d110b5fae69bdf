//! A cluster of CTAs: what its warps share, and their run from beginning to end.

use std::collections::HashMap;

use sim_memory::{Map, View};

use crate::barrier::{Barrier, Mbarrier};
use crate::clock::Agent;
use crate::error::{Error, Fault, Result};
use crate::exec::{Env, run};
use crate::inst::LANES;
use crate::shared::Shared;
use crate::warp::{State, Warp};

/// Most mbarriers of a cluster.
const MBARRIERS: usize = 64;
/// Where an address in the cluster's shared memory has the CTA's rank, counted from 1.
const RANK_SHIFT: u32 = 24;
/// Instructions of a look at an mbarrier: the look and the branch back.
const POLL: u64 = 2;
/// Warps that a deadlock is shown of.
const SHOWN: usize = 8;

/// A CTA's part of the cluster.
pub struct Cta {
    pub shared: Shared,
    pub barriers: [Barrier; 16],
    /// The round of the cluster's barrier that each warp came to last.
    pub cluster_rounds: Vec<u32>,
    pub has_ended: bool,
    mbarriers: HashMap<u32, Mbarrier>,
}

/// What the warps of a cluster share.
pub struct Cluster {
    pub ctas: Vec<Cta>,
    pub barrier: Barrier,
    pub threads: u32,
    agents: usize,
    made: usize,
}

/// A shared address of the CTA with this rank.
pub fn shared_of_rank(address: u32, rank: u32) -> u32 {
    address | (rank + 1) << RANK_SHIFT
}

/// Rank and address of what [`shared_of_rank`] gave.
pub fn rank_of(address: u32) -> (usize, u32) {
    ((address >> RANK_SHIFT).wrapping_sub(1) as usize, address & ((1 << RANK_SHIFT) - 1))
}

impl Cluster {
    fn new(ctas: usize, warps: usize, shared_bytes: usize) -> Self {
        let cta = |i: usize| Cta {
            shared: Shared::new(shared_bytes, warps, i * warps),
            barriers: Default::default(),
            cluster_rounds: vec![0; warps],
            has_ended: false,
            mbarriers: HashMap::new(),
        };
        let agents = ctas * warps + MBARRIERS;
        Self { ctas: (0..ctas).map(cta).collect(), barrier: Barrier::default(), threads: (ctas * warps * LANES) as u32, agents, made: 0 }
    }

    /// Adds an mbarrier, made by `make` of its number among the agents and theirs.
    pub fn add_mbarrier(&mut self, cta: usize, at: u32, make: impl Fn(usize, usize) -> Mbarrier) -> Result<(), Fault> {
        if self.made == MBARRIERS {
            return Err(Fault::Misuse(format!("more than {MBARRIERS} mbarriers in a cluster")));
        }
        let agent = self.agents - MBARRIERS + self.made;
        self.made += 1;
        self.ctas[cta].mbarriers.insert(at, make(agent, self.agents));
        Ok(())
    }

    /// The mbarrier at an address of a CTA.
    pub fn mbarrier(&mut self, cta: usize, at: u32) -> Result<&mut Mbarrier, Fault> {
        let found = self.ctas.get_mut(cta).and_then(|cta| cta.mbarriers.get_mut(&at));
        found.ok_or_else(|| Fault::Misuse(format!("no mbarrier at {at:#x} of CTA {cta}")))
    }

    /// The mbarriers that a warp made are known to who then waits for the cluster.
    pub fn made_known(&mut self, maker: usize) {
        let all = self.ctas.iter_mut().flat_map(|cta| cta.mbarriers.values_mut());
        all.filter(|barrier| barrier.made.0 == maker).for_each(|barrier| barrier.known_in_cluster = true);
    }
}

/// A launch's constants.
pub struct Shape<'a> {
    pub program: &'a crate::parse::Program,
    pub params: &'a [u8],
    pub grid: [u32; 3],
    pub threads: u32,
    /// CTAs of a cluster, along x.
    pub ctas: u32,
    pub shared_bytes: usize,
}

/// Runs the cluster whose first CTA is `first`; the instructions that its warps executed.
pub fn run_cluster(shape: &Shape<'_>, first: [u32; 3], map: &Map) -> Result<u64> {
    let warps = shape.threads as usize / LANES;
    let mut cluster = Cluster::new(shape.ctas as usize, warps, shape.shared_bytes);
    let env = |rank: usize| Env {
        program: shape.program,
        params: shape.params,
        grid: shape.grid,
        cta: [first[0] + rank as u32, first[1], first[2]],
        threads: shape.threads,
        rank: rank as u32,
    };
    let envs: Vec<Env<'_>> = (0..shape.ctas as usize).map(env).collect();
    let agents = cluster.agents;
    let warp = |i: usize| {
        let agent = Agent::new(i, agents);
        Warp::new(i / warps, i % warps, shape.program, agent, View::new(map.clone()))
    };
    let mut all: Vec<Warp> = (0..shape.ctas as usize * warps).map(warp).collect();
    while all.iter().any(|warp| warp.state != State::Ended) {
        let mut goes_on = false;
        for i in 0..all.len() {
            let (warp, cta) = (&mut all[i], i / warps);
            goes_on |= wake(warp, &mut cluster);
            if warp.state == State::Runs {
                let before = warp.executed;
                run(warp, &mut cluster, &envs[cta]).map_err(|fault| located(fault, warp, &envs[cta]))?;
                goes_on |= !warp.polls || warp.executed - before > POLL;
            }
            cluster.ctas[cta].has_ended = all[cta * warps..(cta + 1) * warps].iter().all(|warp| warp.state == State::Ended);
        }
        if !goes_on {
            return Err(deadlock(&all, &envs));
        }
    }
    Ok(all.iter().map(|warp| warp.executed).sum())
}

/// Lets a warp go on whose barrier's round has ended.
fn wake(warp: &mut Warp, cluster: &mut Cluster) -> bool {
    let barrier = match warp.state {
        State::AtBarrier(id, round) => cluster.ctas[warp.cta].barriers[id].leave(round),
        State::AtCluster(round) => cluster.barrier.leave(round),
        State::Runs | State::Ended => None,
    };
    let Some(clocks) = barrier else { return false };
    warp.agent.clocks.join(&clocks);
    match warp.state {
        State::AtCluster(_) => warp.has_met_cluster = true,
        _ => warp.agent.converge(),
    }
    warp.state = State::Runs;
    true
}

fn located(fault: Fault, warp: &Warp, env: &Env<'_>) -> Error {
    let inst = env.program.insts.get(warp.here.pc as usize);
    let (text, line) = inst.map_or((String::new(), 0), |inst| (inst.text.to_string(), inst.line));
    Error::Execution { fault, text, line, cta: env.cta, warp: warp.index }
}

/// Says of a few warps where they wait.
fn deadlock(all: &[Warp], envs: &[Env<'_>]) -> Error {
    let waiting: Vec<&Warp> = all.iter().filter(|warp| warp.state != State::Ended).collect();
    let place = |warp: &&Warp| {
        // A warp stands behind the barrier that it waits at, or at what looks at an mbarrier.
        let at = (warp.here.pc as usize).saturating_sub(1);
        let inst = &envs[warp.cta].program.insts[at];
        format!("CTA {} warp {} at `{}` (line {})", warp.cta, warp.index, inst.text, inst.line)
    };
    let places: Vec<String> = waiting.iter().take(SHOWN).map(place).collect();
    located(Fault::Deadlock(format!("{} warps wait, {}", waiting.len(), places.join("; "))), waiting[0], &envs[waiting[0].cta])
}
