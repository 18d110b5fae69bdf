//! What each kernel is specialized on: from the registry's selection, or a shape, to the compiler's macros. Pure.

use candle::{DType, Result, bail};

pub use super::reducer::REDUCER_THREADS;
use crate::cache::KvDtype;
use crate::gpu::specialize::{self as shared, defines, kv_code, layout_code, mark, query_code, query_name, scales_code, specialization};
pub use crate::gpu::specialize::{WriteKey, plan};
use crate::jit::{Source, Specialization};
use crate::registry::{self, Arch, ArchName, Flags, KernelKey, Problem, Selection};

/// Schedules that the kernels have. Where the registry's tables call for another, the generic tile runs.
const WRITTEN: Flags = Flags {
    bf16_mtp_fused: true,
    bf16_decode_nt_kv: true,
    decode_q_early: true,
    decode_last_v_after_qk: true,
    page16_vpipe: true,
    page16_pages_first: true,
    page16_early_k: true,
    fp8_scales_after_q: true,
    fp8_loop_scales_late: true,
    fp8_mtp4_lean: true,
    fp8_mtp4_q_lds: true,
    fp8_mtp4_pages_ahead: true,
    fp8_decode_nt_v: true,
    direct_output: true,
    dual_group: true,
    packed_q_absmax: true,
    head256_pipe: true,
    head256_interior_unmasked: true,
    fp8_pack_no_old: true,
    mxfp4_tile: true,
    mxfp4_staged_pages: true,
    ..Flags::NONE
};

/// Dwords of the tile's leading arguments, in order: those that scalar registers can be preloaded with (`kernels/common/args.h`).
const LEADING_DWORDS: [usize; 9] = [2, 2, 2, 1, 1, 1, 1, 2, 2];

/// The kernel that runs for `problem` on `arch`: the registry's choice among what is written, its name and reason those of what runs.
///
/// Errors: those of [`registry::select`]; gfx1250, whose tile is not written.
pub fn select(problem: &Problem, arch: &Arch) -> Result<Selection> {
    if arch.name == ArchName::Gfx1250 {
        bail!("arch: the attention tile is not written for gfx1250 yet (its planner, reducer and cache writes are)")
    }
    registry::select_among(problem, arch, &WRITTEN)
}

/// The tile of a selection made by [`select`].
///
/// Errors: not a selection for gfx942 or gfx950.
pub fn tile(selection: &Selection) -> Result<Specialization> {
    let key = &selection.key;
    if !matches!(key.arch, ArchName::Gfx942 | ArchName::Gfx950) {
        bail!("arch: {} has no attention tile among the AMD kernels", key.arch)
    }
    check_cache(key.kv_dtype, key.arch)?;
    let number = [
        ("PA_HEAD_DIM", key.head_dim),
        ("PA_PAGE", key.page_size),
        ("PA_GROUP", key.group),
        ("PA_M_TILES", key.m_tiles),
        ("PA_QUERY", query_code(key.query_dtype)?),
        ("PA_KV", kv_code(key.kv_dtype)),
        ("PA_SCALES", scales_code(key.scales)),
        ("PA_LAYOUT", layout_code(key.layout)),
        ("PA_WAVES_PER_EU", selection.waves_per_eu),
        ("PA_LDS_BYTES", selection.lds_bytes - selection.staged_bytes),
    ];
    let switches = [
        ("PA_SINGLE_QUERY", key.single_query),
        ("PA_PER_HEAD", key.per_head_tables),
        ("PA_RAGGED", key.ragged),
        ("PA_WINDOW", key.windowed),
        ("PA_SOFTCAP", key.softcap),
        ("PA_POSITIVE_SCALE", key.positive_scale),
    ];
    let mut defines = defines(&number, &switches);
    defines.extend(key.flags.all().into_iter().map(|(name, set)| (format!("PA_{name}"), usize::from(set).to_string())));
    Ok(Specialization {
        arch: key.arch,
        source: if key.kv_dtype == KvDtype::Mxfp4 { Source::TileMxfp4 } else { Source::Tile },
        kernel: selection.kernel(),
        defines,
        options: preload_options(key),
    })
}

/// The compiler's option counts arguments, the flag dwords.
fn preload_options(key: &KernelKey) -> Vec<String> {
    let mut room = key.flags.kernarg_preload;
    let arguments = LEADING_DWORDS
        .iter()
        .take_while(|&&dwords| {
            room.checked_sub(dwords).is_some_and(|left| {
                room = left;
                true
            })
        })
        .count();
    match arguments {
        0 => vec![],
        _ => vec!["-mllvm".to_string(), format!("-amdgpu-kernarg-preload-count={arguments}")],
    }
}

/// The reducer of partial results of `head_dim` channels into an output of `output` dtype, by blocks of `threads` ([`REDUCER_THREADS`]).
pub fn reduce(arch: ArchName, head_dim: usize, output: DType, ragged: bool, threads: usize) -> Result<Specialization> {
    let kernel = format!("pa_reduce_d{head_dim}_{}_t{threads}{}", query_name(output)?, mark(ragged, "_ragged"));
    let number = [("PA_HEAD_DIM", head_dim), ("PA_QUERY", query_code(output)?), ("PA_THREADS", threads)];
    Ok(specialization(arch, Source::Reduce, kernel, defines(&number, &[("PA_RAGGED", ragged)])))
}

/// The kernel that writes new tokens into their pages.
pub fn write(key: &WriteKey) -> Result<Specialization> {
    check_cache(key.kv_dtype, key.arch)?;
    shared::write(key)
}

/// Refuses what no AMD kernel reads or writes.
fn check_cache(kv: KvDtype, arch: ArchName) -> Result<()> {
    match kv {
        KvDtype::F32 => bail!("key_cache: {arch} has no kernel for an F32 cache (BF16, F16, FP8, and MXFP4 on gfx950)"),
        KvDtype::Bf16 | KvDtype::F16 | KvDtype::Fp8 | KvDtype::Mxfp4 => Ok(()),
    }
}
