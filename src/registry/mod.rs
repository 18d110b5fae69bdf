//! Which kernel runs: a pure function of the problem and the arch.

mod amd;
mod arch;
mod cpu;
mod cuda;
mod flags;
mod lds;
mod problem;
mod reason;
mod select;

pub use arch::{Arch, ArchName, CpuIsa};
#[cfg(feature = "nvrtc")]
pub use cuda::REDUCER_WARPS;
#[cfg(feature = "cuda")]
pub(crate) use cuda::select_plain;
pub use cuda::{CudaShape, walks_whole_rows};
#[cfg(feature = "nvrtc")]
pub(crate) use cuda::{block_rows, leaves_f16, reducer_warps};
pub use flags::{Flags, Missing};
pub(crate) use problem::Tasks;
pub use problem::{M_TILE_ROWS, Problem, ScaleMode};
pub use reason::Reason;
#[cfg(feature = "rocm")]
pub(crate) use select::select_among;
pub use select::{KernelKey, Selection, missing_requirements, preferred_layout, select};
