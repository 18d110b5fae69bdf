//! How a cache tensor maps (page, head, token, dim) to an element.

use candle::{DType, Layout, Result, bail};

/// What one stored K or V element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KvDtype {
    /// 32-bit floats.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// E4M3, OCP encoding (candle's `DType::F8E4M3`).
    Fp8,
    /// E2M1 nibbles packed two a byte along head_dim (candle's `DType::U8`), one E8M0 scale per 32 elements.
    Mxfp4,
}

/// Elements of head_dim that share one E8M0 scale in an MXFP4 cache.
pub const MXFP4_BLOCK: usize = 32;

impl KvDtype {
    /// The KV dtype stored in tensors of `dtype`; `U8` means MXFP4.
    pub fn of(dtype: DType) -> Result<Self> {
        Ok(match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16,
            DType::F8E4M3 => Self::Fp8,
            DType::U8 => Self::Mxfp4,
            other => bail!("key_cache: dtype {other:?} is not a KV dtype (F32, F16, BF16, F8E4M3, or U8 for MXFP4)"),
        })
    }

    /// The candle dtype of a cache tensor.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
            Self::Fp8 => DType::F8E4M3,
            Self::Mxfp4 => DType::U8,
        }
    }

    /// Bits of one element, scales apart.
    pub fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::Fp8 => 8,
            Self::Mxfp4 => 4,
        }
    }

    /// Elements in 16 bytes: the `x` of the Vllm and Shuffled layouts.
    pub fn elements_per_16_bytes(self) -> usize {
        128 / self.bits()
    }

    /// Short lower-case name, as in kernel names and replay files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Mxfp4 => "mxfp4",
        }
    }
}

/// Where a (page, head, token, dim) element lies. `x` is the number of elements in 16 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CacheLayout {
    /// K and V `[pages, page_size, kv_heads, head_dim]` (FlashAttention, FlashInfer, candle-flash-attn).
    #[default]
    Nhd,
    /// K and V `[pages, kv_heads, page_size, head_dim]`.
    Hnd,
    /// K `[pages, kv_heads, head_dim/x, page_size, x]`, V `[pages, kv_heads, head_dim, page_size]` (vLLM, mistral.rs).
    Vllm,
    /// K as [`CacheLayout::Vllm`], V `[pages, kv_heads, page_size/x, head_dim, x]` (the AMD kernels' own).
    Shuffled,
}

impl CacheLayout {
    /// Every layout, for tests and tables.
    pub const ALL: [Self; 4] = [Self::Nhd, Self::Hnd, Self::Vllm, Self::Shuffled];

    /// Lower-case name, as in replay files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nhd => "nhd",
            Self::Hnd => "hnd",
            Self::Vllm => "vllm",
            Self::Shuffled => "shuffled",
        }
    }

    /// The layout called `name` (see [`CacheLayout::name`]).
    pub fn from_name(name: &str) -> Result<Self> {
        match Self::ALL.into_iter().find(|l| l.name() == name) {
            Some(layout) => Ok(layout),
            None => bail!("layout: {name:?} is not one of nhd, hnd, vllm, shuffled"),
        }
    }

    /// Refuses a layout that cannot hold this dtype and these sizes.
    pub fn check(self, dims: CacheDims, dtype: KvDtype) -> Result<()> {
        let x = dtype.elements_per_16_bytes();
        let CacheDims { page_size, head_dim, .. } = dims;
        match (self, dtype) {
            (Self::Vllm | Self::Shuffled, KvDtype::Mxfp4) => {
                bail!("layout: an MXFP4 cache is nhd or hnd, not {}", self.name())
            }
            (Self::Vllm | Self::Shuffled, _) if !head_dim.is_multiple_of(x) => {
                bail!("layout: {} needs a head_dim that {x} divides, got {head_dim}", self.name())
            }
            (Self::Vllm | Self::Shuffled, _) if !page_size.is_multiple_of(x) => {
                bail!("layout: {} needs a page_size that {x} divides, got {page_size}", self.name())
            }
            (_, KvDtype::Mxfp4) if !head_dim.is_multiple_of(MXFP4_BLOCK) => {
                bail!("head_dim: an MXFP4 cache needs a multiple of {MXFP4_BLOCK}, got {head_dim}")
            }
            _ => Ok(()),
        }
    }

    /// Shape of the K cache tensor.
    pub fn key_shape(self, dims: CacheDims, dtype: KvDtype) -> Vec<usize> {
        let CacheDims { pages, page_size, kv_heads, head_dim } = dims;
        let x = dtype.elements_per_16_bytes();
        let stored = if dtype == KvDtype::Mxfp4 { head_dim / 2 } else { head_dim };
        match self {
            Self::Nhd => vec![pages, page_size, kv_heads, stored],
            Self::Hnd => vec![pages, kv_heads, page_size, stored],
            Self::Vllm | Self::Shuffled => vec![pages, kv_heads, head_dim / x, page_size, x],
        }
    }

    /// Shape of the V cache tensor.
    pub fn value_shape(self, dims: CacheDims, dtype: KvDtype) -> Vec<usize> {
        let CacheDims { pages, page_size, kv_heads, head_dim } = dims;
        let x = dtype.elements_per_16_bytes();
        match self {
            Self::Nhd | Self::Hnd => self.key_shape(dims, dtype),
            Self::Vllm => vec![pages, kv_heads, head_dim, page_size],
            Self::Shuffled => vec![pages, kv_heads, page_size / x, head_dim, x],
        }
    }

    /// Sizes read off a K cache shape; `x` is checked against `dtype`.
    pub fn dims_of_key(self, shape: &[usize], dtype: KvDtype) -> Result<CacheDims> {
        let unpack = if dtype == KvDtype::Mxfp4 { 2 } else { 1 };
        let head_dim = |a: usize, b: usize| match a.checked_mul(b) {
            Some(head_dim) => Ok(head_dim),
            None => bail!("key_cache: the heads of {shape:?} pass the address space"),
        };
        let dims = match (self, shape) {
            (Self::Nhd, &[pages, page_size, kv_heads, d]) | (Self::Hnd, &[pages, kv_heads, page_size, d]) => {
                CacheDims { pages, page_size, kv_heads, head_dim: head_dim(d, unpack)? }
            }
            (Self::Vllm | Self::Shuffled, &[pages, kv_heads, chunks, page_size, x]) => {
                let expected = dtype.elements_per_16_bytes();
                if x != expected {
                    bail!("key_cache: the last dim of a {} cache of {dtype:?} is {expected}, got {shape:?}", self.name())
                }
                CacheDims { pages, page_size, kv_heads, head_dim: head_dim(chunks, x)? }
            }
            _ => {
                let fitting: Vec<_> = Self::ALL.into_iter().filter(|l| l.key_rank() == shape.len()).map(Self::name).collect();
                let hint = if fitting.is_empty() {
                    String::new()
                } else {
                    format!(" (as {} caches have: is the layout given the cache's own?)", fitting.join(" and "))
                };
                bail!("key_cache: a {} cache has {} dims, got {shape:?}{hint}", self.name(), self.key_rank())
            }
        };
        Ok(dims)
    }

    fn key_rank(self) -> usize {
        match self {
            Self::Nhd | Self::Hnd => 4,
            Self::Vllm | Self::Shuffled => 5,
        }
    }

    /// Strides of a K cache tensor whose candle layout is `layout` (shape already checked), in stored elements.
    pub fn key_strides(self, layout: &Layout) -> KvStrides {
        let s = layout.stride();
        let start = layout.start_offset();
        match self {
            Self::Nhd => KvStrides::rows(start, s[0], s[2], s[1]),
            Self::Hnd => KvStrides::rows(start, s[0], s[1], s[2]),
            Self::Vllm | Self::Shuffled => KvStrides {
                start,
                page: s[0],
                head: s[1],
                token: s[3],
                token_chunk: usize::MAX,
                token_chunk_stride: 0,
                dim: s[4],
                dim_chunk: layout.dims()[4],
                dim_chunk_stride: s[2],
            },
        }
    }

    /// Strides of a V cache tensor, as [`CacheLayout::key_strides`].
    pub fn value_strides(self, layout: &Layout) -> KvStrides {
        let s = layout.stride();
        let start = layout.start_offset();
        match self {
            Self::Nhd | Self::Hnd => self.key_strides(layout),
            Self::Vllm => KvStrides { dim: s[2], ..KvStrides::rows(start, s[0], s[1], s[3]) },
            Self::Shuffled => KvStrides {
                start,
                page: s[0],
                head: s[1],
                token: s[4],
                token_chunk: layout.dims()[4],
                token_chunk_stride: s[2],
                dim: s[3],
                dim_chunk: usize::MAX,
                dim_chunk_stride: 0,
            },
        }
    }
}

