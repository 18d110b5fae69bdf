//! Copies between host and device through pinned host memory that is used again, so that an upload never waits for the device.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle::{DType, Result, Shape, bail};
use hip_runtime_sys::{hipError_t, hipEvent_t, hipEventDisableTiming, hipHostMallocDefault, hipMemcpyKind};

use super::context::Context;
use super::device::{Inner, RocmDevice};
use super::storage::RocmStorage;
use super::tensor::RocmTensor;

/// Where the parts of an upload begin: what every kernel's widest load, and every tensor's alignment, is content with.
const ALIGNMENT: usize = 256;
/// The smallest buffer; larger ones are powers of two.
const SMALLEST: usize = 64 << 10;
/// Larger data goes in pieces.
const PIECE: usize = 32 << 20;
/// Pinned memory kept; above it an upload waits for the oldest one instead of taking more.
const CAP: usize = 256 << 20;

/// Whether a buffer may be written.
#[derive(Clone, Copy, PartialEq)]
enum State {
    Idle,
    /// A copy of it is enqueued; its event comes after.
    InFlight,
    /// A copy of it may be enqueued, and no event tells when it is done: left alone until the device is closed.
    Unknown,
}

/// A pinned host buffer and the event that tells when the copy from it is done.
struct Buffer {
    pointer: *mut c_void,
    bytes: usize,
    event: hipEvent_t,
    state: State,
}

// SAFETY: HIP's functions take pinned memory and events from any thread; a buffer has one owner at a time.
unsafe impl Send for Buffer {}

impl Buffer {
    fn new(context: &Context, bytes: usize) -> Result<Self> {
        let hip = context.enter()?;
        let mut buffer = Self { pointer: null_mut(), bytes, event: null_mut(), state: State::Idle };
        // SAFETY: writes one pointer.
        let result = unsafe { hip.hipHostMalloc(&mut buffer.pointer, bytes, hipHostMallocDefault) };
        context.check(result, format_args!("asked for {bytes} bytes of pinned host memory"))?;
        // SAFETY: writes one handle.
        let result = unsafe { hip.hipEventCreateWithFlags(&mut buffer.event, hipEventDisableTiming) };
        if let Err(error) = context.check(result, "") {
            buffer.free(context);
            return Err(error);
        }
        Ok(buffer)
    }

    /// Frees both; nothing on the device uses the memory any more.
    fn free(self, context: &Context) {
        if !self.event.is_null() {
            // SAFETY: from hipEventCreateWithFlags, used no more.
            let _ = unsafe { context.hip().hipEventDestroy(self.event) };
        }
        // SAFETY: from hipHostMalloc, used no more.
        let _ = unsafe { context.hip().hipHostFree(self.pointer) };
    }

    /// Whether the copy from it is done.
    fn is_done(&self, context: &Context) -> Result<bool> {
        match self.state {
            State::Idle => Ok(true),
            State::Unknown => Ok(false),
            // SAFETY: the event is alive.
            State::InFlight => match unsafe { context.enter()?.hipEventQuery(self.event) } {
                Err(failure) if failure.is(hipError_t::hipErrorNotReady) => Ok(false),
                result => context.check(result, "").map(|()| true),
            },
        }
    }
}

/// The pinned buffers of a device.
#[derive(Default)]
pub(super) struct Staging {
    /// The least recently used first: copies are done in this order.
    buffers: Mutex<Vec<Buffer>>,
}

impl Staging {
    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of at least `bytes` that may be written: one whose copy is done, else a new one, else the oldest, after a wait.
    fn take(&self, inner: &Inner, bytes: usize) -> Result<Buffer> {
        let context = &inner.context;
        let bytes = bytes.next_power_of_two().max(SMALLEST);
        let mut buffers = self.lock();
        let fitting = |buffer: &Buffer| buffer.bytes == bytes && buffer.state != State::Unknown;
        if let Some(at) = buffers.iter().position(fitting) {
            // One stream: where the oldest is not done, none is.
            if buffers[at].is_done(context)? {
                return Ok(Buffer { state: State::Idle, ..buffers.remove(at) });
            }
            if buffers.iter().map(|buffer| buffer.bytes).sum::<usize>() + bytes > CAP {
                let event = buffers[at].event;
                // SAFETY: the event is alive: its buffer is in the list, which is locked.
                context.check(unsafe { context.enter()?.hipEventSynchronize(event) }, "")?;
                inner.counts.synchronizations.fetch_add(1, Ordering::Relaxed);
                return Ok(Buffer { state: State::Idle, ..buffers.remove(at) });
            }
        }
        drop(buffers);
        Buffer::new(context, bytes)
    }

    fn put(&self, buffer: Buffer) {
        self.lock().push(buffer);
    }

    /// Frees every buffer; the stream has been waited for.
    pub fn close(&self, context: &Context) {
        for buffer in self.lock().drain(..) {
            buffer.free(context);
        }
    }
}

/// Several pieces of host data, uploaded as one.
pub struct Upload {
    storage: Arc<RocmStorage>,
    offsets: Vec<usize>,
}

impl Upload {
    /// The storage that has all parts.
    pub fn storage(&self) -> &Arc<RocmStorage> {
        &self.storage
    }

    /// Where part `part` begins on the device.
    pub fn address(&self, part: usize) -> Result<u64> {
        Ok(self.storage.address() + self.offset(part)? as u64)
    }

