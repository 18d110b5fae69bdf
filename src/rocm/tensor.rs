//! Tensors in device memory.

use std::fmt;
use std::sync::Arc;

use candle::{DType, Device, Layout, Result, Shape, Storage, Tensor, WithDType, bail};

use super::device::RocmDevice;
use super::storage::RocmStorage;
use crate::gpu::bytes::contiguous_bytes;
use crate::op::call::{Described, Meta};

/// A tensor on an AMD GPU: shared memory, a layout in elements and a dtype. Clones and views share the memory.
///
/// It is for what kernels read and write; there is no arithmetic. Every dtype of whole bytes can be had; FP8 is moved as its bytes.
#[derive(Clone)]
pub struct RocmTensor {
    storage: Arc<RocmStorage>,
    layout: Layout,
    dtype: DType,
}

impl RocmTensor {
    /// Zeros. Enqueued.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &RocmDevice) -> Result<Self> {
        let tensor = Self::empty(shape, dtype, device)?;
        tensor.fill_bytes(0)?;
        Ok(tensor)
    }

    /// Uninitialised.
    pub fn empty(shape: impl Into<Shape>, dtype: DType, device: &RocmDevice) -> Result<Self> {
        let shape = shape.into();
        // Before its strides are asked for, which may pass the address space.
        let bytes = byte_size(&shape, dtype)?;
        Ok(Self { storage: Arc::new(device.alloc(bytes)?), layout: Layout::contiguous(shape), dtype })
    }

    /// `storage`'s bytes from `offset` on as a contiguous tensor. `offset` is a multiple of the element's size.
    pub fn from_storage(storage: Arc<RocmStorage>, offset: usize, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let shape = shape.into();
        storage.check_range("tensor", offset, byte_size(&shape, dtype)?)?;
        let size = dtype.size_in_bytes();
        if !offset.is_multiple_of(size) {
            bail!("rocm: tensor: offset {offset} is not a multiple of {dtype:?}'s {size} bytes")
        }
        Ok(Self { storage, layout: Layout::contiguous_with_offset(shape, offset / size), dtype })
    }

    /// The values of a candle CPU tensor, whatever its strides, as a contiguous tensor. Enqueued.
    pub fn from_tensor(tensor: &Tensor, device: &RocmDevice) -> Result<Self> {
        let new = Self::empty(tensor.shape(), tensor.dtype(), device)?;
        new.copy_from(tensor)?;
        Ok(new)
    }

    /// `values` in `shape`. Enqueued.
    pub fn from_slice<T: WithDType>(values: &[T], shape: impl Into<Shape>, device: &RocmDevice) -> Result<Self> {
        Self::from_tensor(&Tensor::from_slice(values, shape.into(), &Device::Cpu)?, device)
    }

    /// Overwrites the values with those of a candle CPU tensor of the same shape and dtype. This tensor is contiguous. Enqueued; a graph replayed
    /// afterwards sees them. Not while a graph is captured.
    pub fn copy_from(&self, tensor: &Tensor) -> Result<()> {
        if tensor.dims() != self.dims() || tensor.dtype() != self.dtype {
            bail!("rocm: copy: {:?} {:?} into {:?} {:?}", tensor.dtype(), tensor.dims(), self.dtype, self.dims())
        }
        let (offset, _) = self.contiguous_bytes("copy")?;
        with_bytes(tensor, |bytes| self.device().write_bytes(&self.storage, offset, bytes))
    }

    /// Overwrites the values with those of a tensor of the same device, shape and dtype. Both are contiguous, and do not overlap. Enqueued; can
    /// be captured.
    pub fn copy_from_device(&self, from: &Self) -> Result<()> {
        if from.dims() != self.dims() || from.dtype != self.dtype {
            bail!("rocm: copy: {:?} {:?} into {:?} {:?}", from.dtype, from.dims(), self.dtype, self.dims())
        }
        let ((offset, bytes), (from_offset, _)) = (self.contiguous_bytes("copy")?, from.contiguous_bytes("copy")?);
        self.storage.copy_from(offset, &from.storage, from_offset, bytes)
    }

    /// Sets every byte of a contiguous tensor to `value` (0xff makes every float a NaN). Enqueued; can be captured.
    pub fn fill_bytes(&self, value: u8) -> Result<()> {
        let (offset, bytes) = self.contiguous_bytes("fill")?;
        self.storage.fill(offset, bytes, value)
    }

    /// A candle CPU tensor of the values. Waits for everything enqueued; not while a graph is captured.
    pub fn to_tensor(&self) -> Result<Tensor> {
        let size = self.dtype.size_in_bytes();
        let bytes = match self.elem_count() {
            0 => Vec::new(),
            _ => {
                let (offset, span) = self.span();
                let bytes = self.device().read_bytes(&self.storage, offset * size, span * size)?;
                if self.layout.is_contiguous() { bytes } else { gather(&bytes, self.dims(), self.layout.stride(), size) }
            }
        };
        Tensor::from_raw_buffer(&bytes, self.dtype, self.dims(), &Device::Cpu)
    }

    /// Lengths.
    pub fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    /// Lengths.
    pub fn shape(&self) -> &Shape {
        self.layout.shape()
    }

    /// Elements.
    pub fn elem_count(&self) -> usize {
        self.layout.shape().elem_count()
    }

    /// Lengths, strides and offset, in elements.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Strides in elements.
    pub fn stride(&self) -> &[usize] {
        self.layout.stride()
    }

    /// Whether the elements lie one after the other.
    pub fn is_contiguous(&self) -> bool {
        self.layout.is_contiguous()
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where it is.
    pub fn device(&self) -> &RocmDevice {
        self.storage.device()
    }

    /// The memory, which other tensors may share.
    pub fn storage(&self) -> &Arc<RocmStorage> {
        &self.storage
    }

    /// Address of the first element, to be asked for at each launch (see [`RocmStorage::address`]); 0 where there is no memory.
    pub fn address(&self) -> u64 {
        match self.storage.address() {
            0 => 0,
            base => base + (self.layout.start_offset() * self.dtype.size_in_bytes()) as u64,
        }
    }

    /// `length` of dimension `dim` from `start` on: a view.
    pub fn narrow(&self, dim: usize, start: usize, length: usize) -> Result<Self> {
        match self.dims().get(dim) {
            Some(of) if start <= *of && length <= of - start => Ok(self.with_layout(self.layout.narrow(dim, start, length)?)),
            _ => bail!("rocm: narrow: {length} of dimension {dim} from {start} on, of a tensor of {:?}", self.dims()),
        }
    }

    /// Index `index` of dimension `dim`, which goes: a view.
    pub fn select(&self, dim: usize, index: usize) -> Result<Self> {
        self.narrow(dim, index, 1)?.squeeze(dim)
    }

    /// Without dimension `dim`, of length 1: a view.
    pub fn squeeze(&self, dim: usize) -> Result<Self> {
        let (mut dims, mut stride) = (self.dims().to_vec(), self.stride().to_vec());
        if dims.get(dim) != Some(&1) {
            bail!("rocm: squeeze: dimension {dim} of {dims:?} is not of length 1")
        }
        dims.remove(dim);
        stride.remove(dim);
        Ok(self.with_layout(Layout::new(dims.into(), stride, self.layout.start_offset())))
    }

    /// Dimensions `a` and `b` exchanged: a view.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Self> {
        Ok(self.with_layout(self.layout.transpose(a, b)?))
    }

    /// A contiguous tensor in another shape: a view.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.elem_count() != self.elem_count() {
            bail!("rocm: reshape: {:?} has another number of elements than {shape:?}", self.dims())
        }
        self.contiguous_bytes("reshape")?;
        Ok(self.with_layout(Layout::contiguous_with_offset(shape, self.layout.start_offset())))
    }

    /// Whether both are views of the same memory.
    pub fn shares_storage(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage)
    }

    /// Elements of this dtype that the memory behind it holds.
    pub(super) fn storage_elements(&self) -> usize {
        self.storage.bytes() / self.dtype.size_in_bytes().max(1)
    }

    fn with_layout(&self, layout: Layout) -> Self {
        Self { storage: self.storage.clone(), layout, dtype: self.dtype }
    }

    /// Offset and length in bytes of a contiguous tensor.
    fn contiguous_bytes(&self, what: &str) -> Result<(usize, usize)> {
        match self.layout.contiguous_offsets() {
            Some((start, end)) => Ok((start * self.dtype.size_in_bytes(), (end - start) * self.dtype.size_in_bytes())),
            None => bail!("rocm: {what}: a tensor of {:?} with strides {:?} is not contiguous", self.dims(), self.stride()),
        }
    }

    /// Offset of the first element and number of elements from it to the last in memory, of a tensor that has some.
    fn span(&self) -> (usize, usize) {
        let last: usize = self.dims().iter().zip(self.stride()).map(|(length, stride)| (length - 1) * stride).sum();
        (self.layout.start_offset(), last + 1)
    }
}

