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
/// four a (row, KV head), but at least one and at most two a compute unit. On NVIDIA GPUs, whose shared memory one block fills, one a SM; but where
/// (row, KV head) pairs alone are more than half the SMs, blocks that take turns even uneven rows out: two a SM, and four where there are
/// more pairs than SMs and rows may attend 4096 tokens or more. Few pairs get no more than they may have tiles.
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
    match pairs {
        _ if pairs <= arch.compute_units / 2 => each(1).min(pairs.saturating_mul(tiles)),
        _ if pairs <= arch.compute_units || !long => each(2),
        _ => each(4),
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
