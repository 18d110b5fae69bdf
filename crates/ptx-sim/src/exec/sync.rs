//! Barriers, fences, and what CTAs of a cluster send each other.

use super::memory::{addresses, packed};
use super::{Env, set, uniform, value, vector};
use crate::barrier::Mbarrier;
use crate::cluster::{Cluster, Cta, rank_of, shared_of_rank};
use crate::error::Fault;
use crate::inst::{Inst, LANES, Op, Operand, Ty};
use crate::shared::Who;
use crate::warp::{State, Warp, lanes_of};

pub fn execute(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst, lanes: u32) -> Result<(), Fault> {
    let operands = &inst.operands;
    match inst.op {
        Op::SyncWarp => warp.agent.converge(),
        Op::Barrier { waits } => {
            let id = uniform(warp, env, &operands[0])? as usize;
            let threads = operands.get(1).map(|threads| uniform(warp, env, threads).map(|threads| threads as u32)).transpose()?;
            barrier(warp, cluster, id, threads, waits)?;
        }
        Op::ClusterArrive => cluster_arrive(warp, cluster)?,
        Op::ClusterWait => {
            let round = warp.arrived.take().ok_or_else(|| Fault::Misuse("a wait for the cluster without an arrival".to_string()))?;
            warp.state = State::AtCluster(round);
        }
        Op::FenceAsyncProxy => {
            warp.agent.clocks.fence();
            warp.agent.advance();
        }
        Op::FenceMbarrierInit => cluster.release_mbarriers(&warp.agent, lanes),
        Op::MbarrierInit => {
            let (at, counts) = (addresses(warp, &operands[0]), value(warp, env, &operands[1]));
            lanes_of(lanes).try_for_each(|lane| make_mbarrier(warp, cluster, at[lane] as u32, counts[lane] as u32, lane as u8))?;
        }
        Op::MbarrierExpect => {
            let (at, bytes) = (addresses(warp, &operands[1]), value(warp, env, &operands[2]));
            let released = warp.agent.released(lanes);
            for lane in lanes_of(lanes) {
                let barrier = cluster.mbarrier(warp.cta, at[lane] as u32)?;
                known(warp, lane, barrier)?;
                barrier.expect(bytes[lane] as u32, &released)?;
            }
            warp.agent.advance();
        }
        Op::MbarrierTryWait => try_wait(warp, cluster, env, &inst.operands)?,
        Op::MapShared => {
            let (at, rank) = (value(warp, env, &operands[1]), value(warp, env, &operands[2]));
            if let Some(lane) =
                lanes_of(lanes).find(|&lane| rank[lane] >= cluster.ctas.len() as u64 || rank_of(at[lane] as u32).0.is_some())
            {
                return Err(Fault::Misuse(format!("the address {:#x} of CTA {} of the cluster", at[lane], rank[lane])));
            }
            set(warp, &operands[0], lanes, Ty::Bits(4), |lane| shared_of_rank(at[lane] as u32, rank[lane] as u32).into());
        }
        Op::Send { ty } => send(warp, cluster, env, inst, lanes, ty)?,
        _ => return Err(Fault::Misuse("not supported".to_string())),
    }
    Ok(())
}

fn barrier(warp: &mut Warp, cluster: &mut Cluster, id: usize, threads: Option<u32>, waits: bool) -> Result<(), Fault> {
    let Cta { barriers, threads: all, .. } = &mut cluster.ctas[warp.cta];
    let Some(barrier) = barriers.get_mut(id) else { return Err(Fault::Misuse(format!("barrier {id} of 16"))) };
    let round = barrier.arrive(LANES as u32, threads, *all, &warp.agent, waits)?;
    warp.agent.advance();
    if waits {
        warp.state = State::AtBarrier(id, round);
    }
    Ok(())
}