/// Sizes of one layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheDims {
    /// Pages.
    pub pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
}

/// Element offsets of a cache tensor:
/// `start + page*page' + head*head' + (token / token_chunk)*token_chunk_stride + (token % token_chunk)*token'` and likewise for dim.
/// A chunk of `usize::MAX` means the axis is not split. For MXFP4 an element is a byte of two dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvStrides {
    /// Offset of page 0, head 0, token 0, dim 0.
    pub start: usize,
    /// From a page to the next.
    pub page: usize,
    /// From a KV head to the next.
    pub head: usize,
    /// From a token to the next in its chunk.
    pub token: usize,
    /// Tokens of a chunk.
    pub token_chunk: usize,
    /// From a chunk of tokens to the next.
    pub token_chunk_stride: usize,
    /// From a dim to the next in its chunk.
    pub dim: usize,
    /// Dims of a chunk.
    pub dim_chunk: usize,
    /// From a chunk of dims to the next.
    pub dim_chunk_stride: usize,
}

impl KvStrides {
    fn rows(start: usize, page: usize, head: usize, token: usize) -> Self {
        Self {
            start,
            page,
            head,
            token,
            token_chunk: usize::MAX,
            token_chunk_stride: 0,
            dim: 1,
            dim_chunk: usize::MAX,
            dim_chunk_stride: 0,
        }
    }

    /// Strides of a scale tensor `[pages, kv_heads, page_size]` or `[pages, kv_heads, page_size, blocks]`, blocks contiguous.
    pub fn of_scale(layout: &Layout) -> Self {
        let s = layout.stride();
        Self::rows(layout.start_offset(), s[0], s[1], s[2])
    }

    /// The contiguous or evenly strided runs of a row of `width` dims: (first dim, dims, offset of the first), dims `self.dim` apart.
    pub(crate) fn runs(&self, page: usize, head: usize, token: usize, width: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let row = self.offset(page, head, token, 0);
        let (chunk, stride) = (self.dim_chunk.min(width), self.dim_chunk_stride);
        (0..width.div_ceil(chunk)).map(move |c| (c * chunk, chunk.min(width - c * chunk), row + c * stride))
    }

    /// Offset of one element in the storage.
    pub fn offset(&self, page: usize, head: usize, token: usize, dim: usize) -> usize {
        self.start
            + page * self.page
            + head * self.head
            + (token / self.token_chunk) * self.token_chunk_stride
            + (token % self.token_chunk) * self.token
            + (dim / self.dim_chunk) * self.dim_chunk_stride
            + (dim % self.dim_chunk) * self.dim
    }
}
