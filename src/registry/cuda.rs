//! Selection on NVIDIA GPUs: the tensor-core tile and how its block is cut, or the plain tile for what that does not take.

use std::fmt;

use candle::{DType, Result, bail};

use super::arch::{Arch, ArchName};
use super::flags::Flags;
use super::problem::{M_TILE_ROWS, Problem, ScaleMode};
use super::select::{KernelKey, Selection, Tile};
use crate::cache::{CacheLayout, KvDtype};
use crate::plan::TILE_TOKENS;

/// How a block of the tensor-core tile is cut (`kernels/nvidia/traits.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaShape {
    /// Warps that share a chunk of tokens and have 16 query rows (times `m_tiles`) each.
    pub row_warps: usize,
    /// Groups of such warps; each takes every `groups`-th chunk.
    pub groups: usize,
    /// Chunks that a group has room for: one is computed while the others are on their way.
    pub stages: usize,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Products of four warps together that read shared memory themselves (`wgmma`).
    pub warpgroup: bool,
}

impl CudaShape {
    const fn of(row_warps: usize, groups: usize, stages: usize, chunk: usize) -> Self {
        Self { row_warps, groups, stages, chunk, warpgroup: false }
    }

    const fn warpgroups(groups: usize, stages: usize) -> Self {
        Self { warpgroup: true, ..Self::of(4, groups, stages, 64) }
    }

    fn rows(&self) -> usize {
        self.row_warps * M_TILE_ROWS
    }

    fn threads(&self) -> usize {
        self.row_warps * self.groups * 32
    }

    /// Bytes of shared memory: the rings of the groups, or what they are merged through, whichever is more.
    fn shared_bytes(&self, p: &Problem) -> usize {
        let Self { groups, stages, chunk, warpgroup, .. } = *self;
        let (fp8, rows, head_dim) = (p.kv_dtype == KvDtype::Fp8, self.rows(), p.head_dim);
        let scales = if p.scales == ScaleMode::PerToken { chunk * 4 } else { 0 };
        let stage = 2 * chunk * head_dim * if fp8 { 1 } else { 2 } + 2 * scales;
        let transposed = fp8 && warpgroup;
        let beside = if transposed { chunk * 128 + 4 * rows * 4 } else { 0 };
        let query = if warpgroup { rows * head_dim * 2 } else { 0 };
        let ring = groups * (beside + stages * stage).next_multiple_of(1024) + query;
        let row = head_dim
            + if transposed {
                4
            } else if fp8 {
                head_dim / 8
            } else {
                8
            };
        let merge = (groups * rows * (row + 2) + if transposed { groups * 4 * rows } else { 0 }) * 4;
        ring.max(merge)
    }
}

impl fmt::Display for CudaShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row_warps, groups, stages, chunk, warpgroup } = self;
        write!(f, "{}{row_warps}x{groups}s{stages}c{chunk}", if *warpgroup { "wg" } else { "w" })
    }
}

/// Query rows of a block of the plain tile.
pub(crate) fn plain_rows(head_dim: usize) -> usize {
    if head_dim < 256 { 8 } else { 4 }
}

/// Threads of a block of the plain tile.
const PLAIN_THREADS: usize = 128;

/// Shared memory of the plain tile: the query in F32, and what its four warps are merged through.
fn plain_shared_bytes(head_dim: usize) -> usize {
    let rows = plain_rows(head_dim);
    rows * head_dim * 4 + 4 * rows * (head_dim + 2) * 4
}

/// Query rows of one block of a kernel chosen here.
#[cfg(feature = "nvrtc")]
pub(crate) fn block_rows(key: &KernelKey) -> usize {
    key.cuda.map_or_else(|| plain_rows(key.head_dim), |shape| shape.rows())
}

