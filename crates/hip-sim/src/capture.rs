//! Stream capture and graphs.
//!
//! What a capture records executes in the order of its recording, which is one of the orders that the streams' dependencies allow.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use crate::error::{Code, Result};
use crate::handles::lock;
use crate::stream::Stream;
use crate::work::Work;

/// `hipStreamCaptureMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Unsafe calls of any thread are refused.
    Global,
    /// Unsafe calls of the capturing thread are refused.
    ThreadLocal,
    /// Nothing is refused for the capture's sake.
    Relaxed,
}

impl Mode {
    /// From the enumerator's value.
    pub fn from_raw(mode: u32) -> Result<Self> {
        match mode {
            0 => Ok(Mode::Global),
            1 => Ok(Mode::ThreadLocal),
            2 => Ok(Mode::Relaxed),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

/// How much of each stream's recorded work is known to precede something.
pub type Clock = HashMap<u64, usize>;

/// Takes the later of two clocks.
pub fn merge(clock: &mut Clock, other: &Clock) {
    for (&stream, &at) in other {
        let mine = clock.entry(stream).or_default();
        *mine = at.max(*mine);
    }
}

/// Memory that `hipMallocAsync` gave out during a capture: it lives as long as a graph that uses it.
pub type Owned = Arc<Vec<u64>>;

/// A capture under way.
pub struct Session {
    /// Its number.
    pub id: u64,
    /// Its mode.
    pub mode: Mode,
    /// The thread that began it.
    pub thread: ThreadId,
    /// The stream that it was begun on.
    pub origin: u64,
    /// What was recorded: the work, and the stream it was recorded on.
    pub nodes: Mutex<Vec<(u64, Arc<Work>)>>,
    /// Streams that joined it.
    pub streams: Mutex<Vec<Arc<Stream>>>,
    /// Allocations made in it.
    pub owned: Mutex<Vec<u64>>,
    invalid: AtomicBool,
}

impl Session {
    /// A capture on `origin`.
    pub fn new(origin: &Arc<Stream>, mode: Mode) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            mode,
            thread: std::thread::current().id(),
            origin: origin.id,
            nodes: Mutex::default(),
            streams: Mutex::new(vec![origin.clone()]),
            owned: Mutex::default(),
            invalid: AtomicBool::new(false),
        }
    }

    /// Whether a forbidden call spoilt it.
    pub fn is_invalid(&self) -> bool {
        self.invalid.load(Ordering::Acquire)
    }

    /// Spoils it.
    pub fn invalidate(&self) {
        self.invalid.store(true, Ordering::Release);
    }

    /// Records work of a stream that is part of it.
    pub fn record(&self, stream: &Stream, work: Work) -> Result {
        if self.is_invalid() {
            return Err(Code::CAPTURE_INVALIDATED);
        }
        let mut nodes = lock(&self.nodes);
        nodes.push((stream.id, Arc::new(work)));
        if let Some(capture) = lock(&stream.capture).as_mut() {
            capture.clock.insert(stream.id, nodes.len());
        }
        Ok(())
    }

    /// Whether all recorded work precedes what `clock` stands for.
    pub fn is_joined(&self, clock: &Clock) -> bool {
        let nodes = lock(&self.nodes);
        nodes.iter().enumerate().all(|(i, (stream, _))| clock.get(stream).is_some_and(|&known| known > i))
    }
}

/// A graph.
pub struct Graph {
    /// The device it was captured on.
    pub device: usize,
    /// Its work in order.
    pub nodes: Arc<Vec<Arc<Work>>>,
    /// Its own memory.
    pub owned: Owned,
}

/// An instantiated graph.
pub struct GraphExec {
    /// The device it runs on.
    pub device: usize,
    /// Its work in order.
    pub nodes: Arc<Vec<Arc<Work>>>,
    /// Memory that it keeps alive.
    pub owned: Owned,
}
