//! Rotary position embedding (rotate-half) over the first `rotary_dim` channels of a head.

use candle::{D, DType, Device, Result, Tensor};
use half::bf16;

/// Angle per position of each channel pair: `theta^(-2i / rotary_dim)`.
///
/// `DType::BF16` rounds them: a PyTorch model cast to bfloat16 rounds this buffer with its weights, and casting back to F32 does not
/// restore it, so recordings of such a model are met only with rounded frequencies.
pub fn frequencies(theta: f32, rotary_dim: usize, dtype: DType) -> Vec<f32> {
    let frequency = |i| 1.0 / theta.powf(2.0 * i as f32 / rotary_dim as f32);
    let round = |f| if dtype == DType::BF16 { bf16::from_f32(f).to_f32() } else { f };
    (0..rotary_dim / 2).map(frequency).map(round).collect()
}

/// Cosines and sines of the positions of one step's rows.
pub struct Rope {
    /// `[rows, rotary_dim / 2]`.
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    pub fn new(positions: &[usize], frequencies: &[f32], dtype: DType, device: &Device) -> Result<Self> {
        let angles: Vec<f32> = positions.iter().flat_map(|&position| frequencies.iter().map(move |f| position as f32 * f)).collect();
        let angles = Tensor::from_vec(angles, (positions.len(), frequencies.len()), device)?;
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
