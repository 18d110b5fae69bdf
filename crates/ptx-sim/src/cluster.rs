//! A cluster of CTAs: what its warps share, and their run from beginning to end.

use std::collections::HashMap;

use sim_memory::{Map, View};

use crate::barrier::{Barrier, Mbarrier, Meeting};
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
/// Looks at mbarriers in vain, by all warps that run, that are a deadlock: nobody is left who could end a phase, but a loop may count its looks.
const LOOKS: u32 = 4096;
/// Warps that a deadlock is shown of.
const SHOWN: usize = 8;

/// Warps that a `wgmma` is of.
const WARPGROUP: usize = 4;

/// A CTA's part of the cluster.
pub struct Cta {
    pub shared: Shared,
    pub barriers: [Barrier; 16],
    /// Threads of warps that have not ended.
    pub threads: u32,
    pub has_ended: bool,
    mbarriers: HashMap<u32, Mbarrier>,
}

/// What the warps of a cluster share.
pub struct Cluster {
    pub ctas: Vec<Cta>,
    pub barrier: Meeting,
    agents: usize,
    made: usize,
}

/// A shared address of the CTA with this rank.
pub fn shared_of_rank(address: u32, rank: u32) -> u32 {
    address | (rank + 1) << RANK_SHIFT
}

/// Rank and address of what [`shared_of_rank`] gave; no rank: an address of the own CTA.
pub fn rank_of(address: u32) -> (Option<usize>, u32) {
    ((address >> RANK_SHIFT).checked_sub(1).map(|rank| rank as usize), address & ((1 << RANK_SHIFT) - 1))
}

impl Cluster {
    fn new(ctas: usize, warps: usize, shared_bytes: usize) -> Self {
        let cta = |i: usize| Cta {
            shared: Shared::new(shared_bytes, warps, i * warps),
            barriers: Default::default(),
            threads: (warps * LANES) as u32,
            has_ended: false,
            mbarriers: HashMap::new(),
        };
        let agents = ctas * warps + MBARRIERS;
        Self { ctas: (0..ctas).map(cta).collect(), barrier: Meeting::new(ctas * warps), agents, made: 0 }
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

    fn mbarriers_of(&mut self, maker: usize) -> impl Iterator<Item = &mut Mbarrier> {
        self.ctas.iter_mut().flat_map(|cta| cta.mbarriers.values_mut()).filter(move |barrier| barrier.made.0 == maker)
    }

    /// A fence by these lanes of a warp: the mbarriers that were made before are released to the cluster.
    pub fn release_mbarriers(&mut self, maker: &Agent, lanes: u32) {
        for barrier in self.mbarriers_of(maker.index) {
            let (_, lane, epoch) = barrier.made;
            barrier.released |= epoch < maker.together || lanes >> lane & 1 == 1;
        }
    }

    /// Those of a warp that a fence released are known to who waits for this round of the cluster's barrier.
    pub fn made_known(&mut self, maker: usize, round: u32) {
        self.mbarriers_of(maker).filter(|barrier| barrier.released).for_each(|barrier| {
            barrier.known_from.get_or_insert(round);
        });
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
    /// What may be accessed ahead of the wait for the kernel before; `None`: everything.
    pub settled: Option<Map>,
    pub starts_next_early: bool,
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
        starts_next_early: shape.starts_next_early,
    };
    let envs: Vec<Env<'_>> = (0..shape.ctas as usize).map(env).collect();
    let agents = cluster.agents;
    let warp = |i: usize| {
        let agent = Agent::new(i, agents);
        Warp::new(i / warps, i % warps, shape.program, agent, View::new(map.clone()), shape.settled.clone().map(View::new))
    };
    let mut all: Vec<Warp> = (0..shape.ctas as usize * warps).map(warp).collect();
    let mut looks = 0;
    while all.iter().any(|warp| warp.state != State::Ended) {
        let mut goes_on = false;
        for i in 0..all.len() {
            let (warp, cta) = (&mut all[i], i / warps);
            goes_on |= wake(warp, &mut cluster);
            if warp.state == State::Runs {
                run(warp, &mut cluster, &envs[cta]).map_err(|fault| located(fault, warp, &envs[cta]))?;
                goes_on |= !warp.polls;
                if warp.state == State::Ended {
                    cluster.barrier.end(warp.arrived);
                    end_warp(&mut cluster, cta, &all[cta * warps..(cta + 1) * warps])
                        .map_err(|fault| located(fault, &all[i], &envs[cta]))?;
                }
            }
        }
        let polls = all.iter().any(|warp| warp.state == State::Runs);
        looks = if goes_on { 0 } else { looks + 1 };
        if looks > if polls { LOOKS } else { 0 } {
            return Err(deadlock(&all, &envs));
        }
    }
    Ok(all.iter().map(|warp| warp.executed).sum())
}

/// A warp of the CTA has ended: barriers go on without it. Where it was the last, nothing may be on its way to it, and its warpgroups must have multiplied together.
fn end_warp(cluster: &mut Cluster, cta: usize, warps: &[Warp]) -> Result<(), Fault> {
    let Cta { barriers, threads, has_ended, .. } = &mut cluster.ctas[cta];
    *threads -= LANES as u32;
    barriers.iter_mut().for_each(|barrier| barrier.end(LANES as u32));
    *has_ended = *threads == 0;
    if !*has_ended {
        return Ok(());
    }
    if cluster.ctas[cta].mbarriers.values().any(|barrier| !barrier.is_done()) {
        return Err(Fault::Misuse("the CTA ends before it has waited for what is sent to it".to_string()));
    }
    for group in warps.chunks(WARPGROUP) {
        let all = |executed: u64| group.iter().all(|warp| warp.products_executed == executed);
        if !(all(0) || group.len() == WARPGROUP && all(group[0].products_executed)) {
            return Err(Fault::Misuse("a wgmma that not all warps of a warpgroup execute, or not of the same matrices".to_string()));
        }
    }
    Ok(())
}

/// Lets a warp go on whose barrier's round has ended.
fn wake(warp: &mut Warp, cluster: &mut Cluster) -> bool {
    match warp.state {
        State::AtBarrier(id, round) => {
            let Some(clocks) = cluster.ctas[warp.cta].barriers[id].leave(round) else { return false };
            warp.agent.clocks.join(&clocks);
            warp.agent.converge();
        }
        State::AtCluster(round) if cluster.barrier.rounds > round => warp.met = Some(round),
        State::AtCluster(_) | State::Runs | State::Ended => return false,
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
