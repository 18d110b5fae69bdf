//! [`AppendAndAttend`]: write the new tokens into the cache, then attend.

use candle::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};

use crate::cache::PagedKvCache;
use crate::options::DecodeOptions;

/// A candle op over the new tokens' (q, k, v) that holds the cache: k and v `[rows, kv_heads, head_dim]` go to the slots of
/// `slot_mapping` (I64 `[rows]`, `page * page_size + offset`, negative = skip), then q attends as [`crate::paged_decode`] does.
///
/// The cache's own layout and scales are used; those of `options` are ignored... see `PagedKvCache`.
pub struct AppendAndAttend<'a> {
    pub cache: &'a PagedKvCache,
    pub layer: usize,
    pub slot_mapping: Tensor,
    pub block_tables: Tensor,
    pub context_lens: Tensor,
    pub options: DecodeOptions,
}

impl AppendAndAttend<'_> {
    /// Applies the op.
    pub fn apply(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        q.apply_op3_no_bwd(k, v, self)
    }
}

impl CustomOp3 for AppendAndAttend<'_> {
    fn name(&self) -> &'static str {
        "append-and-attend"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("unwritten")
    }
}
