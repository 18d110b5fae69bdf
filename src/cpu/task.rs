//! One item of work: a row block of queries of one KV head over a range of tokens, step by step.

use super::ahead::Ahead;
use super::gemm::{Scores, Weighted};
use super::isa::Isa;
use super::job::Job;
use super::math::Math;
use super::pack::{Head, Keys, Values, pack_query, query_terms, twins};
use super::pages::{Segments, token_scales};
use super::softmax::{Mask, Softmax};
use super::workspace::{STEP, Workspace};

/// A row block of one plan row and KV head. Its rows are flattened (query, head-in-group) pairs.
#[derive(Clone, Copy)]
pub(super) struct RowBlock {
    pub sequence: usize,
    pub head: usize,
    pub query_start: usize,
    pub query_len: usize,
    pub context_len: usize,
    pub group: usize,
    /// First flattened row and their number.
    pub first: usize,
    pub rows: usize,
}

impl RowBlock {
    /// Position of the query of block row `r`; negative where the context is shorter than the query.
    pub fn position(&self, r: usize) -> i64 {
        self.context_len as i64 - self.query_len as i64 + ((self.first + r) / self.group) as i64
    }

    /// Row of q and query head of block row `r`.
    pub fn place(&self, r: usize) -> (usize, usize) {
        let flat = self.first + r;
        (self.query_start + flat / self.group, self.head * self.group + flat % self.group)
    }

    /// The part of `tokens` that any row of the block attends.
    fn attended(&self, window: Option<usize>, tokens: (usize, usize)) -> (usize, usize) {
        let end = (self.position(self.rows - 1) + 1).max(0) as usize;
        let start = match window {
            Some(window) => (before_window(self.position(0), window) + 1).max(0) as usize,
            None => 0,
        };
        (tokens.0.max(start), tokens.1.min(end).min(self.context_len))
    }

    /// Fills the mask of a step, or says that every row attends every token of it. Padding rows attend nothing.
    unsafe fn mask(&self, window: Option<usize>, begin: usize, end: usize, work: &Workspace) -> Option<Mask> {
        let unseen = |position: i64| match window {
            Some(window) => before_window(position, window),
            None => -1,
        };
        if self.position(0) >= end as i64 - 1 && unseen(self.position(self.rows - 1)) < begin as i64 {
            return None;
        }
        for r in 0..work.rows {
            // Relative to the step, so that f32 holds every position that matters.
            let relative = |position: i64| (position.saturating_sub(begin as i64)).clamp(-1, STEP as i64) as f32;
            let (after, last) = match r < self.rows {
                true => (relative(unseen(self.position(r))), relative(self.position(r))),
                false => (0.0, -1.0),
            };
            unsafe {
                *work.after.add(r) = after;
                *work.last.add(r) = last;
            }
        }
        Some(Mask { after: work.after, last: work.last })
    }
}

/// The last position that a query at `position` does not see any more.
fn before_window(position: i64, window: usize) -> i64 {
    position.saturating_sub(i64::try_from(window).unwrap_or(i64::MAX))
}

/// Attends tokens `range` of `block`: leaves unnormalized outputs, maxima and sums in `work`.
///
/// # Safety
/// As [`Isa`]; `job` was checked.
#[inline(always)]
pub(super) unsafe fn attend<I: Isa, A: Math>(job: &Job<'_>, block: &RowBlock, range: (usize, usize), work: &Workspace) {
    unsafe {
        let (start, end) = block.attended(job.window, range);
        for r in 0..work.rows {
            *work.max.add(r) = f32::NEG_INFINITY;
            *work.sum.add(r) = 0.0;
        }
        work.out.write_bytes(0, work.rows * work.width);
        if start >= end {
            return;
        }
        let view = |view| Head { view, head: block.head, head_dim: job.dims.head_dim, page_size: job.dims.page_size };
        let heads = [view(&job.key), view(&job.value)];
        let stop = |begin: usize| ((begin / STEP + 1) * STEP).min(end);
        let (mut now, mut next) = (Segments::new(), Segments::new());
        let mut ahead = [Ahead::new(), Ahead::new()];
        next.locate(job, block.sequence, block.head, start, stop(start) - start);
        for (ahead, head) in ahead.iter_mut().zip(&heads) {
            ahead.aim(head, &next);
            ahead.ask_all::<I>();
        }
        let at = |r: usize| {
            let (row, head) = block.place(r);
            job.query.start + row * job.query.row_stride + head * job.query.head_stride
        };
        pack_query::<I, A>(&job.query, at, block.rows, job.dims.head_dim, work);
        let mut begin = start;
        while begin < end {
            let step_end = stop(begin);
            std::mem::swap(&mut now, &mut next);
            next.locate(job, block.sequence, block.head, step_end, stop(step_end) - step_end);
            ahead.iter_mut().zip(&heads).for_each(|(ahead, head)| ahead.aim(head, &next));
            step::<I, A>(job, block, &heads, (begin, step_end), &now, &mut ahead, work);
            begin = step_end;
        }
    }
}

