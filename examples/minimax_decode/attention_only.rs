//! `--attention-only`: one workload's attention call, without a model.

use std::time::{Duration, Instant};

use anyhow::Result;
use candle::Device;
use testkit::rotation::{ROTATION_BYTES, Rotation};
use testkit::workloads::{Fp8Scale, Kv, Workload};

use super::kv::KvKind;
use super::limits;

/// Calls are timed until they have taken this long together.
const MEASURE_FOR: Duration = Duration::from_secs(2);
const FEWEST_CALLS: usize = 5;

/// Times of a workload's calls.
pub struct AttentionTimes {
    pub calls: usize,
    pub median: Duration,
    pub best: Duration,
    /// K and V bytes of a call, scales included.
    pub kv_bytes: u64,
    /// Caches that the calls went over in turn.
    pub caches: usize,
}

impl AttentionTimes {
    /// KV bytes of all caches.
    pub fn rotation_bytes(&self) -> u64 {
        self.caches as u64 * self.kv_bytes
    }

    /// KV bytes a second, by the median.
    pub fn read_rate(&self) -> f64 {
        self.kv_bytes as f64 / self.median.as_secs_f64()
    }
}

/// How a workload stores K and V.
pub fn kv_kind(workload: &Workload) -> KvKind {
    match (workload.kv, workload.fp8_scale) {
        (Kv::Bf16, _) => KvKind::Bf16,
        (Kv::Fp8, Some(Fp8Scale::PerToken)) => KvKind::Fp8PerToken,
        (Kv::Fp8, _) => KvKind::Fp8,
        (Kv::Mxfp4, _) => KvKind::Mxfp4,
    }
}

/// Times the workload's call over random caches in turn, together more than any cache of the machine holds.
pub fn run(workload: &Workload, kind: KvKind, seed: u64, device: &Device) -> Result<AttentionTimes> {
    let fp8_scale = match kind {
        KvKind::Fp8 => Some(Fp8Scale::Scalar),
        KvKind::Fp8PerToken => Some(Fp8Scale::PerToken),
        _ => None,
    };
    let workload = Workload { fp8_scale, ..workload.clone() };
    let tokens: usize = workload.contexts().iter().sum();
    let kv_bytes = (tokens * workload.num_kv_heads * kind.token_bytes(workload.head_dim)) as u64;
    limits::check_memory("--attention-only", (ROTATION_BYTES as u128).max(2 * u128::from(kv_bytes)))?;
    let rotation = Rotation::new(&workload, kind.dtype(), ROTATION_BYTES, seed)?.to_device(device)?;
    rotation.decode(0)?;
    let mut times = vec![];
    let start = Instant::now();
    while times.len() < FEWEST_CALLS || start.elapsed() < MEASURE_FOR {
        let start = Instant::now();
        rotation.decode(times.len() + 1)?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(AttentionTimes { calls: times.len(), median: times[times.len() / 2], best: times[0], kv_bytes, caches: rotation.turns() })
}
