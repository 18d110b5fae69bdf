//! Loads, stores, copies to shared memory.

use std::ops::Range;

use sim_memory::View;

use super::{Env, elements, set, value};
use crate::clock::WARP;
use crate::cluster::Cluster;
use crate::error::Fault;
use crate::inst::{Inst, LANES, Operand, Space, Ty};
use crate::shared::{Who, little_endian};
use crate::warp::{Copying, Lanes, Warp, lanes_of};

/// Addresses of an operand in all lanes.
pub fn addresses(warp: &Warp, operand: &Operand) -> Lanes {
    match operand {
        Operand::Address { base: Some(base), offset } => warp.regs[*base as usize].map(|base| base.wrapping_add(*offset as u64)),
        Operand::Address { base: None, offset } => [*offset as u64; LANES],
        _ => [0; LANES],
    }
}

fn aligned(address: u64, bytes: usize) -> Result<(), Fault> {
    if address.is_multiple_of(bytes as u64) { Ok(()) } else { Err(Fault::Misaligned { address, bytes }) }
}

/// Global memory, of which a lane may access these bytes now.
fn global<'a>(warp: &'a mut Warp, lane: usize, address: u64, bytes: usize, access: &'static str) -> Result<&'a mut View, Fault> {
    if warp.waited >> lane & 1 == 0
        && let Some(settled) = &mut warp.settled
        && settled.check(address, bytes, access).is_err()
    {
        warp.view.check(address, bytes, access)?;
        return Err(Fault::Early { access, address, bytes });
    }
    Ok(&mut warp.view)
}

fn read_global(warp: &mut Warp, lane: usize, address: u64, bytes: usize) -> Result<u128, Fault> {
    let view = global(warp, lane, address, bytes, "load")?;
    Ok(match bytes {
        1 => view.load::<1>(address)?[0].into(),
        2 => u16::from_le_bytes(view.load(address)?).into(),
        4 => u32::from_le_bytes(view.load(address)?).into(),
        8 => u64::from_le_bytes(view.load(address)?).into(),
        16 => u128::from_le_bytes(view.load(address)?),
        other => return Err(Fault::Misuse(format!("an access of {other} bytes"))),
    })
}

/// Of parameters or a lane's own memory, both small and addressed from 0.
fn read_own(memory: &[u8], what: &str, address: u64, bytes: usize) -> Result<u128, Fault> {
    Ok(little_endian(&memory[own_range(memory.len(), what, address, bytes)?]))
}

fn own_range(len: usize, what: &str, address: u64, bytes: usize) -> Result<Range<usize>, Fault> {
    let end = address.checked_add(bytes as u64).filter(|&end| end <= len as u64);
    let end = end.ok_or_else(|| Fault::Misuse(format!("{bytes} bytes at {address:#x} of {len} bytes of {what}")))?;
    Ok(address as usize..end as usize)
}

pub fn load(
    warp: &mut Warp,
    cluster: &mut Cluster,
    env: &Env<'_>,
    inst: &Inst,
    lanes: u32,
    space: Space,
    (ty, register): (Ty, Ty),
) -> Result<(), Fault> {
    let (to, at) = (elements(&inst.operands[0]), addresses(warp, &inst.operands[1]));
    let bytes = ty.bytes() * to.len();
    let mut data = [0u128; LANES];
    for lane in lanes_of(lanes) {
        aligned(at[lane], bytes)?;
        data[lane] = match space {
            Space::Global => read_global(warp, lane, at[lane], bytes)?,
            Space::Shared => {
                let who = Who { agent: &warp.agent, lane: lane as u8 };
                cluster.ctas[warp.cta].shared.read(at[lane] as u32, bytes, who)?
            }
            Space::Param => read_own(env.params, "parameters", at[lane], bytes)?,
            Space::Local => read_own(&warp.local[lane], "local memory", at[lane], bytes)?,
        };
    }
    for (i, to) in to.iter().enumerate() {
        set(warp, to, lanes, register, |lane| ty.extend((data[lane] >> (8 * ty.bytes() * i)) as u64) as u64);
    }
    Ok(())
}

