//! One kernel, as asked of the compiler.

use candle::{Result, bail};

use super::sources::Source;
use crate::registry::ArchName;

/// Longest name of an entry point; it names a file of the cache, too.
const MAX_NAME: usize = 128;

/// A kernel to compile: two equal specializations are the same code.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Specialization {
    /// What it runs on: an AMD or NVIDIA GPU.
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
    /// Refuses what is not a kernel for a GPU with a proper name. Gives the root's path.
    pub(super) fn check(&self) -> Result<&'static str> {
        let Some(root) = self.source.path(self.arch) else { bail!("jit: no {:?} kernel for {}", self.source, self.arch) };
        for name in self.defines.iter().map(|(name, _)| name).chain([&self.kernel]) {
            if !is_identifier(name) {
                bail!("jit: {name:?} is not an identifier of at most {MAX_NAME} letters, digits and underscores")
            }
        }
        Ok(root)
    }

    /// What the compiler is called with, input and output apart: with the sources all that its result depends on.
    pub(super) fn arguments(&self) -> Vec<String> {
        self.arguments_after(if self.arch.is_cuda() { nvrtc_arguments(self.arch, "sm") } else { clang_arguments(self.arch) })
    }

    /// What NVRTC is called with for PTX in place of code.
    pub(super) fn ptx_arguments(&self) -> Vec<String> {
        self.arguments_after(nvrtc_arguments(self.arch, "compute"))
    }

    /// `arguments` of every kernel for the arch, then this one's.
    fn arguments_after(&self, mut arguments: Vec<String>) -> Vec<String> {
        arguments.extend(self.options.iter().cloned());
        arguments.push(format!("-DPA_KERNEL={}", self.kernel));
        arguments.extend(self.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        arguments
    }
}

fn clang_arguments(arch: ArchName) -> Vec<String> {
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
    fixed.map(String::from).into_iter().chain([format!("--offload-arch={arch}")]).collect()
}

/// `kind`: `sm` for code, `compute` for PTX.
fn nvrtc_arguments(arch: ArchName, kind: &str) -> Vec<String> {
    // The warpgroup products of Hopper are no part of what later archs run.
    let target = match arch {
        ArchName::Sm90 => format!("{kind}_90a"),
        other => other.to_string().replace("sm", &format!("{kind}_")),
    };
    vec![format!("--gpu-architecture={target}"), "--std=c++17".into()]
}

fn is_identifier(name: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.len() <= MAX_NAME && name.chars().all(word) && name.starts_with(|c: char| word(c) && !c.is_ascii_digit())
}