/// Orders nothing but the mbarriers that a fence released before.
fn cluster_arrive(warp: &mut Warp, cluster: &mut Cluster) -> Result<(), Fault> {
    if warp.arrived.is_some() {
        return Err(Fault::Misuse("a second arrival at the cluster's barrier without a wait".to_string()));
    }
    let round = cluster.barrier.arrive();
    cluster.made_known(warp.agent.index, round);
    warp.arrived = Some(round);
    Ok(())
}

fn make_mbarrier(warp: &Warp, cluster: &mut Cluster, at: u32, count: u32, lane: u8) -> Result<(), Fault> {
    cluster.ctas[warp.cta].shared.make_mbarrier(at, Who { agent: &warp.agent, lane })?;
    let made = (warp.agent.index, lane, warp.agent.now());
    cluster.add_mbarrier(warp.cta, at, |agent, agents| Mbarrier::new(agent, made, count, agents))
}

/// Only who waited with all lanes has seen what was sent.
fn try_wait(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, operands: &[Operand]) -> Result<(), Fault> {
    let (at, parity) = (addresses(warp, &operands[1]), value(warp, env, &operands[2]));
    let (mut over, mut learned) = (0u32, vec![]);
    for lane in 0..LANES {
        let barrier = cluster.mbarrier(warp.cta, at[lane] as u32)?;
        known(warp, lane, barrier)?;
        let is_same = lane > 0 && (at[lane], parity[lane]) == (at[lane - 1], parity[lane - 1]);
        if is_same {
            over |= (over >> (lane - 1) & 1) << lane;
        } else if let Some(clocks) = barrier.wait(parity[lane] as u32) {
            over |= 1 << lane;
            learned.push(clocks.clone());
        }
    }
    if over == u32::MAX {
        learned.iter().for_each(|clocks| warp.agent.clocks.join(clocks));
    }
    warp.here.polls = over == 0;
    set(warp, &operands[0], u32::MAX, Ty::Pred, |lane| (over >> lane & 1).into());
    Ok(())
}

/// An mbarrier is used only by who knows that it was made.
fn known(warp: &Warp, lane: usize, barrier: &Mbarrier) -> Result<(), Fault> {
    let (maker, by, epoch) = barrier.made;
    let in_cluster = matches!((barrier.known_from, warp.met), (Some(from), Some(met)) if from <= met);
    if in_cluster || warp.agent.is_after(maker, by, epoch, lane as u8) {
        return Ok(());
    }
    Err(Fault::Misuse("an mbarrier is used before it is known to have been made".to_string()))
}

/// `st.async [to], values, [barrier]`: each lane's values go to the CTA that the addresses name, and count there.
fn send(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst, lanes: u32, ty: Ty) -> Result<(), Fault> {
    let operands = &inst.operands;
    let (to, barriers) = (addresses(warp, &operands[0]), addresses(warp, &operands[2]));
    let from = vector(warp, env, &operands[1]);
    let bytes = ty.bytes() * from.len();
    for lane in lanes_of(lanes) {
        let [(rank, to), (barrier_rank, at)] = [to[lane], barriers[lane]].map(|address| {
            let (rank, address) = rank_of(address as u32);
            (rank.unwrap_or(warp.cta), address)
        });
        if rank != barrier_rank {
            return Err(Fault::Misuse(format!("values to CTA {rank} count at a barrier of CTA {barrier_rank}")));
        }
        let barrier = cluster.mbarrier(rank, at)?;
        known(warp, lane, barrier)?;
        let (agent, epoch) = (barrier.agent, barrier.complete(bytes));
        if cluster.ctas[rank].has_ended {
            return Err(Fault::Misuse(format!("values sent to CTA {rank}, which has ended")));
        }
        let who = Who { agent: &warp.agent, lane: lane as u8 };
        let data = packed(&from, ty, lane).to_le_bytes();
        cluster.ctas[rank].shared.receive(to, &data[..bytes], who, agent, epoch)?;
    }
    Ok(())
}
