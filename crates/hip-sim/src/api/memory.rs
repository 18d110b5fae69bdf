//! Memory: allocations, copies, fills.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use crate::error::{Code, Result};
use crate::guard::{call, put, release, wanted};
use crate::handles::{Handle, lock};
use crate::memory::{Place, write};
use crate::runtime::Runtime;
use crate::stream::Stream;
use crate::work::{End, Work};

/// Allocates memory of the thread's device; no bytes give null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMalloc(ptr: *mut *mut c_void, size: usize) -> Code {
    call("hipMalloc", |runtime| {
        runtime.forbid_in_capture()?;
        wanted(ptr)?;
        let device = runtime.current()?;
        let address = if size == 0 { 0 } else { runtime.allocations.device(device, size, runtime.config.memory)? };
        // SAFETY: the caller's pointer.
        unsafe { put(ptr, address as *mut c_void) }
    })
}

/// Frees memory after all work of its device.
#[unsafe(no_mangle)]
pub extern "C" fn hipFree(ptr: *mut c_void) -> Code {
    release("hipFree", |runtime| free(runtime, ptr as u64, |_| true))
}

fn free(runtime: &Runtime, address: u64, wanted: impl Fn(Place) -> bool) -> Result {
    runtime.forbid_in_capture()?;
    if address == 0 {
        return Ok(());
    }
    let found = runtime.allocations.containing(address).ok_or(Code::INVALID_VALUE)?;
    let (Place::Device(ordinal) | Place::Host(ordinal)) = found.place;
    let device = &runtime.devices[ordinal];
    device.counts.implicit_synchronizations.add(1);
    let finished = runtime.finish_device(device);
    let _alone: Vec<_> = runtime.devices.iter().map(|device| write(&device.busy)).collect();
    runtime.allocations.free(&runtime.devices, address, wanted)?;
    finished
}

/// Allocates memory in a stream's order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMallocAsync(ptr: *mut *mut c_void, size: usize, stream: Handle) -> Code {
    call("hipMallocAsync", |runtime| {
        wanted(ptr)?;
        let stream = runtime.stream(stream)?;
        let device = &runtime.devices[stream.device];
        let session = stream.session();
        if session.as_ref().is_some_and(|session| session.is_invalid()) {
            return Err(Code::CAPTURE_INVALIDATED);
        }
        let address = if size == 0 { 0 } else { runtime.allocations.device(device, size, runtime.config.memory)? };
        if let Some(session) = session.filter(|_| address != 0) {
            lock(&session.owned).push(address);
        }
        // SAFETY: the caller's pointer.
        unsafe { put(ptr, address as *mut c_void) }
    })
}

/// Frees memory in a stream's order. A captured one leaves the memory to its graph.
#[unsafe(no_mangle)]
pub extern "C" fn hipFreeAsync(ptr: *mut c_void, stream: Handle) -> Code {
    release("hipFreeAsync", |runtime| {
        let stream = runtime.stream(stream)?;
        let found = runtime.allocations.containing(ptr as u64).filter(|found| found.address == ptr as u64);
        found.filter(|found| matches!(found.place, Place::Device(_))).ok_or(Code::INVALID_VALUE)?;
        if let Some(session) = stream.session() {
            let own = lock(&session.owned).contains(&(ptr as u64));
            return if own { Ok(()) } else { Err(Code::INVALID_VALUE) };
        }
        match runtime.enqueue(&stream, Arc::new(Work::Free(ptr as u64)), false) {
            // A lost device executes nothing more: the memory goes at once.
            Err(lost) => runtime.allocations.free(&runtime.devices, ptr as u64, |_| true).and(Err(lost)),
            Ok(_) => Ok(()),
        }
    })
}

/// Free and total bytes of the thread's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> Code {
    call("hipMemGetInfo", |runtime| {
        let used = usize::try_from(runtime.current()?.counts.bytes.get()).unwrap_or(0);
        // SAFETY: the caller's pointers.
        unsafe {
            put(free, runtime.config.memory.saturating_sub(used))?;
            put(total, runtime.config.memory)
        }
    })
}

