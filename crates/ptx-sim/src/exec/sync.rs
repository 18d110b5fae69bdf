//! Barriers, fences, and what CTAs of a cluster send each other.

use super::memory::{addresses, packed};
use super::{Env, set, value, vector};
use crate::barrier::Mbarrier;
use crate::cluster::{Cluster, rank_of, shared_of_rank};
use crate::error::Fault;
use crate::inst::{Inst, LANES, Op, Ty};
use crate::shared::Who;
use crate::warp::{State, Warp, lanes_of};

pub fn execute(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst, lanes: u32) -> Result<(), Fault> {
    let operands = &inst.operands;
    let first = lanes.trailing_zeros() as usize;
    match inst.op {
        Op::SyncWarp => warp.agent.converge(),
        Op::Barrier { waits } => {
            let id = value(warp, env, &operands[0])[0] as usize;
            let threads = operands.get(1).map_or(env.threads, |threads| value(warp, env, threads)[0] as u32);
            barrier(warp, cluster, id, threads, waits)?;
        }
        Op::ClusterArrive { relaxed } => cluster_arrive(warp, cluster, relaxed)?,
        Op::ClusterWait => warp.state = State::AtCluster(cluster.ctas[warp.cta].cluster_rounds[warp.index]),
        Op::FenceAsyncProxy => {
            warp.agent.clocks.fence();
            warp.agent.advance();
        }
        Op::FenceMbarrierInit => warp.made_known = true,
        Op::MbarrierInit => {
            let (at, count) = (addresses(warp, &operands[0])[first] as u32, value(warp, env, &operands[1])[first] as u32);
            let who = Who { agent: &warp.agent, lane: first as u8 };
            cluster.ctas[warp.cta].shared.write(at, &u64::from(count).to_le_bytes(), who, false)?;
            let made = (warp.agent.index, warp.agent.now());
            cluster.add_mbarrier(warp.cta, at, |agent, agents| Mbarrier::new(agent, made, count, agents))?;
        }
        Op::MbarrierExpect => {
            let (at, bytes) = (addresses(warp, &operands[1])[first] as u32, value(warp, env, &operands[2])[first] as u32);
            let barrier = cluster.mbarrier(warp.cta, at)?;
            barrier.expect(bytes, &warp.agent.clocks)?;
            warp.agent.advance();
        }
        Op::MbarrierTryWait => {
            let (at, parity) = (addresses(warp, &operands[1])[first] as u32, value(warp, env, &operands[2])[first] as u32);
            let barrier = cluster.mbarrier(warp.cta, at)?;
            known(warp, barrier)?;
            let ended = barrier.wait(parity);
            if let Some(clocks) = ended {
                warp.agent.clocks.join(clocks);
            }
            let is_over = ended.is_some();
            warp.polls = !is_over;
            set(warp, &operands[0], lanes, Ty::Pred, |_| is_over.into());
        }
        Op::MapShared => {
            let (at, rank) = (value(warp, env, &operands[1]), value(warp, env, &operands[2]));
            set(warp, &operands[0], lanes, Ty::Bits(4), |lane| shared_of_rank(at[lane] as u32, rank[lane] as u32).into());
        }
        Op::Send { ty } => send(warp, cluster, env, inst, lanes, ty)?,
        _ => return Err(Fault::Misuse("not supported".to_string())),
    }
    Ok(())
}

fn barrier(warp: &mut Warp, cluster: &mut Cluster, id: usize, threads: u32, waits: bool) -> Result<(), Fault> {
    let barriers = &mut cluster.ctas[warp.cta].barriers;
    let Some(barrier) = barriers.get_mut(id) else { return Err(Fault::Misuse(format!("barrier {id} of 16"))) };
    let round = barrier.arrive(LANES as u32, threads, &warp.agent.clocks, waits)?;
    warp.agent.advance();
    if waits {
        warp.state = State::AtBarrier(id, round);
    }
    Ok(())
}

/// A relaxed arrival orders nothing but the mbarriers that a fence released before.
fn cluster_arrive(warp: &mut Warp, cluster: &mut Cluster, relaxed: bool) -> Result<(), Fault> {
    let agents = warp.agent.clocks.seen.len();
    let known = if relaxed { crate::clock::Clocks::new(agents) } else { warp.agent.clocks.clone() };
    if warp.made_known || !relaxed {
        cluster.made_known(warp.agent.index);
    }
    let threads = cluster.threads;
    let round = cluster.barrier.arrive(LANES as u32, threads, &known, true)?;
    cluster.ctas[warp.cta].cluster_rounds[warp.index] = round;
    warp.agent.advance();
    Ok(())
}

/// An mbarrier of another warp is used only by who knows that it was made.
fn known(warp: &Warp, barrier: &Mbarrier) -> Result<(), Fault> {
    let (maker, epoch) = barrier.made;
    if maker == warp.agent.index || warp.agent.clocks.seen[maker] >= epoch || barrier.known_in_cluster && warp.has_met_cluster {
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
        let ((rank, to), (barrier_rank, at)) = (rank_of(to[lane] as u32), rank_of(barriers[lane] as u32));
        if rank != barrier_rank {
            return Err(Fault::Misuse(format!("values to CTA {rank} count at a barrier of CTA {barrier_rank}")));
        }
        let barrier = cluster.mbarrier(rank, at)?;
        known(warp, barrier)?;
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
