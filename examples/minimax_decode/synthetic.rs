//! A small random MiniMax-M3, written as a sharded checkpoint in the released naming.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use anyhow::{Context, Result};
use half::bf16;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use super::checkpoint::LANGUAGE_PREFIX;
use super::config::{Config, IndexerConfig, LayerKind};
use super::tensors::{TensorSpec, expected};

/// Bytes after which a shard is closed.
const SHARD_BYTES: usize = 8 << 20;

/// The random model: the released architecture (dense and expert layers, full and block-sparse attention) at a size two cores decode quickly.
pub fn config() -> Config {
    let kind = |moe, sparse| LayerKind { moe, sparse };
    Config {
        vocab_size: 512,
        hidden_size: 256,
        expert_size: 128,
        dense_size: 512,
        shared_size: 128,
        q_heads: 16,
        kv_heads: 2,
        head_dim: 64,
        rotary_dim: 32,
        rope_theta: 5e6,
        experts: 8,
        experts_per_token: 2,
        routed_scaling_factor: 2.0,
        swiglu_alpha: 1.702,
        swiglu_limit: 7.0,
        rms_norm_eps: 1e-6,
        max_positions: 65536,
        eos_tokens: vec![],
        tie_word_embeddings: false,
        bf16: true,
        layers: vec![kind(false, false), kind(true, false), kind(true, true), kind(true, true), kind(true, true)],
        indexer: IndexerConfig { heads: 2, head_dim: 64, block_size: 128, top_blocks: 3, local_blocks: 1 },
    }
}

/// [`config`] with the heads of the released model.
pub fn real_heads() -> Config {
    let indexer = IndexerConfig { heads: 4, head_dim: 128, block_size: 128, top_blocks: 16, local_blocks: 1 };
    Config { hidden_size: 512, q_heads: 64, kv_heads: 4, head_dim: 128, rotary_dim: 64, indexer, ..config() }
}

/// Writes `config` with weights drawn from `seed` into `dir`: config.json, shards and their index.
pub fn write(dir: &Path, config: &Config, seed: u64) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    let shards = split_into_shards(expected(config));
    let mut weight_map = BTreeMap::new();
    let mut total_size = 0;
    for (number, specs) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
        let tensors = specs.iter().map(|spec| (spec, random_tensor(spec, &mut rng))).collect::<Vec<_>>();
        let mut views = vec![];
        for (spec, (dtype, bytes)) in &tensors {
            total_size += bytes.len();
            let name = format!("{LANGUAGE_PREFIX}{}", spec.name);
            weight_map.insert(name.clone(), file.clone());
            views.push((name, TensorView::new(*dtype, spec.shape.clone(), bytes)?));
        }
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        let path = dir.join(&file);
        safetensors::serialize_to_file(views, Some(metadata), &path).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    for (file, value) in [("model.safetensors.index.json", index), ("config.json", config.to_json())] {
        let path = dir.join(file);
        std::fs::write(&path, serde_json::to_string_pretty(&value)?).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn split_into_shards(specs: Vec<TensorSpec>) -> Vec<Vec<TensorSpec>> {
    let mut shards: Vec<Vec<TensorSpec>> = vec![vec![]];
    let mut bytes = 0;
    for spec in specs {
        let size = spec.shape.iter().product::<usize>() * size_of::<bf16>();
        if bytes > 0 && bytes + size > SHARD_BYTES {
            shards.push(vec![]);
            bytes = 0;
        }
        bytes += size;
        if let Some(shard) = shards.last_mut() {
            shard.push(spec);
        }
    }
    shards
}

/// Weights in BF16, the router's bias in F32, as released.
fn random_tensor(spec: &TensorSpec, rng: &mut StdRng) -> (Dtype, Vec<u8>) {
    let count = spec.shape.iter().product::<usize>();
    let deviation = deviation(spec);
    let values = (0..count).map(|_| normal(rng) * deviation);
    if spec.name.ends_with("e_score_correction_bias") {
        return (Dtype::F32, values.flat_map(f32::to_le_bytes).collect());
    }
    (Dtype::BF16, values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect())
}

/// Projections keep a unit variance. Attention adds little to the residual stream, so that the next token hangs on the last one above
/// all: such a model falls into loops, which prompt look-up can foresee.
fn deviation(spec: &TensorSpec) -> f32 {
    let fan_in = *spec.shape.last().unwrap_or(&1) as f32;
    match spec.name.as_str() {
        name if name.contains("norm") || name.ends_with("e_score_correction_bias") => 0.1,
        name if name.ends_with("embed_tokens.weight") => 1.0,
        name if name.ends_with("o_proj.weight") => 0.5 / fan_in.sqrt(),
        _ => 1.0 / fan_in.sqrt(),
    }
}

/// A standard normal value (Box and Muller's transform).
pub fn normal(rng: &mut impl Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
    radius * (std::f32::consts::TAU * rng.random::<f32>()).cos()
}