/// Allocates pinned memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostMalloc(ptr: *mut *mut c_void, size: usize, flags: c_uint) -> Code {
    /// Portable, mapped, write-combined, NUMA of the user's, coherent, not coherent.
    const KNOWN: c_uint = 1 | 2 | 4 | 0x2000_0000 | 0x4000_0000 | 0x8000_0000;
    call("hipHostMalloc", |runtime| {
        runtime.forbid_in_capture()?;
        wanted(ptr)?;
        if flags & !KNOWN != 0 || flags & 0xc000_0000 == 0xc000_0000 {
            return Err(Code::INVALID_VALUE);
        }
        let current = runtime.current()?.ordinal;
        let address = if size == 0 { 0 } else { runtime.allocations.host(&runtime.devices, current, size)? };
        // SAFETY: the caller's pointer.
        unsafe { put(ptr, address as *mut c_void) }
    })
}

/// Frees pinned memory.
#[unsafe(no_mangle)]
pub extern "C" fn hipHostFree(ptr: *mut c_void) -> Code {
    release("hipHostFree", |runtime| free(runtime, ptr as u64, |place| matches!(place, Place::Host(_))))
}

/// The address at which devices see pinned memory: the same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostGetDevicePointer(device: *mut *mut c_void, host: *mut c_void, _flags: c_uint) -> Code {
    call("hipHostGetDevicePointer", |runtime| {
        let found = runtime.allocations.containing(host as u64).filter(|found| matches!(found.place, Place::Host(_)));
        found.ok_or(Code::INVALID_VALUE)?;
        // SAFETY: the caller's pointer.
        unsafe { put(device, host) }
    })
}

/// Which way a copy goes: `hipMemcpyKind`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    HostToHost,
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
    Default,
}

impl Kind {
    fn from_raw(kind: c_uint) -> Result<Self> {
        match kind {
            0 => Ok(Kind::HostToHost),
            1 => Ok(Kind::HostToDevice),
            2 => Ok(Kind::DeviceToHost),
            3 => Ok(Kind::DeviceToDevice),
            4 => Ok(Kind::Default),
            _ => Err(Code::INVALID_MEMCPY_DIRECTION),
        }
    }
}

/// One end of a copy, whose memory has to be the runtime's where `kind` says so.
fn end(runtime: &Runtime, address: u64, len: usize, device: bool) -> Result<End> {
    let found = runtime.allocations.range(address, len)?;
    if device && found.is_none() {
        return Err(Code::INVALID_VALUE);
    }
    Ok(End { address, owned: found.is_some() })
}

/// Copies in a stream's order, and waits for it where `blocking`.
fn copy(runtime: &Runtime, stream: &Arc<Stream>, (dst, src, len): (u64, u64, usize), kind: Kind, blocking: bool) -> Result {
    if len == 0 {
        return Ok(());
    }
    if dst == 0 || src == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let dst = end(runtime, dst, len, matches!(kind, Kind::HostToDevice | Kind::DeviceToDevice))?;
    let src = end(runtime, src, len, matches!(kind, Kind::DeviceToHost | Kind::DeviceToDevice))?;
    let capturing = stream.session().is_some();
    // Pageable memory is read at the call; writing to it is waited for. In a graph either happens when it runs.
    let work = if !src.owned && !capturing {
        // SAFETY: the caller vouches for `len` readable bytes.
        Work::Upload { dst, data: unsafe { std::slice::from_raw_parts(src.address as *const u8, len) }.to_vec() }
    } else {
        Work::Copy { dst, src, len }
    };
    let recorded = runtime.submit(stream, work)?;
    if (blocking || !dst.owned) && !recorded {
        runtime.devices[stream.device].counts.synchronizations.add(1);
        runtime.finish(stream, None)?;
    }
    Ok(())
}

fn copy_blocking(runtime: &Runtime, ends: (u64, u64, usize), kind: Kind) -> Result {
    runtime.forbid_in_any_capture(Code::CAPTURE_IMPLICIT)?;
    copy(runtime, &runtime.stream(std::ptr::null_mut())?, ends, kind, true)
}

/// Copies and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpy(dst: *mut c_void, src: *const c_void, size: usize, kind: c_uint) -> Code {
    call("hipMemcpy", |runtime| copy_blocking(runtime, (dst as u64, src as u64, size), Kind::from_raw(kind)?))
}

/// Copies in a stream's order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyAsync(dst: *mut c_void, src: *const c_void, size: usize, kind: c_uint, stream: Handle) -> Code {
    call("hipMemcpyAsync", |runtime| copy(runtime, &runtime.stream(stream)?, (dst as u64, src as u64, size), Kind::from_raw(kind)?, false))
}