impl Described for RocmTensor {
    fn meta(&self) -> Meta<'_> {
        Meta { dtype: self.dtype, layout: &self.layout }
    }
}

impl fmt::Debug for RocmTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RocmTensor({:?} {:?}, {})", self.dtype, self.dims(), self.device().name())
    }
}

/// Bytes of a contiguous tensor.
fn byte_size(shape: &Shape, dtype: DType) -> Result<usize> {
    if matches!(dtype, DType::F4 | DType::F6E2M3 | DType::F6E3M2 | DType::F8E8M0) {
        bail!("rocm: {dtype:?} tensors cannot be had; U8 holds packed bytes")
    }
    match shape.dims().iter().try_fold(dtype.size_in_bytes(), |bytes, length| bytes.checked_mul(*length)) {
        Some(bytes) => Ok(bytes),
        None => bail!("rocm: {dtype:?} {:?} has more bytes than a device's addresses reach", shape.dims()),
    }
}

/// Calls `f` with the elements of a candle CPU tensor in order, as bytes.
fn with_bytes<T>(tensor: &Tensor, f: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
    if !tensor.device().is_cpu() {
        bail!("rocm: only candle CPU tensors can be copied to an AMD GPU, got one on {:?}", tensor.device().location())
    }
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("rocm: a CPU tensor without CPU storage") };
    f(&contiguous_bytes((storage, layout))?)
}

/// The elements of `size` bytes in order of their indices, of memory that begins with the first.
fn gather(bytes: &[u8], dims: &[usize], stride: &[usize], size: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(dims.iter().product::<usize>() * size);
    gather_into(&mut out, bytes, dims, stride, size);
    out
}

fn gather_into(out: &mut Vec<u8>, bytes: &[u8], dims: &[usize], stride: &[usize], size: usize) {
    match (dims, stride) {
        ([length, dims @ ..], [step, stride @ ..]) => {
            (0..*length).for_each(|index| gather_into(out, &bytes[index * step * size..], dims, stride, size))
        }
        _ => out.extend_from_slice(&bytes[..size]),
    }
}
