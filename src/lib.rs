//! Paged-attention decode for candle: one op that plugs into a model's `forward`, a planner that balances batches of mixed context lengths, a
//! registry that picks the kernel by arch and shape and says why, and a paged KV cache.
//!
//! - [`AppendAndAttend`] writes a step's new tokens into a [`cache::PagedKvCache`] and attends; [`cache::PagePool`] hands out the pages.
//! - [`paged_decode`] and its kin attend over cache tensors that the caller owns ([`cache::CacheLayout`] lists the layouts).
//! - [`plan`] splits a batch into tasks, [`registry`] chooses kernels; both are pure and usable by themselves.
//!
//! ```
//! use candle::{DType, Device, Result, Tensor};
//! use candle_paged_attn::cache::{CacheConfig, CacheDims, KvDtype, PagePool, PagedKvCache, Quantization};
//! use candle_paged_attn::AppendAndAttend;
//! # fn main() -> Result<()> {
//! let device = Device::Cpu;
//! let dims = CacheDims { pages: 64, page_size: 16, kv_heads: 2, head_dim: 64 };
//! let config = CacheConfig { layers: 1, dims, dtype: KvDtype::Bf16, layout: None, quantization: Quantization::None };
//! let cache = PagedKvCache::new(config, &device)?;
//! let mut pool = PagePool::new(dims.pages, dims.page_size)?;
//! let sequence = pool.allocate();
//! let prompt = [11, 12, 13, 14, 15];
//! let append = pool.append(sequence, &prompt)?;
//! cache.copy_pages(&append.copies)?;
//! let batch = pool.batch(&[(sequence, &append)], &device)?;
//! // In each layer of the model, with q, k and v of the new tokens after RoPE:
//! let [q, k, v] = [8, 2, 2].map(|heads| Tensor::zeros((prompt.len(), heads, dims.head_dim), DType::BF16, &device));
//! let out = AppendAndAttend::new(&cache, 0, &batch)?.apply(&q?, &k?, &v?)?;
//! assert_eq!(out.dims(), [prompt.len(), 8, dims.head_dim]);
//! pool.commit(sequence)?;
//! # Ok(())
//! # }
//! ```
//!
//! | | CPU | CUDA (feature `cuda`: sm80, sm89, sm90) | ROCm (feature `rocm`: gfx942, gfx950) |
//! |---|---|---|---|
//! | K and V | F32, F16, BF16, FP8 in every layout; MXFP4 in Nhd and Hnd | the same; on tensor cores F16, BF16 and FP8 in Nhd and Hnd | F16, BF16, FP8 (Shuffled, Vllm); MXFP4 on gfx950 (Hnd, Nhd) |
//! | windows, sinks, softcap, ragged batches, per-head tables, LSE | yes | yes | yes |
//! | head_dim; page size | multiples of 8 to 1024; 1 to 1024 | the same; on tensor cores 64, 128 and 256 (FP8: 128, 256) | 64, 128, 192, 256, 512, 1024; powers of two from 8 (FP8: 16) to 1024 |
//! | cache writes, copies and reads of pages | yes | yes | yes |
//! | graphs, plans made on the device | | yes | yes |
//! | checked | against float64 | against float64, on an H200; sm80, sm89 and sm90 on a simulator of PTX | against float64, on a simulator of the GPU's instructions |
//!
//! # Features
//!
//! - `rocm`: AMD GPUs, the module `rocm`: [`cache::PagedKvCache`] and [`AppendAndAttend`] on a device that
//!   candle has no tensors for, and calls over tensors there. Nothing of ROCm is linked: it is looked for when a device is opened.
//! - `cuda`: NVIDIA GPUs, the same calls and caches over tensors of candle's CUDA device: the module `cuda`.
//! - `nvrtc`: the compiler of NVIDIA kernels without a device, to fill the cache of compiled kernels.
//!
//! # Environment
//!
//! | variable | what it does |
//! |---|---|
//! | `CANDLE_PAGED_ATTN_CPU_ISA` | the CPU's instruction set: see [`cpu_instruction_sets`] |
//! | `CANDLE_PAGED_ATTN_RECORD` | a folder into which every call is recorded: see [`Case`] |
//! | `CANDLE_PAGED_ATTN_CLANG`, `ROCM_PATH` | the compiler of AMD kernels (`rocm`) |
//! | `CANDLE_PAGED_ATTN_NVRTC`, `CUDA_HOME`, `CUDA_PATH` | the compiler of NVIDIA kernels (`cuda`, `nvrtc`) |
//! | `CANDLE_PAGED_ATTN_CACHE`, `XDG_CACHE_HOME` | where compiled kernels are kept (`rocm`, `cuda`) |
//! | `HIP_PATH`, `ROCM_PATH` | where the HIP runtime is looked for (`rocm`) |

#![warn(missing_docs)]

mod append;
pub mod cache;
mod case;
mod cpu;
#[cfg(feature = "nvrtc")]
pub mod cuda;
#[cfg(any(feature = "rocm", feature = "nvrtc"))]
pub(crate) mod gpu;
#[cfg(feature = "jit")]
pub mod jit;
mod op;
mod options;
pub mod plan;
pub mod quant;
pub mod registry;
#[cfg(feature = "rocm")]
pub mod rocm;

pub use append::AppendAndAttend;
pub use case::Case;
pub use op::{CallSummary, PagedDecode, explain_call, merge_attention_states, paged_decode, paged_decode_into, paged_decode_with_lse};
pub use options::{DecodeOptions, KvScale, PlanChoice};

/// The instruction sets of this machine that the CPU kernels are written for, best first. Calls use the first, or the one that the
/// environment variable `CANDLE_PAGED_ATTN_CPU_ISA` names (read once).
pub fn cpu_instruction_sets() -> Vec<registry::CpuIsa> {
    registry::CpuIsa::ALL.into_iter().filter(|isa| cpu::available(*isa)).collect()
}

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
