//! Streams and their capture.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use crate::capture::{Graph, Mode, Session};
use crate::error::{Code, Result};
use crate::guard::{call, put, query, release, wanted};
use crate::handles::{Handle, lock};
use crate::runtime::{Runtime, exchange_mode};
use crate::stream::{NON_BLOCKING, Stream, StreamCapture};
use crate::work::{HostFn, Work};

fn create(runtime: &Runtime, stream: *mut Handle, flags: c_uint) -> Result {
    wanted(stream)?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let device = runtime.current()?;
    device.counts.streams.add(1);
    // SAFETY: the caller's pointer.
    unsafe { put(stream, runtime.streams.insert(|id| Stream::new(id, device.ordinal, flags))) }
}

/// Makes a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreate(stream: *mut Handle) -> Code {
    call("hipStreamCreate", |runtime| create(runtime, stream, 0))
}

/// Makes a stream with flags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreateWithFlags(stream: *mut Handle, flags: c_uint) -> Code {
    call("hipStreamCreateWithFlags", |runtime| create(runtime, stream, flags))
}

/// Makes a stream with flags; priorities make no difference here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreateWithPriority(stream: *mut Handle, flags: c_uint, _priority: c_int) -> Code {
    call("hipStreamCreateWithPriority", |runtime| create(runtime, stream, flags))
}

/// Destroys a stream once its work is done.
#[unsafe(no_mangle)]
pub extern "C" fn hipStreamDestroy(stream: Handle) -> Code {
    release("hipStreamDestroy", |runtime| {
        if stream as usize <= 2 {
            return Err(Code::INVALID_HANDLE);
        }
        let stream = runtime.streams.remove(stream).ok_or(Code::CONTEXT_IS_DESTROYED)?;
        runtime.devices[stream.device].counts.streams.add(-1);
        if let Some(session) = stream.session() {
            session.invalidate();
            if session.origin == stream.id {
                abandon(runtime, &session);
            }
            return Ok(());
        }
        runtime.finish(&stream, None)
    })
}

/// Ends a capture without a graph.
fn abandon(runtime: &Runtime, session: &Arc<Session>) {
    runtime.end_session(session);
    for address in lock(&session.owned).drain(..) {
        let _ = runtime.allocations.free(&runtime.devices, address, |_| true);
    }
}

/// Waits for a stream's work.
#[unsafe(no_mangle)]
pub extern "C" fn hipStreamSynchronize(stream: Handle) -> Code {
    call("hipStreamSynchronize", |runtime| {
        let stream = runtime.stream(stream)?;
        runtime.forbid_wait_in_capture(&stream)?;
        runtime.devices[stream.device].counts.synchronizations.add(1);
        runtime.finish(&stream, None)
    })
}

/// Whether a stream's work is done.
#[unsafe(no_mangle)]
pub extern "C" fn hipStreamQuery(stream: Handle) -> Code {
    call("hipStreamQuery", |runtime| {
        let stream = runtime.stream(stream)?;
        runtime.forbid_wait_in_capture(&stream)?;
        if runtime.devices[stream.device].queues.is_busy(stream.id) { Err(Code::NOT_READY) } else { Ok(()) }
    })
}

/// A stream's flags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamGetFlags(stream: Handle, flags: *mut c_uint) -> Code {
    // SAFETY: the caller's pointer.
    call("hipStreamGetFlags", |runtime| unsafe { put(flags, runtime.stream(stream)?.flags) })
}

/// Calls a function of the program in a stream's order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipLaunchHostFunc(stream: Handle, function: Option<HostFn>, data: *mut c_void) -> Code {
    call("hipLaunchHostFunc", |runtime| {
        let function = function.ok_or(Code::INVALID_VALUE)?;
        runtime.submit(&runtime.stream(stream)?, Work::Call(function, data as usize)).map(|_| ())
    })
}

/// Begins a capture.
#[unsafe(no_mangle)]
pub extern "C" fn hipStreamBeginCapture(stream: Handle, mode: c_uint) -> Code {
    call("hipStreamBeginCapture", |runtime| {
        let stream = runtime.stream(stream)?;
        if stream.id == 0 {
            return Err(Code::CAPTURE_UNSUPPORTED);
        }
        let mode = Mode::from_raw(mode)?;
        let mut capture = lock(&stream.capture);
        if capture.is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        let session = Arc::new(Session::new(&stream, mode));
        *capture = Some(StreamCapture { session: session.clone(), clock: Default::default() });
        lock(&runtime.sessions).push(session);
        Ok(())
    })
}

/// Ends a capture and gives its graph.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamEndCapture(stream: Handle, graph: *mut Handle) -> Code {
    release("hipStreamEndCapture", |runtime| {
        wanted(graph)?;
        let stream = runtime.stream(stream)?;
        let Some(session) = stream.session() else { return Err(Code::ILLEGAL_STATE) };
        if session.origin != stream.id {
            return Err(Code::CAPTURE_UNMATCHED);
        }
        if session.mode != Mode::Relaxed && session.thread != std::thread::current().id() {
            return Err(Code::CAPTURE_WRONG_THREAD);
        }
        // SAFETY: the caller's pointer.
        unsafe { put(graph, std::ptr::null_mut()) }?;
        let joined = lock(&stream.capture).as_ref().is_some_and(|capture| session.is_joined(&capture.clock));
        if session.is_invalid() || !joined {
            let code = if session.is_invalid() { Code::CAPTURE_INVALIDATED } else { Code::CAPTURE_UNJOINED };
            abandon(runtime, &session);
            return Err(code);
        }
        runtime.end_session(&session);
        let nodes = lock(&session.nodes).drain(..).map(|(_, work)| work).collect();
        let owned = Arc::new(std::mem::take(&mut *lock(&session.owned)));
        runtime.devices[stream.device].counts.graphs.add(1);
        let handle = runtime.graphs.insert(|_| Graph { device: stream.device, nodes: Arc::new(nodes), owned });
        // SAFETY: as above.
        unsafe { put(graph, handle) }
    })
}

/// 0: no capture, 1: active, 2: spoilt.
fn status(stream: &Stream) -> (c_uint, c_ulonglong) {
    match stream.session() {
        None => (0, 0),
        Some(session) => (1 + c_uint::from(session.is_invalid()), session.id),
    }
}

/// Whether a stream captures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamIsCapturing(stream: Handle, out: *mut c_uint) -> Code {
    // SAFETY: the caller's pointer.
    call("hipStreamIsCapturing", |runtime| unsafe { put(out, status(&*runtime.stream(stream)?).0) })
}

/// Whether a stream captures, and the capture's number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamGetCaptureInfo(stream: Handle, out: *mut c_uint, id: *mut c_ulonglong) -> Code {
    call("hipStreamGetCaptureInfo", |runtime| {
        let (status, number) = status(&*runtime.stream(stream)?);
        // SAFETY: the caller's pointers.
        unsafe {
            if status == 1 && !id.is_null() {
                put(id, number)?;
            }
            put(out, status)
        }
    })
}

/// Exchanges the thread's capture mode.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> Code {
    query("hipThreadExchangeStreamCaptureMode", |_| {
        wanted(mode)?;
        // SAFETY: the caller's pointer.
        let new = Mode::from_raw(unsafe { mode.read() })?;
        // SAFETY: as above.
        unsafe { put(mode, exchange_mode(new) as c_uint) }
    })
}