    /// Part `part` as a contiguous tensor.
    pub fn tensor(&self, part: usize, shape: impl Into<Shape>, dtype: DType) -> Result<RocmTensor> {
        RocmTensor::from_storage(self.storage.clone(), self.offset(part)?, shape, dtype)
    }

    fn offset(&self, part: usize) -> Result<usize> {
        match self.offsets.get(part) {
            Some(offset) => Ok(*offset),
            None => bail!("rocm: upload: there is no part {part} of {}", self.offsets.len()),
        }
    }
}

impl RocmDevice {
    /// Copies `parts` to new device memory, each at a multiple of 256 bytes: in one copy (up to 32 MiB), enqueued; the host's data is free to go
    /// when this returns. Not while a graph is captured.
    pub fn upload(&self, parts: &[&[u8]]) -> Result<Upload> {
        let mut end = 0usize;
        let offsets = parts.iter().map(|part| {
            let offset = end.next_multiple_of(ALIGNMENT);
            end = offset + part.len();
            offset
        });
        let offsets: Vec<usize> = offsets.collect();
        self.inner.stream.refuse_capture("uploading host data")?;
        let storage = RocmStorage::new(self, end)?;
        if end <= PIECE {
            self.write(&storage, 0, end, |bytes| {
                for (part, offset) in parts.iter().zip(&offsets) {
                    bytes[*offset..][..part.len()].copy_from_slice(part);
                }
            })?;
        } else {
            parts.iter().zip(&offsets).try_for_each(|(part, offset)| self.write_bytes(&storage, *offset, part))?;
        }
        Ok(Upload { storage: Arc::new(storage), offsets })
    }

    /// Copies host data over `storage`'s bytes from `offset` on. Enqueued; not while a graph is captured.
    pub(super) fn write_bytes(&self, storage: &RocmStorage, offset: usize, data: &[u8]) -> Result<()> {
        self.inner.stream.refuse_capture("uploading host data")?;
        storage.check_range("upload", offset, data.len())?;
        for (piece, at) in data.chunks(PIECE).zip((offset..).step_by(PIECE)) {
            self.write(storage, at, piece.len(), |bytes| bytes.copy_from_slice(piece))?;
        }
        Ok(())
    }

    /// Has `fill` write `bytes` bytes of pinned memory and copies them to `storage` from `offset` on.
    fn write(&self, storage: &RocmStorage, offset: usize, bytes: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let inner = &self.inner;
        let mut buffer = inner.staging.take(inner, bytes)?;
        // SAFETY: the buffer has at least so many bytes, has one owner, and no copy from it is under way. Its memory is the runtime's, foreign to
        // Rust: bytes of whatever value.
        fill(unsafe { std::slice::from_raw_parts_mut(buffer.pointer.cast::<u8>(), bytes) });
        let to = (storage.address() + offset as u64) as *mut c_void;
        let context = &inner.context;
        let result = inner.stream.enqueue_eagerly("upload", |stream| {
            let hip = context.enter()?;
            // SAFETY: both ranges are inside allocations, which live until the copy is done: the device's by the stream's order, the host's by
            // the buffer's state.
            let copied = unsafe { hip.hipMemcpyAsync(to, buffer.pointer, bytes, hipMemcpyKind::hipMemcpyHostToDevice, stream) };
            context.check(copied, format_args!("upload of {bytes} bytes"))?;
            buffer.state = State::Unknown;
            // SAFETY: event and stream are alive.
            context.check(unsafe { hip.hipEventRecord(buffer.event, stream) }, "")?;
            buffer.state = State::InFlight;
            Ok(())
        });
        match buffer.state {
            State::InFlight => {
                inner.counts.copies.fetch_add(1, Ordering::Relaxed);
            }
            // Without its event the copy's end shows only in the stream's.
            State::Unknown if inner.stream.synchronize(context).is_ok() => buffer.state = State::Idle,
            State::Unknown | State::Idle => {}
        }
        inner.staging.put(buffer);
        result
    }

    /// Copies `bytes` bytes of `storage` from `offset` on to the host. Waits for everything enqueued; not while a graph is captured.
    pub(super) fn read_bytes(&self, storage: &RocmStorage, offset: usize, bytes: usize) -> Result<Vec<u8>> {
        self.inner.stream.refuse_capture("downloading device data")?;
        storage.check_range("download", offset, bytes)?;
        let mut data = Vec::with_capacity(bytes);
        while data.len() < bytes {
            let piece = (bytes - data.len()).min(PIECE);
            self.read(storage, offset + data.len(), piece, &mut data)?;
        }
        Ok(data)
    }

    fn read(&self, storage: &RocmStorage, offset: usize, bytes: usize, data: &mut Vec<u8>) -> Result<()> {
        let inner = &self.inner;
        let mut buffer = inner.staging.take(inner, bytes)?;
        let from = (storage.address() + offset as u64) as *const c_void;
        let copied = inner.copy("download", buffer.pointer, from, bytes, hipMemcpyKind::hipMemcpyDeviceToHost);
        let result = copied.and_then(|()| {
            buffer.state = State::Unknown;
            self.synchronize()?;
            buffer.state = State::Idle;
            // SAFETY: the copy has written so many bytes, and the buffer has one owner.
            data.extend_from_slice(unsafe { std::slice::from_raw_parts(buffer.pointer.cast::<u8>(), bytes) });
            Ok(())
        });
        inner.staging.put(buffer);
        result
    }
}
