//! Random prompts that repeat themselves, as real text does.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Tokens of the phrases that a prompt is put together from.
const PHRASE_TOKENS: usize = 12;
const PHRASES: usize = 8;

/// `count` prompts of `length` tokens below `vocab`.
pub fn random(count: usize, length: usize, vocab: usize, seed: u64) -> Vec<Vec<u32>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let prompt = |_| {
        let phrases: [[u32; PHRASE_TOKENS]; PHRASES] =
            [(); PHRASES].map(|()| [(); PHRASE_TOKENS].map(|()| rng.random_range(0..vocab as u32)));
        let mut tokens = vec![];
        while tokens.len() < length {
            tokens.extend(phrases[rng.random_range(0..PHRASES)]);
        }
        tokens.truncate(length);
        tokens
    };
    (0..count).map(prompt).collect()
}
