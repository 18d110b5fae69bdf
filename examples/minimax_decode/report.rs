//! What a run prints: text, or one line of JSON.

use std::time::Duration;

use serde_json::{Value, json};

use super::attention_only::AttentionTimes;
use super::check::{Comparison, TOLERANCE};
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

    fn tokens_per_second(&self) -> f64 {
        per_second(self.stats.decode.tokens as f64, self.stats.decode.time)
    }

    fn attention_share(&self) -> f64 {
        ratio(self.stats.decode.attention.time.as_secs_f64(), self.stats.decode.time.as_secs_f64())
    }

    fn kv_read_rate(&self) -> f64 {
        per_second(self.stats.decode.attention.kv_bytes as f64, self.stats.decode.attention.time)
    }

    /// Prefill, steps and acceptance.
    pub fn details(&self) -> String {
        let Stats { prefill, decode, drafted, accepted } = &self.stats;
        let mut text = format!(
            "{}: {} steps with prompt chunks, {:.0} rows/s; {} decode steps, {} tokens",
            self.name(),
            prefill.steps,
            per_second(prefill.rows as f64, prefill.time),
            decode.steps,
            decode.tokens
        );
        if self.mtp_rows > 1 {
            text += &format!("; {accepted} of {drafted} drafts accepted ({:.0}%)", 100.0 * self.acceptance());
        }
        text
    }

    /// The figures of the decode steps.
    pub fn summary(&self) -> String {
        format!(
            "{}: {:.1} tokens/s, attention {:.1}% of the time, KV read at {:.2} GB/s",
            self.name(),
            self.tokens_per_second(),
            100.0 * self.attention_share(),
            self.kv_read_rate() / 1e9
        )
    }

    pub fn json(&self) -> Value {
        json!({
            "mtp": self.mtp_rows,
            "tokens_per_second": self.tokens_per_second(),
            "attention_share": self.attention_share(),
            "kv_bytes_per_second": self.kv_read_rate(),
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
        "{shape} with {kv} KV: {:.1} us a call (median of {}, best {:.1}), {:.1} MB of KV read at {:.2} GB/s",
        micros(times.median),
        times.calls,
        micros(times.best),
        times.kv_bytes as f64 / 1e6,
        times.read_rate() / 1e9
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
        "kv_bytes_per_second": times.read_rate(),
    })
}

fn per_second(count: f64, time: Duration) -> f64 {
    ratio(count, time.as_secs_f64())
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
