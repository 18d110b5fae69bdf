//! AMD GPUs through the HIP runtime.

pub mod specialize;
