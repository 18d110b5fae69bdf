//! The planner: how a batch is split into tasks. Pure; no device code.

use std::sync::Arc;

use candle::{Device, Result, Tensor, bail};

use crate::registry::Arch;

/// KV tokens of a tile: the unit a task's range is counted in.
pub const TILE_TOKENS: usize = 256;

/// A plan as plain records.
///
/// `work[slot] = [row, first tile, end tile, partition index]`, padding has row -1; `reduce[row] = [first slot, count]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlan {
    pub work: Vec<[i32; 4]>,
    pub reduce: Vec<[i32; 2]>,
}

/// What a plan is made for.
#[derive(Clone, Debug)]
pub struct PlanRequest<'a> {
    /// Context length of each plan row (one a sequence, or one a (sequence, KV head) with per-head tables). Any value; <= 0 is empty.
    pub context_lens: &'a [i32],
    /// New tokens of each plan row; one entry serves all.
    pub query_lens: &'a [usize],
    /// KV heads that share each plan row: `kv_heads`, or 1 with per-head tables.
    pub kv_heads: usize,
    pub window: Option<usize>,
    pub max_partitions: Option<usize>,
    pub workgroup_budget: Option<usize>,
}

impl HostPlan {
    /// Plans `request` for `arch`.
    pub fn new(request: &PlanRequest<'_>, arch: &Arch) -> Result<Self> {
        let _ = (request, arch);
        bail!("unwritten")
    }

    /// The plan-free split: each row is one task in its own slot.
    pub fn free(request: &PlanRequest<'_>) -> Self {
        let _ = request;
        Self { work: vec![], reduce: vec![] }
    }

    /// Refuses a plan that does not cover exactly the tiles `request` needs (a plan made for other lengths).
    pub fn check_covers(&self, request: &PlanRequest<'_>) -> Result<()> {
        let _ = request;
        Ok(())
    }
}

/// A plan as the kernels take it: I32 tensors on a device, with the host records where they were made on the host.
#[derive(Clone, Debug)]
pub struct DecodePlan {
    work_info: Tensor,
    reduce_info: Tensor,
    host: Option<Arc<HostPlan>>,
}

impl DecodePlan {
    /// Plans on the host and copies the records to `device`.
    pub fn new(request: &PlanRequest<'_>, arch: &Arch, device: &Device) -> Result<Self> {
        let _ = (request, arch, device);
        bail!("unwritten")
    }

    /// I32 `[capacity, 4]`.
    pub fn work_info(&self) -> &Tensor {
        &self.work_info
    }

    /// I32 `[rows, 2]`.
    pub fn reduce_info(&self) -> &Tensor {
        &self.reduce_info
    }

    /// The host records, read back from the device where they were not made here.
    pub fn host(&self) -> Result<Arc<HostPlan>> {
        match &self.host {
            Some(host) => Ok(host.clone()),
            None => bail!("unwritten"),
        }
    }
}