/// Why the tensor-core tile does not take the problem, or `None` where it does.
fn misses_tensor_cores(p: &Problem, arch: &Arch) -> Option<&'static str> {
    let fp8 = p.kv_dtype == KvDtype::Fp8;
    let head_dims: &[usize] = if fp8 { &[128, 256] } else { &[64, 128, 256] };
    match p.kv_dtype {
        KvDtype::F32 => Some("F32 (never TF32)"),
        KvDtype::Mxfp4 => Some("MXFP4"),
        KvDtype::Fp8 if arch.name == ArchName::Sm80 => Some("FP8 (no conversion instruction)"),
        _ if p.query_dtype == DType::F32 => Some("an F32 query"),
        _ if !matches!(p.layout, CacheLayout::Nhd | CacheLayout::Hnd) => Some("the layout"),
        _ if !head_dims.contains(&p.head_dim) => Some("the head_dim"),
        _ => None,
    }
}

/// The cuts for a problem, the fastest first; docs/cuda-notes.md has the measurements.
fn shapes(p: &Problem, arch: &Arch) -> Vec<CudaShape> {
    let fp8 = p.kv_dtype == KvDtype::Fp8;
    let rows = p.query_len.saturating_mul(p.group());
    let many = p.workgroups() > arch.compute_units;
    let mut shapes = vec![];
    if rows > M_TILE_ROWS {
        if arch.name == ArchName::Sm90 && p.head_dim == 128 {
            shapes.push(if fp8 { CudaShape::warpgroups(2, 3) } else { CudaShape::warpgroups(3, 2) });
        }
        let row_warps = if rows > 2 * M_TILE_ROWS { 4 } else { 2 };
        shapes.extend(
            [(2, 3, 32), (2, 2, 32), (1, 2, 32), (1, 2, 16)].map(|(groups, stages, chunk)| CudaShape::of(row_warps, groups, stages, chunk)),
        );
        return shapes;
    }
    // With more blocks than SMs, two a SM.
    match (fp8, many) {
        (true, false) => shapes.extend([CudaShape::of(1, 8, 3, 32), CudaShape::of(1, 4, 3, 32)]),
        (true, true) => shapes.push(CudaShape::of(1, 4, 3, 32)),
        (false, false) => shapes.extend([CudaShape::of(1, 4, 3, 32), CudaShape::of(1, 4, 3, 16)]),
        (false, true) => shapes.push(CudaShape::of(1, 4, 3, 16)),
    }
    shapes.extend([(4, 2, 32), (4, 2, 16), (2, 2, 16)].map(|(groups, stages, chunk)| CudaShape::of(1, groups, stages, chunk)));
    shapes
}

pub(super) fn select(p: &Problem, arch: &Arch) -> Result<Selection> {
    select_among(p, arch, misses_tensor_cores(p, arch))
}

/// The plain tile, for tensors that are not aligned to what the tensor-core tile loads at a time.
#[cfg(feature = "cuda")]
pub(crate) fn select_plain(p: &Problem, arch: &Arch) -> Result<Selection> {
    select_among(p, arch, Some("tensors that are not aligned to 16 bytes"))
}

