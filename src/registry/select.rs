//! The selection itself: what is chosen, and the dispatch over archs.

use candle::{DType, Result};

use super::arch::{Arch, ArchName, CpuIsa};
use super::cuda::CudaShape;
use super::flags::{Flags, Missing};
use super::problem::{Problem, ScaleMode};
use super::reason::Reason;
use super::{amd, cpu, cuda};
use crate::cache::{CacheLayout, KvDtype};

/// What a compiled kernel is specialized on: two calls with equal keys run the same code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelKey {
    /// For a CPU kernel, the instruction set that computes.
    pub arch: ArchName,
    /// Channels of a head.
    pub head_dim: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Query heads of a KV head.
    pub group: usize,
    /// One query token a sequence: rows are heads, and no causal mask is needed among them.
    pub single_query: bool,
    /// 16-row tiles of one workgroup.
    pub m_tiles: usize,
    /// KV tokens of one step of the loop.
    pub tile_tokens: usize,
    /// Dtype of q and of the output.
    pub query_dtype: DType,
    /// What the cache stores.
    pub kv_dtype: KvDtype,
    /// Where the cache stores it.
    pub layout: CacheLayout,
    /// An FP8 cache without scales has scalar ones of 1.
    pub scales: ScaleMode,
    /// Every KV head has a block table of its own.
    pub per_head_tables: bool,
    /// Sequences may have different query lengths.
    pub ragged: bool,
    /// There is a sliding window.
    pub windowed: bool,
    /// Scores are capped.
    pub softcap: bool,
    /// The softmax scale is above 0.
    pub positive_scale: bool,
    /// Parts of the schedule that are switched on.
    pub flags: Flags,
    /// How a block of NVIDIA's tensor-core tile is cut; `None` for the tile without tensor cores, and off NVIDIA.
    pub cuda: Option<CudaShape>,
}

/// The part of a key that is chosen rather than given.
pub(super) struct Tile {
    pub m_tiles: usize,
    pub tokens: usize,
    /// Parts of the schedule that are switched on.
    pub flags: Flags,
}

impl KernelKey {
    /// The one place where keys are made.
    pub(super) fn new(p: &Problem, arch: ArchName, tile: Tile) -> Self {
        Self {
            arch,
            head_dim: p.head_dim,
            page_size: p.page_size,
            group: p.group(),
            single_query: p.query_len <= 1,
            m_tiles: tile.m_tiles,
            tile_tokens: tile.tokens,
            query_dtype: p.query_dtype,
            kv_dtype: p.kv_dtype,
            layout: p.layout,
            scales: if p.kv_dtype == KvDtype::Fp8 { p.scales.max(ScaleMode::Scalar) } else { p.scales },
            per_head_tables: p.per_head_tables,
            ragged: p.ragged,
            windowed: p.windowed,
            softcap: p.softcap,
            positive_scale: p.positive_scale,
            flags: tile.flags,
            cuda: None,
        }
    }
}

/// The kernel chosen for a problem, and how it is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// What the kernel is specialized on.
    pub key: KernelKey,
    /// The instruction set of a CPU kernel.
    pub cpu_isa: Option<CpuIsa>,
    /// Threads of a workgroup. 1 on the CPU: a task is one core's work.
    pub threads: usize,
    /// LDS or shared memory of a workgroup, bytes.
    pub lds_bytes: usize,
    /// Of these, what a launch adds to the kernel's own: page ids, as many as the block table has (MXFP4).
    pub staged_bytes: usize,
    /// Workgroups that share the rows of one (task slot, KV head), `key.m_tiles` M-tiles each (the last may have fewer).
    pub row_groups: usize,
    /// Waves a SIMD is to hold, which caps the registers of one; 0 leaves it to the compiler.
    pub waves_per_eu: usize,
    /// On NVIDIA, whether a plan row may have several tasks, whose results a second launch merges. Elsewhere `false`: an AMD kernel without
    /// `direct_output` stores partial results however many tasks a row has, the CPU merges in the same call.
    pub merges_tasks: bool,
    /// One line: what was chosen and why.
    pub reason: Reason,
}

impl Selection {
    /// The kernel's readable name, made of the key; the key tells specializations apart.
    pub fn kernel(&self) -> String {
        match self.key.arch {
            ArchName::Cpu(_) => cpu::kernel_name(&self.key),
            ArchName::Gfx942 | ArchName::Gfx950 | ArchName::Gfx1250 => amd::kernel_name(&self.key),
            ArchName::Sm80 | ArchName::Sm89 | ArchName::Sm90 => cuda::kernel_name(&self.key),
        }
    }

    /// The schedule flags.
    pub fn flags(&self) -> &Flags {
        &self.key.flags
    }

    /// Whether partial results of this kernel are merged by a second launch. The CPU merges in the same call.
    pub fn needs_reducer(&self) -> bool {
        self.merges_tasks || self.key.arch.is_amd() && !self.key.flags.direct_output
    }
}

/// Chooses the kernel for `problem` on `arch`: a pure function. An arch without a kernel for the problem is an error that names the argument.
pub fn select(problem: &Problem, arch: &Arch) -> Result<Selection> {
    select_among(problem, arch, &Flags::ALL)
}

/// Chooses among kernels that have the schedules `written` and no others: what [`select`] gives, where some are still to be written.
pub(crate) fn select_among(problem: &Problem, arch: &Arch, written: &Flags) -> Result<Selection> {
    problem.check()?;
    match arch.name {
        ArchName::Cpu(isa) => cpu::select(problem, isa),
        ArchName::Gfx942 | ArchName::Gfx950 | ArchName::Gfx1250 => amd::select(problem, arch, written),
        ArchName::Sm80 | ArchName::Sm89 | ArchName::Sm90 => cuda::select(problem, arch),
    }
}

/// For each schedule flag of the AMD tile the first requirement that `problem` misses on `arch`; `None` off AMD.
pub fn missing_requirements(problem: &Problem, arch: &Arch) -> Result<Option<Missing>> {
    problem.check()?;
    if arch.name.is_amd() { amd::missing(problem, arch).map(Some) } else { Ok(None) }
}

/// The layout that `arch`'s kernels read fastest: what a cache takes when left to choose.
///
/// AMD: Shuffled, both operands of the matrix instructions contiguous in 16 bytes (MXFP4: Hnd). CUDA: Nhd, which the tensor-core tile reads. CPU: Nhd.
pub fn preferred_layout(arch: &Arch, kv: KvDtype) -> CacheLayout {
    match (arch.name, kv) {
        (name, KvDtype::Mxfp4) if name.is_amd() => CacheLayout::Hnd,
        (name, _) if name.is_amd() => CacheLayout::Shuffled,
        _ => CacheLayout::Nhd,
    }
}

/// Splits `total` M-tiles evenly over the fewest workgroups of at most four that `fits` allows: (M-tiles of a workgroup, workgroups).
/// `None` where not even one M-tile fits.
pub(super) fn split_rows(total: usize, fits: impl Fn(usize) -> bool) -> Option<(usize, usize)> {
    let most = (1..=4).rev().find(|&m| fits(m))?;
    let groups = total.div_ceil(most).max(1);
    Some((total.div_ceil(groups).max(1), groups))
}
