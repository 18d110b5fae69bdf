//! A call's small tensors, and where in the workspace they and its scratch memory go.

use std::borrow::Cow;

use candle::{Device, Layout, Result, Storage, Tensor, bail};

use crate::cache::check_bounds;
use crate::gpu::bytes::contiguous_bytes;
use crate::op::host::cpu_storage;

/// A small tensor on the device, or its bytes on the host to be uploaded.
pub(super) enum Small<'a> {
    None,
    Device(&'a Storage, &'a Layout),
    Host(Cow<'a, [u8]>),
}

impl<'a> Small<'a> {
    /// `tensor`; what of it is apart on the device was checked.
    pub fn of(name: &str, tensor: Option<&'a Tensor>, storage: impl FnOnce() -> &'a Storage) -> Result<Self> {
        let Some(tensor) = tensor else { return Ok(Self::None) };
        match tensor.device() {
            Device::Cpu => {
                let (storage, layout) = (cpu_storage(name, storage())?, tensor.layout());
                check_bounds(name, storage, layout)?;
                contiguous_bytes((storage, layout)).map(Self::Host)
            }
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
