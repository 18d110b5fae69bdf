//! The model's sizes, read from a checkpoint's `config.json`.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

/// Bounds within which no product of two sizes overflows and no table of layers or experts grows out of hand.
const MOST_SIZE: usize = 1 << 30;
const MOST_PARTS: usize = 1 << 16;

/// The `model_type` of the released config, and of its text config alone.
const MODEL_TYPES: [&str; 2] = ["minimax_m3_vl", "minimax_m3"];

/// MiniMax-M3's text model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// Intermediate size of one routed expert.
    pub expert_size: usize,
    /// Intermediate size of the MLP on layers without experts.
    pub dense_size: usize,
    /// Intermediate size of the shared expert.
    pub shared_size: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Leading channels of a head that RoPE turns.
    pub rotary_dim: usize,
    pub rope_theta: f32,
    pub experts: usize,
    pub experts_per_token: usize,
    pub routed_scaling_factor: f64,
    pub swiglu_alpha: f64,
    pub swiglu_limit: f64,
    pub rms_norm_eps: f32,
    pub max_positions: usize,
    pub eos_tokens: Vec<u32>,
    pub tie_word_embeddings: bool,
    /// `torch_dtype` is bfloat16.
    pub bf16: bool,
    pub layers: Vec<LayerKind>,
    pub indexer: IndexerConfig,
}

/// What one decoder layer is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// A mixture of experts; else one dense MLP.
    pub moe: bool,
    /// Block-sparse attention behind an indexer; else attention over the whole context.
    pub sparse: bool,
}

/// The indexer of the sparse layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexerConfig {
    /// Query heads: one per KV head.
    pub heads: usize,
    pub head_dim: usize,
    /// Keys per block, which is also the page size.
    pub block_size: usize,
    /// Blocks a query attends, its own included.
    pub top_blocks: usize,
    /// Blocks up to and including the query's own that are always attended.
    pub local_blocks: usize,
}

impl Config {
    /// Reads `DIR/config.json`: a text config, or one with the text config under `text_config`.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::from_json(&text).with_context(|| format!("in {}", path.display()))
    }

    /// As [`Config::from_dir`], from the file's text.
    pub fn from_json(text: &str) -> Result<Self> {
        let mut outer: Value = serde_json::from_str(text).context("not valid JSON")?;
        ensure!(outer.get("quantization_config").is_none_or(Value::is_null), "quantization_config: quantized weights are not supported");
        if let Some(model_type) = outer.get("model_type").and_then(Value::as_str) {
            ensure!(MODEL_TYPES.contains(&model_type), "model_type: {model_type:?} is not supported ({})", MODEL_TYPES.join(", "));
        }
        let fields = [Some(&outer), outer.get("text_config")].into_iter().flatten();
        let dtype = fields.flat_map(|config| [config.get("torch_dtype"), config.get("dtype")]).flatten().find_map(Value::as_str);
        let bf16 = dtype == Some("bfloat16");
        let inner = match outer.get_mut("text_config") {
            Some(inner) => inner.take(),
            None => outer,
        };
        let raw: RawConfig = serde_json::from_value(inner)?;
        Ok(Self { bf16, ..raw.resolve()? })
    }

    /// The config in the released form, `text_config` inside `minimax_m3_vl`.
    pub fn to_json(&self) -> Value {
        let flags = |flag: fn(&LayerKind) -> bool| self.layers.iter().map(|layer| u8::from(flag(layer))).collect::<Vec<_>>();
        json!({
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "model_type": "minimax_m3_vl",
            "torch_dtype": if self.bf16 { "bfloat16" } else { "float32" },
            "text_config": {
                "model_type": "minimax_m3",
                "vocab_size": self.vocab_size,
                "hidden_size": self.hidden_size,
                "intermediate_size": self.expert_size,
                "dense_intermediate_size": self.dense_size,
                "shared_intermediate_size": self.shared_size,
                "num_hidden_layers": self.layers.len(),
                "num_attention_heads": self.q_heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "rotary_dim": self.rotary_dim,
                "rope_theta": self.rope_theta,
                "num_local_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "n_shared_experts": 1,
                "routed_scaling_factor": self.routed_scaling_factor,
                "scoring_func": "sigmoid",
                "use_routing_bias": true,
                "hidden_act": "swigluoai",
                "swiglu_alpha": self.swiglu_alpha,
                "swiglu_limit": self.swiglu_limit,
                "use_qk_norm": true,
                "qk_norm_type": "per_head",
                "use_gemma_norm": true,
                "rms_norm_eps": self.rms_norm_eps,
                "max_position_embeddings": self.max_positions,
                "eos_token_id": self.eos_tokens,
                "tie_word_embeddings": self.tie_word_embeddings,
                "moe_layer_freq": flags(|layer| layer.moe),
                "sparse_attention_config": {
                    "use_sparse_attention": true,
                    "sparse_num_index_heads": self.indexer.heads,
                    "sparse_index_dim": self.indexer.head_dim,
                    "sparse_block_size": self.indexer.block_size,
                    "sparse_topk_blocks": self.indexer.top_blocks,
                    "sparse_local_block": self.indexer.local_blocks,
                    "sparse_attention_freq": flags(|layer| layer.sparse),
                },
            },
        })
    }

    pub fn has_sparse_layers(&self) -> bool {
        self.layers.iter().any(|layer| layer.sparse)
    }

    fn check(&self) -> Result<()> {
        let Self { q_heads, kv_heads, head_dim, rotary_dim, experts, experts_per_token, indexer, .. } = self;
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", *q_heads),
            ("num_key_value_heads", *kv_heads),
            ("head_dim", *head_dim),
            ("intermediate_size", self.expert_size),
            ("dense_intermediate_size", self.dense_size),
            ("shared_intermediate_size", self.shared_size),
            ("sparse_block_size", indexer.block_size),
            ("sparse_index_dim", indexer.head_dim),
        ];
        for (name, size) in sizes {
            ensure!((1..=MOST_SIZE).contains(&size), "{name}: {size} is not from 1 to {MOST_SIZE}");
        }
        ensure!(*experts <= MOST_PARTS, "num_local_experts: {experts} is more than {MOST_PARTS}");
        ensure!(q_heads.is_multiple_of(*kv_heads), "num_attention_heads: {q_heads} is not a multiple of num_key_value_heads {kv_heads}");
        ensure!(
            *rotary_dim > 0 && rotary_dim.is_multiple_of(2) && rotary_dim <= head_dim,
            "rotary_dim: {rotary_dim} is not an even number from 2 to head_dim {head_dim}"
        );
        if self.layers.iter().any(|layer| layer.moe) {
            ensure!(
                (1..=*experts).contains(experts_per_token),
                "num_experts_per_tok: {experts_per_token} is not from 1 to num_local_experts {experts}"
            );
        }
        if self.has_sparse_layers() {
            let IndexerConfig { heads, head_dim, top_blocks, local_blocks, .. } = *indexer;
            ensure!(heads == *kv_heads, "sparse_num_index_heads: {heads}, but num_key_value_heads is {kv_heads}");
            ensure!(*rotary_dim <= head_dim, "sparse_index_dim: {head_dim} is less than rotary_dim {rotary_dim}");
            ensure!(
                (1..=top_blocks).contains(&local_blocks),
                "sparse_local_block: {local_blocks} is not from 1 to sparse_topk_blocks {top_blocks}"
            );
        }
        Ok(())
    }
}

