//! A device: its memory, what runs on it, and whether it is lost.

use std::sync::RwLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::counts::Counts;
use crate::error::{Code, Result};
use crate::queue::Queues;

/// One GPU.
#[derive(Default)]
pub struct Device {
    /// Its number.
    pub ordinal: usize,
    /// Its memory as kernels see it.
    pub memory: cdna_sim::Memory,
    /// What was done.
    pub counts: Counts,
    /// Shared by what runs; exclusive for taking memory away.
    pub busy: RwLock<()>,
    /// Work not executed yet.
    pub queues: Queues,
    lost: AtomicU32,
}

impl Device {
    /// Device `ordinal`.
    pub fn new(ordinal: usize) -> Self {
        Self { ordinal, ..Self::default() }
    }

    /// An error from the first fault on.
    pub fn check(&self) -> Result {
        match self.lost.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// Marks the device as lost where `code` is an error that it does not recover from.
    pub fn note(&self, code: Code) -> Code {
        if code.is_sticky() {
            let _ = self.lost.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
        }
        code
    }

    /// Forgets the fault.
    pub fn revive(&self) {
        self.lost.store(0, Ordering::Release);
    }
}
