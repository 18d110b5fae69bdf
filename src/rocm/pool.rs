//! Device memory that is used again: freed blocks are kept by size, up to a cap.
//!
//! All work of a device is on one stream, so a block may be handed out as soon as its last user has enqueued its work: the new user's work
//! comes later on the same stream. Nothing waits, and `hipMalloc` and `hipFree`, which do, are rare.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle::{Result, bail};
use hip_runtime_sys::hipError_t;

use super::context::Context;

/// What the smallest block has; every block begins at a multiple of it.
const SMALLEST: usize = 512;
/// Above this, sizes are multiples of [`LARGE_STEP`]; below, each power of two has four steps.
const LARGE: usize = 64 << 20;
const LARGE_STEP: usize = 2 << 20;
/// From this size on a block may also serve a request that is smaller by up to a fifth.
const SHARED: usize = 1 << 20;

pub(super) struct Pool {
    /// Most bytes kept for later.
    cap: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: BTreeMap<usize, Vec<u64>>,
    usage: Usage,
}

/// Bytes and blocks of a device's memory that its pool has taken from the runtime.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    pub live_bytes: usize,
    pub live_blocks: usize,
    pub cached_bytes: usize,
}

impl State {
    fn take(&mut self, bytes: usize) -> Option<(u64, usize)> {
        let (&size, blocks) = self.free.range_mut(bytes..).next().filter(|(size, _)| serves(**size, bytes))?;
        let address = blocks.pop()?;
        if blocks.is_empty() {
            self.free.remove(&size);
        }
        self.usage.cached_bytes -= size;
        Some((address, size))
    }

    fn keep(&mut self, address: u64, bytes: usize) {
        self.free.entry(bytes).or_default().push(address);
        self.usage.cached_bytes += bytes;
    }

    /// Takes blocks out, the largest first, until at most `cap` bytes are kept.
    fn surplus(&mut self, cap: usize) -> Vec<u64> {
        let mut out = Vec::new();
        while self.usage.cached_bytes > cap {
            let Some((size, mut blocks)) = self.free.pop_last() else { break };
            let count = (self.usage.cached_bytes - cap).div_ceil(size).min(blocks.len());
            out.extend(blocks.drain(blocks.len() - count..));
            self.usage.cached_bytes -= count * size;
            if !blocks.is_empty() {
                self.free.insert(size, blocks);
            }
        }
        out
    }
}

/// The size of the block that serves a request of `bytes`.
fn block_bytes(bytes: usize) -> Option<usize> {
    let step = if bytes > LARGE { LARGE_STEP } else { (bytes.next_power_of_two() / 8).max(SMALLEST) };
    bytes.max(1).checked_next_multiple_of(step)
}

/// Whether a block of `size` bytes may serve a request of `bytes`, itself the size of a block.
pub(super) fn serves(size: usize, bytes: usize) -> bool {
    size == bytes || (bytes >= SHARED && size > bytes && size - bytes <= bytes / 4)
}

