//! The ROCm runtime layer: memory, copies, launches, graphs, errors, on the HIP runtime that is found (a GPU's, or the simulator's).
#![cfg(feature = "rocm")]

mod errors;
mod graphs;
mod injection;
mod launches;
mod memory;
mod pool;
mod support;
