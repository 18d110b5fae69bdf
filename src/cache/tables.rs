//! A pool's numbers as the tensors a decode call takes.

use candle::{Device, Result, Tensor, bail};

use super::{Append, NO_PAGE, PagePool, SeqId};

/// Block tables and context lengths of a batch.
#[derive(Clone, Debug)]
pub struct BatchTables {
    /// U32 `[batch, max_pages]`, [`NO_PAGE`] where a sequence has no page.
    pub block_tables: Tensor,
    /// U32 `[batch]`, uncommitted tokens included.
    pub context_lens: Tensor,
}

impl PagePool {
    /// Tables of `sequences`, in their order, on `device`. `max_pages` is that of the longest one (at least 1).
    pub fn tables(&self, sequences: &[SeqId], device: &Device) -> Result<BatchTables> {
        let rows = sequences.iter().map(|&s| self.block_table(s)).collect::<Result<Vec<_>>>()?;
        let columns = rows.iter().map(|row| row.len()).max().unwrap_or(0).max(1);
        let mut ids = vec![NO_PAGE; rows.len() * columns];
        for (lanes, row) in ids.chunks_exact_mut(columns).zip(&rows) {
            lanes[..row.len()].copy_from_slice(row);
        }
        let lens = sequences.iter().map(|&s| u32_len(s, self.context_len(s)?)).collect::<Result<Vec<_>>>()?;
        Ok(BatchTables {
            block_tables: Tensor::from_vec(ids, (rows.len(), columns), device)?,
            context_lens: Tensor::from_vec(lens, rows.len(), device)?,
        })
    }

    /// The slots of several appends, one after the other: I64 `[tokens]` on `device`.
    pub fn slot_mapping<'a>(appends: impl IntoIterator<Item = &'a Append>, device: &Device) -> Result<Tensor> {
        let slots: Vec<i64> = appends.into_iter().flat_map(|append| append.slots.iter().copied()).collect();
        let tokens = slots.len();
        Tensor::from_vec(slots, tokens, device)
    }
}

fn u32_len(sequence: SeqId, len: usize) -> Result<u32> {
    match i32::try_from(len) {
        Ok(len) => Ok(len.unsigned_abs()),
        Err(_) => bail!("context_lens: sequence {sequence} has {len} tokens, the most is {}", i32::MAX),
    }
}
