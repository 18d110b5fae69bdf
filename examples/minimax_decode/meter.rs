//! What the attention calls took and read.

use std::time::{Duration, Instant};

/// Time and KV bytes of attention calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter {
    pub time: Duration,
    /// K and V bytes that the calls had to read, scales included, each KV head's once a sequence.
    pub kv_bytes: u64,
}

impl Meter {
    /// Runs `call`, which reads `kv_bytes`.
    pub fn measure<T>(&mut self, kv_bytes: u64, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = call();
        self.time += start.elapsed();
        self.kv_bytes += kv_bytes;
        result
    }

    pub fn add(&mut self, other: &Self) {
        self.time += other.time;
        self.kv_bytes += other.kv_bytes;
    }
}
