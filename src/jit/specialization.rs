//! One kernel, as asked of the compiler.

use candle::{Result, bail};

use super::sources::Source;
use crate::registry::ArchName;

/// Longest name of an entry point; it names a file of the cache, too.
const MAX_NAME: usize = 128;

/// A kernel to compile: two equal specializations are the same code.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Specialization {
    /// What it runs on: gfx942, gfx950 or gfx1250.
    pub arch: ArchName,
    /// The file that is compiled.
    pub source: Source,
    /// Name of the entry point, a C identifier: the macro `PA_KERNEL`.
    pub kernel: String,
    /// Macros: name and value.
    pub defines: Vec<(String, String)>,
    /// Options to the compiler beyond those every kernel is compiled with.
    pub options: Vec<String>,
}

impl Specialization {
    /// Refuses what is not a kernel for an AMD GPU with a proper name.
    pub(super) fn check(&self) -> Result<()> {
        if !self.arch.is_amd() {
            bail!("jit: {} is not an AMD GPU", self.arch)
        }
        for name in self.defines.iter().map(|(name, _)| name).chain([&self.kernel]) {
            if !is_identifier(name) {
                bail!("jit: {name:?} is not an identifier of at most {MAX_NAME} letters, digits and underscores")
            }
        }
        Ok(())
    }

    /// What the compiler is called with, input and output apart: with the sources all that its result depends on.
    pub(super) fn arguments(&self) -> Vec<String> {
        let fixed = [
            // Options of the user's own configuration would be missing from the cache's key.
            "--no-default-config",
            "-x",
            "hip",
            "--cuda-device-only",
            "--no-gpu-bundle-output",
            "-nogpulib",
            "-nogpuinc",
            // A number from the source's path would be in the code object.
            "-fuse-cuid=none",
            // What ROCm 5.7 and everything newer loads.
            "-mcode-object-version=5",
            "-std=c++20",
            "-O3",
        ];
        let mut arguments: Vec<String> = fixed.map(String::from).into();
        arguments.push(format!("--offload-arch={}", self.arch));
        arguments.extend(self.options.iter().cloned());
        arguments.push(format!("-DPA_KERNEL={}", self.kernel));
        arguments.extend(self.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        arguments
    }
}

fn is_identifier(name: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.len() <= MAX_NAME && name.chars().all(word) && name.starts_with(|c: char| word(c) && !c.is_ascii_digit())
}
