//! The workloads, one group a family: this crate, candle-nn's CPU attention, and candle's matmul + softmax on the same KV, gathered.
//!
//! `cargo bench` runs a few shapes of each family; `cargo bench --bench decode -- FAMILY/NAME` (or any part of it) runs those, out of all.
//! Throughput is in KV bytes that the call reads (candle reads an FP8 cache as BF16: its bytes are those). Calls rotate over 1 GiB of KV.
//! Some of candle's loops use AVX2 only where compiled for it: `RUSTFLAGS="-C target-cpu=native"` shows them at their best.

use std::cell::OnceCell;
use std::time::{Duration, Instant};

use candle::Result;
use candle_paged_attn::cache::KvDtype;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, measurement::WallTime};
use testkit::peers::Peers;
use testkit::rotation::{ROTATION_BYTES, Rotation};
use testkit::workloads::{Family, Workload, families};

/// What `cargo bench` runs when no filter names a shape.
const DEFAULT: &[&str] = &[
    "minimax20/decode-b4-q1-ctx8192-bf16",
    "minimax20/decode-b4-q1-ctx8192-fp8",
    "minimax20/verify-b3-q4-ctx8192-bf16",
    "large16/large-b16-q4-ctx8192-bf16",
    "random24/random-b64-q1-128-2048-bf16",
    "review/R1",
    "review/W6",
    "review/W4",
];

/// KV that the peers rotate over: they are bound by arithmetic, so twice a large last-level cache is plenty.
const PEER_BYTES: usize = 256 << 20;

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    let families = families().expect("benches/workloads.json is part of the repository");
    let named = names_a_shape(&families);
    for family in &families {
        let mut group = criterion.benchmark_group(family.name);
        let shapes = family.workloads.iter().filter(|w| named || DEFAULT.contains(&path(family, w).as_str()));
        shapes.for_each(|workload| bench(&mut group, workload));
        group.finish();
    }
    criterion.final_summary();
}

fn path(family: &Family, workload: &Workload) -> String {
    format!("{}/{}", family.name, workload.name)
}

/// Whether an argument is part of a workload's path: then every shape is a candidate and criterion's filter picks.
fn names_a_shape(families: &[Family]) -> bool {
    let paths: Vec<_> = families.iter().flat_map(|f| f.workloads.iter().map(|w| path(f, w))).collect();
    let filters = std::env::args().skip(1).filter(|arg| !arg.starts_with('-'));
    filters.into_iter().any(|arg| paths.iter().any(|path| path.contains(&arg) || arg.starts_with(path.as_str())))
}

/// The three contestants on one shape. Tensors are made when the first of them is run, so a shape that a filter drops costs nothing.
fn bench(group: &mut BenchmarkGroup<'_, WallTime>, workload: &Workload) {
    let rotation = OnceCell::new();
    let rotation = || rotation.get_or_init(|| made(Rotation::new(workload, workload.kv_dtype(), ROTATION_BYTES, 1)));
    group.throughput(Throughput::Bytes(workload.kv_bytes() as u64));
    group.bench_function(BenchmarkId::new(&workload.name, "paged_decode"), |b| {
        let rotation = rotation();
        b.iter_custom(|calls| timed(calls, |turn| rotation.decode(turn)));
    });
    if workload.kv_dtype() == KvDtype::Mxfp4 {
        return;
    }
    let widened = if workload.kv_dtype() == KvDtype::Fp8 { 2 } else { 1 };
    let peer_bytes = widened * workload.kv_bytes();
    let peers = OnceCell::new();
    let peers = || peers.get_or_init(|| made(Peers::new(rotation(), PEER_BYTES.div_ceil(peer_bytes).max(2))));
    group.throughput(Throughput::Bytes(peer_bytes as u64));
    group.bench_function(BenchmarkId::new(&workload.name, "candle_nn"), |b| {
        let peers = peers();
        b.iter_custom(|calls| timed(calls, |turn| peers.candle_nn(turn)));
    });
    group.bench_function(BenchmarkId::new(&workload.name, "matmul_softmax"), |b| {
        let peers = peers();
        b.iter_custom(|calls| timed(calls, |turn| peers.matmul_softmax(turn)));
    });
}

/// Time of `calls` calls, each on the next cache.
fn timed<T>(calls: u64, call: impl Fn(usize) -> Result<T>) -> Duration {
    let start = Instant::now();
    for turn in 0..calls as usize {
        std::hint::black_box(made(call(turn)));
    }
    start.elapsed()
}

fn made<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
