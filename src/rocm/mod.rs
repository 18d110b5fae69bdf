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
//! The second way, a step of two sequences: planned on the GPU, attended, and captured so that later steps replay it.
//!
//! ```no_run
//! use candle::{DType, Device, Result, Tensor};
//! use candle_paged_attn::PlanChoice;
//! use candle_paged_attn::cache::{CacheConfig, CacheDims, KvDtype, PagedKvCache, Quantization};
//! use candle_paged_attn::rocm::{self, PlanShape, RocmDevice, RocmPlan, RocmTensor};
//! # fn main() -> Result<()> {
//! let device = RocmDevice::new(0)?;
//! let dims = CacheDims { pages: 64, page_size: 16, kv_heads: 2, head_dim: 64 };
//! let config = CacheConfig { layers: 1, dims, dtype: KvDtype::Bf16, layout: None, quantization: Quantization::None };
//! let cache = PagedKvCache::new(config, &device)?;
//! // Made once, as large as they get: a graph reads these tensors, whatever they hold by then.
//! let q = RocmTensor::zeros((2, 8, 64), DType::BF16, &device)?;
//! let out = RocmTensor::zeros((2, 8, 64), DType::BF16, &device)?;
//! let tables = RocmTensor::zeros((2, 32), DType::U32, &device)?; // 32 pages a sequence at most
//! let lens = RocmTensor::zeros(2, DType::U32, &device)?;
//! let shape = PlanShape {
//!     batch: 2,
//!     q_heads: 8,
//!     kv_heads: 2,
//!     per_head_tables: false,
//!     query_len: 1,
//!     ragged: false,
//!     window: None,
//!     max_partitions: None,
//!     workgroup_budget: None,
//! };
//! let plan = RocmPlan::new(shape, &device)?;
//! let mut options = cache.rocm_decode_options(0)?;
//! options.plan = PlanChoice::Given(plan.clone());
//! let layer = cache.rocm_layer(0)?;
//! let attend = || {
//!     plan.refresh(&lens, None)?; // once a step, before its first layer
//!     rocm::decode_into(&out, None, &q, &layer.key, &layer.value, &tables, &lens, &options)
//! };
//! # let (host_q, k) = (Tensor::zeros((2, 8, 64), DType::BF16, &Device::Cpu)?, Tensor::zeros((2, 2, 64), DType::BF16, &Device::Cpu)?);
//! # let (v, slots) = (k.clone(), Tensor::new(&[0i64, 16], &Device::Cpu)?);
//! # let (host_tables, host_lens) = (Tensor::zeros((2, 32), DType::U32, &Device::Cpu)?, Tensor::new(&[1u32, 1], &Device::Cpu)?);
//! // A step: CPU tensors of a `PagePool`'s pages, lengths and slots. Uploads are outside the graph.
//! cache.write(0, &k, &v, &slots)?;
//! q.copy_from(&host_q)?;
//! tables.copy_from(&host_tables)?;
//! lens.copy_from(&host_lens)?;
//! attend()?; // the first step compiles and loads the kernels
//! let graph = device.capture(attend)?; // recorded, not run
//! graph.replay()?; // every later step, in place of `attend`
//! let result = out.to_tensor()?; // waits
//! # Ok(())
//! # }
//! ```
//!
//! [`PagedKvCache::write`](crate::cache::PagedKvCache::write) takes K and V from the CPU. Where they are on the GPU already, the program writes them to
//! [`rocm_layer`](crate::cache::PagedKvCache::rocm_layer)'s tensors with a kernel of its own ([`RocmDevice::load`], [`RocmDevice::launch`]). Tensors are of
//! memory that the device allocated; memory and streams of other libraries cannot be taken in.
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
//! Building is another matter, as a dependency looks for a ROCm: it wants `HIP_PATH` (or `/opt/rocm`) with `include/hip/hip_runtime_api.h`, and
//! `lib/libamdhip64.so`, which the linker is shown and the program does not keep.
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
mod reducer;
mod scalar;
mod scale;
pub mod specialize;
mod staged;
mod storage;
mod stream;
mod strides;
mod tensor;

pub use crate::gpu::plan_shape::PlanShape;
pub use decode::{RocmOptions, decode, decode_into, decode_with_lse};
pub use device::{Counts, DeviceSettings, RocmDevice};
pub use graph::RocmGraph;
pub use module::Kernel;
pub use pages::RocmPages;
pub use pinned::Upload;
pub use plan::RocmPlan;
pub use staged::{explain_call, paged_decode};
pub use storage::RocmStorage;
pub use tensor::RocmTensor;
