//! From kernel sources and a specialization to a code object: an on-disk cache, and clang or NVRTC where the cache has no entry.
//!
//! The sources are part of this crate. A kernel is compiled on first use: for AMD by a clang of version 20 or newer, LLVM's (with lld) or ROCm's (from
//! ROCm 7 on; that of ROCm 6 is older; ROCm's headers and device libraries are not needed), for NVIDIA by the NVRTC library of CUDA 12 or newer.
//! What was compiled is kept in a cache folder that processes share, so each kernel costs its seconds
//! once; a cache filled beforehand (`examples/precompile`) makes the compiler unnecessary.
//!
//! | environment | what it sets |
//! |---|---|
//! | `CANDLE_PAGED_ATTN_CLANG` | the compiler; only this one is tried |
//! | `ROCM_PATH` | its `llvm/bin/clang` is tried first, then `/opt/rocm/llvm/bin/clang`, then PATH: `clang`, `clang-24` to `clang-20` |
//! | `CANDLE_PAGED_ATTN_NVRTC` | the NVRTC library; only this one is tried. Else `libnvrtc.so.13`, `.12` and without a number, as the loader finds them, then in `$CUDA_HOME/lib64`, `$CUDA_PATH/lib64` and `/usr/local/cuda/lib64` |
//! | `CANDLE_PAGED_ATTN_CACHE` | the cache folder; else `$XDG_CACHE_HOME/candle-paged-attn`, else `~/.cache/candle-paged-attn` |

mod cache;
mod clang;
mod compiler;
mod event;
mod nvrtc;
mod recipe;
mod search;
mod sources;
mod specialization;
mod toolchain;

pub use compiler::{Compiler, JitSettings};
pub use event::{JitEvent, Progress};
pub use sources::Source;
pub use specialization::Specialization;
