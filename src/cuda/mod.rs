//! NVIDIA GPUs through candle's CUDA device.
//!
//! With the feature `cuda` the ops of this crate run on tensors of a CUDA device of candle: [`crate::paged_decode`] and its kin, and
//! [`crate::AppendAndAttend`] over a [`crate::cache::PagedKvCache`] made there. Everything is enqueued on the device's stream; nothing waits, but
//! where tables on the device are to be validated ([`crate::DecodeOptions::validate`], the default of debug builds).
//!
//! # Tables and plans
//!
//! - Tables, lengths and `query_start` on the CPU are checked, planned for and uploaded in every call.
//! - On the device they are used where they are. The plan is made there too, by a kernel of one block, so that a captured graph plans anew in
//!   every replay; or it is the given one. Page ids are clamped to the cache.
//! - A call begins while the kernel ahead of it in the stream ends. It waits for that before it reads anything, but behind a cache write of its own, or where
//!   the caller gives the promise [`crate::DecodeOptions::tables_settled`], tables and plans are read ahead of that wait.
//!
//! # Graphs
//!
//! A call can be captured once it was made before with the same shapes and options: that compiles its kernels and uploads what stays. Events are not to be
//! tracked on the device (`CudaDevice::disable_event_tracking` before the tensors are made). A graph is replayed on the stream it was captured on, or in turn with it:
//! the scratch memory is the stream's and the thread's, so the call before the capture is made on the thread that captures, and the capture is of that thread
//! (`CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`; outputs that candle allocates within it want `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`).
//! What a graph reads are the tensors of the capture: slots, tables, lengths, q, k and v of later steps are copied into them. The tables' width and the longest
//! query are the captured call's.
//!
//! # Kernels
//!
//! Compiled at their first use with [`crate::jit::JitSettings`]'s default, or what `set_jit_settings` was given (another cache, a callback that hears of each
//! kernel), or before it by [`crate::cache::PagedKvCache::warm_up`], or where no GPU is, from what [`expected_kernels`] lists: see
//! [`crate::jit`]. The feature `nvrtc` is that alone, without a device. [`Decided`] is what would run of a call, known without a GPU too.

#[cfg(feature = "cuda")]
mod append;
#[cfg(feature = "cuda")]
mod copy;
#[cfg(feature = "cuda")]
mod decide;
mod decided;
#[cfg(feature = "cuda")]
mod decode;
#[cfg(feature = "cuda")]
mod device;
mod expected;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod record;
#[cfg(feature = "cuda")]
mod small;
pub mod specialize;
#[cfg(feature = "cuda")]
mod strides;
#[cfg(feature = "cuda")]
mod warm_up;
#[cfg(feature = "cuda")]
mod workspace;
#[cfg(feature = "cuda")]
mod write;

#[cfg(feature = "cuda")]
pub(crate) use append::append_and_attend;
#[cfg(feature = "cuda")]
pub(crate) use copy::{copy_pages, read_pages};
pub use decided::{Decided, Tables};
#[cfg(feature = "cuda")]
pub(crate) use decode::{Operand, attend_into, attend_new, explain};
#[cfg(feature = "cuda")]
pub use device::{arch_of, loaded_kernels, set_jit_settings};
pub use expected::expected_kernels;
#[cfg(feature = "cuda")]
pub(crate) use memory::elements;
#[cfg(feature = "cuda")]
pub(crate) use warm_up::warm_up;
#[cfg(feature = "cuda")]
pub(crate) use write::CacheWrite;
