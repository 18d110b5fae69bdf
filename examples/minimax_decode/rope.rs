//! Rotary position embedding (rotate-half) over the first `rotary_dim` channels of a head.

use candle::{D, DType, Device, Result, Tensor};

/// Cosines and sines of the positions of one step's rows.
pub struct Rope {
    /// `[rows, rotary_dim / 2]`.
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    pub fn new(positions: &[usize], theta: f32, rotary_dim: usize, dtype: DType, device: &Device) -> Result<Self> {
        let half = rotary_dim / 2;
        let frequencies: Vec<f32> = (0..half).map(|i| 1.0 / theta.powf(2.0 * i as f32 / rotary_dim as f32)).collect();
        let angles: Vec<f32> = positions.iter().flat_map(|&position| frequencies.iter().map(move |f| position as f32 * f)).collect();
        let angles = Tensor::from_vec(angles, (positions.len(), half), device)?;
        Ok(Self { cos: angles.cos()?.to_dtype(dtype)?, sin: angles.sin()?.to_dtype(dtype)? })
    }

    /// Turns `x` `[rows, heads, head_dim]`; channels past `rotary_dim` pass unchanged.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let rotary_dim = 2 * self.cos.dim(1)?;
        let rest = x.dim(D::Minus1)? - rotary_dim;
        let turned = x.narrow(D::Minus1, 0, rotary_dim)?.contiguous()?;
        let turned = candle_nn::rotary_emb::rope_thd(&turned.unsqueeze(0)?, &self.cos, &self.sin)?.squeeze(0)?;
        match rest {
            0 => Ok(turned),
            _ => Tensor::cat(&[&turned, &x.narrow(D::Minus1, rotary_dim, rest)?], D::Minus1),
        }
    }
}
