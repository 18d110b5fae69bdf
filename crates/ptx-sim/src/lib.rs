//! A functional simulator of PTX: it runs kernels for NVIDIA GPUs, as NVRTC or nvcc compiles them to virtual instructions, where there is no GPU.
//!
//! A [`Module`] is read from PTX's text; its kernels are launched on real host memory that a [`Memory`] tracks, a warp's 32 lanes at a time, clusters on
//! all cores. What a GPU would do silently is an error that names the instruction, the CTA and the warp:
//!
//! - an access outside every allocation or outside shared memory, or one that is not aligned;
//! - a race in shared memory: by vector clocks of warps (and, between barriers of a warp, of lanes), through named barriers, `bar.warp.sync` and
//!   mbarriers; `cp.async` is under way until its lane waits for it, what `wgmma` reads until its warp does, and what it reads must have been fenced
//!   (`fence.proxy.async`); the cluster's barrier is relaxed and orders mbarriers alone;
//! - registers of a `wgmma` that is not waited for, and one that not all of a warpgroup execute alike;
//! - a deadlock, lanes that do not come to an instruction of the whole warp, masks that are not the lanes', a barrier used with two counts or
//!   whose rounds others could come to;
//! - an access to what the kernel before may still write, ahead of `griddepcontrol.wait` ([`Launch::early`]);
//! - a CTA that ends with bytes on their way to it.
//!
//! Supported is what the kernels of candle-paged-attn use; all else is refused when the text is read. A proxy fence and a look at an mbarrier are of a
//! whole warp: lanes that come to them alone are told so. Shared memory starts as NaNs.
//!
//! Not modelled: time, caches, ptxas's scheduling, races in global memory, kernels that overlap, the rounding of matrix products (sums are exact).

mod alu;
mod barrier;
mod clock;
mod cluster;
mod decode;
mod error;
mod exec;
mod forms;
mod inst;
mod parse;
mod shared;
mod text;
mod warp;

use rayon::prelude::*;
pub use sim_memory::Memory;

use cluster::{Shape, run_cluster};
pub use error::{Error, Fault, Result};
use inst::LANES;
use parse::Program;

/// Most shared memory of a CTA.
const MOST_SHARED: u32 = 227 << 10;

/// The kernels of a PTX text.
#[derive(Debug)]
pub struct Module(Vec<Kernel>);

/// A kernel.
#[derive(Debug)]
pub struct Kernel(Program);

/// How a kernel is launched.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// CTAs.
    pub grid: [u32; 3],
    /// Threads of a CTA, whole warps.
    pub threads: u32,
    /// CTAs along x that are a cluster.
    pub cluster: u32,
    /// Bytes of shared memory besides the kernel's own.
    pub dynamic_shared: u32,
    /// Where the kernel before may still run, what may be done ahead of `griddepcontrol.wait`.
    pub early: Option<Early<'a>>,
}

/// What a kernel may do ahead of `griddepcontrol.wait`.
#[derive(Debug, Clone, Copy)]
pub struct Early<'a> {
    /// Addresses in the allocations that it may access: the kernel before leaves these alone.
    pub settled: &'a [u64],
    /// Whether it may let the next kernel start: where the kernel before had itself waited when it let this one start, all before that is over.
    pub starts_next: bool,
}

/// What a launch executed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Instructions of all warps.
    pub instructions: u64,
}

impl Module {
    /// Reads a PTX text.
    ///
    /// Errors: [`Error::Syntax`] where it has what the simulator does not support.
    pub fn parse(text: &str) -> Result<Self> {
        Ok(Self(parse::module(text)?.into_iter().map(Kernel).collect()))
    }

    /// The kernel of this name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.0.iter().find(|kernel| kernel.0.name == name)
    }
}

impl Kernel {
    /// Runs all CTAs; `params`: the bytes of the kernel's parameters, in order.
    ///
    /// Errors: a launch that does not fit, or the first fault of any cluster, [`Fault::Early`] among them.
    pub fn launch(&self, memory: &Memory, params: &[u8], launch: &Launch<'_>) -> Result<Counters> {
        self.check(params, launch)?;
        let Launch { grid, threads, cluster, dynamic_shared, early } = *launch;
        let shared_bytes = self.shared_bytes(dynamic_shared) as usize;
        let map = memory.map();
        let holds = |early: Early<'_>, start, end| early.settled.iter().any(|address| (start..end).contains(address));
        let settled = early.map(|early| map.iter().copied().filter(|&(start, end)| holds(early, start, end)).collect());
        let starts_next_early = early.is_some_and(|early| early.starts_next);
        let shape = Shape { program: &self.0, params, grid, threads, ctas: cluster, shared_bytes, settled, starts_next_early };
        let [row, rows] = [grid[0] / cluster, grid[1]].map(u64::from);
        let first = |i: u64| [(i % row) as u32 * cluster, (i / row % rows) as u32, (i / row / rows) as u32];
        let all = (0..row * rows * u64::from(grid[2])).into_par_iter();
        let instructions = all.map(|i| run_cluster(&shape, first(i), &map)).try_reduce(|| 0, |a, b| Ok(a + b))?;
        Ok(Counters { instructions })
    }

    fn shared_bytes(&self, dynamic: u32) -> u64 {
        u64::from(self.0.static_shared.next_multiple_of(self.0.dynamic_align.unwrap_or(1))) + u64::from(dynamic)
    }

    fn check(&self, params: &[u8], launch: &Launch<'_>) -> Result<()> {
        let refuse = |reason: String| Err(Error::Launch { kernel: self.0.name.clone(), reason });
        let Launch { grid, threads, cluster, dynamic_shared, .. } = *launch;
        if params.len() != self.0.param_bytes {
            return refuse(format!("{} bytes of parameters, it has {}", params.len(), self.0.param_bytes));
        }
        if threads == 0 || !(threads as usize).is_multiple_of(LANES) || threads > self.0.max_threads.unwrap_or(1024) {
            return refuse(format!("{threads} threads, which are not whole warps or more than {:?}", self.0.max_threads));
        }
        if cluster == 0 || cluster > 16 || !grid[0].is_multiple_of(cluster) {
            return refuse(format!("clusters of {cluster} CTAs of {}", grid[0]));
        }
        if grid.contains(&0) || grid[0] > i32::MAX as u32 || grid[1] > 65535 || grid[2] > 65535 {
            return refuse(format!("a grid of {grid:?}"));
        }
        if self.shared_bytes(dynamic_shared) > u64::from(MOST_SHARED) {
            return refuse(format!("{dynamic_shared} bytes of shared memory besides {}", self.0.static_shared));
        }
        Ok(())
    }
}
