//! One layer's attention: projections, per-head norms, RoPE, and the op over the paged cache.

use candle::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module};
use candle_paged_attn::{AppendAndAttend, DecodeOptions};

use super::batch::Step;
use super::checkpoint::Checkpoint;
use super::config::Config;
use super::indexer::Indexer;
use super::kv::Memory;
use super::meter::Recorder;
use super::mlp::linear;
use super::norm::RmsNorm;

pub struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    indexer: Option<Indexer>,
    layer: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Attention {
    pub fn load(
        checkpoint: &Checkpoint,
        prefix: &str,
        config: &Config,
        layer: usize,
        dtype: DType,
        device: &Device,
    ) -> anyhow::Result<Self> {
        let proj = |name| linear(checkpoint, &format!("{prefix}.{name}.weight"), dtype, device);
        let norm = |name| RmsNorm::load(checkpoint, &format!("{prefix}.{name}.weight"), config, device);
        let indexer = || Indexer::load(checkpoint, prefix, config, dtype, device);
        Ok(Self {
            q_proj: proj("q_proj")?,
            k_proj: proj("k_proj")?,
            v_proj: proj("v_proj")?,
            o_proj: proj("o_proj")?,
            q_norm: norm("q_norm")?,
            k_norm: norm("k_norm")?,
            indexer: config.layers[layer].sparse.then(indexer).transpose()?,
            layer,
            q_heads: config.q_heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        })
    }

    /// `x` `[rows, hidden]`: appends the rows' K and V to the cache and attends.
    pub fn forward(&self, x: &Tensor, step: &Step<'_>, memory: &Memory, recorder: &mut Recorder) -> Result<Tensor> {
        let rows = x.dim(0)?;
        let heads = |proj: &Linear, heads| proj.forward(x)?.reshape((rows, heads, self.head_dim));
        let q = step.rope.apply(&self.q_norm.forward(&heads(&self.q_proj, self.q_heads)?)?)?;
        let k = step.rope.apply(&self.k_norm.forward(&heads(&self.k_proj, self.kv_heads)?)?)?;
        let v = heads(&self.v_proj, self.kv_heads)?;
        let (op, attended) = self.op(x, step, memory)?;
        let kv_bytes = (attended * memory.kind.token_bytes(self.head_dim)) as u64;
        if recorder.explains {
            recorder.kernels.push(op.explain(&q)?.selection.kernel());
        }
        let attended = recorder.measure(kv_bytes, x.device(), || op.apply(&q, &k, &v))?;
        recorder.repeat(kv_bytes, x.device(), || op.apply(&q, &k, &v))?;
        self.o_proj.forward(&attended.reshape((rows, self.q_heads * self.head_dim))?)
    }

    /// The op of this step, and the tokens it attends over all KV heads: whole sequences, or on a sparse layer every row as a sequence
    /// of its own with the blocks that its KV heads chose.
    fn op<'a>(&self, x: &Tensor, step: &Step<'_>, memory: &'a Memory) -> Result<(AppendAndAttend<'a>, usize)> {
        let (block_tables, context_lens, query_start, attended) = match &self.indexer {
            Some(indexer) => {
                let selection = indexer.select(x, step, memory, self.layer)?;
                (selection.block_tables, selection.context_lens, None, selection.attended)
            }
            None => {
                let attended = step.sequences.iter().map(|s| s.context_len() * self.kv_heads).sum();
                (step.block_tables.clone(), step.context_lens.clone(), Some(step.query_start.clone()), attended)
            }
        };
        let op = AppendAndAttend {
            cache: &memory.kv,
            layer: self.layer,
            slot_mapping: step.slot_mapping.clone(),
            block_tables,
            context_lens,
            options: DecodeOptions { query_start, max_query_len: Some(step.longest), ..Default::default() },
        };
        Ok((op, attended))
    }
}
