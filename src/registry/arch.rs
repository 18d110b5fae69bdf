//! What the registry and the planner know of a processor.

use std::fmt;

use candle::{Result, bail};

use crate::plan::TILE_TOKENS;

/// The processors the registry has tables for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArchName {
    /// A CPU, with the instruction set that computes.
    Cpu(CpuIsa),
    /// CDNA 3: MI300X, MI308X, MI325X.
    Gfx942,
    /// CDNA 4: MI350X, MI355X.
    Gfx950,
    /// Kernels are compiled for it, never run.
    Gfx1250,
    /// Ampere: A100.
    Sm80,
    /// Ada: L40S, RTX 4090.
    Sm89,
    /// Hopper: H100, H200.
    Sm90,
}

/// Instruction sets the CPU kernels are written for, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CpuIsa {
    /// AMX tiles of BF16 (with AVX512-BF16).
    AmxBf16,
    /// AVX-512 F, BW, DQ, VL with BF16 and VBMI.
    Avx512Bf16,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// NEON, on aarch64.
    Neon,
    /// Plain Rust.
    Portable,
}

impl CpuIsa {
    /// Every instruction set, best first.
    pub const ALL: [Self; 6] = [Self::AmxBf16, Self::Avx512Bf16, Self::Avx512, Self::Avx2, Self::Neon, Self::Portable];

    /// Lower-case name, as in kernel names and `cpu-NAME`.
    pub fn name(self) -> &'static str {
        match self {
            Self::AmxBf16 => "amxbf16",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }

    /// Whether it multiplies BF16 pairs into F32 in one instruction.
    pub fn has_bf16_dot(self) -> bool {
        matches!(self, Self::AmxBf16 | Self::Avx512Bf16)
    }
}

impl ArchName {
    /// Whether kernels for it are AMD code objects.
    pub fn is_amd(self) -> bool {
        matches!(self, Self::Gfx942 | Self::Gfx950 | Self::Gfx1250)
    }

    /// Whether kernels for it are NVIDIA cubins.
    pub fn is_cuda(self) -> bool {
        matches!(self, Self::Sm80 | Self::Sm89 | Self::Sm90)
    }

    /// KV tokens of a plan's tile: 256; on NVIDIA GPUs 128, with which a short context is enough tasks for all SMs.
    pub fn tile_tokens(self) -> usize {
        if self.is_cuda() { 128 } else { TILE_TOKENS }
    }
}

impl fmt::Display for ArchName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(isa) => write!(f, "cpu-{}", isa.name()),
            Self::Gfx942 => f.write_str("gfx942"),
            Self::Gfx950 => f.write_str("gfx950"),
            Self::Gfx1250 => f.write_str("gfx1250"),
            Self::Sm80 => f.write_str("sm80"),
            Self::Sm89 => f.write_str("sm89"),
            Self::Sm90 => f.write_str("sm90"),
        }
    }
}

/// A processor: its name and the sizes that decisions depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Arch {
    /// Which processor.
    pub name: ArchName,
    /// CUs or SMs. On the CPU a constant, so that a plan (and with it the output's bits) never depends on the thread count.
    pub compute_units: usize,
    /// LDS or shared memory a workgroup may use, bytes. 0 on the CPU.
    pub lds_bytes: usize,
    /// Lanes of a wave (warp). 1 on the CPU.
    pub wave_size: usize,
}

/// The names [`Arch::from_name`] knows, for messages.
const NAMES: &str = "cpu, cpu-ISA (amxbf16, avx512bf16, avx512, avx2, neon, portable), gfx942, gfx950, gfx1250, sm80, sm86, sm89, sm90";
/// Which of them a GPU is.
const GPUS: &str =
    "MI300: gfx942; MI350: gfx950; A100 and other compute capabilities 8.x: sm80; 8.6: sm86; 8.9, Ada: sm89; H100, H200: sm90";

impl Arch {
    /// Compute units every CPU is planned for, whatever its cores: plans, and with them the order partial results are merged in, never
    /// depend on the machine or the thread count. 32 makes 64 task slots by default, enough to balance large sockets.
    pub const CPU_COMPUTE_UNITS: usize = 32;

    /// A CPU with instruction set `isa`.
    pub const fn cpu(isa: CpuIsa) -> Self {
        Self { name: ArchName::Cpu(isa), compute_units: Self::CPU_COMPUTE_UNITS, lds_bytes: 0, wave_size: 1 }
    }

