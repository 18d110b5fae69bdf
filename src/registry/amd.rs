//! Selection on AMD GPUs: which tile, how many rows a workgroup takes, which schedule.

use std::fmt;

use candle::{Result, bail};

use super::arch::{Arch, ArchName};
use super::flags::{Fit, Flags, Missing, kernarg_preload};
use super::lds::{self, Lds};
use super::problem::{Problem, ScaleMode};
use super::reason::{self, Reason};
use super::select::{KernelKey, Selection, Tile, split_rows};
use crate::cache::{CacheLayout, KvDtype};
use crate::plan::TILE_TOKENS;

/// Head dims the tile is written for.
const HEAD_DIMS: [usize; 6] = [64, 128, 192, 256, 512, 1024];

/// M-tiles of a workgroup times head_dim: a quarter of O in registers, F32, beside K, V and scores.
const MAX_OUTPUT: usize = 2048;
/// The same of the MXFP4 tile, whose waves hold all of O each.
const MAX_MXFP4_OUTPUT: usize = 512;

pub(super) fn select(p: &Problem, arch: &Arch, written: &Flags) -> Result<Selection> {
    check(p, arch)?;
    let fit = fit(p, arch)?;
    let missing = Missing::of(p, arch, &fit).among(written);
    let flags = missing.flags(kernarg_preload(p, arch));
    let groups = if flags.dual_group { 2 } else { 1 };
    Ok(Selection {
        cpu_isa: None,
        threads: groups * lds::WAVES * arch.wave_size,
        lds_bytes: lds_bytes(p, &fit, &flags),
        staged_bytes: groups * staged_ids(p, &flags).unwrap_or(0) * 4,
        row_groups: fit.row_groups,
        waves_per_eu: if flags.bf16_mtp_fused || flags.fp8_mtp4_lean { 2 } else { 0 },
        merges_tasks: false,
        reason: Reason(reason::Why::Amd(Why::new(p, arch, &fit, &flags, &missing))),
        key: KernelKey::new(p, arch.name, Tile { m_tiles: fit.m_tiles, tokens: TILE_TOKENS, flags }),
    })
}

/// The flags' conditions with what each misses.
pub(super) fn missing(p: &Problem, arch: &Arch) -> Result<Missing> {
    check(p, arch)?;
    Ok(Missing::of(p, arch, &fit(p, arch)?))
}

/// Refuses what the AMD kernels are not written for.
fn check(p: &Problem, arch: &Arch) -> Result<()> {
    let name = arch.name;
    match (p.kv_dtype, p.layout) {
        (KvDtype::F32, _) => bail!("key_cache: {name} has no kernel for an F32 cache (BF16, F16, FP8, and MXFP4 on gfx950)"),
        (KvDtype::Mxfp4, _) if name != ArchName::Gfx950 => {
            bail!("key_cache: {name} has no kernel for an MXFP4 cache (gfx950 has; BF16, F16 and FP8 run here)")
        }
        (KvDtype::Mxfp4, _) | (_, CacheLayout::Vllm | CacheLayout::Shuffled) => {}
        (kv, layout) => {
            let kv = kv.name().to_uppercase();
            bail!(
                "layout: {name} kernels read {kv} caches as shuffled or vllm (V contiguous along tokens), got {}; CacheConfig's layout None is the \
                 device's own",
                layout.name()
            )
        }
    }
    if !HEAD_DIMS.contains(&p.head_dim) {
        bail!("head_dim: {name} kernels are written for {HEAD_DIMS:?}, got {}", p.head_dim)
    }
    if !p.page_size.is_power_of_two() || !(8..=1024).contains(&p.page_size) {
        bail!("page_size: {name} kernels take powers of two from 8 to 1024, got {}", p.page_size)
    }
    if p.scales != ScaleMode::None && !matches!(p.kv_dtype, KvDtype::Fp8 | KvDtype::Mxfp4) {
        bail!("scales: {name} kernels apply scales to FP8 and MXFP4 caches, the cache is {:?}", p.kv_dtype)
    }
    Ok(())
}

