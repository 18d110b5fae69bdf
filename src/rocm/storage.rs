//! Bytes of device memory.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle::{Result, bail};
use hip_runtime_sys::hipMemcpyKind;

use super::device::RocmDevice;

/// Memory of the device's pool, until nobody has it any more.
pub(super) struct Block {
    device: RocmDevice,
    address: u64,
    bytes: usize,
}

impl Block {
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let inner = &self.device.inner;
            inner.pool.give_back(&inner.context, self.address, self.bytes, inner.stream.is_capturing());
        }
    }
}

/// Bytes of a device's memory, uninitialised when allocated. Dropping them gives them to the device's pool: work that is enqueued already
/// may still use them.
pub struct RocmStorage {
    block: Arc<Block>,
    bytes: usize,
}

impl Drop for RocmStorage {
    fn drop(&mut self) {
        self.block.device.inner.stream.retire(&self.block);
    }
}

impl fmt::Debug for RocmStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RocmStorage({} bytes on {})", self.bytes, self.block.device.name())
    }
}

impl RocmStorage {
    pub(super) fn new(device: &RocmDevice, bytes: usize) -> Result<Self> {
        let inner = &device.inner;
        if bytes == 0 {
            return Ok(Self { block: Arc::new(Block { device: device.clone(), address: 0, bytes: 0 }), bytes });
        }
        let size = inner.pool.size(bytes)?;
        if let Some(block) = inner.stream.reuse(size) {
            return Ok(Self { block, bytes });
        }
        let (address, size) = inner.pool.take(&inner.context, size, inner.stream.is_capturing())?;
        Ok(Self { block: Arc::new(Block { device: device.clone(), address, bytes: size }), bytes })
    }

    /// The device whose memory it is.
    pub fn device(&self) -> &RocmDevice {
        &self.block.device
    }

    /// Bytes asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where it begins, a multiple of 256; 0 where it has no bytes. To be asked for at each launch: while a graph is captured, this tells that
    /// the graph uses the memory, and has to keep it.
    pub fn address(&self) -> u64 {
        self.block.device.inner.stream.hold(&self.block);
        self.block.address
    }

    /// Sets `bytes` bytes from `offset` on to `value`. Enqueued; can be captured.
    pub fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<()> {
        self.check_range("fill", offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let (inner, to) = (&self.device().inner, self.address() + offset as u64);
        inner.stream.enqueue("fill", |stream| {
            let hip = inner.context.enter()?;
            // SAFETY: the range is inside this allocation, which is in use until the stream has passed this.
            let result = unsafe { hip.hipMemsetAsync(to as *mut c_void, value.into(), bytes, stream) };
            inner.context.check(result, format_args!("{bytes} bytes"))
        })?;
        inner.counts.fills.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Copies `bytes` bytes of `from` (from `from_offset` on) to `offset`. Both are on the same device; the ranges do not overlap. Enqueued;
    /// can be captured.
    pub fn copy_from(&self, offset: usize, from: &Self, from_offset: usize, bytes: usize) -> Result<()> {
        self.check_range("copy to", offset, bytes)?;
        from.check_range("copy from", from_offset, bytes)?;
        self.device().check_same(from.device(), "copy")?;
        if Arc::ptr_eq(&self.block, &from.block) && offset.abs_diff(from_offset) < bytes {
            bail!("rocm: copy: {bytes} bytes from {from_offset} and from {offset} of the same memory overlap")
        }
        if bytes == 0 {
            return Ok(());
        }
        let inner = &self.device().inner;
        let (to, from) = (self.address() + offset as u64, from.address() + from_offset as u64);
        inner.copy("copy", to as *mut c_void, from as *const c_void, bytes, hipMemcpyKind::hipMemcpyDeviceToDevice)
    }

    pub(super) fn check_range(&self, what: &str, offset: usize, bytes: usize) -> Result<()> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => bail!("rocm: {what}: {bytes} bytes from {offset} on, of storage with {} bytes", self.bytes),
        }
    }
}
