//! The online softmax of a step: query rows are the lanes, so everything runs down the tokens.

use super::isa::{Isa, exp2, tanh};
use super::math::Math;

/// Scores and running state of a row block. All arrays over rows hold `rows` (a multiple of 16) floats.
pub(super) struct Softmax {
    pub rows: usize,
    /// Tokens of this step.
    pub tokens: usize,
    /// `[tokens][rows]`: raw products in; overwritten.
    pub scores: *mut f32,
    /// Units `[units][rows]` out: the weights, times the tokens' value scales. May be `scores` where a unit is an f32.
    pub weights: *mut u32,
    /// Running maximum of `score * log2(e)`, -inf at first.
    pub max: *mut f32,
    /// Running sum of `2^(score - max)`. It sums the weights before they are rounded to BF16: rounding errors are unbiased, so they
    /// average out of the quotient, and the LSE keeps f32 accuracy.
    pub sum: *mut f32,
    /// Out: what the output rows must be multiplied by before this step is added.
    pub factor: *mut f32,
    /// From a product to `score * log2(e)`.
    pub scale: f32,
    pub softcap: Option<f32>,
    /// One factor a token on its scores, where keys have scales.
    pub key_scales: Option<*const f32>,
    /// One factor a token on its weights.
    pub value_scales: Option<*const f32>,
    /// Where rows differ in what they attend: row r attends token t of the step if `after[r] < t <= last[r]`.
    pub mask: Option<Mask>,
}

#[derive(Clone, Copy)]
pub(super) struct Mask {
    pub after: *const f32,
    pub last: *const f32,
}

impl Softmax {
    /// Turns scores into weights and updates the state; true if any factor is not 1.
    #[inline(always)]
    pub unsafe fn run<I: Isa, A: Math>(&self) -> bool {
        let shaped = self.softcap.is_some() || self.key_scales.is_some() || self.mask.is_some();
        let scale = if shaped { 1.0 } else { self.scale };
        let mut rescale = false;
        for row in (0..self.rows).step_by(I::LANES) {
            unsafe {
                if shaped {
                    self.shape::<I>(row);
                }
                let (base, grown) = self.raise_max::<I>(row, scale);
                rescale |= grown;
                self.weigh::<I, A>(row, scale, base);
            }
        }
        rescale
    }

    /// Scales, caps and masks the scores of one vector of rows in place.
    #[inline(always)]
    unsafe fn shape<I: Isa>(&self, row: usize) {
        unsafe {
            for t in 0..self.tokens {
                let at = self.scores.add(t * self.rows + row);
                let scale = self.scale * self.key_scales.map_or(1.0, |scales| *scales.add(t));
                let mut s = I::mul(I::load(at), I::splat(scale));
                if let Some(cap) = self.softcap {
                    let cap = cap * std::f32::consts::LOG2_E;
                    s = I::mul(tanh::<I>(I::mul(s, I::splat(1.0 / cap))), I::splat(cap));
                }
                if let Some(mask) = self.mask {
                    let token = I::splat(t as f32);
                    // token <= last, for whole numbers
                    let seen = I::and(
                        I::less(I::load(mask.after.add(row)), token),
                        I::less(I::splat(t as f32 - 0.5), I::load(mask.last.add(row))),
                    );
                    s = I::select(seen, s, I::splat(f32::NEG_INFINITY));
                }
                I::store(at, s);
            }
        }
    }

    /// The new maximum (0 where nothing finite was seen yet) and whether any rose.
    #[inline(always)]
    unsafe fn raise_max<I: Isa>(&self, row: usize, scale: f32) -> (I::V, bool) {
        unsafe {
            let scale = I::splat(scale);
            let old = I::load(self.max.add(row));
            // Four chains: a maximum waits for the one before it.
            let mut top = [old; 4];
            let fours = self.tokens / 4 * 4;
            for t in (0..fours).step_by(4) {
                for (i, top) in top.iter_mut().enumerate() {
                    *top = I::max(I::mul(I::load(self.scores.add((t + i) * self.rows + row)), scale), *top);
                }
            }
            for t in fours..self.tokens {
                top[0] = I::max(I::mul(I::load(self.scores.add(t * self.rows + row)), scale), top[0]);
            }
            let new = I::max(I::max(top[0], top[1]), I::max(top[2], top[3]));
            let base = I::select(I::less(new, I::splat(f32::MIN)), I::splat(0.0), new);
            let grown = I::any(I::less(old, new));
            let mut factor = I::splat(1.0);
            if grown {
                factor = I::select(I::less(old, new), exp2::<I>(I::sub(old, base)), factor);
                I::store(self.max.add(row), new);
                I::store(self.sum.add(row), I::mul(I::load(self.sum.add(row)), factor));
            }
            I::store(self.factor.add(row), factor);
            (base, grown)
        }
    }

    #[inline(always)]
    unsafe fn weigh<I: Isa, A: Math>(&self, row: usize, scale: f32, base: I::V) {
        unsafe {
            let scale = I::splat(scale);
            let mut sum = I::load(self.sum.add(row));
            for unit in 0..self.tokens.div_ceil(A::PAIR) {
                let first = self.weight::<I>(row, unit * A::PAIR, scale, base, &mut sum);
                let weights = if A::PAIR == 1 {
                    first
                } else if 2 * unit + 1 < self.tokens {
                    I::pairs(first, self.weight::<I>(row, 2 * unit + 1, scale, base, &mut sum))
                } else {
                    I::pairs(first, I::splat(0.0))
                };
                I::store(self.weights.add(unit * self.rows + row).cast(), weights);
            }
            I::store(self.sum.add(row), sum);
        }
    }

    #[inline(always)]
    unsafe fn weight<I: Isa>(&self, row: usize, t: usize, scale: I::V, base: I::V, sum: &mut I::V) -> I::V {
        unsafe {
            let s = I::load(self.scores.add(t * self.rows + row));
            // Rounded as the maximum was, so that no exponent is above 0 however large the scores: not one fused operation.
            let p = exp2::<I>(I::sub(I::mul(s, scale), base));
            *sum = I::add(*sum, p);
            match self.value_scales {
                None => p,
                // A masked token's scale may be NaN.
                Some(scales) => I::select(I::less(s, I::splat(f32::MIN)), I::splat(0.0), I::mul(p, I::splat(*scales.add(t)))),
            }
        }
    }
}
