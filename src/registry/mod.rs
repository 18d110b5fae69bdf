//! Which kernel runs: a pure function of the problem and the arch.

mod arch;
mod problem;
mod select;

pub use arch::{Arch, ArchName, CpuIsa};
pub use problem::{Problem, ScaleMode};
pub use select::{Flags, KernelKey, Selection, select};
