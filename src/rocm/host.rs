//! Candle's CPU tensors on their way to a device.

use candle::{CpuStorage, Result, Storage, Tensor, bail};

use crate::gpu::bytes::contiguous_bytes;

/// The CPU storage of an argument.
pub(super) fn cpu<'a>(name: &str, storage: &'a Storage) -> Result<&'a CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        other => bail!("{name}: on {:?}; tensors go to an AMD GPU from the CPU", other.device().location()),
    }
}

/// The bytes of a small tensor's elements in order.
pub(super) fn tensor_bytes(name: &str, tensor: &Tensor) -> Result<Vec<u8>> {
    let (storage, layout) = tensor.storage_and_layout();
    let storage = cpu(name, &storage)?;
    crate::cache::check_bounds(name, storage, layout)?;
    Ok(contiguous_bytes((storage, layout))?.into_owned())
}
