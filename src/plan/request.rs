//! What a plan is made for.

#[cfg(any(feature = "rocm", feature = "nvrtc"))]
use std::borrow::Cow;

use candle::{Result, bail};

use super::{TileRange, tile_range};
use crate::registry::Arch;

/// What a plan is made for.
#[derive(Clone, Debug)]
pub struct PlanRequest<'a> {
    /// Context length of each plan row (one a sequence, or one a (sequence, KV head) with per-head tables), new tokens included.
    /// Any value; <= 0 is empty.
    pub context_lens: &'a [i32],
    /// New tokens of each plan row; one entry serves all. A row with none needs no task.
    pub query_lens: &'a [usize],
    /// KV heads that share each plan row: `kv_heads`, or 1 with per-head tables. At least 1.
    pub kv_heads: usize,
    /// Sliding window in tokens, at least 1. `None`: all tokens.
    pub window: Option<usize>,
    /// Most tasks a row may be split into, at least 1. `None`: as many as there are slots.
    pub max_partitions: Option<usize>,
    /// Task slots over all KV heads, at least 1. `None`: [`super::default_budget`].
    pub workgroup_budget: Option<usize>,
    /// Most context tokens that any row may come to have, such as its block table has room for. `None`: any number. Only
    /// [`super::default_budget`] looks at it.
    pub max_context_len: Option<usize>,
}

/// Lengths for a request of `rows` rows of which only their number is asked. Of as many rows as calls have without an allocation.
#[cfg(any(feature = "rocm", feature = "nvrtc"))]
pub(crate) fn no_lengths(rows: usize) -> Cow<'static, [i32]> {
    static NONE: [i32; 1024] = [0; 1024];
    NONE.get(..rows).map_or_else(|| Cow::Owned(vec![0; rows]), Cow::Borrowed)
}

impl<'a> PlanRequest<'a> {
    /// A request with no window, no limits and the default budget.
    pub fn new(context_lens: &'a [i32], query_lens: &'a [usize], kv_heads: usize) -> Self {
        Self { context_lens, query_lens, kv_heads, window: None, max_partitions: None, workgroup_budget: None, max_context_len: None }
    }

    /// Plan rows.
    pub fn rows(&self) -> usize {
        self.context_lens.len()
    }

    /// New tokens of `row`; where `query_lens` has no entry for it, as many as there can be, so that nothing it may attend is left out.
    pub fn query_len(&self, row: usize) -> usize {
        match self.query_lens {
            [all] => *all,
            each => each.get(row).copied().unwrap_or(usize::MAX),
        }
    }

    /// The longest query of the batch, 0 for an empty one.
    pub fn max_query_len(&self) -> usize {
        if self.rows() == 0 { 0 } else { self.query_lens.iter().copied().max().unwrap_or(0) }
    }

    /// The tiles that each plan row needs on `arch`.
    pub fn tile_ranges(&self, arch: &Arch) -> impl Iterator<Item = TileRange> + '_ {
        let tile_tokens = arch.name.tile_tokens();
        self.context_lens
            .iter()
            .enumerate()
            .map(move |(row, &context_len)| tile_range(context_len, self.query_len(row), self.window, tile_tokens))
    }

    /// Refuses arguments that no plan can be made for; context lengths are all legal.
    ///
    /// # Errors
    /// `kv_heads`, `window`, `max_partitions` or `workgroup_budget` is 0; `query_lens` has neither one entry nor one a row; more than
    /// 2^31 - 1 rows.
    pub fn check(&self) -> Result<()> {
        let rows = self.rows();
        if i32::try_from(rows).is_err() {
            bail!("context_lens has {rows} rows, a plan holds at most {}", i32::MAX)
        }
        if self.query_lens.len() != rows && self.query_lens.len() != 1 {
            bail!("query_lens has {} entries for {rows} rows of context_lens: it must have one, or one a row", self.query_lens.len())
        }
        if self.kv_heads == 0 {
            bail!("kv_heads is 0, it must be at least 1")
        }
        for (name, value) in [("window", self.window), ("max_partitions", self.max_partitions), ("workgroup_budget", self.workgroup_budget)]
        {
            if value == Some(0) {
                bail!("{name} is 0, it must be at least 1 (or absent)")
            }
        }
        Ok(())
    }
}

#[cfg(all(test, any(feature = "rocm", feature = "nvrtc")))]
mod tests {
    use super::no_lengths;

    #[test]
    fn there_are_as_many_lengths_as_rows() {
        assert!([0, 1, 1024, 1025, 9000].into_iter().all(|rows| no_lengths(rows).len() == rows));
    }
}
