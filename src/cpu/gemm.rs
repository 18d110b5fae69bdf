//! The two products of a step as register tiles: scores = K·Q with query rows in the lanes, output += P·V with dims in the lanes.

// Register tiles are arrays indexed by lane group; iterators would hide which registers meet.
#![allow(clippy::needless_range_loop)]

use super::ahead::Ahead;
use super::isa::Isa;
use super::math::Math;
use super::workspace::STEP;

/// Tokens of a key block: the granularity in which keys are addressed.
pub(super) const BLOCK: usize = 16;

/// Where the units of 16 tokens' keys lie: token t, chunk c, unit u at `data + t*token + c*chunk + 4*u` bytes.
#[derive(Clone, Copy)]
pub(super) struct KeyBlock {
    pub data: *const u8,
    pub token: usize,
    pub chunk: usize,
}

/// `out[t][r] = sum over units of q[u][r] · key[t][u]` for the tokens of `blocks` and `rows` query rows (a multiple of 16).
pub(super) struct Scores<'a> {
    /// Units `[terms][units][rows]`: the terms of a split query add up. Or `[terms][units / 2][rows][2]`.
    pub query: *const u32,
    /// Whether two units of a query row lie side by side.
    pub twins: bool,
    pub terms: usize,
    pub rows: usize,
    /// Units of head_dim, `chunks * chunk_units`.
    pub chunks: usize,
    pub chunk_units: usize,
    pub blocks: &'a [KeyBlock],
    /// `[blocks * 16][rows]`.
    pub out: *mut f32,
}

/// `out[r][d] += sum over units of p[u][r] · value[u][d]` for a run of tokens.
pub(super) struct Weighted {
    /// Units `[units][stride]`.
    pub weights: *const u32,
    pub weights_stride: usize,
    /// Query rows wanted (rows up to the next multiple of 16 may be written).
    pub rows: usize,
    /// Unit u of dim d at `values + u*unit + 4*d` bytes.
    pub values: *const u8,
    pub unit: usize,
    pub units: usize,
    /// `[rows][width]`; width is a multiple of 16.
    pub out: *mut f32,
    pub width: usize,
}

/// Values of a step as the cache holds them, for sets that make units of them on their way into the product.
pub(super) struct StoredRows {
    pub kind: Stored,
    /// One row a token, then a row of zeros.
    pub rows: [*const u8; STEP + 1],
    /// Their E8M0 scales, or null.
    pub scales: [*const u8; STEP + 1],
}

#[derive(Clone, Copy)]
pub(super) enum Stored {
    F16,
    Bf16,
    Fp8,
    Mxfp4,
}

/// Where a tile of [`Weighted`] takes DV vectors of unit `unit` from dim `dim` on.
pub(super) trait Units<I: Isa, const DV: usize> {
    unsafe fn load(&self, unit: usize, dim: usize) -> [I::V; DV];
}

/// Units that lie ready in memory.
struct Ready {
    values: *const u8,
    unit: usize,
}

impl<I: Isa, const DV: usize> Units<I, DV> for Ready {
    #[inline(always)]
    unsafe fn load(&self, unit: usize, dim: usize) -> [I::V; DV] {
        unsafe {
            let at = self.values.add(unit * self.unit).cast::<f32>().add(dim);
            let mut v = [I::splat(0.0); DV];
            for i in 0..DV {
                v[i] = I::load(at.add(i * I::LANES));
            }
            v
        }
    }
}

