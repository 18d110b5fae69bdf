//! Events.

use std::ffi::c_uint;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::capture::merge;
use crate::error::{Code, Result};
use crate::guard::{call, put, release, wanted};
use crate::handles::{Handle, lock};
use crate::runtime::Runtime;
use crate::stream::{DISABLE_TIMING, Event, Recorded, StreamCapture};
use crate::work::Work;

fn create(runtime: &Runtime, event: *mut Handle, flags: c_uint) -> Result {
    /// Blocking wait, no timing, between processes, release to the device or the system, no system fence.
    const KNOWN: c_uint = 1 | DISABLE_TIMING | 4 | 0x2000_0000 | 0x4000_0000 | 0x8000_0000;
    wanted(event)?;
    if flags & !KNOWN != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let device = runtime.current()?;
    device.counts.events.add(1);
    let made = |_| Event { device: device.ordinal, flags, state: Default::default(), recordings: Default::default() };
    // SAFETY: the caller's pointer.
    unsafe { put(event, runtime.events.insert(made)) }
}

fn event_of(runtime: &Runtime, event: Handle) -> Result<Arc<Event>> {
    runtime.events.get(event).ok_or(Code::INVALID_HANDLE)
}

/// Makes an event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventCreate(event: *mut Handle) -> Code {
    call("hipEventCreate", |runtime| create(runtime, event, 0))
}

/// Makes an event with flags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventCreateWithFlags(event: *mut Handle, flags: c_uint) -> Code {
    call("hipEventCreateWithFlags", |runtime| create(runtime, event, flags))
}

/// Destroys an event.
#[unsafe(no_mangle)]
pub extern "C" fn hipEventDestroy(event: Handle) -> Code {
    release("hipEventDestroy", |runtime| {
        let event = runtime.events.remove(event).ok_or(Code::INVALID_HANDLE)?;
        runtime.devices[event.device].counts.events.add(-1);
        Ok(())
    })
}

/// Records an event in a stream.
#[unsafe(no_mangle)]
pub extern "C" fn hipEventRecord(event: Handle, stream: Handle) -> Code {
    call("hipEventRecord", |runtime| {
        let event = event_of(runtime, event)?;
        let stream = runtime.stream(stream)?;
        if let Some(capture) = lock(&stream.capture).as_ref() {
            if capture.session.is_invalid() {
                return Err(Code::CAPTURE_INVALIDATED);
            }
            *lock(&event.state) = Recorded::Captured(capture.session.clone(), capture.clock.clone());
            return Ok(());
        }
        if event.device != stream.device {
            return Err(Code::INVALID_HANDLE);
        }
        let number = event.recordings.fetch_add(1, Ordering::AcqRel) + 1;
        let queued = runtime.enqueue(&stream, Arc::new(Work::Record(event.clone(), number)), false)?;
        if runtime.config.queued {
            *lock(&event.state) = Recorded::Queued(stream, queued);
        }
        Ok(())
    })
}

/// Refuses an event of a capture under way.
fn refuse_captured(event: &Event) -> Result {
    if let Recorded::Captured(session, _) = &*lock(&event.state) {
        session.invalidate();
        return Err(Code::CAPTURED_EVENT);
    }
    Ok(())
}

/// Waits for an event.
#[unsafe(no_mangle)]
pub extern "C" fn hipEventSynchronize(event: Handle) -> Code {
    call("hipEventSynchronize", |runtime| {
        let event = event_of(runtime, event)?;
        refuse_captured(&event)?;
        runtime.forbid_in_capture()?;
        runtime.devices[event.device].counts.synchronizations.add(1);
        wait(runtime, &event)
    })
}

/// Executes what the event is behind.
fn wait(runtime: &Runtime, event: &Event) -> Result {
    let queued = match &*lock(&event.state) {
        Recorded::Queued(stream, number) => Some((stream.clone(), *number)),
        _ => None,
    };
    queued.map_or(Ok(()), |(stream, number)| runtime.finish(&stream, Some(number)))
}

/// Whether an event was reached.
#[unsafe(no_mangle)]
pub extern "C" fn hipEventQuery(event: Handle) -> Code {
    call("hipEventQuery", |runtime| {
        let event = event_of(runtime, event)?;
        refuse_captured(&event)?;
        if matches!(&*lock(&event.state), Recorded::Queued(..)) { Err(Code::NOT_READY) } else { Ok(()) }
    })
}

/// Milliseconds between two events: the simulator's, which say nothing about a GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventElapsedTime(ms: *mut f32, start: Handle, stop: Handle) -> Code {
    call("hipEventElapsedTime", |runtime| {
        wanted(ms)?;
        let at = |event: Handle| {
            let event = event_of(runtime, event)?;
            if event.flags & DISABLE_TIMING != 0 {
                return Err(Code::INVALID_HANDLE);
            }
            match &*lock(&event.state) {
                Recorded::At(time) => Ok(*time),
                Recorded::Queued(..) => Err(Code::NOT_READY),
                Recorded::Never | Recorded::Captured(..) => Err(Code::INVALID_HANDLE),
            }
        };
        let (start, stop) = (at(start)?, at(stop)?);
        let elapsed = stop.saturating_duration_since(start).as_secs_f32() - start.saturating_duration_since(stop).as_secs_f32();
        // SAFETY: the caller's pointer.
        unsafe { put(ms, elapsed * 1e3) }
    })
}

/// Makes a stream's further work wait for an event; an event of a capture takes the stream into it.
#[unsafe(no_mangle)]
pub extern "C" fn hipStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) -> Code {
    call("hipStreamWaitEvent", |runtime| {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let event = runtime.events.get(event).ok_or(Code::INVALID_HANDLE)?;
        let stream = runtime.stream(stream).map_err(|_| Code::INVALID_HANDLE)?;
        let mut capture = lock(&stream.capture);
        match (&*lock(&event.state), capture.as_mut()) {
            (Recorded::Captured(session, _), _) if session.is_invalid() => Err(Code::CAPTURE_INVALIDATED),
            (Recorded::Captured(session, clock), None) => {
                if stream.id == 0 {
                    return Err(Code::INVALID_HANDLE);
                }
                lock(&session.streams).push(stream.clone());
                *capture = Some(StreamCapture { session: session.clone(), clock: clock.clone() });
                Ok(())
            }
            (Recorded::Captured(session, clock), Some(mine)) => {
                if !Arc::ptr_eq(session, &mine.session) {
                    session.invalidate();
                    mine.session.invalidate();
                    return Err(Code::CAPTURE_MERGE);
                }
                merge(&mut mine.clock, clock);
                Ok(())
            }
            (Recorded::Never, _) => Ok(()),
            (_, Some(mine)) => {
                mine.session.invalidate();
                Err(Code::CAPTURE_ISOLATION)
            }
            (Recorded::Queued(other, number), None) if other.device == stream.device => {
                runtime.devices[stream.device].queues.wait(stream.id, (other.id, *number));
                Ok(())
            }
            (Recorded::Queued(other, number), None) => runtime.finish(other, Some(*number)),
            (Recorded::At(_), None) => Ok(()),
        }
    })
}
