//! AMD GPUs through the HIP runtime.
