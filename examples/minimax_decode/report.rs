//! What a run prints: text, or one line of JSON.

use std::time::Duration;

use serde_json::{Value, json};

use super::attention_only::AttentionTimes;
use super::check::{Comparison, TOLERANCE};
use super::meter::Meter;
use super::scheduler::{Phase, Stats};

/// One decoding run.
pub struct Pass {
    /// Rows of a verify step; 1 is token by token.
    pub mtp_rows: usize,
    pub stats: Stats,
}

impl Pass {
    fn name(&self) -> String {
        match self.mtp_rows {
            1 => "token by token".to_string(),
            rows => format!("MTP{rows}"),
        }
    }

    /// Share of the drafts that proved right.
    pub fn acceptance(&self) -> f64 {
        ratio(self.stats.accepted as f64, self.stats.drafted as f64)
    }

    fn tokens_per_second(&self) -> Option<f64> {
        per_second(self.stats.decode.tokens as f64, self.stats.decode.time)
    }

    fn attention_share(&self) -> Option<f64> {
        per_second(self.stats.decode.attention.time.as_secs_f64(), self.stats.decode.time)
    }

    fn kv_read_rate(&self) -> Option<f64> {
        per_second(self.stats.decode.attention.kv_bytes as f64, self.stats.decode.attention.time)
    }

    /// Prefill, steps and acceptance.
    pub fn details(&self) -> String {
        let Stats { prefill, decode, drafted, accepted, .. } = &self.stats;
        let prefill = match per_second(prefill.rows as f64, prefill.time) {
            Some(rate) => format!("{} with prompt chunks at {rate:.0} rows/s", count(prefill.steps, "step")),
            None => "no step with prompt chunks".to_string(),
        };
        let decode = match decode.steps {
            0 => "no decode step".to_string(),
            steps => format!("{} for {}", count(steps, "decode step"), count(decode.tokens, "token")),
        };
        let mut text = format!("{}: {prefill}; {decode}", self.name());
        if self.mtp_rows > 1 {
            text += &format!("; {accepted} of {} accepted", count(*drafted, "draft"));
        }
        if *drafted > 0 {
            text += &format!(" ({:.0}%)", 100.0 * self.acceptance());
        }
        text
    }

    /// The figures of the decode steps.
    pub fn summary(&self) -> String {
        let (Some(tokens), Some(share)) = (self.tokens_per_second(), self.attention_share()) else {
            return format!("{}: no decode step to time", self.name());
        };
        let kv = self.kv_read_rate().map(|rate| format!(", KV read at {:.2} GB/s", rate / 1e9)).unwrap_or_default();
        format!("{}: {tokens:.1} tokens/s, attention {:.1}% of the time{kv}", self.name(), 100.0 * share)
    }

    /// The attention kernels of a decode step and the layers that they run in.
    pub fn kernels(&self) -> String {
        let mut runs: Vec<(&str, usize, usize)> = vec![];
        for (layer, kernel) in self.stats.kernels.iter().enumerate() {
            match runs.last_mut() {
                Some((same, _, last)) if same == kernel => *last = layer,
                _ => runs.push((kernel, layer, layer)),
            }
        }
        let layers = |first, last| if first == last { format!("layer {first}") } else { format!("layers {first} to {last}") };
        let runs: Vec<_> = runs.into_iter().map(|(kernel, first, last)| format!("{kernel} in {}", layers(first, last))).collect();
        let warm_up =
            self.stats.warm_up.map(|(kernels, time)| format!("{} ready after {:.1} s; ", count(kernels, "kernel"), time.as_secs_f64()));
        let warm_up = warm_up.unwrap_or_default();
        format!(
            "{}: {warm_up}decode steps attend by {}",
            self.name(),
            if runs.is_empty() { "nothing".to_string() } else { runs.join(", ") }
        )
    }

    /// How an attention call of the decode steps compares with the same call by itself, where that was measured.
    pub fn comparison(&self) -> Option<String> {
        let Stats { decode, alone, .. } = &self.stats;
        let micros = |meter: &Meter| (meter.calls > 0).then(|| meter.time.as_secs_f64() * 1e6 / meter.calls as f64);
        let (inside, alone) = (micros(&decode.attention)?, micros(alone)?);
        Some(format!(
            "{}: attention takes {inside:.1} us a layer, the same call by itself {alone:.1} us: {:.2}x",
            self.name(),
            ratio(inside, alone)
        ))
    }

    /// What the words of these passes mean.
    pub fn legend(passes: &[Self]) -> String {
        let mut text =
            "rows: tokens that went through the model; a step with prompt chunks carries rows of prompts, and decoding sequences \
                        beside them; a decode step carries decoding sequences alone, and tokens/s is theirs"
                .to_string();
        for pass in passes.iter().filter(|pass| pass.mtp_rows > 1) {
            let drafts = count(pass.mtp_rows - 1, "drafted token");
            text += &format!("; {}: multi-token verify, where a sequence's decode step is its last token and up to {drafts}", pass.name());
        }
        text
    }

