//! What the registry and the planner know of a processor.

/// The processors the registry has tables for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArchName {
    Cpu(CpuIsa),
    Gfx942,
    Gfx950,
    Gfx1250,
    Sm80,
    Sm89,
    Sm90,
}

/// Instruction sets the CPU kernels are written for, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CpuIsa {
    AmxBf16,
    Avx512Bf16,
    Avx512,
    Avx2,
    Neon,
    Portable,
}

/// A processor: its name and the sizes that decisions depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Arch {
    pub name: ArchName,
    /// CUs or SMs. On the CPU a constant, so that a plan (and with it the output's bits) never depends on the thread count.
    pub compute_units: usize,
    /// LDS or shared memory a workgroup may use, bytes.
    pub lds_bytes: usize,
    pub wave_size: usize,
}

impl Arch {
    pub fn cpu(isa: CpuIsa) -> Self {
        Self { name: ArchName::Cpu(isa), compute_units: 32, lds_bytes: 0, wave_size: 16 }
    }
}
