//! Bytes of LDS (shared memory) a workgroup needs, part by part.

use candle::DType;

use super::problem::{M_TILE_ROWS, Problem, ScaleMode};
use crate::cache::KvDtype;
use crate::plan::TILE_TOKENS;

/// Waves that share one tile.
pub(super) const WAVES: usize = 4;
/// Padding that keeps rows off the same banks.
const ROW_PAD: usize = 16;
/// Tokens of one wave of an MXFP4 tile.
const MXFP4_WAVE_TOKENS: usize = 64;
/// Dims of an MXFP4 V that a wave converts at a time.
const MXFP4_STAGED_DIMS: usize = 32;

/// One LDS layout of the AMD tile: the sum of these parts, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lds {
    /// Q: `m_tiles * 16` rows of `head_dim * element + 16` in the cache's dtype, with a F32 scale a row where Q is quantized (FP8) or brought
    /// into F16's range; twice the rows where Q is split in two parts because the cache's dtype cannot hold it.
    pub query: usize,
    /// P: `p_slots * 16` rows of `256 * element + 16`, twice where q is F32 and the cache 16-bit (P in two parts). One slot that
    /// M-tiles take in turn, or one for each M-tile (BF16_MTP_FUSED, FP8_MTP4_LEAN).
    pub probabilities: usize,
    /// Row maxima and sums of each wave: `p_slots * 2 * 4 * 16` F32.
    pub statistics: usize,
    /// Page ids: two tiles of `ceil(256 / page_size)` (four above head_dim 256), or all tiles' of a table row (MXFP4), 4 bytes each.
    pub page_ids: usize,
    /// Per-token scales of K and V: `2 * 256` F32, and the largest V scale of each wave.
    pub scales: usize,
    /// MXFP4: V as BF16, for each wave twice 32 dims of 64 tokens, 16 bytes of padding for two dims: one is put there while the other is multiplied.
    /// P stays in registers, because V is read in the token order that score accumulators come out in. The waves are merged in the same
    /// space and Q's, after the loop.
    pub values: usize,
}

impl Lds {
    pub fn total(&self) -> usize {
        [self.query, self.probabilities, self.statistics, self.page_ids, self.scales, self.values]
            .into_iter()
            .fold(0, usize::saturating_add)
    }

    /// The FP8 or 16-bit tile with `m_tiles` M-tiles and `p_slots` slots for P.
    pub fn of_tile(p: &Problem, m_tiles: usize, p_slots: usize) -> Self {
        let fp8 = p.kv_dtype == KvDtype::Fp8;
        let element = if fp8 { 1 } else { 2 };
        let rows = m_tiles * M_TILE_ROWS;
        Self {
            query: query_rows(p, m_tiles, element) + if is_row_scaled(p) { rows * 4 } else { 0 },
            probabilities: p_parts(p) * p_slots * M_TILE_ROWS * (TILE_TOKENS * element + ROW_PAD),
            statistics: p_slots * 2 * WAVES * M_TILE_ROWS * 4,
            page_ids: if p.head_dim > 256 { 4 } else { 2 } * TILE_TOKENS.div_ceil(p.page_size) * 4,
            scales: if p.scales == ScaleMode::PerToken { 2 * TILE_TOKENS * 4 + WAVES * 4 } else { 0 },
            values: 0,
        }
    }

    /// The MXFP4 tile with `m_tiles` M-tiles and room for `staged` page ids.
    pub fn of_mxfp4(p: &Problem, m_tiles: usize, staged: Option<usize>) -> Self {
        let ids = staged.unwrap_or(0);
        let values = WAVES * 2 * MXFP4_STAGED_DIMS * (MXFP4_WAVE_TOKENS * 2 + 8);
        Self { query: query_rows(p, m_tiles, 2), page_ids: ids.saturating_mul(4), values, ..Self::default() }
    }
}

/// Bytes of Q's rows with `element` bytes a value.
fn query_rows(p: &Problem, m_tiles: usize, element: usize) -> usize {
    let parts = if is_split(p) { 2 } else { 1 };
    parts * m_tiles * M_TILE_ROWS * (p.head_dim * element + ROW_PAD)
}

/// Whether Q needs two parts of the cache's dtype: F32 in a 16-bit cache, F16 in a BF16 one or in MXFP4's, which is multiplied as BF16.
fn is_split(p: &Problem) -> bool {
    match p.kv_dtype {
        KvDtype::Bf16 | KvDtype::Mxfp4 => p.query_dtype != DType::BF16,
        KvDtype::F16 => p.query_dtype == DType::F32,
        _ => false,
    }
}

/// Parts that P is kept in: two where an F32 output would show what one of a 16-bit dtype loses.
fn p_parts(p: &Problem) -> usize {
    let split = p.query_dtype == DType::F32 && matches!(p.kv_dtype, KvDtype::Bf16 | KvDtype::F16);
    if split { 2 } else { 1 }
}

/// Whether rows of Q are scaled: to FP8's range, or to F16's where Q is not F16 itself.
fn is_row_scaled(p: &Problem) -> bool {
    p.kv_dtype == KvDtype::Fp8 || p.kv_dtype == KvDtype::F16 && p.query_dtype != DType::F16
}

/// Two copies for two tile groups; the groups merge through the same space: one M-tile of O, maxima and sums in F32.
pub(super) fn two_groups(copy: Lds, head_dim: usize) -> usize {
    let merge = M_TILE_ROWS * (head_dim + 2) * 4;
    copy.total().saturating_mul(2).max(merge)
}