    pub fn json(&self) -> Value {
        json!({
            "mtp": self.mtp_rows,
            "tokens_per_second": self.tokens_per_second(),
            "attention_share": self.attention_share(),
            "kv_bytes_per_second": self.kv_read_rate(),
            "kernels": self.stats.kernels,
            "attention_calls": self.stats.decode.attention.calls,
            "alone_seconds": self.stats.alone.time.as_secs_f64(),
            "alone_calls": self.stats.alone.calls,
            "drafted": self.stats.drafted,
            "accepted": self.stats.accepted,
            "decode": phase_json(&self.stats.decode),
            "prefill": phase_json(&self.stats.prefill),
        })
    }
}

fn phase_json(phase: &Phase) -> Value {
    json!({
        "steps": phase.steps,
        "rows": phase.rows,
        "tokens": phase.tokens,
        "seconds": phase.time.as_secs_f64(),
        "attention_seconds": phase.attention.time.as_secs_f64(),
        "kv_bytes": phase.attention.kv_bytes,
    })
}

pub fn comparison_text(index: usize, comparison: &Comparison) -> String {
    let Comparison { prompt_tokens, new_tokens, worst, first_difference } = comparison;
    let tokens = match first_difference {
        None => "every token equal".to_string(),
        Some((at, ours, recorded)) => format!("token {at} is {ours}, recorded {recorded}"),
    };
    format!("prompt {index} ({prompt_tokens} + {new_tokens} tokens): worst difference {worst:.2e} (at most {TOLERANCE:.0e}), {tokens}")
}

pub fn comparison_json(comparison: &Comparison) -> Value {
    json!({
        "prompt_tokens": comparison.prompt_tokens,
        "new_tokens": comparison.new_tokens,
        "worst": comparison.worst,
        "first_difference": comparison.first_difference.map(|(at, ours, recorded)| json!({ "at": at, "token": ours, "recorded": recorded })),
        "passes": comparison.passes(),
    })
}

pub fn attention_text(shape: &str, kv: &str, times: &AttentionTimes) -> String {
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    format!(
        "{shape} with {kv} KV: {:.1} us a call (median of {}, best {:.1}), {:.1} MB of KV read at {:.2} GB/s; calls rotate over {} caches, \
         {:.2} GiB of KV",
        micros(times.median),
        times.calls,
        micros(times.best),
        times.kv_bytes as f64 / 1e6,
        times.read_rate() / 1e9,
        times.caches,
        times.rotation_bytes() as f64 / f64::from(1 << 30)
    )
}

pub fn attention_json(shape: &str, kv: &str, times: &AttentionTimes) -> Value {
    json!({
        "shape": shape,
        "kv": kv,
        "calls": times.calls,
        "median_us": times.median.as_secs_f64() * 1e6,
        "best_us": times.best.as_secs_f64() * 1e6,
        "kv_bytes": times.kv_bytes,
        "caches": times.caches,
        "rotation_bytes": times.rotation_bytes(),
        "kv_bytes_per_second": times.read_rate(),
    })
}

/// `None` where nothing was timed.
fn per_second(count: f64, time: Duration) -> Option<f64> {
    (!time.is_zero()).then(|| ratio(count, time.as_secs_f64()))
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

/// `1 step`, `2 steps`.
fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_timed_is_no_rate() {
        let idle = Pass { mtp_rows: 1, stats: Stats::default() };
        assert_eq!(idle.details(), "token by token: no step with prompt chunks; no decode step");
        assert_eq!(idle.summary(), "token by token: no decode step to time");
        assert!(idle.json()["tokens_per_second"].is_null());
        let decode = Phase { steps: 1, rows: 2, tokens: 2, time: Duration::from_secs(1), ..Phase::default() };
        let stats = Stats { decode, drafted: 1, accepted: 0, ..Stats::default() };
        let kernels = ["a", "b", "b"].map(String::from).to_vec();
        let stats = Stats { kernels, ..stats };
        let verify = Pass { mtp_rows: 2, stats };
        assert_eq!(verify.kernels(), "MTP2: decode steps attend by a in layer 0, b in layers 1 to 2");
        assert_eq!(verify.details(), "MTP2: no step with prompt chunks; 1 decode step for 2 tokens; 0 of 1 draft accepted (0%)");
        assert!(verify.summary().contains("2.0 tokens/s"));
        assert!(Pass::legend(&[verify]).ends_with("up to 1 drafted token"));
    }
}
