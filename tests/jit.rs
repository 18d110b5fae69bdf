//! From specialization to code object: the search for a compiler, the cache on disk, what is told on the way. No GPU, and mostly no compiler:
//! scripts stand in for clang, so that what is called, and how often, can be counted.
#![cfg(all(feature = "rocm", unix))]

#[path = "jit/cache.rs"]
mod cache;
#[path = "jit/clang.rs"]
mod clang;
#[path = "jit/fake.rs"]
mod fake;
#[path = "jit/processes.rs"]
mod processes;
