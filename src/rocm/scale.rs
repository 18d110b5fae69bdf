//! Scales as the kernels take them.

use candle::{Result, bail};

use super::device::RocmDevice;
use super::scalar::Scalar;
use super::strides::paged_scale;
use super::tensor::RocmTensor;
use crate::gpu::args::Paged;
use crate::options::KvScale;
use crate::registry::ScaleMode;

/// K's or V's scale.
pub(super) struct ScaleArgs {
    pub address: u64,
    pub stride: Paged,
    /// Keeps a scalar of this call's own.
    pub scalar: Option<Scalar>,
}

impl ScaleArgs {
    /// `scale` for a kernel specialized on `mode`.
    ///
    /// Errors: a scale per token of one side only; tokens' scales that are apart; no memory for a scalar.
    pub fn of(name: &str, scale: &KvScale<RocmTensor>, mode: ScaleMode, device: &RocmDevice) -> Result<Self> {
        let none = Self { address: 0, stride: Paged::default(), scalar: None };
        let value = match (scale, mode) {
            (_, ScaleMode::None) => return Ok(none),
            (KvScale::Tensor(tensor), ScaleMode::Scalar) => return Ok(Self { address: tensor.address(), ..none }),
            (KvScale::Tensor(tensor), ScaleMode::PerToken | ScaleMode::Block) if tensor.dims().len() >= 3 => {
                return Ok(Self { address: tensor.address(), stride: paged_scale(name, tensor)?, ..none });
            }
            (_, ScaleMode::PerToken | ScaleMode::Block) => {
                bail!("{name}: one factor, but the other side has a scale per token: the AMD kernels need both sides alike")
            }
            (KvScale::None, ScaleMode::Scalar) => 1.0,
            (KvScale::Scalar(value), ScaleMode::Scalar) => *value,
        };
        let scalar = device.inner.scalars.get(device, value)?;
        Ok(Self { address: scalar.address(), scalar: Some(scalar), ..none })
    }
}