/// The fields as files have them: the released names, and the flat ones that Hugging Face's own saves use.
#[derive(Deserialize)]
struct RawConfig {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    dense_intermediate_size: usize,
    shared_intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    rotary_dim: usize,
    rope_theta: Option<f32>,
    rope_parameters: Option<RawRope>,
    rope_scaling: Option<Value>,
    num_local_experts: usize,
    num_experts_per_tok: usize,
    n_shared_experts: Option<usize>,
    routed_scaling_factor: f64,
    scoring_func: Option<String>,
    use_routing_bias: Option<bool>,
    hidden_act: Option<String>,
    swiglu_alpha: f64,
    swiglu_limit: f64,
    use_qk_norm: Option<bool>,
    qk_norm_type: Option<String>,
    use_gemma_norm: Option<bool>,
    rms_norm_eps: f32,
    max_position_embeddings: usize,
    eos_token_id: Option<OneOrMany>,
    #[serde(default)]
    tie_word_embeddings: bool,
    moe_layer_freq: Option<Vec<u8>>,
    mlp_layer_types: Option<Vec<String>>,
    sparse_attention_config: Option<RawSparse>,
    layer_types: Option<Vec<String>>,
    index_n_heads: Option<usize>,
    index_head_dim: Option<usize>,
    index_block_size: Option<usize>,
    index_topk_blocks: Option<usize>,
    index_local_blocks: Option<usize>,
    quantization_config: Option<Value>,
}

#[derive(Deserialize)]
struct RawRope {
    rope_theta: Option<f32>,
    rope_type: Option<String>,
}

