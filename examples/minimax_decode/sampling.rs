//! The next token from a row of logits.

use anyhow::{Result, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// How tokens are drawn. Temperature 0 takes the largest logit.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    pub temperature: f32,
    /// Draw among the fewest tokens that hold this much probability.
    pub top_p: f32,
    /// Draw among this many tokens at most; 0 is no limit.
    pub top_k: usize,
    pub seed: u64,
}

impl Sampling {
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 }
    }

    pub fn check(&self) -> Result<()> {
        ensure!(self.temperature >= 0.0 && self.temperature.is_finite(), "temperature: {} is not a number from 0", self.temperature);
        ensure!(self.top_p > 0.0 && self.top_p <= 1.0, "top-p: {} is not above 0 and at most 1", self.top_p);
        Ok(())
    }

    /// The token after `position` tokens of `request`. It hangs on nothing but these and the logits, so a verified draft is exactly the
    /// token that decoding one by one would have drawn.
    ///
    /// Draws by the Gumbel-max trick, each token's noise its own: where rounding swaps two close logits, the draw stays the same.
    pub fn token(&self, logits: &[f32], request: usize, position: usize) -> u32 {
        if self.temperature == 0.0 {
            return argmax(logits);
        }
        let mut rng = generator(self.seed, request, position);
        let gumbel = |logit: &f32| logit / self.temperature - (-(1.0 - rng.random::<f32>()).ln()).ln();
        let noisy: Vec<f32> = logits.iter().map(gumbel).collect();
        let kept = self.kept(logits);
        kept.into_iter().reduce(|best, next| if noisy[next] > noisy[best] { next } else { best }).unwrap_or(0) as u32
    }

    /// The tokens that a draw may give.
    fn kept(&self, logits: &[f32]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        if self.top_k == 0 && self.top_p >= 1.0 {
            return order;
        }
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        if self.top_k > 0 {
            order.truncate(self.top_k);
        }
        let largest = order.first().map_or(0.0, |&token| logits[token]);
        let weights: Vec<f32> = order.iter().map(|&token| ((logits[token] - largest) / self.temperature).exp()).collect();
        order.truncate(nucleus(&weights, self.top_p));
        order
    }
}

/// The first of the largest logits.
pub fn argmax(logits: &[f32]) -> u32 {
    let better = |best: usize, next: usize| if logits[next] > logits[best] { next } else { best };
    (0..logits.len()).reduce(better).unwrap_or(0) as u32
}

/// How many of the descending `weights` hold `top_p` of their sum.
fn nucleus(weights: &[f32], top_p: f32) -> usize {
    let enough = top_p * weights.iter().sum::<f32>();
    let mut sum = 0.0;
    let reached = weights.iter().position(|weight| {
        sum += weight;
        sum >= enough
    });
    reached.map_or(weights.len(), |last| last + 1)
}

fn generator(seed: u64, request: usize, position: usize) -> StdRng {
    let mut bytes = [0; 32];
    for (chunk, value) in bytes.chunks_exact_mut(8).zip([seed, request as u64, position as u64]) {
        chunk.copy_from_slice(&value.to_le_bytes());
    }
    StdRng::from_seed(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperature_zero_is_greedy_and_ties_go_to_the_first() {
        assert_eq!(Sampling::greedy().token(&[0.0, 2.0, 1.0, 2.0], 0, 0), 1);
    }

    #[test]
    fn draws_follow_the_softmax_of_the_tokens_kept() {
        let sampling = Sampling { temperature: 0.5, top_p: 0.9, top_k: 3, seed: 7 };
        let logits = [0.0, 1.0, 0.5, -2.0];
        let mut counts = [0; 4];
        (0..4000).for_each(|position| counts[sampling.token(&logits, 1, position) as usize] += 1);
        // Token 0 falls to top_p: e^2 and e^1 of e^2 + e^1 + e^0 are 0.91.
        let expected = [0.0, 0.7311, 0.2689, 0.0];
        for (count, expected) in counts.iter().zip(expected) {
            assert!((*count as f64 / 4000.0 - expected).abs() < 0.03, "{counts:?}");
        }
    }
}
