//! The KV cache: layouts, pages, writes.

mod layout;

pub use layout::{CacheDims, CacheLayout, KvDtype, KvStrides, MXFP4_BLOCK};
mod store;
pub use store::{CacheConfig, LayerCache, PagedKvCache, Quantization};
