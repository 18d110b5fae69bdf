//! Candle tensors over device memory that belongs to someone else.

use candle::cuda_backend::CudaDType;
use candle::cuda_backend::cudarc::driver::DeviceRepr;
use candle::op::BackpropOp;
use candle::{CudaDevice, CudaStorage, Shape, Storage, Tensor};

/// A contiguous tensor at `address`. Its storage is never dropped, so candle never frees the memory.
///
/// # Safety
/// The elements are there as long as the tensor is used.
pub unsafe fn tensor<T: CudaDType + DeviceRepr>(device: &CudaDevice, address: u64, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    // SAFETY: the caller's word.
    let slice = unsafe { device.cuda_stream().upgrade_device_ptr::<T>(address, shape.elem_count()) };
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, device.clone()));
    let tensor = Tensor::from_storage(storage, shape, BackpropOp::none(), false);
    std::mem::forget(tensor.clone());
    tensor
}
