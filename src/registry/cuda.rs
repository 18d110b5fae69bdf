//! Selection on NVIDIA GPUs: one generic tile, sized to the shared memory.

use candle::{Result, bail};

use super::arch::Arch;
use super::flags::Flags;
use super::lds;
use super::problem::{Problem, ScaleMode};
use super::select::{KernelKey, Selection, Tile, split_rows};
use crate::cache::KvDtype;

/// KV tokens a stage may hold, best first.
const TILE_TOKENS: [usize; 3] = [64, 32, 16];

pub(super) fn select(p: &Problem, arch: &Arch) -> Result<Selection> {
    let name = arch.name;
    if !p.head_dim.is_multiple_of(16) || p.head_dim > 1024 {
        bail!("head_dim: {name} kernels take multiples of 16 up to 1024, got {}", p.head_dim)
    }
    if p.page_size > 1024 {
        bail!("page_size: {name} kernels take 1 to 1024, got {}", p.page_size)
    }
    if p.scales != ScaleMode::None && !matches!(p.kv_dtype, KvDtype::Fp8 | KvDtype::Mxfp4) {
        bail!("scales: {name} kernels apply scales to FP8 and MXFP4 caches, the cache is {:?}", p.kv_dtype)
    }
    let smem = |m_tiles, tokens| lds::cuda_tile(p, m_tiles, tokens);
    // More rows a block before more tokens a stage: KV is then read by fewer blocks.
    let fits = |m_tiles| TILE_TOKENS.into_iter().find(|&tokens| smem(m_tiles, tokens) <= arch.lds_bytes);
    let Some((m_tiles, row_groups)) = split_rows(p.m_tiles(), |m| fits(m).is_some()) else {
        let need = smem(1, TILE_TOKENS[2]);
        bail!("head_dim: a tile of head_dim {} needs {need} bytes of shared memory, {name} has {}", p.head_dim, arch.lds_bytes)
    };
    let tokens = fits(m_tiles).unwrap_or(TILE_TOKENS[2]);
    let unit = if p.kv_dtype == KvDtype::F32 { "F32 multiply-adds (never TF32)" } else { "16-bit tensor cores" };
    Ok(Selection {
        kernel: format!("pa_{name}_{}_d{}_p{}_m{m_tiles}", p.kv_dtype.name(), p.head_dim, p.page_size),
        cpu_isa: None,
        threads: lds::WAVES * arch.wave_size,
        lds_bytes: smem(m_tiles, tokens),
        row_groups,
        waves_per_eu: 0,
        reason: format!("generic tile of {tokens} tokens a stage on {unit}: the most that fits the shared memory"),
        key: KernelKey::new(p, name, Tile { m_tiles, tokens, flags: Flags::default() }),
    })
}
