//! The op: [`PagedDecode`] and the free functions around it.

use candle::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};

use crate::options::DecodeOptions;

/// Paged-attention decode as a candle op over (q, key_cache, value_cache).
pub struct PagedDecode {
    pub block_tables: Tensor,
    pub context_lens: Tensor,
    pub options: DecodeOptions,
}

impl CustomOp3 for PagedDecode {
    fn name(&self) -> &'static str {
        "paged-decode"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("unwritten")
    }
}

/// Attention of the new tokens `q` `[batch*query_len, q_heads, head_dim]` (or `[batch, query_len, q_heads, head_dim]`) over a paged cache.
pub fn paged_decode(
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<Tensor> {
    let op = PagedDecode { block_tables: block_tables.clone(), context_lens: context_lens.clone(), options: options.clone() };
    q.apply_op3_no_bwd(key_cache, value_cache, &op)
}

/// [`paged_decode`] with the log-sum-exp of each row and head: F32 `[rows, q_heads]`, natural log, `-inf` where nothing is attended.
pub fn paged_decode_with_lse(
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<(Tensor, Tensor)> {
    let _ = (q, key_cache, value_cache, block_tables, context_lens, options);
    bail!("unwritten")
}

/// [`paged_decode`] into `out`, a tensor or view of q's shape and dtype whose last dim is contiguous.
pub fn paged_decode_into(
    out: &Tensor,
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<()> {
    let _ = (out, q, key_cache, value_cache, block_tables, context_lens, options);
    bail!("unwritten")
}

/// Merges attention over disjoint parts of a context: `outs` of one shape `[rows, q_heads, head_dim]` with their `lses` F32 `[rows, q_heads]`.
pub fn merge_attention_states(outs: &[Tensor], lses: &[Tensor]) -> Result<(Tensor, Tensor)> {
    let _ = (outs, lses);
    bail!("unwritten")
}