/// Splits the rows into workgroups whose tile fits the LDS.
fn fit(p: &Problem, arch: &Arch) -> Result<Fit> {
    if p.kv_dtype == KvDtype::Mxfp4 {
        return fit_mxfp4(p, arch);
    }
    let need = |m_tiles| Lds::of_tile(p, m_tiles, 1);
    // O of more rows than this does not fit the registers; one M-tile always does.
    let fits = |m| need(m).total() <= arch.lds_bytes && (m == 1 || m * p.head_dim <= MAX_OUTPUT);
    let Some((m_tiles, row_groups)) = split_rows(p.m_tiles(), fits) else {
        bail!("head_dim: a tile of head_dim {} needs {} bytes of LDS, {} has {}", p.head_dim, need(1).total(), arch.name, arch.lds_bytes)
    };
    Ok(Fit { m_tiles, row_groups, staged_pages: false, two_copies: lds::two_groups(need(m_tiles), p.head_dim) <= arch.lds_bytes })
}

/// An MXFP4 tile's LDS grows with its rows, and with the table whose page ids it stages.
fn fit_mxfp4(p: &Problem, arch: &Arch) -> Result<Fit> {
    let need = |m_tiles, staged| Lds::of_mxfp4(p, m_tiles, staged);
    let fits = |m| need(m, None).total() <= arch.lds_bytes && (m == 1 || m * p.head_dim <= MAX_MXFP4_OUTPUT);
    let Some((m_tiles, row_groups)) = split_rows(p.m_tiles(), fits) else {
        let least = need(1, None).total();
        bail!("head_dim: an MXFP4 tile of head_dim {} needs {least} bytes of LDS, {} has {}", p.head_dim, arch.name, arch.lds_bytes)
    };
    Ok(Fit {
        m_tiles,
        row_groups,
        staged_pages: need(m_tiles, Some(task_pages(p))).total() <= arch.lds_bytes,
        two_copies: lds::two_groups(need(m_tiles, Some(group_pages(p))), p.head_dim) <= arch.lds_bytes,
    })
}

/// Page ids that an MXFP4 task stages: those of all tiles that the block table has.
fn task_pages(p: &Problem) -> usize {
    let pages_a_tile = TILE_TOKENS.div_ceil(p.page_size);
    p.max_pages.div_ceil(pages_a_tile).saturating_mul(pages_a_tile)
}

/// Page ids that one of two MXFP4 groups stages: those of every other tile.
fn group_pages(p: &Problem) -> usize {
    let pages_a_tile = TILE_TOKENS.div_ceil(p.page_size);
    // A page larger than a tile serves tiles of both groups.
    if p.page_size > TILE_TOKENS { p.max_pages } else { p.max_pages.div_ceil(2 * pages_a_tile).saturating_mul(pages_a_tile) }
}

/// Page ids that one group of tiles stages, where it does.
fn staged_ids(p: &Problem, flags: &Flags) -> Option<usize> {
    match p.kv_dtype {
        KvDtype::Mxfp4 if flags.dual_group => Some(group_pages(p)),
        KvDtype::Mxfp4 => flags.mxfp4_staged_pages.then(|| task_pages(p)),
        _ => None,
    }
}

fn lds_bytes(p: &Problem, fit: &Fit, flags: &Flags) -> usize {
    let copy = match p.kv_dtype {
        KvDtype::Mxfp4 => Lds::of_mxfp4(p, fit.m_tiles, staged_ids(p, flags)),
        _ => Lds::of_tile(p, fit.m_tiles, if flags.bf16_mtp_fused || flags.fp8_mtp4_lean { fit.m_tiles } else { 1 }),
    };
    if flags.dual_group { lds::two_groups(copy, p.head_dim) } else { copy.total() }
}

