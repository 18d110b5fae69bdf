//! The CPU backend: flash decoding over the planner's tasks on rayon's pool.

mod job;

pub(crate) use job::{Ids, Job, KvData, KvView, Output, OutputData, PageTable, QueryData, QueryView, Row, Scale};

use candle::{Result, bail};

use crate::registry::CpuIsa;

/// Query rows (times heads of the group) that one pass over the KV serves; longer rows of work are split.
pub(crate) const ROW_BLOCK: usize = 64;

/// The instruction set calls run on.
pub(crate) fn isa() -> Result<CpuIsa> {
    Ok(detect())
}

/// The best instruction set of this machine that the kernels know.
pub(crate) fn detect() -> CpuIsa {
    CpuIsa::Portable
}

/// Runs one validated call.
pub(crate) fn run(job: &Job<'_>, output: &mut Output<'_>) -> Result<()> {
    let _ = (job, output);
    bail!("unwritten")
}
