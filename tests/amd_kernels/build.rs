//! Compiles and launches a root of kernels/amd, and packs arguments.

use cdna_sim::{Counters, Launch, Memory, Module};

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