/// `pa_KV_dHEAD_pPAGE_mTILES`, then what sets the kernel apart, `_dual` last.
pub(super) fn kernel_name(key: &KernelKey) -> String {
    let flags = &key.flags;
    let mut name = format!("pa_{}_d{}_p{}_m{}", key.kv_dtype.name(), key.head_dim, key.page_size, key.m_tiles);
    let marks = [
        (key.scales == ScaleMode::PerToken, "_token"),
        (key.layout == CacheLayout::Vllm, "_vllm"),
        (key.layout == CacheLayout::Nhd, "_nhd"),
        (flags.bf16_mtp_fused, "_mtp_fused"),
        (flags.fp8_mtp4_lean, "_mtp4_lean"),
        (flags.page16_vpipe, "_vpipe"),
        (flags.head256_pipe, "_pipe"),
        (flags.bf16_decode_nt_kv || flags.fp8_decode_nt_v, "_nt"),
        (key.windowed, "_window"),
        (key.softcap, "_softcap"),
        (flags.direct_output, "_direct"),
        (flags.dual_group, "_dual"),
    ];
    marks.iter().filter(|(on, _)| *on).for_each(|(_, mark)| name.push_str(mark));
    name
}

/// The tile, and what changes around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Why {
    tile: Chosen,
    split_rows: bool,
    dual_group: bool,
    direct_output: bool,
}

/// A tile in a few words; of a generic one why a faster one does not serve.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Chosen {
    Schedule(&'static str),
    /// The only one there is for the shape.
    OnlyOneOf(ArchName),
    Generic {
        schedule: &'static str,
        lacks: Option<&'static str>,
    },
}

impl Why {
    fn new(p: &Problem, arch: &Arch, fit: &Fit, flags: &Flags, missing: &Missing) -> Self {
        let generic = |schedule, lacks| Chosen::Generic { schedule, lacks };
        let decode = p.m_tiles() == 1;
        let tile = match p.kv_dtype {
            _ if flags.bf16_mtp_fused => Chosen::Schedule("fused BF16 multi-query tile: one publication barrier serves all M-tiles"),
            _ if flags.fp8_mtp4_lean => Chosen::Schedule("lean FP8 MTP4 tile: K scale folded into exp2, one V factor a chunk"),
            _ if flags.mxfp4_tile => Chosen::Schedule("MXFP4 tile: each wave owns 64 tokens, merged once after the loop"),
            _ if flags.page16_vpipe => Chosen::Schedule("page-16 V pipe: V prefetched and kept in flight"),
            _ if flags.head256_pipe => Chosen::Schedule("head-256 pipe"),
            _ if flags.bf16_decode_nt_kv => {
                Chosen::Schedule("BF16 decode tile: K and V streamed past the caches, the last V right after QK")
            }
            _ if flags.fp8_decode_nt_v => Chosen::Schedule("FP8 decode tile: V streamed past the caches"),
            _ if arch.name != ArchName::Gfx950 => Chosen::OnlyOneOf(arch.name),
            KvDtype::Bf16 if !decode => generic("fused BF16 tile", missing.bf16_mtp_fused),
            KvDtype::Bf16 => generic("BF16 decode tile", missing.bf16_decode_nt_kv),
            KvDtype::Fp8 if !decode => generic("lean FP8 MTP4 tile", missing.fp8_mtp4_lean),
            KvDtype::Fp8 => generic("FP8 decode tile", missing.fp8_decode_nt_v),
            _ => generic("", None),
        };
        Self { tile, split_rows: fit.row_groups > 1, dual_group: flags.dual_group, direct_output: flags.direct_output }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tile {
            Chosen::Schedule(what) => f.write_str(what)?,
            Chosen::OnlyOneOf(arch) => write!(f, "generic tile: the only one {arch} has for this shape")?,
            Chosen::Generic { schedule, lacks: Some(lacks) } => write!(f, "generic tile: the {schedule} needs {lacks}")?,
            Chosen::Generic { lacks: None, .. } => f.write_str("generic tile")?,
        }
        let around = [
            (self.split_rows, "; rows split over workgroups"),
            (self.dual_group, "; two tile groups, as no CU has a second workgroup"),
            (self.direct_output, "; rows stored directly, no reducer"),
        ];
        around.iter().filter(|(on, _)| *on).try_for_each(|(_, what)| f.write_str(what))
    }
}
