//! MiniMax-M3's text model over a paged cache.

use candle::{DType, Device, Result, Tensor};
use candle_nn::{Embedding, Linear, Module};

use super::args::Devices;
use super::attention::Attention;
use super::batch::{SequenceRows, Step};
use super::checkpoint::Checkpoint;
use super::config::Config;
use super::kv::Memory;
use super::meter::Recorder;
use super::mlp::{Mlp, linear};
use super::moe::Moe;
use super::norm::RmsNorm;
use super::rope::frequencies;
use super::tensors::{MLP_NAMES, layer_prefix};

pub struct Model {
    pub config: Config,
    pub dtype: DType,
    pub devices: Devices,
    /// Of RoPE: see [`frequencies`].
    frequencies: Vec<f32>,
    embed: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
}

struct Layer {
    input_norm: RmsNorm,
    attention: Attention,
    post_norm: RmsNorm,
    feed_forward: FeedForward,
}

enum FeedForward {
    Dense(Mlp),
    Moe(Moe),
}

impl Model {
    /// Loads the weights layer by layer as `dtype`; RoPE's frequencies are rounded to `rope`. `on_layer` is called after each layer.
    pub fn load(
        checkpoint: &Checkpoint,
        config: Config,
        dtype: DType,
        rope: DType,
        devices: impl Into<Devices>,
        on_layer: impl Fn(),
    ) -> anyhow::Result<Self> {
        let devices = devices.into();
        let device = &devices.model;
        let embed = checkpoint.load("model.embed_tokens.weight", dtype, device)?;
        let mut layers = vec![];
        for index in 0..config.layers.len() {
            layers.push(Layer::load(checkpoint, &config, index, dtype, device)?);
            on_layer();
        }
        let norm = RmsNorm::load(checkpoint, "model.norm.weight", &config, device)?;
        let lm_head = match config.tie_word_embeddings {
            true => Linear::new(embed.clone(), None),
            false => linear(checkpoint, "lm_head.weight", dtype, device)?,
        };
        let embed = Embedding::new(embed, config.hidden_size);
        let frequencies = frequencies(config.rope_theta, config.rotary_dim, rope);
        Ok(Self { config, dtype, devices, frequencies, embed, layers, norm, lm_head })
    }

    /// Appends the sequences' new tokens to `memory`; logits F32 `[rows that need them, vocab]`.
    pub fn forward(&self, sequences: &[SequenceRows], memory: &Memory, recorder: &mut Recorder) -> Result<Tensor> {
        let step = Step::new(sequences, &self.frequencies, self.dtype, &self.devices.model)?;
        let mut x = self.embed.forward(&step.tokens)?;
        for layer in &self.layers {
            x = layer.forward(&x, &step, memory, recorder)?;
        }
        if step.logit_rows.elem_count() == 0 {
            return Tensor::zeros((0, self.config.vocab_size), DType::F32, &self.devices.model);
        }
        let x = self.norm.forward(&x.index_select(&step.logit_rows, 0)?)?;
        self.lm_head.forward(&x)?.to_dtype(DType::F32)
    }
}

impl Layer {
    fn load(checkpoint: &Checkpoint, config: &Config, index: usize, dtype: DType, device: &Device) -> anyhow::Result<Self> {
        let prefix = layer_prefix(index);
        let feed_forward = match config.layers[index].moe {
            true => FeedForward::Moe(Moe::load(checkpoint, &format!("{prefix}.block_sparse_moe"), config, dtype, device)?),
            false => FeedForward::Dense(Mlp::load(checkpoint, &format!("{prefix}.mlp"), MLP_NAMES, config, dtype, device)?),
        };
        Ok(Self {
            input_norm: RmsNorm::load(checkpoint, &format!("{prefix}.input_layernorm.weight"), config, device)?,
            attention: Attention::load(checkpoint, &format!("{prefix}.self_attn"), config, index, dtype, device)?,
            post_norm: RmsNorm::load(checkpoint, &format!("{prefix}.post_attention_layernorm.weight"), config, device)?,
            feed_forward,
        })
    }

    fn forward(&self, x: &Tensor, step: &Step<'_>, memory: &Memory, recorder: &mut Recorder) -> Result<Tensor> {
        let x = (self.attention.forward(&self.input_norm.forward(x)?, step, memory, recorder)? + x)?;
        let normed = self.post_norm.forward(&x)?;
        let fed = match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.forward(&normed)?,
            FeedForward::Moe(moe) => moe.forward(&normed)?,
        };
        fed + x
    }
}
