//! Scalar scales as device memory: one persistent F32 a value, so that a decode call with a known scale enqueues nothing for it.

use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use candle::Result;

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
    /// Bits of the value in each slot. Its fill is on the device's one stream, so whatever uses it, a graph's replay too, comes after.
    values: Vec<u32>,
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
        state.values.clear();
        if let Some((address, bytes)) = state.block.take() {
            pool.give_back(context, address, bytes, true);
        }
    }

    /// `value` on the device. Enqueues its fill, but where the value is kept; can be captured.
    ///
    /// Up to 64 values are kept, each from the first call outside of a capture on. One that a capture asks for first, and every one past 64, is
    /// filled anew for each call: in a graph that fill is a part of the graph, as nothing else would run it.
    pub fn get(&self, device: &RocmDevice, value: f32) -> Result<Scalar> {
        let inner = &*device.inner;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.values.iter().position(|bits| *bits == value.to_bits()) {
            Some(slot) => return Ok(Scalar::Kept(state.address(slot))),
            None if !inner.stream.is_capturing() && state.values.len() < MOST => return state.add(inner, value),
            None => {}
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

    /// Fills the next slot. A fill that fails leaves it free.
    fn add(&mut self, inner: &Inner, value: f32) -> Result<Scalar> {
        if self.block.is_none() {
            self.block = Some(inner.pool.take(&inner.context, inner.pool.size(MOST * SPACING)?, false)?);
        }
        let address = self.address(self.values.len());
        fill(inner, address, value)?;
        self.values.push(value.to_bits());
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