#[inline(always)]
unsafe fn step<I: Isa, A: Math>(
    job: &Job<'_>,
    block: &RowBlock,
    heads: &[Head<'_, '_>; 2],
    (begin, end): (usize, usize),
    segments: &Segments,
    ahead: &mut [Ahead; 2],
    work: &Workspace,
) {
    let tokens = end - begin;
    unsafe {
        let keys = heads[0].keys::<I, A>(segments, tokens, work);
        score::<I, A>(job, &keys, tokens, &mut ahead[0], work);
        let mask = block.mask(job.window, begin, end, work);
        let key_scales = token_scales(&job.key.scale, block.head, segments, work.key_scales);
        let value_scales = token_scales(&job.value.scale, block.head, segments, work.value_scales);
        let softmax = Softmax {
            rows: work.rows,
            tokens,
            scores: work.scores,
            weights: if A::PAIR == 1 { work.scores.cast() } else { work.weights },
            max: work.max,
            sum: work.sum,
            factor: work.factor,
            scale: job.softmax_scale * job.key.scale.scalar() * std::f32::consts::LOG2_E,
            softcap: job.softcap,
            key_scales,
            value_scales,
            mask,
        };
        if softmax.run::<I, A>() {
            rescale::<I>(block.rows, work);
        }
        let values = heads[1].values::<I, A>(segments, tokens, mask.is_some(), work);
        if let Some(mask) = mask {
            isolate::<A>(block.rows, job.dims.head_dim, tokens, mask, softmax.weights, work);
        }
        accumulate::<I, A>(block.rows, &values, softmax.weights, &mut ahead[1], work);
    }
}

#[inline(always)]
unsafe fn score<I: Isa, A: Math>(job: &Job<'_>, keys: &Keys, tokens: usize, ahead: &mut Ahead, work: &Workspace) {
    let blocks = &keys.blocks[..tokens.div_ceil(super::gemm::BLOCK)];
    let terms = query_terms::<A>(&job.query);
    let (chunks, chunk_units) = (keys.chunks, keys.chunk_units);
    let twins = twins::<I, A>(job.dims.head_dim, work.rows);
    unsafe {
        A::scores::<I>(&Scores { query: work.query, twins, terms, rows: work.rows, chunks, chunk_units, blocks, out: work.scores }, ahead)
    }
}

#[inline(always)]
unsafe fn accumulate<I: Isa, A: Math>(rows: usize, values: &Values, weights: *const u32, ahead: &mut Ahead, work: &Workspace) {
    for run in values.iter() {
        unsafe {
            let job = Weighted {
                weights: weights.add(run.first / A::PAIR * work.rows),
                weights_stride: work.rows,
                rows,
                values: run.data,
                unit: run.stride,
                units: run.units,
                out: work.out,
                width: work.width,
            };
            match &values.stored {
                Some(stored) => I::weighted_stored::<A>(&job, stored, ahead),
                None => A::weighted::<I>(&job, ahead),
            }
        }
    }
}

/// Multiplies output rows by their factors.
#[inline(always)]
unsafe fn rescale<I: Isa>(rows: usize, work: &Workspace) {
    for r in 0..rows {
        unsafe {
            let factor = *work.factor.add(r);
            if factor == 1.0 {
                continue;
            }
            for d in (0..work.width).step_by(I::LANES) {
                let at = work.out.add(r * work.width + d);
                I::store(at, I::mul(I::load(at), I::splat(factor)));
            }
        }
    }
}

/// A value that is not finite must not meet the zero weight of a row that does not attend its token: such tokens are added here, for
/// the rows that attend them, and zeroed in the staged values.
unsafe fn isolate<A: Math>(rows: usize, head_dim: usize, tokens: usize, mask: Mask, weights: *const u32, work: &Workspace) {
    unsafe {
        let attends = |r: usize, t: usize| *mask.after.add(r) < t as f32 && t as f32 <= *mask.last.add(r);
        for t in (0..tokens).filter(|&t| !(0..rows).all(|r| attends(r, t))) {
            let value = |d: usize| work.values.add(t / A::PAIR * work.width + d);
            if (0..head_dim).all(|d| element::<A>(*value(d), t).is_finite()) {
                continue;
            }
            for r in (0..rows).filter(|&r| attends(r, t)) {
                let weight = element::<A>(*weights.add(t / A::PAIR * work.rows + r), t);
                for d in 0..head_dim {
                    *work.out.add(r * work.width + d) += weight * element::<A>(*value(d), t);
                }
            }
            for d in 0..head_dim {
                *value(d) &= match (A::PAIR, t % 2) {
                    (1, _) => 0,
                    (_, 0) => 0xffff_0000,
                    _ => 0xffff,
                };
            }
        }
    }
}

/// Token `t`'s element of a unit.
fn element<A: Math>(unit: u32, t: usize) -> f32 {
    f32::from_bits(match (A::PAIR, t % 2) {
        (1, _) => unit,
        (_, 0) => unit << 16,
        _ => unit & 0xffff_0000,
    })
}
