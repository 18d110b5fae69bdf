//! Device addresses of candle's storages.

use candle::backend::BackendStorage;
use candle::cuda_backend::CudaStorageSlice as Slice;
use candle::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle::{CudaDevice, CudaStorage, Layout, Result, Storage, bail};

use crate::op::call::Meta;

/// A tensor on the device that is read: kept until the kernels that read it are enqueued.
pub(super) struct Reads<'a> {
    stream: &'a CudaStream,
    guards: Vec<SyncOnDrop<'a>>,
}

macro_rules! each {
    ($slice:expr, $s:ident => $body:expr) => {
        match $slice {
            Slice::U8($s) => $body,
            Slice::U32($s) => $body,
            Slice::I16($s) => $body,
            Slice::I32($s) => $body,
            Slice::I64($s) => $body,
            Slice::BF16($s) => $body,
            Slice::F16($s) => $body,
            Slice::F32($s) => $body,
            Slice::F64($s) => $body,
            Slice::F8E4M3($s) => $body,
            Slice::F6E2M3($s) => $body,
            Slice::F6E3M2($s) => $body,
            Slice::F4($s) => $body,
            Slice::F8E8M0($s) => $body,
        }
    };
}

/// Elements of a storage.
pub(crate) fn elements(storage: &CudaStorage) -> usize {
    each!(&storage.slice, s => s.len())
}

/// The metadata of a tensor whose storage is `storage`, once it is seen to lie within that.
pub(super) fn meta<'a>(name: &str, storage: &CudaStorage, layout: &'a Layout) -> Result<Meta<'a>> {
    let meta = Meta { dtype: storage.dtype(), layout };
    meta.check_bounds(name, elements(storage))?;
    Ok(meta)
}

impl<'a> Reads<'a> {
    pub fn new(stream: &'a CudaStream) -> Self {
        Self { stream, guards: vec![] }
    }

    /// The address of the first element of `layout`.
    pub fn address(&mut self, storage: &'a CudaStorage, layout: &Layout) -> u64 {
        let (address, guard) = each!(&storage.slice, s => s.device_ptr(self.stream));
        self.guards.push(guard);
        address + (layout.start_offset() * storage.dtype().size_in_bytes()) as u64
    }
}

/// The address of the first element of `layout`, to be written until the guard is dropped.
pub(super) fn write_address<'a>(storage: &'a mut CudaStorage, layout: &Layout, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
    let size = storage.dtype().size_in_bytes();
    let (address, guard) = each!(&mut storage.slice, s => s.device_ptr_mut(stream));
    (address + (layout.start_offset() * size) as u64, guard)
}

/// The CUDA storage of an argument; an error naming it where it lives elsewhere.
pub(super) fn cuda_storage<'a>(name: &str, storage: &'a Storage, device: &CudaDevice) -> Result<&'a CudaStorage> {
    match storage {
        Storage::Cuda(storage) => {
            check_device(name, storage, device)?;
            Ok(storage)
        }
        other => bail!("{name}: on {:?}, but q is on Cuda {{ gpu_id: {} }}", other.device().location(), ordinal(device)),
    }
}

/// Refuses a storage on another GPU than q's.
pub(super) fn check_device(name: &str, storage: &CudaStorage, device: &CudaDevice) -> Result<()> {
    let (own, other) = (ordinal(device), ordinal(&storage.device));
    if own != other {
        bail!("{name}: on Cuda {{ gpu_id: {other} }}, but q is on Cuda {{ gpu_id: {own} }}")
    }
    Ok(())
}

fn ordinal(device: &CudaDevice) -> usize {
    device.cuda_stream().context().ordinal()
}
