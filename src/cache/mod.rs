//! The KV cache: layouts, pages, writes. A [`PagedKvCache`] has the tensors, a [`PagePool`] of the same page size says whose page is whose.

mod batch;
mod copy;
mod form;
mod gather;
mod layout;
mod overlap;
mod pool;
mod prefix;
mod rows;
mod store;
mod warm_up;
mod write;

pub use batch::Batch;
pub use copy::copy_pages;
pub use gather::gather;
pub use layout::{CacheDims, CacheLayout, KvDtype, KvStrides, MXFP4_BLOCK};
pub use pool::{Append, NO_PAGE, PagePool, SeqId};
pub use store::{CacheConfig, LayerCache, PagedKvCache, Placement, Quantization};
pub use warm_up::ExpectedCalls;
pub use write::reshape_and_cache;

#[cfg(feature = "nvrtc")]
pub(crate) use form::LayerForm;
pub(crate) use form::{Lent, check_bounds, shares_storage};
#[cfg(any(feature = "rocm", feature = "cuda"))]
pub(crate) use write::last_writes;
#[cfg(feature = "rocm")]
pub(crate) use {copy::check_pairs, gather::gather_as, gather::needed_pages, store::layer_of, write::check_tokens};
#[cfg(feature = "cuda")]
pub(crate) use {
    copy::{PageRuns, page_runs},
    form::{ScaleForm, Side},
    rows::check_new_tokens,
    write::{check_apart, check_as_many, checked_slots},
};
