//! One step's rows: some new tokens of each of some sequences, side by side.

use candle::{DType, Device, Result, Tensor};

use super::rope::Rope;

/// The new tokens of one sequence in a step.
#[derive(Clone, Debug)]
pub struct SequenceRows {
    pub tokens: Vec<u32>,
    /// Position of the first of `tokens`: the tokens already cached.
    pub start: usize,
    /// The sequence's pages, the new tokens' included.
    pub pages: Vec<u32>,
    /// Cache slot of each new token.
    pub slots: Vec<i64>,
    /// How many of the last tokens need logits.
    pub logits: usize,
}

impl SequenceRows {
    /// Tokens cached after the step.
    pub fn context_len(&self) -> usize {
        self.start + self.tokens.len()
    }

    pub fn positions(&self) -> impl Iterator<Item = usize> {
        self.start..self.context_len()
    }
}

/// The tensors that every layer shares in one step.
pub struct Step<'a> {
    pub sequences: &'a [SequenceRows],
    /// U32 `[rows]`.
    pub tokens: Tensor,
    pub rope: Rope,
    /// I64 `[rows]`.
    pub slot_mapping: Tensor,
    /// U32 `[sequences, pages]`, padded with 0.
    pub block_tables: Tensor,
    /// U32 `[sequences]`.
    pub context_lens: Tensor,
    /// U32 `[sequences + 1]`.
    pub query_start: Tensor,
    /// Rows of the sequence that has most.
    pub longest: usize,
    /// U32: the rows that need logits.
    pub logit_rows: Tensor,
}

impl<'a> Step<'a> {
    pub fn new(sequences: &'a [SequenceRows], frequencies: &[f32], dtype: DType, device: &Device) -> Result<Self> {
        let tokens: Vec<u32> = sequences.iter().flat_map(|s| s.tokens.iter().copied()).collect();
        let slots: Vec<i64> = sequences.iter().flat_map(|s| s.slots.iter().copied()).collect();
        let positions: Vec<usize> = sequences.iter().flat_map(SequenceRows::positions).collect();
        let columns = sequences.iter().map(|s| s.pages.len()).max().unwrap_or(0);
        let tables: Vec<u32> = sequences.iter().flat_map(|s| (0..columns).map(|c| s.pages.get(c).copied().unwrap_or(0))).collect();
        let mut query_start = vec![0];
        let mut logit_rows = vec![];
        let mut end = 0;
        for sequence in sequences {
            end += sequence.tokens.len() as u32;
            query_start.push(end);
            logit_rows.extend(end - sequence.logits as u32..end);
        }
        let context_lens: Vec<u32> = sequences.iter().map(|s| s.context_len() as u32).collect();
        Ok(Self {
            sequences,
            tokens: Tensor::new(tokens, device)?,
            rope: Rope::new(&positions, frequencies, dtype, device)?,
            slot_mapping: Tensor::new(slots, device)?,
            block_tables: Tensor::from_vec(tables, (sequences.len(), columns), device)?,
            context_lens: Tensor::new(context_lens, device)?,
            query_start: Tensor::new(query_start, device)?,
            longest: sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0),
            logit_rows: Tensor::new(logit_rows, device)?,
        })
    }
}
