//! Gemma-style RMSNorm: computed in F32, scaled by the weight plus one.

use candle::{DType, Device, Result, Tensor};

use super::checkpoint::Checkpoint;
use super::config::Config;

pub struct RmsNorm {
    /// Weight plus one, F32.
    scale: Tensor,
    eps: f32,
}

impl RmsNorm {
    pub fn load(checkpoint: &Checkpoint, name: &str, config: &Config, device: &Device) -> anyhow::Result<Self> {
        let weight = checkpoint.load(name, DType::F32, device)?;
        Ok(Self { scale: (weight + 1.0)?, eps: config.rms_norm_eps })
    }

    /// Normalizes the last dim of `x`; the result has x's dtype.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = candle_nn::ops::rms_norm(&x.to_dtype(DType::F32)?.contiguous()?, &self.scale, self.eps)?;
        normed.to_dtype(x.dtype())
    }
}
