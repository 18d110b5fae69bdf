//! Memory that calls use beside their tensors, kept from call to call.
//!
//! It belongs to a thread and a stream: the stream's order makes reuse safe, and the per-thread default stream is another one on every thread.

use std::cell::RefCell;
use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use candle::cuda_backend::WrapErr;
use candle::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, sys};
use candle::{Result, bail};

use super::launch::check;

/// Scalars that are kept at most.
const MOST: usize = 64;
/// Room grows to a multiple of this.
const STEP: usize = 1 << 20;

thread_local! {
    static WORKSPACES: RefCell<HashMap<[usize; 2], Workspace>> = RefCell::default();
}

/// The memory of one thread's calls on one stream.
#[derive(Default)]
pub(super) struct Workspace {
    room: Option<Room>,
    scalars: HashMap<u32, CudaSlice<f32>>,
}

/// Scratch memory that a stream's calls use one after the other.
struct Room {
    slice: ManuallyDrop<CudaSlice<u8>>,
    /// A captured graph uses it too: it is never freed.
    is_captured: bool,
}

impl Drop for Room {
    fn drop(&mut self) {
        if !self.is_captured {
            // SAFETY: dropped here alone, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.slice) }
        }
    }
}

/// Device memory of one call. A part that is the call's own is freed in the stream's order when this is dropped.
#[derive(Default)]
pub(super) struct Own {
    bytes: Vec<CudaSlice<u8>>,
}

/// Runs `f` with the workspace of this thread and `stream`.
pub(super) fn with<T>(stream: &Arc<CudaStream>, f: impl FnOnce(&mut Workspace) -> Result<T>) -> Result<T> {
    let key = [stream.context().ordinal(), stream.cu_stream() as usize];
    WORKSPACES.with_borrow_mut(|all| f(all.entry(key).or_default()))
}

/// Whether work on the stream is being captured in a graph.
pub(super) fn is_capturing(stream: &CudaStream) -> Result<bool> {
    Ok(stream.capture_status().w()? != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

fn address<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> u64 {
    slice.device_ptr(stream).0
}

/// Enqueues a copy of `bytes` to `to`. The bytes are pageable memory, which has been read when this returns.
pub(super) fn upload(to: u64, bytes: &[u8], stream: &CudaStream) -> Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    if is_capturing(stream)? {
        bail!("paged-decode: tables, lengths or slots on the CPU, from where a graph cannot take them; keep them on the device")
    }
    // SAFETY: the caller laid out as many bytes there.
    let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), stream.cu_stream()) };
    check(copied, format_args!("uploading {} bytes of tables", bytes.len()))
}

impl Workspace {
    /// `bytes` of uninitialised memory until the next call.
    ///
    /// A graph takes what the call before the capture left (allocations among its nodes would keep one call's kernels from starting while those of the
    /// call before drain), so that its replays and other calls take turns in the stream; where that is too little it allocates.
    pub fn room(&mut self, bytes: usize, own: &mut Own, stream: &Arc<CudaStream>) -> Result<u64> {
        let is_capturing = is_capturing(stream)?;
        match &mut self.room {
            Some(room) if room.slice.num_bytes() >= bytes => room.is_captured |= is_capturing,
            _ if is_capturing => return own.add(bytes, stream),
            room => {
                *room = None;
                // SAFETY: written before it is read.
                let slice = unsafe { stream.alloc(bytes.next_multiple_of(STEP)) }.w()?;
                *room = Some(Room { slice: ManuallyDrop::new(slice), is_captured: false });
            }
        }
        Ok(self.room.as_ref().map_or(0, |room| address(&room.slice, stream)))
    }

    /// One F32 on the device.
    pub fn scalar(&mut self, value: f32, own: &mut Own, stream: &Arc<CudaStream>) -> Result<u64> {
        if let Some(scalar) = self.scalars.get(&value.to_bits()) {
            return Ok(address(scalar, stream));
        }
        let fresh = is_capturing(stream)? || self.scalars.len() >= MOST;
        let at = match fresh {
            true => own.add(size_of::<f32>(), stream)?,
            false => {
                // SAFETY: filled below.
                let scalar = unsafe { stream.alloc::<f32>(1) }.w()?;
                let at = address(&scalar, stream);
                self.scalars.insert(value.to_bits(), scalar);
                at
            }
        };
        // SAFETY: four bytes that are allocated.
        check(unsafe { sys::cuMemsetD32Async(at, value.to_bits(), 1, stream.cu_stream()) }, "cuMemsetD32Async of a scalar")?;
        Ok(at)
    }
}

impl Own {
    /// Memory of this call's own.
    pub fn add(&mut self, bytes: usize, stream: &Arc<CudaStream>) -> Result<u64> {
        // SAFETY: written before it is read.
        let slice = unsafe { stream.alloc::<u8>(bytes.max(1)) }.w()?;
        let at = address(&slice, stream);
        self.bytes.push(slice);
        Ok(at)
    }
}
