//! Scalar scales as device memory: one persistent F32 a value, so that a decode call with a known scale enqueues nothing for it.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use candle::Result;
use hip_runtime_sys::{hipError_t, hipEvent_t, hipEventDisableTiming};

use super::context::Context;
use super::device::{Inner, RocmDevice};
use super::pool::Pool;
use super::storage::RocmStorage;

/// Values that are kept. None is ever evicted, for graphs hold their addresses.
const MOST: usize = 64;
/// From one value to the next, so that no two share what a scalar load fetches.
const SPACING: usize = 64;

/// The scalars of a device.
#[derive(Default)]
pub(super) struct Scalars {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Address and size of the block that holds them, from the pool.
    block: Option<(u64, usize)>,
    /// The value in each slot.
    entries: Vec<Entry>,
}

struct Entry {
    bits: u32,
    /// Tells when its fill is done, until it was seen to be.
    filled: Option<Event>,
}

struct Event(hipEvent_t);

// SAFETY: HIP's functions take events from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event after everything enqueued.
    fn record(inner: &Inner) -> Result<Self> {
        let mut event = null_mut();
        // SAFETY: writes one handle.
        inner.context.check(unsafe { inner.context.enter()?.hipEventCreateWithFlags(&mut event, hipEventDisableTiming) }, "")?;
        let event = Self(event);
        let recorded = inner.stream.enqueue_eagerly("filling a scalar", |stream| {
            // SAFETY: event and stream are alive.
            inner.context.check(unsafe { inner.context.enter()?.hipEventRecord(event.0, stream) }, "")
        });
        match recorded {
            Ok(()) => Ok(event),
            Err(error) => {
                event.destroy(&inner.context);
                Err(error)
            }
        }
    }

    fn is_done(&self, context: &Context) -> Result<bool> {
        // SAFETY: the event is alive.
        match unsafe { context.enter()?.hipEventQuery(self.0) } {
            Err(failure) if failure.is(hipError_t::hipErrorNotReady) => Ok(false),
            result => context.check(result, "").map(|()| true),
        }
    }

    fn destroy(self, context: &Context) {
        // SAFETY: from hipEventCreateWithFlags, used no more.
        let _ = unsafe { context.hip().hipEventDestroy(self.0) };
    }
}

/// A value in device memory.
pub(super) enum Scalar {
    /// Kept as long as the device is open.
    Kept(u64),
    /// This call's own.
    Fresh(RocmStorage),
}

impl Scalar {
    pub fn address(&self) -> u64 {
        match self {
            Self::Kept(address) => *address,
            Self::Fresh(storage) => storage.address(),
        }
    }
}

impl Scalars {
    /// Frees what is kept; the stream has been waited for.
    pub fn close(&self, context: &Context, pool: &Pool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        for event in state.entries.drain(..).filter_map(|entry| entry.filled) {
            event.destroy(context);
        }
        if let Some((address, bytes)) = state.block.take() {
            pool.give_back(context, address, bytes, true);
        }
    }

    /// `value` on the device. Enqueues its fill, but where the value is kept; can be captured.
    ///
    /// A value is kept from the call on that finds its fill done, up to 64 of them. One that a capture asks for first, and every one past 64, is
    /// filled anew for each call: in a graph that fill is a part of the graph.
    pub fn get(&self, device: &RocmDevice, value: f32) -> Result<Scalar> {
        let inner = &*device.inner;
        let capturing = inner.stream.is_capturing();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.entries.iter().position(|entry| entry.bits == value.to_bits()) {
            Some(slot) if state.is_filled(slot, &inner.context, capturing)? => return Ok(Scalar::Kept(state.address(slot))),
            None if !capturing && state.entries.len() < MOST => return state.add(inner, value),
            _ => {}
        }
        drop(state);
        let storage = device.alloc(size_of::<f32>())?;
        fill(inner, storage.address(), value)?;
        Ok(Scalar::Fresh(storage))
    }
}

impl State {
    fn address(&self, slot: usize) -> u64 {
        self.block.map_or(0, |(address, _)| address + (slot * SPACING) as u64)
    }

    /// Whether a value is known to be there. A capture asks the runtime nothing.
    fn is_filled(&mut self, slot: usize, context: &Context, capturing: bool) -> Result<bool> {
        let entry = &mut self.entries[slot];
        if let Some(event) = &entry.filled {
            if capturing || !event.is_done(context)? {
                return Ok(false);
            }
        }
        if let Some(event) = entry.filled.take() {
            event.destroy(context);
        }
        Ok(true)
    }

    /// Fills the next slot. This call may use it at once: its kernels come after the fill.
    fn add(&mut self, inner: &Inner, value: f32) -> Result<Scalar> {
        if self.block.is_none() {
            self.block = Some(inner.pool.take(&inner.context, inner.pool.size(MOST * SPACING)?, false)?);
        }
        let address = self.address(self.entries.len());
        fill(inner, address, value)?;
        self.entries.push(Entry { bits: value.to_bits(), filled: Some(Event::record(inner)?) });
        Ok(Scalar::Kept(address))
    }
}

/// Enqueues the fill of one F32, byte by byte: unlike a copy from the host, a graph can hold it.
fn fill(inner: &Inner, address: u64, value: f32) -> Result<()> {
    for (at, byte) in value.to_le_bytes().into_iter().enumerate() {
        inner.stream.enqueue("filling a scalar", |stream| {
            let to = (address + at as u64) as *mut c_void;
            // SAFETY: inside an allocation that is in use until the stream has passed this.
            let result = unsafe { inner.context.enter()?.hipMemsetAsync(to, byte.into(), 1, stream) };
            inner.context.check(result, "a scalar")
        })?;
        inner.counts.fills.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}
