//! [`AppendAndAttend`]: write the new tokens into the cache, then attend.

use candle::{CpuStorage, CudaStorage, CustomOp3, Layout, MetalStorage, Result, Shape, Tensor, bail};

use crate::cache::{Batch, LayerCache, Lent, PagedKvCache, shares_storage};
use crate::op::{CallSummary, PagedDecode, explain, no_kernel, with_cache};
use crate::options::DecodeOptions;

/// A candle op over the new tokens' (q, k, v) that holds the cache: it writes k and v into their pages, then attends.
///
/// - q: as in [`PagedDecode`], `[rows, q_heads, head_dim]` or `[batch, query_len, q_heads, head_dim]`; so is the output.
/// - k, v: F32, F16 or BF16 `[rows, kv_heads, head_dim]`, quantized as the cache is.
///
/// Nothing but the new tokens is copied, so it is the op for a cache that candle itself has no storage for.
///
/// # Errors
/// Those of [`PagedDecode`] and of [`PagedKvCache::write`], and a k whose rows are not q's. All are found before the cache changes.
#[derive(Clone, Debug)]
pub struct AppendAndAttend<'a> {
    /// The cache that is written and read.
    pub cache: &'a PagedKvCache,
    /// Layer of the cache to write and read.
    pub layer: usize,
    /// I64 `[rows]`: `page * page_size + offset` of each new token; negative = do not write it.
    pub slot_mapping: Tensor,
    /// U32 or I32 `[batch, max_pages]` or `[batch, kv_heads, max_pages]`.
    pub block_tables: Tensor,
    /// U32 or I32 `[batch]` or `[batch, kv_heads]`: tokens in the cache once the new ones are written.
    pub context_lens: Tensor,
    /// Everything optional; the layout and the scales are the cache's own, whatever stands here.
    pub options: DecodeOptions,
}

impl<'a> AppendAndAttend<'a> {
    /// The op for one layer of a step that a pool's batch describes; its query lengths may differ.
    ///
    /// # Errors
    /// The pool's pages are not of the cache's size.
    pub fn new(cache: &'a PagedKvCache, layer: usize, batch: &Batch) -> Result<Self> {
        let page_size = cache.config().dims.page_size;
        if batch.page_size != page_size {
            bail!("batch: its pool's pages have {} tokens, the cache's have {page_size}", batch.page_size)
        }
        Ok(Self {
            cache,
            layer,
            slot_mapping: batch.slot_mapping.clone(),
            block_tables: batch.block_tables.clone(),
            context_lens: batch.context_lens.clone(),
            options: DecodeOptions {
                query_start: Some(batch.query_start.clone()),
                max_query_len: Some(batch.max_query_len),
                ..DecodeOptions::default()
            },
        })
    }

    /// Applies the op to q, k and v.
    pub fn apply(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        q.apply_op3_no_bwd(k, v, self)
    }

    /// What the planner and the registry decide for the attention of `q`; nothing is written or computed.
    pub fn explain(&self, q: &Tensor) -> Result<CallSummary> {
        #[cfg(feature = "rocm")]
        if let Some(pages) = self.cache.rocm() {
            return pages.explain(self, q);
        }
        let layer = self.cache.layer(self.layer)?;
        explain(&self.decode(layer), q, &layer.key, &layer.value)
    }

    /// The decode over the cache's layer.
    pub(crate) fn decode(&self, layer: &LayerCache) -> PagedDecode {
        let options = DecodeOptions {
            layout: self.cache.layout(),
            k_scale: layer.k_scale.clone(),
            v_scale: layer.v_scale.clone(),
            ..self.options.clone()
        };
        PagedDecode::new(&self.block_tables, &self.context_lens, &options)
    }
}

/// Refuses k and q that are not of the same tokens.
fn check_rows(q: &Layout, k: &Layout) -> Result<()> {
    let rows: usize = q.dims().iter().rev().skip(2).product();
    if k.dims().first() != Some(&rows) {
        bail!(
            "k: {} rows (shape {:?}) beside {rows} rows of q (shape {:?}): both have one for each new token",
            k.dims().first().unwrap_or(&0),
            k.dims(),
            q.dims()
        )
    }
    Ok(())
}

/// Refuses q in storage that is to be written.
pub(crate) fn check_apart<S: Lent>(layer: &LayerCache, q: &S) -> Result<()> {
    for (name, tensor) in layer.tensors() {
        if shares_storage(tensor, q) {
            bail!("q: shares its storage with {name}, which is to be written; pass a copy")
        }
    }
    Ok(())
}

impl CustomOp3 for AppendAndAttend<'_> {
    fn name(&self) -> &'static str {
        "append-and-attend"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        check_rows(q_layout, k_layout)?;
        #[cfg(feature = "rocm")]
        if let Some(pages) = self.cache.rocm() {
            let out = pages.append_and_attend(self, (q, q_layout), (k, k_layout), (v, v_layout))?;
            return Ok((out, q_layout.shape().clone()));
        }
        let layer = self.cache.layer(self.layer)?;
        check_apart(layer, q)?;
        let decode = self.decode(layer);
        let call = with_cache(&layer.key, &layer.value, |key, value| decode.prepare((q, q_layout), key, value, None))?;
        self.cache.write_storage(self.layer, (k, k_layout), (v, v_layout), &self.slot_mapping)?;
        let out = with_cache(&layer.key, &layer.value, |key, value| decode.attend_new(&call, (q, q_layout), key, value, None))?;
        Ok((out, q_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        check_rows(q_layout, k_layout)?;
        let out = crate::cuda::append_and_attend(self, (q, q_layout), (k, k_layout), (v, v_layout))?;
        Ok((out, q_layout.shape().clone()))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        no_kernel("append-and-attend", "CUDA")
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        no_kernel("append-and-attend", "Metal")
    }
}
