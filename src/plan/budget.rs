//! How many slots a plan has.

use candle::{Result, bail};

use super::PlanRequest;
use crate::registry::{Arch, ArchName};

/// Most slots of a plan: 256 MiB of records. Scratch for partial outputs is far larger, so no plan of use comes near.
pub const MAX_SLOTS: usize = 1 << 24;

/// Slots over all KV heads where the caller names no `workgroup_budget`.
///
/// Two a compute unit; on NVIDIA one, whose shared memory a block fills, but where (row, KV head) pairs alone are more than half the SMs. On gfx950, a batch with more than one new token a row (MTP verify) pays for its query rows once a task, so it gets
/// four a (row, KV head), but at least one and at most two a compute unit.
pub fn default_budget(rows: usize, max_query_len: usize, kv_heads: usize, arch: &Arch) -> usize {
    let two_each = arch.compute_units.saturating_mul(2);
    if arch.name == ArchName::Gfx950 && max_query_len > 1 {
        let four_a_row = rows.saturating_mul(kv_heads).saturating_mul(4);
        four_a_row.max(arch.compute_units).min(two_each)
    } else if arch.name.is_cuda() && rows.saturating_mul(kv_heads) <= arch.compute_units / 2 {
        arch.compute_units
    } else {
        two_each
    }
}

/// Slots of a plan for `request`: `min(rows * max_partitions, max(rows, ceil(budget / kv_heads)))`.
///
/// At least one a row, whatever the budget, and exactly one a row where `max_partitions` is 1. The lengths of the contexts play no part.
///
/// # Errors
/// What [`PlanRequest::check`] refuses, or more than [`MAX_SLOTS`] slots.
pub fn capacity(request: &PlanRequest<'_>, arch: &Arch) -> Result<usize> {
    request.check()?;
    let rows = request.rows();
    let budget = match request.workgroup_budget {
        Some(budget) => budget,
        None => default_budget(rows, request.max_query_len(), request.kv_heads, arch),
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
