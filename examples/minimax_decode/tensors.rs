//! Which tensors a checkpoint holds: their released names and shapes.

use super::config::Config;

/// Names of the gate, up and down projections: of plain MLPs, and of experts.
pub const MLP_NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
pub const EXPERT_NAMES: [&str; 3] = ["w1", "w3", "w2"];

/// One tensor of a checkpoint. Names start below the language model's prefix (`model.` or `lm_head.`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub shape: Vec<usize>,
}

/// Every tensor of the model, in the order of the layers.
pub fn expected(config: &Config) -> Vec<TensorSpec> {
    let Config { vocab_size: vocab, hidden_size: hidden, .. } = *config;
    let mut specs = Specs::default();
    specs.add("model.embed_tokens.weight", &[vocab, hidden]);
    for (index, kind) in config.layers.iter().enumerate() {
        let layer = layer_prefix(index);
        specs.attention(config, &format!("{layer}.self_attn"), kind.sparse);
        match kind.moe {
            true => specs.experts(config, &format!("{layer}.block_sparse_moe")),
            false => specs.mlp(&format!("{layer}.mlp"), MLP_NAMES, hidden, config.dense_size),
        }
        specs.add(&format!("{layer}.input_layernorm.weight"), &[hidden]);
        specs.add(&format!("{layer}.post_attention_layernorm.weight"), &[hidden]);
    }
    specs.add("model.norm.weight", &[hidden]);
    if !config.tie_word_embeddings {
        specs.add("lm_head.weight", &[vocab, hidden]);
    }
    specs.0
}

/// Prefix of one decoder layer's names.
pub fn layer_prefix(index: usize) -> String {
    format!("model.layers.{index}")
}

#[derive(Default)]
struct Specs(Vec<TensorSpec>);

impl Specs {
    fn add(&mut self, name: &str, shape: &[usize]) {
        self.0.push(TensorSpec { name: name.to_string(), shape: shape.to_vec() });
    }

    fn attention(&mut self, config: &Config, prefix: &str, sparse: bool) {
        let Config { hidden_size: hidden, head_dim, .. } = *config;
        for (name, heads) in [("q_proj", config.q_heads), ("k_proj", config.kv_heads), ("v_proj", config.kv_heads)] {
            self.add(&format!("{prefix}.{name}.weight"), &[heads * head_dim, hidden]);
        }
        self.add(&format!("{prefix}.o_proj.weight"), &[hidden, config.q_heads * head_dim]);
        self.add(&format!("{prefix}.q_norm.weight"), &[head_dim]);
        self.add(&format!("{prefix}.k_norm.weight"), &[head_dim]);
        if sparse {
            let index_dim = config.indexer.head_dim;
            self.add(&format!("{prefix}.index_q_proj.weight"), &[config.indexer.heads * index_dim, hidden]);
            self.add(&format!("{prefix}.index_k_proj.weight"), &[index_dim, hidden]);
            self.add(&format!("{prefix}.index_q_norm.weight"), &[index_dim]);
            self.add(&format!("{prefix}.index_k_norm.weight"), &[index_dim]);
        }
    }

    fn experts(&mut self, config: &Config, prefix: &str) {
        self.add(&format!("{prefix}.gate.weight"), &[config.experts, config.hidden_size]);
        self.add(&format!("{prefix}.e_score_correction_bias"), &[config.experts]);
        for expert in 0..config.experts {
            self.mlp(&format!("{prefix}.experts.{expert}"), EXPERT_NAMES, config.hidden_size, config.expert_size);
        }
        let shared = format!("{prefix}.shared_experts");
        self.mlp(&shared, MLP_NAMES, config.hidden_size, config.shared_size);
    }

    fn mlp(&mut self, prefix: &str, [gate, up, down]: [&str; 3], hidden: usize, intermediate: usize) {
        self.add(&format!("{prefix}.{gate}.weight"), &[intermediate, hidden]);
        self.add(&format!("{prefix}.{up}.weight"), &[intermediate, hidden]);
        self.add(&format!("{prefix}.{down}.weight"), &[hidden, intermediate]);
    }
}