/// Copies in a stream's order and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyWithStream(dst: *mut c_void, src: *const c_void, size: usize, kind: c_uint, stream: Handle) -> Code {
    call("hipMemcpyWithStream", |runtime| {
        copy(runtime, &runtime.stream(stream)?, (dst as u64, src as u64, size), Kind::from_raw(kind)?, true)
    })
}

/// Copies to the device and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyHtoD(dst: *mut c_void, src: *const c_void, size: usize) -> Code {
    call("hipMemcpyHtoD", |runtime| copy_blocking(runtime, (dst as u64, src as u64, size), Kind::HostToDevice))
}

/// Copies from the device and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyDtoH(dst: *mut c_void, src: *mut c_void, size: usize) -> Code {
    call("hipMemcpyDtoH", |runtime| copy_blocking(runtime, (dst as u64, src as u64, size), Kind::DeviceToHost))
}

/// Copies on the device and waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyDtoD(dst: *mut c_void, src: *mut c_void, size: usize) -> Code {
    call("hipMemcpyDtoD", |runtime| copy_blocking(runtime, (dst as u64, src as u64, size), Kind::DeviceToDevice))
}

/// Copies to the device in a stream's order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyHtoDAsync(dst: *mut c_void, src: *const c_void, size: usize, stream: Handle) -> Code {
    call("hipMemcpyHtoDAsync", |runtime| copy(runtime, &runtime.stream(stream)?, (dst as u64, src as u64, size), Kind::HostToDevice, false))
}

/// Copies from the device in a stream's order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyDtoHAsync(dst: *mut c_void, src: *mut c_void, size: usize, stream: Handle) -> Code {
    call("hipMemcpyDtoHAsync", |runtime| copy(runtime, &runtime.stream(stream)?, (dst as u64, src as u64, size), Kind::DeviceToHost, false))
}

/// Copies on the device in a stream's order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyDtoDAsync(dst: *mut c_void, src: *mut c_void, size: usize, stream: Handle) -> Code {
    call("hipMemcpyDtoDAsync", |runtime| {
        copy(runtime, &runtime.stream(stream)?, (dst as u64, src as u64, size), Kind::DeviceToDevice, false)
    })
}

/// Fills in a stream's order, `width` bytes at a time.
fn fill(runtime: &Runtime, stream: &Arc<Stream>, dst: u64, value: u32, width: usize, count: usize) -> Result {
    let len = width.checked_mul(count).ok_or(Code::INVALID_VALUE)?;
    if len == 0 {
        return Ok(());
    }
    if runtime.allocations.range(dst, len)?.is_none() || !dst.is_multiple_of(width as u64) {
        return Err(Code::INVALID_VALUE);
    }
    runtime.submit(stream, Work::Fill { dst, value, width, count }).map(|_| ())
}

/// Fills bytes on the null stream.
#[unsafe(no_mangle)]
pub extern "C" fn hipMemset(dst: *mut c_void, value: c_int, size: usize) -> Code {
    call("hipMemset", |runtime| {
        runtime.forbid_in_any_capture(Code::CAPTURE_IMPLICIT)?;
        fill(runtime, &runtime.stream(std::ptr::null_mut())?, dst as u64, value as u32, 1, size)
    })
}

/// Fills bytes in a stream's order.
#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetAsync(dst: *mut c_void, value: c_int, size: usize, stream: Handle) -> Code {
    call("hipMemsetAsync", |runtime| fill(runtime, &runtime.stream(stream)?, dst as u64, value as u32, 1, size))
}

/// Fills bytes in a stream's order.
#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetD8Async(dst: *mut c_void, value: u8, count: usize, stream: Handle) -> Code {
    call("hipMemsetD8Async", |runtime| fill(runtime, &runtime.stream(stream)?, dst as u64, value.into(), 1, count))
}

/// Fills 16-bit words in a stream's order.
#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetD16Async(dst: *mut c_void, value: u16, count: usize, stream: Handle) -> Code {
    call("hipMemsetD16Async", |runtime| fill(runtime, &runtime.stream(stream)?, dst as u64, value.into(), 2, count))
}

/// Fills 32-bit words in a stream's order.
#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetD32Async(dst: *mut c_void, value: c_int, count: usize, stream: Handle) -> Code {
    call("hipMemsetD32Async", |runtime| fill(runtime, &runtime.stream(stream)?, dst as u64, value as u32, 4, count))
}
