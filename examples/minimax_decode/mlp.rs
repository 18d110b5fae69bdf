//! The gated MLP of dense layers, experts and shared experts.

use candle::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module};

use super::checkpoint::Checkpoint;
use super::config::Config;

pub struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    alpha: f64,
    limit: f64,
}

impl Mlp {
    pub fn load(
        checkpoint: &Checkpoint,
        prefix: &str,
        names: [&str; 3],
        config: &Config,
        dtype: DType,
        device: &Device,
    ) -> anyhow::Result<Self> {
        let [gate, up, down] = names.map(|name| linear(checkpoint, &format!("{prefix}.{name}.weight"), dtype, device));
        Ok(Self { gate: gate?, up: up?, down: down?, alpha: config.swiglu_alpha, limit: config.swiglu_limit })
    }

    /// `down((up + 1) * gate * sigmoid(alpha * gate))`, the gate capped at the limit and up clamped to it on both sides.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = self.gate.forward(x)?.minimum(self.limit)?;
        let up = self.up.forward(x)?.clamp(-self.limit, self.limit)?;
        let gated = (&gate * candle_nn::ops::sigmoid(&(&gate * self.alpha)?)?)?;
        self.down.forward(&((up + 1.0)? * gated)?)
    }
}

/// A projection without bias.
pub fn linear(checkpoint: &Checkpoint, name: &str, dtype: DType, device: &Device) -> anyhow::Result<Linear> {
    Ok(Linear::new(checkpoint.load(name, dtype, device)?, None))
}
