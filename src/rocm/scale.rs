//! Scales as the kernels take them.

use candle::Result;

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
    /// `scale` for a kernel specialized on `mode`. Where the other side has a scale per token, a single factor is read through strides of 0.
    pub fn of(name: &str, scale: &KvScale<RocmTensor>, mode: ScaleMode, device: &RocmDevice) -> Result<Self> {
        let value = match (scale, mode) {
            (_, ScaleMode::None) => return Ok(Self { address: 0, stride: Paged::default(), scalar: None }),
            (KvScale::None, _) => 1.0,
            (KvScale::Scalar(value), _) => *value,
            (KvScale::Tensor(tensor), _) => {
                let stride = if tensor.elem_count() == 1 { Paged::default() } else { paged_scale(name, tensor)? };
                return Ok(Self { address: tensor.address(), stride, scalar: None });
            }
        };
        let scalar = device.inner.scalars.get(device, value)?;
        Ok(Self { address: scalar.address(), stride: Paged::default(), scalar: Some(scalar) })
    }
}
