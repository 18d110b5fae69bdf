//! The indexer of sparse layers: which blocks of keys each query row attends, per KV head.

use candle::{D, DType, Device, Result, Tensor};
use candle_nn::{Linear, Module};

use super::batch::{SequenceRows, Step};
use super::checkpoint::Checkpoint;
use super::config::{Config, IndexerConfig};
use super::kv::Memory;
use super::mlp::linear;
use super::norm::RmsNorm;
use super::rope::Rope;

/// Most scores held at once (F32); a longer context is scored a few rows at a time.
const SCORES_AT_ONCE: usize = 1 << 24;

pub struct Indexer {
    q_proj: Linear,
    k_proj: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    config: IndexerConfig,
}

/// Pages and lengths of one-query sequences: one a row, with a table of its own for each KV head.
pub struct Selection {
    /// U32 `[rows, kv_heads, columns]`, padded with 0.
    pub block_tables: Tensor,
    /// U32 `[rows, kv_heads]`.
    pub context_lens: Tensor,
    /// Tokens attended, over all rows and heads.
    pub attended: usize,
}

impl Indexer {
    pub fn load(checkpoint: &Checkpoint, prefix: &str, config: &Config, dtype: DType, device: &Device) -> anyhow::Result<Self> {
        let proj = |name| linear(checkpoint, &format!("{prefix}.{name}.weight"), dtype, device);
        let norm = |name| RmsNorm::load(checkpoint, &format!("{prefix}.{name}.weight"), config, device);
        Ok(Self {
            q_proj: proj("index_q_proj")?,
            k_proj: proj("index_k_proj")?,
            q_norm: norm("index_q_norm")?,
            k_norm: norm("index_k_norm")?,
            config: config.indexer,
        })
    }

    /// Remembers the index keys of the rows `x` `[rows, hidden]`, then chooses each row's blocks.
    pub fn select(&self, x: &Tensor, step: &Step<'_>, memory: &Memory, layer: usize) -> Result<Selection> {
        let keys = self.heads(&self.k_proj, &self.k_norm, x, 1, &step.rope)?.squeeze(1)?;
        memory.write_index_keys(layer, &keys, &step.slot_mapping)?;
        let queries = self.heads(&self.q_proj, &self.q_norm, x, self.config.heads, &step.rope)?.to_dtype(DType::F32)?;
        let mut builder = SelectionBuilder::new(self.config, step.sequences);
        let mut row = 0;
        for sequence in step.sequences {
            self.select_sequence(&queries.narrow(0, row, sequence.tokens.len())?, sequence, memory, layer, &mut builder)?;
            row += sequence.tokens.len();
        }
        builder.finish(x.device())
    }

    fn heads(&self, proj: &Linear, norm: &RmsNorm, x: &Tensor, heads: usize, rope: &Rope) -> Result<Tensor> {
        let projected = proj.forward(x)?.reshape((x.dim(0)?, heads, self.config.head_dim))?;
        rope.apply(&norm.forward(&projected)?)
    }

    /// Blocks of the rows `queries` `[rows, heads, index_head_dim]` of one sequence. Only blocks that lie wholly before a query compete
    /// (its own and other local ones are always kept), so no score needs a causal mask.
    fn select_sequence(
        &self,
        queries: &Tensor,
        sequence: &SequenceRows,
        memory: &Memory,
        layer: usize,
        builder: &mut SelectionBuilder,
    ) -> Result<()> {
        let IndexerConfig { heads, head_dim, block_size, top_blocks, .. } = self.config;
        let last_block = (sequence.context_len() - 1) / block_size;
        if last_block < top_blocks {
            sequence.positions().for_each(|position| (0..heads).for_each(|_| builder.push(sequence, position, &[])));
            return Ok(());
        }
        let keys = memory.index_keys(layer, &sequence.pages[..last_block])?.t()?;
        let rows_at_once = (SCORES_AT_ONCE / (heads * last_block * block_size)).max(1);
        let rows = queries.dim(0)?;
        for start in (0..rows).step_by(rows_at_once) {
            let rows = rows_at_once.min(rows - start);
            let scores = queries.narrow(0, start, rows)?.reshape((rows * heads, head_dim))?.matmul(&keys)?;
            let blocks: Vec<Vec<f32>> = scores.reshape((rows * heads, last_block, block_size))?.max(D::Minus1)?.to_vec2()?;
            for (index, scores) in blocks.iter().enumerate() {
                builder.push(sequence, sequence.start + start + index / heads, scores);
            }
        }
        Ok(())
    }
}

