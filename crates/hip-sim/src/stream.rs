//! Streams and events.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::capture::{Clock, Session};
use crate::handles::lock;

/// `hipStreamNonBlocking`.
pub const NON_BLOCKING: u32 = 1;
/// `hipEventDisableTiming`.
pub const DISABLE_TIMING: u32 = 2;

/// A stream.
pub struct Stream {
    /// Its handle; 0 for a device's null stream.
    pub id: u64,
    /// The device.
    pub device: usize,
    /// Flags it was made with.
    pub flags: u32,
    /// Held while its work executes.
    pub order: Mutex<()>,
    /// The capture that it is part of.
    pub capture: Mutex<Option<StreamCapture>>,
}

/// A stream's part in a capture.
pub struct StreamCapture {
    /// The capture.
    pub session: Arc<Session>,
    /// What of each stream precedes the next node.
    pub clock: Clock,
}

impl Stream {
    /// A stream that captures nothing.
    pub fn new(id: u64, device: usize, flags: u32) -> Self {
        Self { id, device, flags, order: Mutex::default(), capture: Mutex::default() }
    }

    /// The capture that it is part of.
    pub fn session(&self) -> Option<Arc<Session>> {
        lock(&self.capture).as_ref().map(|capture| capture.session.clone())
    }

    /// Whether the null stream and this one wait for each other.
    pub fn is_blocking(&self) -> bool {
        self.flags & NON_BLOCKING == 0
    }
}

/// An event.
pub struct Event {
    /// Device it was made on.
    pub device: usize,
    /// Flags it was made with.
    pub flags: u32,
    /// Its last recording.
    pub state: Mutex<Recorded>,
    /// How often it was recorded: of several queued recordings the last counts.
    pub recordings: AtomicU64,
}

/// A recording of an event.
#[derive(Default)]
pub enum Recorded {
    /// None yet.
    #[default]
    Never,
    /// Behind the work of this stream with this number.
    Queued(Arc<Stream>, u64),
    /// Reached.
    At(Instant),
    /// In a capture.
    Captured(Arc<Session>, Clock),
}
