//! The compiler of an arch's kernels.

use std::path::Path;

use super::clang::Clang;
use super::nvrtc::Nvrtc;
use super::specialization::Specialization;
use crate::registry::ArchName;

/// A compiler that was found.
#[derive(Debug)]
pub(super) enum Toolchain {
    Clang(Clang),
    Nvrtc(Nvrtc),
}

impl Toolchain {
    /// The compiler for `arch`: `given`, or the first that serves. The error says what was found and where was looked.
    pub fn find(arch: ArchName, given: Option<&Path>) -> Result<Self, String> {
        if arch.is_cuda() { Nvrtc::find(given).map(Self::Nvrtc) } else { Clang::find(given).map(Self::Clang) }
    }

    /// Names the compiler and its version.
    pub fn version(&self) -> &str {
        match self {
            Self::Clang(clang) => &clang.version,
            Self::Nvrtc(nvrtc) => &nvrtc.version,
        }
    }

    /// Compiles; the error has what the compiler said.
    pub fn compile(&self, spec: &Specialization, root: &str) -> Result<Vec<u8>, String> {
        match self {
            Self::Clang(clang) => clang.compile(spec, root),
            Self::Nvrtc(nvrtc) => nvrtc.compile(spec, root),
        }
    }
}
