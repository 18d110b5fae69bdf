//! NVIDIA GPUs through candle's CUDA device.

pub mod specialize;
