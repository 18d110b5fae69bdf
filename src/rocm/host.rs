//! Candle's CPU tensors on their way to a device.

use std::borrow::Cow;

use candle::backend::{BackendDevice, BackendStorage};
use candle::cpu_backend::CpuDevice;
use candle::{CpuStorage, Result, Storage, Tensor, bail};

use super::tensor::storage_bytes;
use crate::op::Operand;

/// The CPU storage of an argument.
pub(super) fn cpu<'a>(name: &str, storage: &'a Storage) -> Result<&'a CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        other => bail!("{name}: on {:?}; tensors go to an AMD GPU from the CPU", other.device().location()),
    }
}

/// The bytes of an operand's elements in order. The layout was checked against the storage.
pub(super) fn contiguous_bytes<'a>((storage, layout): Operand<'a>) -> Result<Cow<'a, [u8]>> {
    let size = BackendStorage::dtype(storage).size_in_bytes();
    if let Some((start, end)) = layout.contiguous_offsets() {
        return Ok(Cow::Borrowed(&storage_bytes(storage)?[start * size..end * size]));
    }
    let mut copy = CpuDevice.zeros_impl(layout.shape(), BackendStorage::dtype(storage))?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok(Cow::Owned(storage_bytes(&copy)?.to_vec()))
}

/// The bytes of a small tensor's elements in order.
pub(super) fn tensor_bytes(name: &str, tensor: &Tensor) -> Result<Vec<u8>> {
    let (storage, layout) = tensor.storage_and_layout();
    let storage = cpu(name, &storage)?;
    crate::cache::check_bounds(name, storage, layout)?;
    Ok(contiguous_bytes((storage, layout))?.into_owned())
}