/// The tensor-core tile, or where `misses` says why not, the plain one.
fn select_among(p: &Problem, arch: &Arch, misses: Option<&str>) -> Result<Selection> {
    let name = arch.name;
    let step = if p.kv_dtype == KvDtype::Mxfp4 { 32 } else { 8 };
    if !p.head_dim.is_multiple_of(step) || p.head_dim > 1024 {
        bail!("head_dim: {name} kernels take multiples of {step} up to 1024, got {}", p.head_dim)
    }
    if p.page_size > 1024 {
        bail!("page_size: {name} kernels take 1 to 1024, got {}", p.page_size)
    }
    if p.scales != ScaleMode::None && !matches!(p.kv_dtype, KvDtype::Fp8 | KvDtype::Mxfp4) {
        bail!("scales: {name} kernels apply scales to FP8 and MXFP4 caches, the cache is {:?}", p.kv_dtype)
    }
    let fits = |shape: &CudaShape| shape.shared_bytes(p) <= arch.lds_bytes;
    let (shape, reason) = match misses {
        Some(what) => (None, format!("the plain tile, without tensor cores: {what}")),
        None => match shapes(p, arch).into_iter().find(fits) {
            Some(shape) => (
                Some(shape),
                format!(
                    "tensor cores, {} groups of {} warps on {} stages of {} tokens{}",
                    shape.groups,
                    shape.row_warps,
                    shape.stages,
                    shape.chunk,
                    if shape.warpgroup { ", warpgroup products" } else { "" }
                ),
            ),
            None => (None, "the plain tile, without tensor cores: the shared memory holds no two stages".to_string()),
        },
    };
    let (rows, threads, shared) = match &shape {
        Some(shape) => (shape.rows(), shape.threads(), shape.shared_bytes(p)),
        None => (plain_rows(p.head_dim), PLAIN_THREADS, plain_shared_bytes(p.head_dim)),
    };
    if shared > arch.lds_bytes {
        bail!("head_dim: a tile of head_dim {} needs {shared} bytes of shared memory, {name} has {}", p.head_dim, arch.lds_bytes)
    }
    let cut = shape.map_or_else(|| "plain".to_string(), |shape| shape.to_string());
    Ok(Selection {
        kernel: format!("pa_{name}_{}_d{}_p{}_{cut}", p.kv_dtype.name(), p.head_dim, p.page_size),
        cpu_isa: None,
        threads,
        lds_bytes: shared,
        staged_bytes: 0,
        row_groups: p.query_len.saturating_mul(p.group()).div_ceil(rows).max(1),
        waves_per_eu: 0,
        reason,
        key: KernelKey { cuda: shape, ..KernelKey::new(p, name, Tile { m_tiles: 1, tokens: TILE_TOKENS, flags: Flags::default() }) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_what_the_kernels_ask_for() {
        let problem = |kv_dtype, scales| Problem { kv_dtype, scales, layout: CacheLayout::Nhd, ..Problem::default() };
        let bf16 = problem(KvDtype::Bf16, ScaleMode::None);
        assert_eq!(CudaShape::of(1, 8, 3, 16).shared_bytes(&bf16), 8 * 3 * 2 * 16 * 256);
        assert_eq!(CudaShape::warpgroups(3, 2).shared_bytes(&bf16), 3 * 2 * 2 * 64 * 256 + 64 * 256);
        let token = problem(KvDtype::Fp8, ScaleMode::PerToken);
        assert_eq!(CudaShape::of(1, 8, 3, 32).shared_bytes(&token), 8 * (3 * (2usize * 32 * 128 + 256)).next_multiple_of(1024));
        assert_eq!(plain_shared_bytes(128), 8 * 128 * 4 + 4 * 8 * 130 * 4);
    }

    #[test]
    fn what_tensor_cores_do_not_take_goes_to_the_plain_tile() {
        let base = Problem { layout: CacheLayout::Nhd, ..Problem::default() };
        let cut = |p: Problem, arch: Arch| select(&p, &arch).unwrap().key.cuda;
        assert_eq!(cut(base.clone(), Arch::sm90()), Some(CudaShape::of(1, 4, 3, 32)));
        assert_eq!(cut(Problem { query_len: 4, ..base.clone() }, Arch::sm90()), Some(CudaShape::warpgroups(3, 2)));
        assert_eq!(cut(Problem { query_len: 4, ..base.clone() }, Arch::sm89()), Some(CudaShape::of(4, 2, 3, 32)));
        for p in [
            Problem { head_dim: 80, ..base.clone() },
            Problem { layout: CacheLayout::Vllm, ..base.clone() },
            Problem { query_dtype: DType::F32, ..base.clone() },
            Problem { kv_dtype: KvDtype::F32, ..base.clone() },
        ] {
            assert_eq!(cut(p, Arch::sm90()), None);
        }
        let fp8 = Problem { kv_dtype: KvDtype::Fp8, ..base };
        assert_eq!(cut(fp8.clone(), Arch::sm80()), None);
        assert!(cut(fp8, Arch::sm89()).is_some());
    }
}
