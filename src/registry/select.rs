//! The selection itself.

use super::{Arch, CpuIsa, Problem};

/// Flags K1-K13.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flags {}

/// What a compiled kernel is specialized on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelKey {}

/// The kernel chosen for a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    pub kernel: String,
    /// The instruction set of a CPU kernel.
    pub cpu_isa: Option<CpuIsa>,
    pub reason: &'static str,
}

/// Chooses the kernel for `problem` on `arch`.
pub fn select(problem: &Problem, arch: &Arch) -> candle::Result<Selection> {
    let _ = (problem, arch);
    candle::bail!("unwritten")
}
