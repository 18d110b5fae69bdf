//! Selection on the CPU: which instruction set computes.

use candle::{DType, Result, bail};

use super::arch::{ArchName, CpuIsa};
use super::flags::Flags;
use super::problem::{M_TILE_ROWS, Problem};
use super::reason::{Reason, Why};
use super::select::{KernelKey, Selection, Tile};
use crate::cache::KvDtype;
use crate::plan::TILE_TOKENS;

const MAX_HEAD_DIM: usize = 1024;
const MAX_PAGE: usize = 1024;
/// M-tiles that one pass over the KV serves; more rows are passes of their own.
const ROW_TILES: usize = crate::cpu::ROW_BLOCK / M_TILE_ROWS;

pub(super) fn select(p: &Problem, isa: CpuIsa) -> Result<Selection> {
    if !p.head_dim.is_multiple_of(8) || p.head_dim > MAX_HEAD_DIM {
        bail!("head_dim: the CPU kernels take multiples of 8 up to {MAX_HEAD_DIM}, got {}", p.head_dim)
    }
    if p.page_size > MAX_PAGE {
        bail!("page_size: the CPU kernels take 1 to {MAX_PAGE}, got {}", p.page_size)
    }
    let (used, why) = isa_for(p, isa);
    Ok(Selection {
        cpu_isa: Some(used),
        // A task is one core's work.
        threads: 1,
        lds_bytes: 0,
        staged_bytes: 0,
        row_groups: p.m_tiles().div_ceil(ROW_TILES),
        waves_per_eu: 0,
        merges_tasks: false,
        reason: Reason(Why::Cpu(why)),
        key: KernelKey::new(
            p,
            ArchName::Cpu(used),
            Tile { m_tiles: p.m_tiles().min(ROW_TILES), tokens: TILE_TOKENS, flags: Flags::default() },
        ),
    })
}

/// `cpu_ISA_KV_dHEAD`.
pub(super) fn kernel_name(key: &KernelKey) -> String {
    let isa = if let ArchName::Cpu(isa) = key.arch { isa.name() } else { "" };
    format!("cpu_{isa}_{}_d{}", key.kv_dtype.name(), key.head_dim)
}

/// The instruction set that computes on a CPU with `isa`, and why.
fn isa_for(p: &Problem, isa: CpuIsa) -> (CpuIsa, &'static str) {
    match (p.kv_dtype, p.query_dtype, isa) {
        (KvDtype::F32, _, CpuIsa::AmxBf16 | CpuIsa::Avx512Bf16) => {
            (CpuIsa::Avx512, "F32 cache: computed in F32, BF16 products would round it")
        }
        (KvDtype::F16, _, CpuIsa::AmxBf16 | CpuIsa::Avx512Bf16) => {
            (CpuIsa::Avx512, "F16 cache: computed in F32, BF16 products would drop 3 of its bits")
        }
        (_, DType::F32, CpuIsa::AmxBf16 | CpuIsa::Avx512Bf16) => {
            (CpuIsa::Avx512, "F32 query: computed in F32, BF16 products would round the softmax weights")
        }
        (_, _, CpuIsa::AmxBf16) => (isa, "BF16 tile products (AMX) summed in F32; softmax weights are rounded to BF16"),
        (_, _, CpuIsa::Avx512Bf16) => (isa, "BF16 pair products (AVX512-BF16) summed in F32; softmax weights are rounded to BF16"),
        (_, _, CpuIsa::Portable) => (isa, "computed in F32 by portable code"),
        (KvDtype::F32 | KvDtype::F16, _, _) => (isa, "computed in F32"),
        _ => (isa, "computed in F32: this instruction set has no BF16 products"),
    }
}