impl Pool {
    pub fn new(cap: usize) -> Self {
        Self { cap, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn usage(&self) -> Usage {
        self.lock().usage
    }

    /// The size of the block that would serve a request; more than any device has is an error.
    pub fn size(&self, bytes: usize) -> Result<usize> {
        match block_bytes(bytes) {
            Some(size) => Ok(size),
            None => bail!("rocm: {bytes} bytes are more than a device's addresses reach"),
        }
    }

    /// A block of at least `size` bytes, which [`Pool::size`] gave: a kept one, else a new one. While a graph is captured
    /// nothing can be asked of the runtime.
    pub fn take(&self, context: &Context, size: usize, capturing: bool) -> Result<(u64, usize)> {
        let found = self.lock().take(size);
        let (address, size) = match found {
            Some(block) => block,
            None if capturing => bail!(
                "rocm: the pool of {} has no free block of {size} bytes, and none can be allocated while a graph is being captured: make the same \
                 calls once before the capture (the pool keeps at most {} bytes: DeviceSettings::pool_cap_bytes)",
                context.name,
                self.cap
            ),
            None => (self.allocate(context, size)?, size),
        };
        let usage = &mut self.lock().usage;
        usage.live_bytes += size;
        usage.live_blocks += 1;
        Ok((address, size))
    }

    /// New memory from the runtime; where there is none left, once more after giving back all that is kept.
    fn allocate(&self, context: &Context, bytes: usize) -> Result<u64> {
        let hip = context.enter()?;
        let malloc = || {
            let mut pointer = null_mut();
            // SAFETY: writes one pointer.
            unsafe { hip.hipMalloc(&mut pointer, bytes) }.map(|()| pointer as u64)
        };
        let mut result = malloc();
        if result.as_ref().is_err_and(|failure| failure.is(hipError_t::hipErrorOutOfMemory)) && self.trim(context, 0) {
            result = malloc();
        }
        match result {
            Ok(address) => Ok(address),
            Err(failure) => {
                let detail = format!("asked for {bytes} bytes{}", self.memory_left(context, &failure));
                context.check(Err(failure), detail).map(|()| 0)
            }
        }
    }

    /// For the message that memory is short: who has it.
    fn memory_left(&self, context: &Context, failure: &super::error::Failure) -> String {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        let mut ask = || context.enter().is_ok_and(|hip| unsafe { hip.hipMemGetInfo(&mut free, &mut total) }.is_ok());
        let known = failure.is(hipError_t::hipErrorOutOfMemory) && ask();
        if known { format!(" with {} in use here and {free} of {total} free", self.usage().live_bytes) } else { String::new() }
    }

    /// Takes a block back that [`Pool::take`] gave. Nothing but work that is already enqueued uses it.
    pub fn give_back(&self, context: &Context, address: u64, bytes: usize, capturing: bool) {
        {
            let mut state = self.lock();
            state.usage.live_bytes -= bytes;
            state.usage.live_blocks -= 1;
            state.keep(address, bytes);
        }
        if !capturing {
            self.trim(context, self.cap);
        }
    }

    /// Gives blocks back to the runtime until at most the cap is kept; what went over it while a graph was captured.
    pub fn trim_to_cap(&self, context: &Context) {
        self.trim(context, self.cap);
    }

    /// Gives blocks back to the runtime until at most `cap` bytes are kept. Whether there were any.
    pub fn trim(&self, context: &Context, cap: usize) -> bool {
        let surplus = self.lock().surplus(cap);
        if surplus.is_empty() {
            return false;
        }
        for address in surplus {
            // SAFETY: from hipMalloc, in no list any more; hipFree waits for the work that uses it.
            let _ = unsafe { context.hip().hipFree(address as *mut c_void) };
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_at_most_a_quarter_larger_than_asked_for() {
        for bytes in (0..4096).chain((12..40).flat_map(|power| [(1 << power) - 1, 1 << power, (1 << power) + 1, 3 << (power - 1)])) {
            let size = block_bytes(bytes).unwrap();
            assert!(size >= bytes && size.is_multiple_of(SMALLEST), "{bytes}: {size}");
            assert!(size <= SMALLEST.max(bytes + bytes / 4).next_multiple_of(SMALLEST), "{bytes}: {size}");
            assert_eq!(block_bytes(size), Some(size), "a block serves its own size");
        }
        assert_eq!(block_bytes(usize::MAX), None);
    }

    #[test]
    fn kept_blocks_are_found_by_size_and_the_largest_go_first() {
        let mut state = State::default();
        for (address, bytes) in [(1, 512), (2, 512), (3, 5 << 20), (4, 4 << 20)] {
            state.keep(address, bytes);
        }
        assert_eq!(state.usage.cached_bytes, 1024 + (9 << 20));
        assert_eq!(state.take(1024), None, "small blocks serve their own size alone");
        assert_eq!(state.take(3 << 20), None, "4 MiB are more than a quarter above 3 MiB");
        assert_eq!(state.take(7 << 19), Some((4, 4 << 20)));
        state.keep(4, 4 << 20);
        assert_eq!(state.surplus(5 << 20), [3]);
        assert_eq!(state.take(512), Some((2, 512)));
        assert_eq!(state.surplus(0), [4, 1]);
        assert_eq!(state.usage.cached_bytes, 0);
    }
}
