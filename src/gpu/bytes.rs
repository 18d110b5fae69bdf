//! Candle's CPU tensors as the bytes that go to a device.

use std::borrow::Cow;

use candle::backend::{BackendDevice, BackendStorage};
use candle::cpu_backend::CpuDevice;
use candle::{CpuStorage, Result, bail};

use crate::op::Operand;

/// The bytes of an operand's elements in order. The layout was checked against the storage.
pub(crate) fn contiguous_bytes<'a>((storage, layout): Operand<'a>) -> Result<Cow<'a, [u8]>> {
    let size = BackendStorage::dtype(storage).size_in_bytes();
    if let Some((start, end)) = layout.contiguous_offsets() {
        return Ok(Cow::Borrowed(&storage_bytes(storage)?[start * size..end * size]));
    }
    let mut copy = CpuDevice.zeros_impl(layout.shape(), BackendStorage::dtype(storage))?;
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok(Cow::Owned(storage_bytes(&copy)?.to_vec()))
}

/// The bytes of candle's CPU storage.
fn storage_bytes(storage: &CpuStorage) -> Result<&[u8]> {
    Ok(match storage {
        CpuStorage::U8(values) => values,
        CpuStorage::U32(values) => as_bytes(values),
        CpuStorage::I16(values) => as_bytes(values),
        CpuStorage::I32(values) => as_bytes(values),
        CpuStorage::I64(values) => as_bytes(values),
        CpuStorage::BF16(values) => as_bytes(values),
        CpuStorage::F16(values) => as_bytes(values),
        CpuStorage::F32(values) => as_bytes(values),
        CpuStorage::F64(values) => as_bytes(values),
        CpuStorage::F8E4M3(values) => as_bytes(values),
        other => bail!("{:?} tensors cannot be had on the device; U8 holds packed bytes", BackendStorage::dtype(other)),
    })
}

/// Numbers that are nothing but their bytes.
pub(crate) trait Plain {}
impl Plain for u32 {}
impl Plain for i16 {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for half::bf16 {}
impl Plain for half::f16 {}
impl Plain for f32 {}
impl Plain for f64 {}
impl Plain for float8::F8E4M3 {}

pub(crate) fn as_bytes<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: a `Plain` type has no padding, and any byte may be read as u8.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use candle::{Device, Storage, Tensor, bail};

    use super::*;

    #[test]
    fn elements_come_in_their_order_whatever_the_strides() -> Result<()> {
        let numbers = Tensor::arange(0u32, 24, &Device::Cpu)?.reshape((4, 6))?;
        for view in [numbers.narrow(0, 1, 2)?, numbers.narrow(1, 2, 3)?, numbers.t()?, numbers.narrow(0, 4, 0)?] {
            let (storage, layout) = view.storage_and_layout();
            let Storage::Cpu(storage) = &*storage else { bail!("not on the CPU") };
            let bytes = contiguous_bytes((storage, layout))?;
            let want: Vec<u8> = view.flatten_all()?.to_vec1::<u32>()?.into_iter().flat_map(u32::to_ne_bytes).collect();
            assert_eq!((bytes.as_ref(), matches!(bytes, Cow::Borrowed(_))), (want.as_slice(), view.is_contiguous()));
        }
        Ok(())
    }
}
