//! What the model remembers: K and V pages of every layer, the index keys of sparse layers in the same pages, and the pool that hands pages out.

use anyhow::{Result, ensure};
use candle::{DType, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheDims, ExpectedCalls, KvDtype, MXFP4_BLOCK, PagedKvCache, Quantization};
use clap::ValueEnum;

use super::args::Devices;
use super::config::Config;

/// How K and V are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvKind {
    F32,
    Bf16,
    F16,
    /// E4M3, unscaled.
    Fp8,
    /// E4M3 with a scale per token and head.
    Fp8PerToken,
    /// E2M1 with a scale per 32 channels.
    Mxfp4,
}

impl KvKind {
    /// The kind that stores what `dtype` computes.
    pub fn of(dtype: DType) -> Self {
        if dtype == DType::F32 { Self::F32 } else { Self::Bf16 }
    }

    pub fn dtype(self) -> KvDtype {
        match self {
            Self::F32 => KvDtype::F32,
            Self::Bf16 => KvDtype::Bf16,
            Self::F16 => KvDtype::F16,
            Self::Fp8 | Self::Fp8PerToken => KvDtype::Fp8,
            Self::Mxfp4 => KvDtype::Mxfp4,
        }
    }

    pub fn quantization(self) -> Quantization {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 => Quantization::None,
            Self::Fp8 => Quantization::Scalar { k: 1.0, v: 1.0 },
            Self::Fp8PerToken => Quantization::PerToken,
            Self::Mxfp4 => Quantization::Block,
        }
    }

    /// Bytes of one token's K and V of one head, scales included.
    pub fn token_bytes(self, head_dim: usize) -> usize {
        let scales = match self {
            Self::F32 | Self::Bf16 | Self::F16 | Self::Fp8 => 0,
            Self::Fp8PerToken => size_of::<f32>(),
            Self::Mxfp4 => head_dim / MXFP4_BLOCK,
        };
        2 * (head_dim * self.dtype().bits() / 8 + scales)
    }

    /// The name the command line takes.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default()
    }
}

/// The caches of one model.
pub struct Memory {
    pub kv: PagedKvCache,
    /// Per layer: `[pages, page_size, index_head_dim]` on sparse layers.
    index_keys: Vec<Option<Tensor>>,
    pub kind: KvKind,
}

impl Memory {
    /// Room for `pages` pages. Sparse layers attend whole pages, so there the page size must be the indexer's block size.
    pub fn new(config: &Config, kind: KvKind, pages: usize, page_size: usize, dtype: DType, devices: &Devices) -> Result<Self> {
        let block_size = config.indexer.block_size;
        ensure!(
            !config.has_sparse_layers() || page_size == block_size,
            "page_size: {page_size}, but the sparse layers select blocks of {block_size} keys, which must be the pages"
        );
        let dims = CacheDims { pages, page_size, kv_heads: config.kv_heads, head_dim: config.head_dim };
        let layers = config.layers.len();
        let cache = CacheConfig { layers, dims, dtype: kind.dtype(), layout: None, quantization: kind.quantization() };
        let index_keys = |sparse: bool| match sparse {
            true => Tensor::zeros((pages, page_size, config.indexer.head_dim), dtype, &devices.model).map(Some),
            false => Ok(None),
        };
        Ok(Self {
            kv: PagedKvCache::new(cache, devices.cache())?,
            index_keys: config.layers.iter().map(|layer| index_keys(layer.sparse)).collect::<candle::Result<_>>()?,
            kind,
        })
    }

    /// Compiles the attention kernels of every step of up to `sequences` sequences and `rows` rows, of tables of up to `columns` pages: whole sequences on
    /// the dense layers, rows on the sparse ones. Gives how many kernels that took.
    pub fn warm_up(&self, config: &Config, dtype: DType, sequences: usize, rows: usize, columns: usize) -> candle::Result<usize> {
        let dense = ExpectedCalls {
            batch: sequences,
            query_len: rows,
            max_pages: columns,
            ragged: true,
            ..ExpectedCalls::new(config.q_heads, dtype)
        };
        let mut kernels = self.kv.warm_up(&dense)?;
        if config.has_sparse_layers() {
            let max_pages = columns.min(config.indexer.top_blocks);
            let sparse = ExpectedCalls { batch: rows, query_len: 1, max_pages, ragged: false, per_head_tables: true, ..dense };
            kernels += self.kv.warm_up(&sparse)?;
        }
        Ok(kernels)
    }

    /// Writes the rows' index keys `[rows, index_head_dim]` to their slots.
    pub fn write_index_keys(&self, layer: usize, keys: &Tensor, slot_mapping: &Tensor) -> candle::Result<()> {
        let pages = self.index_pages(layer)?;
        let slots = slot_mapping.unsqueeze(1)?.broadcast_as(keys.shape())?.contiguous()?;
        pages.flatten(0, 1)?.scatter_set(&slots, &keys.contiguous()?, 0)
    }

    /// Index keys of whole `pages`, `[pages * page_size, index_head_dim]` in F32.
    pub fn index_keys(&self, layer: usize, pages: &[u32]) -> candle::Result<Tensor> {
        let ids = Tensor::new(pages, self.index_pages(layer)?.device())?;
        self.index_pages(layer)?.index_select(&ids, 0)?.flatten(0, 1)?.to_dtype(DType::F32)
    }

    fn index_pages(&self, layer: usize) -> candle::Result<&Tensor> {
        match self.index_keys.get(layer) {
            Some(Some(pages)) => Ok(pages),
            _ => candle::bail!("layer {layer} has no index keys"),
        }
    }
}
