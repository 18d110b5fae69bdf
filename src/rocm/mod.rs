//! AMD GPUs through the HIP runtime.
//!
//! A [`RocmDevice`] is one GPU with a stream on which all its work happens in order, a pool of device memory, and the kernels loaded so far.
//! [`RocmTensor`]s live in its memory: candle has no ROCm device of its own, so tensors are copied from and to candle's CPU tensors, through
//! pinned memory. [`RocmDevice::capture`] records work as a [`RocmGraph`] that can be replayed with other contents of the same tensors.
//!
//! # Attention
//!
//! Three ways, from the one that asks least of a program:
//!
//! - a [`PagedKvCache`](crate::cache::PagedKvCache) made with a `&RocmDevice`: [`AppendAndAttend`](crate::AppendAndAttend) takes candle's CPU tensors and
//!   gives one back, the cache stays on the GPU;
//! - [`decode`], [`decode_with_lse`] and [`decode_into`] over tensors on the GPU: the work is enqueued, nothing waits, and it can be captured. A
//!   [`RocmPlan`] made once for a batch's shape is refreshed there each step, also inside a graph;
//! - [`paged_decode`] over candle's CPU tensors copies everything, the cache too: for tests and recorded calls.
//!
//! FP8 tensors hold the GPU's own encoding: OCP E4M3, but FNUZ on gfx942. The first and the last way convert; [`crate::quant::fp8::ocp_to_fnuz`] does it for
//! tensors of the second.
//!
//! # What is opened
//!
//! The feature `rocm` links nothing: a program starts where ROCm is not installed. The first use of a device opens `libamdhip64.so`
//! (ROCm 6 or newer), the first of these that is there, and keeps it open:
//!
//! | | |
//! |---|---|
//! | `$HIP_PATH/lib` | where `HIP_PATH` is set |
//! | `$ROCM_PATH/lib` | where `ROCM_PATH` is set |
//! | `/opt/rocm/lib` | ROCm's own place |
//! | where the loader looks | `LD_LIBRARY_PATH`, `ldconfig` |
//!
//! Building with the feature wants `HIP_PATH` (or `/opt/rocm`) with `include/hip/hip_runtime_api.h`, and `lib/libamdhip64.so` to link a program.
//! Which GPUs there are is the runtime's to say (`ROCR_VISIBLE_DEVICES`, `HIP_VISIBLE_DEVICES`). Kernels are compiled at their first use: see [`crate::jit`].
//!
//! # Errors
//!
//! Each is a candle error that names what is wrong:
//!
//! - no HIP runtime: the places looked at; a runtime too old: the function that it lacks;
//! - no AMD GPU, or no such ordinal: how many there are;
//! - a GPU that there are no kernels for: its arch and the supported ones;
//! - no compiler, and no compiled kernel in the cache: at a kernel's first use (see [`crate::jit`]);
//! - a HIP call that failed: its name, the runtime's text, name and number of the code, what was asked for, and the device:
//!   `hipMalloc: out of memory (hipErrorOutOfMemory, 2), asked for 4096 bytes on device 0 (gfx950)`. Out of memory comes after the pool has given
//!   back all it kept. The call after a failed one works, unless the device is lost:
//! - a device that is lost (a kernel touched memory that is not there, or failed otherwise): that first error, for this call and every later one.
//!   Nothing in the process can bring the device back; a new process can. (For some faults ROCm itself ends the process.)
//! - what a graph cannot hold, while one is captured: uploads, downloads, waiting, loading a kernel, memory that the pool has not; see
//!   [`RocmDevice::capture`].
//!
//! # Memory
//!
//! Freed memory is kept, up to [`DeviceSettings::pool_cap_bytes`], and handed out again at once: the stream's order makes that safe. A
//! graph keeps the memory that it uses until it is dropped. [`RocmDevice::counts`] tells what is in use and what is kept.

mod context;
mod decode;
mod device;
mod error;
mod graph;
mod hip;
mod host;
mod launch;
mod module;
mod pages;
mod pinned;
mod plan;
mod pool;
mod scalar;
mod scale;
pub mod specialize;
mod staged;
mod storage;
mod stream;
mod strides;
mod tensor;

pub use decode::{RocmOptions, decode, decode_into, decode_with_lse};
pub use device::{Counts, DeviceSettings, RocmDevice};
pub use graph::RocmGraph;
pub use module::Kernel;
pub use pages::RocmPages;
pub use pinned::Upload;
pub use plan::{PlanShape, RocmPlan};
pub use staged::{explain_call, paged_decode};
pub use storage::RocmStorage;
pub use tensor::RocmTensor;
