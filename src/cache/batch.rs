//! A step of a pool's sequences as the tensors of a decode call.

use std::collections::HashSet;

use candle::{Device, Result, Tensor, bail};

use super::{Append, NO_PAGE, PagePool, SeqId};

/// The tensors of one step: what [`AppendAndAttend`](crate::AppendAndAttend) takes beside q, k and v, whose rows follow the batch's order.
#[derive(Clone, Debug)]
pub struct Batch {
    /// I64 `[rows]`: the slot of each new token.
    pub slot_mapping: Tensor,
    /// U32 `[batch + 1]`: the first row of each sequence, and the end.
    pub query_start: Tensor,
    /// U32 `[batch, max_pages]`, [`NO_PAGE`] where a sequence has no page.
    pub block_tables: Tensor,
    /// U32 `[batch]`: tokens in the cache, the new ones included.
    pub context_lens: Tensor,
    /// Tokens of the longest append.
    pub max_query_len: usize,
    /// Tokens of a page, as the pool counted when it made slots and tables.
    pub page_size: usize,
}

impl PagePool {
    /// The step in which each sequence runs the tokens of its append, in the given order, on `device`. Query lengths may differ: a prompt chunk
    /// runs beside decodes. `max_pages` is that of the longest sequence (at least 1).
    ///
    /// # Errors
    /// A sequence that the pool does not have or that comes twice, an append that is not of the sequence's last tokens (another sequence's, or one from
    /// before a [`PagePool::truncate`] or a later append), a context or a number of rows past 2^31 - 1.
    pub fn batch(&self, step: &[(SeqId, &Append)], device: &Device) -> Result<Batch> {
        self.check_step(step)?;
        let tables = step.iter().map(|&(sequence, _)| self.block_table(sequence)).collect::<Result<Vec<_>>>()?;
        let columns = tables.iter().map(|table| table.len()).max().unwrap_or(0).max(1);
        let mut ids = vec![NO_PAGE; tables.len() * columns];
        for (lanes, table) in ids.chunks_exact_mut(columns).zip(&tables) {
            lanes[..table.len()].copy_from_slice(table);
        }
        let slots: Vec<i64> = step.iter().flat_map(|(_, append)| append.slots.iter().copied()).collect();
        let mut starts = vec![0];
        let mut lens = Vec::with_capacity(step.len());
        let mut rows = 0;
        for &(sequence, append) in step {
            rows += append.slots.len();
            starts.push(index("query_start", sequence, rows)?);
            lens.push(index("context_lens", sequence, self.context_len(sequence)?)?);
        }
        Ok(Batch {
            slot_mapping: Tensor::from_vec(slots, rows, device)?,
            query_start: Tensor::from_vec(starts, step.len() + 1, device)?,
            block_tables: Tensor::from_vec(ids, (step.len(), columns), device)?,
            context_lens: Tensor::from_vec(lens, step.len(), device)?,
            max_query_len: step.iter().map(|(_, append)| append.slots.len()).max().unwrap_or(0),
            page_size: self.page_size(),
        })
    }

    /// Refuses appends that are not the last tokens of the sequences that they are given for: rows would be written and attended elsewhere.
    fn check_step(&self, step: &[(SeqId, &Append)]) -> Result<()> {
        let mut seen = HashSet::with_capacity(step.len());
        for &(sequence, append) in step {
            if !seen.insert(sequence) {
                bail!("step: sequence {sequence} comes twice")
            }
            let (tokens, len) = (append.slots.len(), self.context_len(sequence)?);
            if tokens > len {
                bail!("step: an append of {tokens} tokens beside sequence {sequence}, which has {len}")
            }
            let wrong = |(_, (slot, own)): &(usize, (&i64, i64))| **slot != *own;
            if let Some((i, (slot, own))) = append.slots.iter().zip(self.last_slots(sequence, tokens)?).enumerate().find(wrong) {
                bail!(
                    "step: slot {slot} for token {} of sequence {sequence}, which is in slot {own}: not the append of its last tokens",
                    len - tokens + i
                )
            }
        }
        Ok(())
    }
}

/// `value` as kernels count: at most 2^31 - 1.
fn index(name: &str, sequence: SeqId, value: usize) -> Result<u32> {
    match i32::try_from(value) {
        Ok(value) => Ok(value.unsigned_abs()),
        Err(_) => bail!("{name}: {value} at sequence {sequence}, the most is {}", i32::MAX),
    }
}
