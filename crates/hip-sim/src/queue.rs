//! Queued work (`HIP_SIM_ASYNC=1`): executed when something waits for it, in an order that the streams allow, as late as that permits.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use crate::device::Device;
use crate::error::Result;
use crate::handles::lock;
use crate::memory::Allocations;
use crate::work::Work;

/// A place in a stream: its id and a number of the device's.
pub type Place = (u64, u64);

struct Item {
    number: u64,
    after: Vec<Place>,
    work: std::sync::Arc<Work>,
    in_graph: bool,
}

#[derive(Default)]
struct State {
    streams: HashMap<u64, VecDeque<Item>>,
    /// What each stream's next work has to wait for.
    waits: HashMap<u64, Vec<Place>>,
    next: u64,
}

/// A device's queues.
#[derive(Default)]
pub struct Queues {
    state: Mutex<State>,
    draining: Mutex<()>,
}

impl Queues {
    /// Appends work to a stream, behind what is queued in the streams of `also`; its number.
    pub fn push(&self, stream: u64, also: &[u64], work: std::sync::Arc<Work>, in_graph: bool) -> u64 {
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        let mut after = state.waits.remove(&stream).unwrap_or_default();
        after.extend(also.iter().filter_map(|&other| Some((other, state.streams.get(&other)?.back()?.number))));
        state.streams.entry(stream).or_default().push_back(Item { number, after, work, in_graph });
        number
    }

    /// Makes what `stream` gets from now on wait for a place.
    pub fn wait(&self, stream: u64, place: Place) {
        lock(&self.state).waits.entry(stream).or_default().push(place);
    }

    /// Streams with work.
    fn busy(&self) -> Vec<u64> {
        lock(&self.state).streams.iter().filter(|(_, queue)| !queue.is_empty()).map(|(&stream, _)| stream).collect()
    }

    /// Whether a stream has work queued.
    pub fn is_busy(&self, stream: u64) -> bool {
        lock(&self.state).streams.get(&stream).is_some_and(|queue| !queue.is_empty())
    }

    /// Executes a stream's work up to and including `last`, all of it without one, and what that waits for. After an error the rest is dropped.
    pub fn drain(&self, devices: &[Device], device: &Device, allocations: &Allocations, stream: u64, last: Option<u64>) -> Result {
        let _draining = lock(&self.draining);
        let result = self.drain_inner(devices, device, allocations, (stream, last.unwrap_or(u64::MAX)));
        if result.is_err() {
            lock(&self.state).streams.clear();
        }
        result
    }

    /// Executes everything.
    pub fn drain_all(&self, devices: &[Device], device: &Device, allocations: &Allocations) -> Result {
        self.busy().into_iter().try_for_each(|stream| self.drain(devices, device, allocations, stream, None))
    }

    /// Drops everything.
    pub fn clear(&self) {
        let mut state = lock(&self.state);
        state.streams.clear();
        state.waits.clear();
    }

    fn drain_inner(&self, devices: &[Device], device: &Device, allocations: &Allocations, (stream, last): Place) -> Result {
        loop {
            let item = {
                let mut state = lock(&self.state);
                let Some(queue) = state.streams.get_mut(&stream) else { return Ok(()) };
                if queue.front().is_none_or(|item| item.number > last) {
                    return Ok(());
                }
                queue.pop_front()
            };
            let Some(item) = item else { return Ok(()) };
            // What it waits for was queued before it, so this ends.
            item.after.iter().try_for_each(|&place| self.drain_inner(devices, device, allocations, place))?;
            item.work.execute(device, devices, allocations, item.in_graph)?;
        }
    }
}