/// Collects the tables of a step's rows, head by head.
struct SelectionBuilder {
    config: IndexerConfig,
    columns: usize,
    tables: Vec<u32>,
    lens: Vec<u32>,
}

impl SelectionBuilder {
    fn new(config: IndexerConfig, sequences: &[SequenceRows]) -> Self {
        let blocks = sequences.iter().map(|s| s.context_len().div_ceil(config.block_size)).max().unwrap_or(0);
        Self { config, columns: blocks.min(config.top_blocks), tables: vec![], lens: vec![] }
    }

    /// Adds one head of the row at `position`; `scores` of the blocks before it may be left out when all blocks fit.
    fn push(&mut self, sequence: &SequenceRows, position: usize, scores: &[f32]) {
        let block_size = self.config.block_size;
        let own = position / block_size;
        let blocks = select_blocks(scores, own, &self.config);
        // Ascending order puts the query's own block last: the only one that it does not attend whole.
        self.lens.push(((blocks.len() - 1) * block_size + position % block_size + 1) as u32);
        self.tables.extend(blocks.iter().map(|&block| sequence.pages[block]));
        self.tables.resize(self.lens.len() * self.columns, 0);
    }

    fn finish(self, device: &Device) -> Result<Selection> {
        let heads = self.config.heads;
        let rows = self.lens.len() / heads;
        Ok(Selection {
            attended: self.lens.iter().map(|&len| len as usize).sum(),
            block_tables: Tensor::from_vec(self.tables, (rows, heads, self.columns), device)?,
            context_lens: Tensor::from_vec(self.lens, (rows, heads), device)?,
        })
    }
}

/// The blocks that a query in block `own` attends, ascending: the local ones, and of those before them the ones of largest score (the
/// earlier of equals) up to `top_blocks` in all.
fn select_blocks(scores: &[f32], own: usize, config: &IndexerConfig) -> Vec<usize> {
    let first_local = (own + 1).saturating_sub(config.local_blocks);
    let mut blocks: Vec<usize> = (0..first_local).collect();
    let places = config.top_blocks - (own + 1 - first_local);
    if blocks.len() > places {
        blocks.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        blocks.truncate(places);
        blocks.sort_unstable();
    }
    blocks.extend(first_local..=own);
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(top_blocks: usize, local_blocks: usize) -> IndexerConfig {
        IndexerConfig { heads: 1, head_dim: 32, block_size: 4, top_blocks, local_blocks }
    }

    #[test]
    fn the_best_blocks_and_the_local_ones_are_kept_in_order() {
        let scores = [3.0, -1.0, 5.0, 4.0, 9.0];
        assert_eq!(select_blocks(&scores, 4, &config(3, 1)), [2, 3, 4]);
        assert_eq!(select_blocks(&scores, 4, &config(3, 2)), [2, 3, 4]);
        assert_eq!(select_blocks(&scores, 4, &config(3, 3)), [2, 3, 4]);
        assert_eq!(select_blocks(&scores, 3, &config(2, 1)), [2, 3]);
        assert_eq!(select_blocks(&scores, 4, &config(2, 2)), [3, 4]);
        assert_eq!(select_blocks(&[1.0, 1.0, 1.0], 3, &config(2, 1)), [0, 3]);
        assert_eq!(select_blocks(&[], 1, &config(3, 3)), [0, 1]);
        assert_eq!(select_blocks(&[], 0, &config(1, 1)), [0]);
    }

    #[test]
    fn a_row_attends_its_own_block_up_to_itself() {
        let sequence = SequenceRows { tokens: vec![0; 2], start: 8, pages: vec![7, 5, 6], slots: vec![], logits: 0 };
        let mut builder = SelectionBuilder::new(config(2, 1), std::slice::from_ref(&sequence));
        builder.push(&sequence, 8, &[1.0, 2.0]);
        builder.push(&sequence, 9, &[2.0, 1.0]);
        assert_eq!(builder.tables, [5, 6, 7, 6]);
        assert_eq!(builder.lens, [5, 6]);
    }
}
