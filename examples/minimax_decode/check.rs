//! `--check`: the model against recorded logits and greedy tokens.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use candle::safetensors::MmapedSafetensors;
use candle::{DType, Device, Tensor};

use super::model::Model;
use super::sampling::Sampling;
use super::scheduler::{Completion, Request, ServeOptions, serve};

/// Largest absolute difference of a logit that passes.
pub const TOLERANCE: f32 = 2e-3;

/// One prompt of a recording.
pub struct Recorded {
    pub prompt: Vec<u32>,
    /// Logits after the prompt, then after each greedy token but the last.
    pub logits: Vec<Vec<f32>>,
    pub greedy: Vec<u32>,
}

/// How one prompt's run compares.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    pub prompt_tokens: usize,
    pub new_tokens: usize,
    /// Largest absolute difference over the logits of the steps whose tokens so far agree; NaN if any is NaN.
    pub worst: f32,
    /// The first new token that differs: its index, ours, and the recorded one.
    pub first_difference: Option<(usize, u32, u32)>,
}

impl Comparison {
    pub fn passes(&self) -> bool {
        self.worst <= TOLERANCE && self.first_difference.is_none()
    }
}

/// Runs all recorded prompts as one batch of requests, greedily and past any end-of-sequence token.
pub fn check(model: &Model, recorded: &[Recorded], options: ServeOptions, on_step: impl FnMut(usize)) -> Result<Vec<Comparison>> {
    let requests: Vec<Request> = recorded.iter().map(Recorded::request).collect();
    let options = ServeOptions { sampling: Sampling::greedy(), keep_logits: true, ..options };
    let (completions, _) = serve(model, &requests, options, on_step)?;
    Ok(recorded.iter().zip(&completions).map(|(recorded, completion)| recorded.compare(completion)).collect())
}

impl Recorded {
    pub fn request(&self) -> Request {
        Request { prompt: self.prompt.clone(), max_new_tokens: self.greedy.len(), stop_tokens: vec![] }
    }

    fn compare(&self, completion: &Completion) -> Comparison {
        let differs = completion.tokens.iter().zip(&self.greedy).position(|(ours, recorded)| ours != recorded);
        let comparable = differs.map_or(self.logits.len(), |at| at + 1);
        let pairs = completion.logits.iter().zip(&self.logits).take(comparable);
        let worst = pairs.flat_map(|(ours, recorded)| ours.iter().zip(recorded)).fold(0f32, |worst, (ours, recorded)| {
            let difference = (ours - recorded).abs();
            if worst.is_nan() || difference <= worst { worst } else { difference }
        });
        Comparison {
            prompt_tokens: self.prompt.len(),
            new_tokens: self.greedy.len(),
            worst,
            first_difference: differs.map(|at| (at, completion.tokens[at], self.greedy[at])),
        }
    }
}

/// Reads `prompt.i`, `prefill_logits.i`, `decode_logits.i` and `greedy.i`, i from 0.
pub fn read(path: &Path, vocab: usize) -> Result<Vec<Recorded>> {
    // SAFETY: the file is only read; as with every mapped file, no one may truncate it while the example runs.
    let file = unsafe { MmapedSafetensors::new(path) }.with_context(|| format!("cannot read {}", path.display()))?;
    let names: Vec<String> = file.tensors().into_iter().map(|(name, _)| name).collect();
    let count = names.iter().filter(|name| name.starts_with("prompt.")).count();
    ensure!(count > 0, "{}: no prompt.0", path.display());
    (0..count).map(|i| read_prompt(&file, i, vocab).with_context(|| format!("{}: prompt {i}", path.display()))).collect()
}

fn read_prompt(file: &MmapedSafetensors, index: usize, vocab: usize) -> Result<Recorded> {
    let load = |name: &str| -> Result<Tensor> { Ok(file.load(&format!("{name}.{index}"), &Device::Cpu)?) };
    let tokens = |name: &str| -> Result<Vec<u32>> {
        let tokens: Vec<i64> = load(name)?.to_dtype(DType::I64)?.to_vec1()?;
        tokens.iter().map(|&token| u32::try_from(token).with_context(|| format!("{name}: token {token}"))).collect()
    };
    let mut logits = vec![load("prefill_logits")?.to_dtype(DType::F32)?.to_vec1()?];
    logits.extend(load("decode_logits")?.to_dtype(DType::F32)?.to_vec2()?);
    let (prompt, greedy) = (tokens("prompt")?, tokens("greedy")?);
    if greedy.len() != logits.len() {
        bail!("greedy has {} tokens; decode_logits has {} rows, which asks for one more", greedy.len(), logits.len() - 1);
    }
    if let Some(row) = logits.iter().find(|row| row.len() != vocab) {
        bail!("logits of {} tokens, but vocab_size is {vocab}", row.len());
    }
    Ok(Recorded { prompt, logits, greedy })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nan_does_not_pass() {
        let recorded = Recorded { prompt: vec![1], logits: vec![vec![0.0, 1.0], vec![0.0, 1.0]], greedy: vec![1, 1] };
        let compare = |logits| recorded.compare(&Completion { tokens: vec![1, 1], logits });
        assert!(compare(recorded.logits.clone()).passes());
        assert!(!compare(vec![vec![f32::NAN, 1.0], vec![0.0, 1.0]]).passes());
    }

    #[test]
    fn logits_after_a_differing_token_do_not_count() {
        let recorded = Recorded { prompt: vec![1], logits: vec![vec![0.0, 1.0]; 3], greedy: vec![1, 1, 1] };
        let logits = vec![vec![0.0, 1.0], vec![1.5, 1.0], vec![9.0, 1.0]];
        let comparison = recorded.compare(&Completion { tokens: vec![1, 0, 0], logits });
        assert_eq!((comparison.worst, comparison.first_difference), (1.5, Some((1, 0, 1))));
    }
}