pub fn store(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst, lanes: u32, space: Space, ty: Ty) -> Result<(), Fault> {
    let (at, from) = (addresses(warp, &inst.operands[0]), super::vector(warp, env, &inst.operands[1]));
    let bytes = ty.bytes() * from.len();
    for lane in lanes_of(lanes) {
        aligned(at[lane], bytes)?;
        let data = packed(&from, ty, lane).to_le_bytes();
        match space {
            Space::Global => global(warp, lane, at[lane], bytes, "store")?.store(at[lane], &data[..bytes])?,
            Space::Shared => {
                let who = Who { agent: &warp.agent, lane: lane as u8 };
                cluster.ctas[warp.cta].shared.write(at[lane] as u32, &data[..bytes], who, false)?;
            }
            Space::Local => {
                let range = own_range(warp.local[lane].len(), "local memory", at[lane], bytes)?;
                warp.local[lane][range].copy_from_slice(&data[..bytes]);
            }
            Space::Param => return Err(Fault::Misuse("a store to parameters".to_string())),
        }
    }
    Ok(())
}

/// A lane's elements, one after the other.
pub fn packed(from: &[Lanes], ty: Ty, lane: usize) -> u128 {
    from.iter().enumerate().fold(0, |all, (i, element)| all | u128::from(element[lane] & ty.mask()) << (8 * ty.bytes() * i))
}

/// `cp.async [to], [from], bytes{, read}{, policy}`: what is not read is zero.
pub fn copy(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst, lanes: u32) -> Result<(), Fault> {
    let operands = &inst.operands;
    let (to, from) = (addresses(warp, &operands[0]), addresses(warp, &operands[1]));
    let Operand::Imm(bytes) = operands[2] else { return Err(Fault::Misuse("a copy's size is a constant".to_string())) };
    let bytes = bytes as usize;
    let read = operands.get(3).map_or([bytes as u64; LANES], |read| value(warp, env, read));
    for lane in lanes_of(lanes) {
        aligned(from[lane], bytes)?;
        let data = match read[lane] as usize {
            0 => 0,
            all if all == bytes => read_global(warp, lane, from[lane], bytes)?,
            part => return Err(Fault::Misuse(format!("a copy that reads {part} of {bytes} bytes is not supported"))),
        };
        let who = Who { agent: &warp.agent, lane: lane as u8 };
        cluster.ctas[warp.cta].shared.write(to[lane] as u32, &data.to_le_bytes()[..bytes], who, true)?;
        warp.copies[lane].push(Copying { address: to[lane] as u32, bytes });
    }
    Ok(())
}

/// Each lane waits for its own copies.
pub fn copy_wait(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst, lanes: u32) {
    let left = value(warp, env, &inst.operands[0])[0] as usize;
    for lane in lanes_of(lanes) {
        for Copying { address, bytes } in warp.copies[lane].take_done(left) {
            cluster.ctas[warp.cta].shared.finish_write(address, bytes, &warp.agent);
        }
    }
}

/// Four matrices of 8 x 8 halves: lanes 8i to 8i + 7 say where the rows of matrix i are, and each lane gets two neighbours of a row, or of a column.
pub fn load_matrix(warp: &mut Warp, cluster: &mut Cluster, inst: &Inst, transposed: bool) -> Result<(), Fault> {
    let (to, at) = (elements(&inst.operands[0]), addresses(warp, &inst.operands[1]));
    let mut rows = [0u128; LANES];
    for (row, address) in rows.iter_mut().zip(at) {
        *row = cluster.ctas[warp.cta].shared.read(address as u32, 16, Who { agent: &warp.agent, lane: WARP })?;
    }
    let half = |row: usize, column: usize| (rows[row] >> (16 * column)) as u64 & 0xffff;
    for (matrix, to) in to.iter().enumerate() {
        let element = |lane: usize, i: usize| {
            let (outer, inner) = (lane / 4, lane % 4 * 2 + i);
            if transposed { half(matrix * 8 + inner, outer) } else { half(matrix * 8 + outer, inner) }
        };
        set(warp, to, u32::MAX, Ty::Bits(4), |lane| element(lane, 0) | element(lane, 1) << 16);
    }
    Ok(())
}
