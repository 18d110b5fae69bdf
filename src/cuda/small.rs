//! A call's small tensors, and where in the workspace they and its scratch memory go.

use candle::{DType, Device, Layout, Result, Storage, Tensor, bail};

/// A small tensor on the device, or its bytes on the host to be uploaded.
pub(super) enum Small<'a> {
    None,
    Device(&'a Storage, &'a Layout),
    Host(Vec<u8>),
}

impl<'a> Small<'a> {
    /// `tensor`; what of it is apart on the device was checked.
    pub fn of(name: &str, tensor: Option<&'a Tensor>, storage: impl FnOnce() -> &'a Storage) -> Result<Self> {
        let Some(tensor) = tensor else { return Ok(Self::None) };
        match tensor.device() {
            Device::Cpu => host_bytes(name, tensor).map(Self::Host),
            _ => Ok(Self::Device(storage(), tensor.layout())),
        }
    }
}

/// Refuses a tensor on the device whose elements are apart.
pub(super) fn check_contiguous(name: &str, tensor: Option<&Tensor>) -> Result<()> {
    match tensor {
        Some(tensor) if !tensor.device().is_cpu() && !tensor.is_contiguous() => {
            bail!("{name}: the CUDA kernels read it contiguous, got {:?} with strides {:?}", tensor.dims(), tensor.stride())
        }
        _ => Ok(()),
    }
}

/// The elements of a small CPU tensor in order, four bytes each.
fn host_bytes(name: &str, tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::U32 => flat.to_vec1::<u32>()?.into_iter().flat_map(u32::to_ne_bytes).collect(),
        DType::I32 => flat.to_vec1::<i32>()?.into_iter().flat_map(i32::to_ne_bytes).collect(),
        DType::F32 => flat.to_vec1::<f32>()?.into_iter().flat_map(f32::to_ne_bytes).collect(),
        other => bail!("{name}: dtype {other:?} is neither U32, I32 nor F32"),
    })
}

/// The part of the workspace that a call lays out for itself.
#[derive(Default)]
pub(super) struct Room {
    pub uploads: Vec<u8>,
    pub bytes: usize,
}

impl Room {
    const ALIGNMENT: usize = 256;

    /// Bytes that are uploaded, all of them before any [`Room::scratch`]. Gives their offset.
    pub fn upload(&mut self, bytes: &[u8]) -> usize {
        let at = self.uploads.len().next_multiple_of(Self::ALIGNMENT);
        self.uploads.resize(at, 0);
        self.uploads.extend_from_slice(bytes);
        self.bytes = self.uploads.len();
        at
    }

    /// Uninitialised bytes. Gives their offset.
    pub fn scratch(&mut self, bytes: usize) -> usize {
        let at = self.bytes.next_multiple_of(Self::ALIGNMENT);
        self.bytes = at + bytes;
        at
    }
}

pub(super) fn as_bytes(records: &[i32]) -> Vec<u8> {
    records.iter().flat_map(|record| record.to_ne_bytes()).collect()
}