    /// The CPU this process runs on, with the instruction set that calls use here.
    pub fn host() -> Result<Self> {
        Ok(Self::cpu(crate::cpu::isa()?))
    }

    /// MI300-class (CDNA 3) with `compute_units` CUs: 304 on MI300X and MI325X, 80 on MI308X. 64 KiB of LDS.
    pub const fn gfx942(compute_units: usize) -> Self {
        Self { name: ArchName::Gfx942, compute_units, lds_bytes: 64 << 10, wave_size: 64 }
    }

    /// MI350X and MI355X (CDNA 4): 256 CUs, 160 KiB of LDS.
    pub const fn gfx950() -> Self {
        Self { name: ArchName::Gfx950, compute_units: 256, lds_bytes: 160 << 10, wave_size: 64 }
    }

    /// gfx1250, wave32 with 320 KiB of LDS. Kernels for it are compiled, never run; 256 CUs is a stand-in for the number a device reports.
    pub const fn gfx1250() -> Self {
        Self { name: ArchName::Gfx1250, compute_units: 256, lds_bytes: 320 << 10, wave_size: 32 }
    }

    /// A100: 108 SMs, 163 KiB of shared memory a block.
    pub const fn sm80() -> Self {
        Self { name: ArchName::Sm80, compute_units: 108, lds_bytes: 163 << 10, wave_size: 32 }
    }

    /// Compute capability 8.6, as RTX 3090 and A40: sm80's kernels on 84 SMs, 99 KiB of shared memory a block.
    pub const fn sm86() -> Self {
        Self { compute_units: 84, lds_bytes: 99 << 10, ..Self::sm80() }
    }

    /// Ada. 142 SMs as on L40S and RTX 6000 Ada (an RTX 4090 has 128: `sm89:128`), 99 KiB of shared memory a block.
    pub const fn sm89() -> Self {
        Self { name: ArchName::Sm89, compute_units: 142, lds_bytes: 99 << 10, wave_size: 32 }
    }

    /// H100 SXM and H200: 132 SMs, 227 KiB of shared memory a block.
    pub const fn sm90() -> Self {
        Self { name: ArchName::Sm90, compute_units: 132, lds_bytes: 227 << 10, wave_size: 32 }
    }

    /// The same processor with another number of CUs or SMs. At least 1.
    pub fn with_compute_units(self, compute_units: usize) -> Result<Self> {
        match (self.name, compute_units) {
            (_, 0) => bail!("arch: {} needs at least 1 CU or SM, got 0", self.name),
            (ArchName::Cpu(_), n) => {
                bail!("arch: a CPU is always planned for {} compute units, got {n}", Self::CPU_COMPUTE_UNITS)
            }
            (_, n) => Ok(Self { compute_units: n, ..self }),
        }
    }

    /// The processor called `name`: `gfx950`, `gfx942:80` (a CU or SM count after the colon), `sm90`, `cpu` (this one), `cpu-avx2`, or a
    /// name as the HIP runtime spells it (`gfx942:sramecc+:xnack-`; the feature marks are passed over).
    pub fn from_name(name: &str) -> Result<Self> {
        let mut parts = name.split(':');
        let mut arch = match parts.next().unwrap_or_default() {
            "cpu" => Self::host()?,
            "gfx942" => Self::gfx942(304),
            "gfx950" => Self::gfx950(),
            "gfx1250" => Self::gfx1250(),
            "sm80" => Self::sm80(),
            "sm86" => Self::sm86(),
            "sm89" => Self::sm89(),
            "sm90" | "sm90a" => Self::sm90(),
            other => match CpuIsa::ALL.into_iter().find(|isa| other.strip_prefix("cpu-") == Some(isa.name())) {
                Some(isa) => Self::cpu(isa),
                None => bail!("arch: {name:?} is not one of {NAMES} ({GPUS})"),
            },
        };
        for part in parts {
            match part.parse::<usize>() {
                Ok(units) => arch = arch.with_compute_units(units)?,
                Err(_) if arch.name.is_amd() && part.ends_with(['+', '-']) => {}
                Err(_) => bail!("arch: {part:?} in {name:?} is not a number of CUs or SMs"),
            }
        }
        Ok(arch)
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            ArchName::Cpu(_) => self.name.fmt(f),
            name => write!(f, "{name}:{}", self.compute_units),
        }
    }
}