/// Rows `from..to` of [`Scores`] in tiles of RV vectors by NB tokens; `to - from` is a multiple of RV vectors, NB divides 16.
#[inline(always)]
pub(super) unsafe fn score_rows<I: Isa, A: Math, const RV: usize, const NB: usize>(
    job: &Scores,
    ahead: &mut Ahead,
    from: usize,
    to: usize,
) {
    for row in (from..to).step_by(RV * I::LANES) {
        for (b, block) in job.blocks.iter().enumerate() {
            for t in (0..BLOCK).step_by(NB) {
                unsafe {
                    let keys = KeyBlock { data: block.data.add(t * block.token), ..*block };
                    score_tile::<I, A, RV, NB>(job, ahead, row, keys, job.out.add((b * BLOCK + t) * job.rows + row));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn score_tile<I: Isa, A: Math, const RV: usize, const NB: usize>(
    job: &Scores,
    ahead: &mut Ahead,
    row: usize,
    keys: KeyBlock,
    out: *mut f32,
) {
    unsafe {
        let mut acc = [[I::splat(0.0); RV]; NB];
        let mut query = job.query.add(row).cast::<f32>();
        for _ in 0..job.terms {
            let mut chunk = keys.data;
            for _ in 0..job.chunks {
                let mut at = chunk;
                for unit in 0..job.chunk_units {
                    if unit % 2 == 0 {
                        ahead.ask::<I>();
                    }
                    let mut q = [I::splat(0.0); RV];
                    for i in 0..RV {
                        q[i] = I::load(query.add(i * I::LANES));
                    }
                    for t in 0..NB {
                        let k = I::splat(at.add(t * keys.token).cast::<f32>().read_unaligned());
                        for i in 0..RV {
                            acc[t][i] = A::dot::<I>(q[i], k, acc[t][i]);
                        }
                    }
                    query = query.add(job.rows);
                    at = at.add(4);
                }
                chunk = chunk.add(keys.chunk);
            }
        }
        for t in 0..NB {
            for i in 0..RV {
                I::store(out.add(t * job.rows + i * I::LANES), acc[t][i]);
            }
        }
    }
}

/// Dims `from..to` of [`Weighted`] in tiles of RB rows by DV vectors; `to - from` is a multiple of DV vectors, RB divides 16.
#[inline(always)]
pub(super) unsafe fn weighted_rows<I: Isa, A: Math, const RB: usize, const DV: usize>(
    job: &Weighted,
    ahead: &mut Ahead,
    from: usize,
    to: usize,
) {
    for dim in (from..to).step_by(DV * I::LANES) {
        for row in (0..job.rows).step_by(RB) {
            unsafe { weighted_tile::<I, A, _, RB, DV>(job, &Ready { values: job.values, unit: job.unit }, ahead, row, dim) }
        }
    }
}

/// All dims of [`Weighted`]: the first RB rows take units from `fresh`, which leaves them at `job.values` for the other rows.
#[inline(always)]
pub(super) unsafe fn weighted_fresh<I: Isa, A: Math, U: Units<I, DV>, const RB: usize, const DV: usize>(
    job: &Weighted,
    fresh: &U,
    ahead: &mut Ahead,
) {
    for dim in (0..job.width).step_by(DV * I::LANES) {
        unsafe { weighted_tile::<I, A, U, RB, DV>(job, fresh, ahead, 0, dim) }
        for row in (RB..job.rows).step_by(RB) {
            unsafe { weighted_tile::<I, A, _, RB, DV>(job, &Ready { values: job.values, unit: job.unit }, ahead, row, dim) }
        }
    }
}

#[inline(always)]
unsafe fn weighted_tile<I: Isa, A: Math, U: Units<I, DV>, const RB: usize, const DV: usize>(
    job: &Weighted,
    units: &U,
    ahead: &mut Ahead,
    row: usize,
    dim: usize,
) {
    unsafe {
        let out = job.out.add(row * job.width + dim);
        let mut acc = [[I::splat(0.0); DV]; RB];
        for r in 0..RB {
            for i in 0..DV {
                acc[r][i] = I::load(out.add(r * job.width + i * I::LANES));
            }
        }
        let mut weights = job.weights.add(row).cast::<f32>();
        for unit in 0..job.units {
            if unit % 2 == 0 {
                ahead.ask::<I>();
            }
            let v = units.load(unit, dim);
            for r in 0..RB {
                let p = I::splat(*weights.add(r));
                for i in 0..DV {
                    acc[r][i] = A::dot::<I>(p, v[i], acc[r][i]);
                }
            }
            weights = weights.add(job.weights_stride);
        }
        for r in 0..RB {
            for i in 0..DV {
                I::store(out.add(r * job.width + i * I::LANES), acc[r][i]);
            }
        }
    }
}
