//! Compiles a root of kernels/amd, and packs arguments.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use cdna_sim::{Counters, Launch, Memory, Module};

/// A clang for AMD GPUs: `CANDLE_PAGED_ATTN_CLANG`, or the newest on the path.
pub fn clang() -> Option<String> {
    let named = std::env::var("CANDLE_PAGED_ATTN_CLANG").ok();
    let candidates = named.into_iter().chain((20..=24).rev().map(|version| format!("clang-{version}")));
    candidates.into_iter().find(|clang| Command::new(clang).arg("--version").output().is_ok_and(|output| output.status.success()))
}

/// Skips the calling test, saying why, where there is no clang.
#[macro_export]
macro_rules! require_clang {
    () => {
        if $crate::build::clang().is_none() {
            println!("SKIPPED {}: no clang of version 20 or newer (scripts/install-llvm installs one)", module_path!());
            return;
        }
    };
}

/// The code object of kernels/amd/ROOT.hip, its kernel called `test`.
pub fn compile(root: &str, arch: &str, defines: &[(&str, &str)]) -> Vec<u8> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let output = std::env::temp_dir().join(format!("paged-attn-{}-{number}.co", std::process::id()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/amd").join(root).with_extension("hip");
    let mut command = Command::new(clang().expect("a clang"));
    command.args(["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc", "-O3", "-Wall", "-Werror"]);
    command.args([format!("--offload-arch={arch}"), "-DPA_KERNEL=test".into()]);
    command.args(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    let run = command.arg(source).arg("-o").arg(&output).output().unwrap();
    assert!(run.status.success(), "{root} {arch} {defines:?}: {}", String::from_utf8_lossy(&run.stderr));
    let object = std::fs::read(&output).unwrap();
    let _ = std::fs::remove_file(output);
    object
}

/// [`compile`], ready to run; the kernel must not spill.
pub fn module(root: &str, arch: &str, defines: &[(&str, &str)]) -> Module {
    let module = Module::load(&compile(root, arch, defines)).unwrap_or_else(|e| panic!("{root} {arch} {defines:?}: {e}"));
    assert_eq!(module.kernel("test").unwrap().private_segment_size, 0, "{root} {arch} {defines:?} spills");
    module
}

/// Launches the kernel.
#[track_caller]
pub fn launch(module: &Module, memory: &Memory, args: &Args, grid: [u32; 3], threads: u32) -> Counters {
    let kernel = module.kernel("test").unwrap();
    module.launch(memory, kernel, &args.0, &Launch::new(grid, [threads, 1, 1])).unwrap_or_else(|e| panic!("{e}"))
}

/// Argument bytes: fields in order, each at its own alignment.
#[derive(Default)]
pub struct Args(pub Vec<u8>);

impl Args {
    fn put(mut self, bytes: &[u8]) -> Self {
        self.0.resize(self.0.len().next_multiple_of(bytes.len()), 0);
        self.0.extend(bytes);
        self
    }

    /// Pointers (0 for none), strides.
    pub fn longs(self, values: impl IntoIterator<Item = u64>) -> Self {
        values.into_iter().fold(self, |args, value| args.put(&value.to_le_bytes()))
    }

    pub fn ints(self, values: impl IntoIterator<Item = i32>) -> Self {
        values.into_iter().fold(self, |args, value| args.put(&value.to_le_bytes()))
    }
}

/// Little-endian bytes.
pub fn bytes<T: Copy, const N: usize>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| to(x)).collect()
}

/// Uploads; nothing is address 0.
pub fn upload(memory: &Memory, data: &[u8]) -> u64 {
    if data.is_empty() { 0 } else { memory.upload(data).unwrap() }
}

/// `count` 32-bit words at an address.
pub fn words(memory: &Memory, address: u64, count: usize) -> Vec<i32> {
    memory.read(address, 4 * count).unwrap().as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word)).collect()
}
