//! Attention on AMD GPUs: the op's contracts through the calls that engines make, on the HIP runtime that is found (a GPU's, or the simulator's).
#![cfg(feature = "rocm")]

mod append;
mod cache;
mod cases;
mod device;
mod graphs;
mod properties;
mod support;
mod workloads;
