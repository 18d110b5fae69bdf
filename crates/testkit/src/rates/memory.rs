//! Memory read rate.

use std::hint::black_box;

use super::{best_seconds, threads};

/// Bytes per second that all cores together read from `bytes` of memory (at least 1 GiB to be sure that no cache holds it).
pub fn memory_read(bytes: usize) -> f64 {
    let words: Vec<u64> = (0..bytes as u64 / 8).collect();
    let parts: Vec<_> = words.chunks(words.len().div_ceil(threads()).max(1)).collect();
    let seconds = best_seconds(&parts, 7, |part| {
        black_box(sum(part));
    });
    size_of_val(&words[..]) as f64 / seconds
}

/// Reads every word, with the widest loads that the machine has.
fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was detected.
            return unsafe { sum_avx512(words) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was detected.
            return unsafe { sum_avx2(words) };
        }
    }
    sum_lanes(words)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(words: &[u64]) -> u64 {
    sum_lanes(words)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(words: &[u64]) -> u64 {
    sum_lanes(words)
}

/// Many independent sums, so that additions never hold a load back.
#[inline(always)]
fn sum_lanes(words: &[u64]) -> u64 {
    const LANES: usize = 64;
    let (chunks, rest) = words.as_chunks::<LANES>();
    let mut sums = [0u64; LANES];
    for chunk in chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().chain(rest).fold(0, |total, word| total.wrapping_add(*word))
}

#[cfg(test)]
mod tests {
    use super::sum;

    #[test]
    fn every_word_is_read() {
        let words: Vec<u64> = (0..1000).collect();
        assert_eq!(sum(&words), 999 * 1000 / 2);
    }
}
