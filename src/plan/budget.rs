//! How many slots a plan has.

use candle::{Result, bail};

use super::PlanRequest;
use crate::registry::{Arch, ArchName};

/// Most slots of a plan: 256 MiB of records. Scratch for partial outputs is far larger, so no plan of use comes near.
pub const MAX_SLOTS: usize = 1 << 24;

/// Tokens from which on splitting one of many rows is worth the merge on an NVIDIA GPU.
const LONG_ROW: usize = 4096;

/// Slots over all KV heads where the caller names no `workgroup_budget`.
///
/// Two a compute unit. On gfx950, a batch with more than one new token a row (MTP verify) pays for its query rows once a task, so it gets
/// four a (row, KV head), but at least one and at most two a compute unit. On NVIDIA GPUs one a SM, whose shared memory one block fills, and for few
/// (row, KV head) pairs no more than they may have tiles. Where pairs alone are more than half the SMs, two, which take turns, the longest first: that
/// evens uneven rows out. Rows that may attend 4096 tokens or more get two from a third of the SMs on, and four from half; with more than one new token,
/// whose query rows cost each task more, from 9/20 and from more pairs than SMs on. Shorter rows that fill the GPU get a slot each
/// where the caller names no `max_partitions`, so that they are kept whole (an empty one leaves its slot to the longest) and nothing is left to be
/// merged: with one new token more pairs than 10/7 of the SMs, with more new tokens, whose blocks have an SM to themselves, than 7/8 of them.
pub fn default_budget(request: &PlanRequest<'_>, arch: &Arch) -> usize {
    let pairs = request.rows().saturating_mul(request.kv_heads);
    let each = |slots: usize| arch.compute_units.saturating_mul(slots);
    if arch.name == ArchName::Gfx950 && request.max_query_len() > 1 {
        return pairs.saturating_mul(4).max(each(1)).min(each(2));
    }
    if !arch.name.is_cuda() {
        return each(2);
    }
    let attended = request.max_context_len.into_iter().chain(request.window).min();
    let long = attended.is_none_or(|most| most >= LONG_ROW);
    let tiles = request.max_context_len.map_or(usize::MAX, |most| most.div_ceil(arch.name.tile_tokens()).max(1));
    let verifies = request.max_query_len() > 1;
    let (over, of) = if verifies { (7, 8) } else { (10, 7) };
    let fills = pairs.saturating_mul(of) > each(over);
    // More pairs than these get four slots a SM, or two.
    let (four, two) = match long {
        true if verifies => (each(1), each(9) / 20),
        true => (each(1) / 2, each(1) / 3),
        false => (usize::MAX, each(1) / 2),
    };
    match pairs {
        _ if fills && !long && request.max_partitions.is_none() => pairs,
        _ if pairs > four => each(4),
        _ if pairs > two => each(2),
        _ => each(1).min(pairs.saturating_mul(tiles)),
    }
}

/// Slots of a plan for `request`: `min(rows * max_partitions, max(rows, ceil(budget / kv_heads)))`.
///
/// At least one a row, whatever the budget, and exactly one a row where `max_partitions` is 1. `context_lens` play no part; the most that they may
/// become, `max_context_len`, does on NVIDIA GPUs (see [`default_budget`]).
///
/// # Errors
/// What [`PlanRequest::check`] refuses, or more than [`MAX_SLOTS`] slots.
pub fn capacity(request: &PlanRequest<'_>, arch: &Arch) -> Result<usize> {
    request.check()?;
    let rows = request.rows();
    let budget = match request.workgroup_budget {
        Some(budget) => budget,
        None => default_budget(request, arch),
    };
    let most = rows.saturating_mul(request.max_partitions.unwrap_or(usize::MAX));
    let capacity = rows.max(budget.div_ceil(request.kv_heads)).min(most);
    if capacity > MAX_SLOTS {
        bail!(
            "a plan of {rows} rows with a workgroup_budget of {budget} over {} KV heads has {capacity} slots, more than {MAX_SLOTS}",
            request.kv_heads
        )
    }
    Ok(capacity)
}
