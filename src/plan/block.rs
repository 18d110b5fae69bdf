//! What a device planner, one block of threads, needs to be compiled and launched.

use candle::{Result, bail};

use crate::registry::{Arch, ArchName};

/// Threads of the device planner's block. A batch of at most this many rows keeps one row a thread.
pub const PLANNER_THREADS: usize = 256;

/// LDS of a row: its first tile, its tile count and its first slot, I32 each.
const ROW_BYTES: usize = 12;
/// LDS of a wave's part of a block-wide sum.
const WAVE_BYTES: usize = 8;

/// The number of rows a planner is compiled for to serve a batch of `rows`: the next power of two, at least 1.
pub fn batch_bucket(rows: usize) -> usize {
    rows.checked_next_power_of_two().unwrap_or(usize::MAX)
}

/// The launch of a device planner: one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlannerBlock {
    /// Rows it is compiled for ([`batch_bucket`]).
    pub bucket: usize,
    /// Threads of the block.
    pub threads: usize,
    /// LDS (shared memory) of the block, bytes: 12 a row of the bucket and 8 a wave.
    pub lds_bytes: usize,
}

impl PlannerBlock {
    /// The planner block for a batch of `rows` on `arch`.
    ///
    /// # Errors
    /// The block needs more LDS than `arch` has (such a batch is planned on the host), or `arch` is a CPU.
    pub fn new(rows: usize, arch: &Arch) -> Result<Self> {
        if let ArchName::Cpu(_) = arch.name {
            bail!("the CPU has no planner block, its plans are made on the host")
        }
        let bucket = batch_bucket(rows);
        let waves = PLANNER_THREADS.div_ceil(arch.wave_size.max(1));
        let lds_bytes = bucket.saturating_mul(ROW_BYTES).saturating_add(waves * WAVE_BYTES);
        if lds_bytes > arch.lds_bytes {
            bail!(
                "a planner block for {rows} rows (bucket {bucket}) needs {lds_bytes} bytes of LDS, {:?} has {}: plan on the host",
                arch.name,
                arch.lds_bytes
            )
        }
        Ok(Self { bucket, threads: PLANNER_THREADS, lds_bytes })
    }
}
