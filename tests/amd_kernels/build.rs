//! Compiles and launches a root of kernels/amd.

use cdna_sim::{Counters, Launch, Memory, Module};
use testkit::arguments::Arguments;
use testkit::raw::i32s;

use crate::compile::code_object_of;

/// The code object of kernels/amd/ROOT.hip, its kernel called `test`.
pub fn compile(root: &str, arch: &str, defines: &[(&str, &str)]) -> Vec<u8> {
    let macros = defines.iter().map(|(name, value)| format!("-D{name}={value}"));
    code_object_of(root, arch, &std::iter::once("-DPA_KERNEL=test".to_string()).chain(macros).collect::<Vec<_>>())
}

/// [`compile`], ready to run; the kernel must not spill.
pub fn module(root: &str, arch: &str, defines: &[(&str, &str)]) -> Module {
    let module = Module::load(&compile(root, arch, defines)).unwrap_or_else(|e| panic!("{root} {arch} {defines:?}: {e}"));
    assert_eq!(module.kernel("test").unwrap().private_segment_size, 0, "{root} {arch} {defines:?} spills");
    module
}

/// Launches the kernel.
#[track_caller]
pub fn launch(module: &Module, memory: &Memory, args: &Arguments, grid: [u32; 3], threads: u32) -> Counters {
    let kernel = module.kernel("test").unwrap();
    module.launch(memory, kernel, &args.0, &Launch::new(grid, [threads, 1, 1])).unwrap_or_else(|e| panic!("{e}"))
}

/// Uploads; nothing is address 0.
pub fn upload(memory: &Memory, data: &[u8]) -> u64 {
    if data.is_empty() { 0 } else { memory.upload(data).unwrap() }
}

/// `count` 32-bit words at an address.
pub fn words(memory: &Memory, address: u64, count: usize) -> Vec<i32> {
    i32s(&memory.read(address, 4 * count).unwrap())
}