#[derive(Deserialize, Default)]
struct RawSparse {
    use_sparse_attention: Option<bool>,
    sparse_num_index_heads: Option<usize>,
    sparse_index_dim: Option<usize>,
    sparse_block_size: Option<usize>,
    sparse_topk_blocks: Option<usize>,
    sparse_local_block: Option<usize>,
    sparse_attention_freq: Option<Vec<u8>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl RawConfig {
    fn resolve(self) -> Result<Config> {
        self.refuse_other_architectures()?;
        let layers = self.layer_kinds()?;
        let sparse = self.sparse_attention_config.unwrap_or_default();
        let config = Config {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            expert_size: self.intermediate_size,
            dense_size: self.dense_intermediate_size,
            shared_size: self.shared_intermediate_size,
            q_heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            rotary_dim: self.rotary_dim,
            rope_theta: self.rope_theta.or(self.rope_parameters.and_then(|rope| rope.rope_theta)).unwrap_or(5e6),
            experts: self.num_local_experts,
            experts_per_token: self.num_experts_per_tok,
            routed_scaling_factor: self.routed_scaling_factor,
            swiglu_alpha: self.swiglu_alpha,
            swiglu_limit: self.swiglu_limit,
            rms_norm_eps: self.rms_norm_eps,
            max_positions: self.max_position_embeddings,
            eos_tokens: match self.eos_token_id {
                None => vec![],
                Some(OneOrMany::One(token)) => vec![token],
                Some(OneOrMany::Many(tokens)) => tokens,
            },
            tie_word_embeddings: self.tie_word_embeddings,
            bf16: false,
            layers,
            indexer: IndexerConfig {
                heads: sparse.sparse_num_index_heads.or(self.index_n_heads).unwrap_or(4),
                head_dim: sparse.sparse_index_dim.or(self.index_head_dim).unwrap_or(128),
                block_size: sparse.sparse_block_size.or(self.index_block_size).unwrap_or(128),
                top_blocks: sparse.sparse_topk_blocks.or(self.index_topk_blocks).unwrap_or(16),
                local_blocks: sparse.sparse_local_block.or(self.index_local_blocks).unwrap_or(1),
            },
        };
        config.check()?;
        Ok(config)
    }

    /// A field that asks for arithmetic this example does not have must not be read past.
    fn refuse_other_architectures(&self) -> Result<()> {
        let texts = [
            ("hidden_act", &self.hidden_act, &["swigluoai", "silu"][..]),
            ("scoring_func", &self.scoring_func, &["sigmoid"]),
            ("qk_norm_type", &self.qk_norm_type, &["per_head"]),
            ("rope_type", &self.rope_parameters.as_ref().and_then(|rope| rope.rope_type.clone()), &["default"]),
        ];
        for (name, value, known) in texts {
            if let Some(value) = value {
                ensure!(known.contains(&value.as_str()), "{name}: {value:?} is not supported ({})", known.join(", "));
            }
        }
        let flags =
            [("use_qk_norm", self.use_qk_norm), ("use_gemma_norm", self.use_gemma_norm), ("use_routing_bias", self.use_routing_bias)];
        for (name, value) in flags {
            ensure!(value != Some(false), "{name}: false is not supported");
        }
        ensure!(self.n_shared_experts.is_none_or(|n| n == 1), "n_shared_experts: {:?} is not supported (1)", self.n_shared_experts);
        for (name, value) in [("rope_scaling", &self.rope_scaling), ("quantization_config", &self.quantization_config)] {
            ensure!(value.is_none(), "{name}: not supported");
        }
        Ok(())
    }

    fn layer_kinds(&self) -> Result<Vec<LayerKind>> {
        let layers = self.num_hidden_layers;
        ensure!((1..=MOST_PARTS).contains(&layers), "num_hidden_layers: {layers} is not from 1 to {MOST_PARTS}");
        let moe = layer_flags(
            ("moe_layer_freq", self.moe_layer_freq.as_deref()),
            ("mlp_layer_types", self.mlp_layer_types.as_deref(), "sparse", "dense"),
        )?
        .unwrap_or_else(|| vec![true; layers]);
        let sparse = self.sparse_attention_config.as_ref();
        let frequencies = sparse.and_then(|sparse| sparse.sparse_attention_freq.as_deref());
        let mut attention = layer_flags(
            ("sparse_attention_freq", frequencies),
            ("layer_types", self.layer_types.as_deref(), "minimax_m3_sparse", "full_attention"),
        )?
        .unwrap_or_else(|| vec![false; layers]);
        if sparse.is_some_and(|sparse| sparse.use_sparse_attention == Some(false)) {
            attention.fill(false);
        }
        for (name, count) in [("moe_layer_freq", moe.len()), ("sparse_attention_freq", attention.len())] {
            ensure!(count == layers, "{name}: {count} entries for num_hidden_layers {layers}");
        }
        Ok(moe.into_iter().zip(attention).map(|(moe, sparse)| LayerKind { moe, sparse }).collect())
    }
}

/// One flag a layer, from 0/1 numbers or from one of two words.
fn layer_flags(numbers: (&str, Option<&[u8]>), words: (&str, Option<&[String]>, &str, &str)) -> Result<Option<Vec<bool>>> {
    if let (name, Some(numbers)) = numbers {
        ensure!(numbers.iter().all(|&n| n <= 1), "{name}: {numbers:?} are not all 0 or 1");
        return Ok(Some(numbers.iter().map(|&n| n == 1).collect()));
    }
    let (name, Some(values), yes, no) = words else { return Ok(None) };
    let flag = |value: &String| match value.as_str() {
        value if value == yes => Ok(true),
        value if value == no => Ok(false),
        other => bail!("{name}: {other:?} is neither {yes:?} nor {no:?}"),
    };
    values.iter().map(flag).collect::<Result<_>>().map(Some)
}
