//! A markdown table of this crate against candle's own attention, measured side by side.
//!
//! `cargo bench --bench ratios` does the default shapes, `cargo bench --bench ratios -- FAMILY/NAME...` those. In one process the contestants
//! take turns, call by call (A B C A B C ...), so that whatever else the machine does meets them alike; each figure is the median of its calls
//! and each ratio the median of the rounds' ratios, with the quartiles of the ratio beside it. Calls rotate over 1 GiB of KV. The memory read
//! rate is measured right before each row; above the table stands what arithmetic reached.
//!
//! The first ratio is over the faster of candle's two ways, row by row: that is the one to quote. This crate picks its instructions at run
//! time, most loops of candle-nn's attention get theirs when they are compiled: `RUSTFLAGS="-C target-cpu=native" cargo bench --bench ratios` shows candle at
//! its best, and a note above the table says so where the build is not that one.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Result;
use candle::DType;
use candle_paged_attn::cache::KvDtype;
use testkit::peers::Peers;
use testkit::rates;
use testkit::rotation::{ROTATION_BYTES, Rotation};
use testkit::workloads::{Workload, families, find};

/// Shape and KV dtype of the default rows: one decode shape in every dtype, one verify shape, and the smallest call.
const DEFAULT: &[(&str, &[KvDtype])] = &[
    ("minimax20/decode-b4-q1-ctx8192-bf16", &[KvDtype::Bf16, KvDtype::F32, KvDtype::F16]),
    ("minimax20/decode-b4-q1-ctx8192-fp8", &[KvDtype::Fp8]),
    ("minimax20/verify-b3-q4-ctx32768-bf16", &[KvDtype::Bf16]),
    ("random24/random-b64-q1-128-2048-bf16", &[KvDtype::Bf16]),
    ("review/R1", &[KvDtype::Fp8]),
];

/// Time for one row, once its tensors are made.
const ROW_TIME: Duration = Duration::from_secs(10);
const ROUNDS: std::ops::RangeInclusive<usize> = 5..=200;
/// KV that the peers rotate over.
const PEER_BYTES: usize = 256 << 20;

fn main() -> Result<()> {
    let shapes = shapes()?;
    if shapes.is_empty() {
        return Ok(());
    }
    let (fma, dot) = (rates::f32_fma(), rates::bf16_dot());
    println!(
        "{} threads; in registers {:.0} GFLOP/s with {}, {:.0} with {}; candle's BF16 matmul {:.0} GFLOP/s; compiled {} AVX2.\n",
        rates::threads(),
        fma.flops / 1e9,
        fma.instructions,
        dot.flops / 1e9,
        dot.instructions,
        rates::candle_matmul(DType::BF16, 2048)? / 1e9,
        if cfg!(target_feature = "avx2") { "with" } else { "without" }
    );
    if let Some(note) = build_note() {
        println!("{note}\n");
    }
    let arithmetic = format!("of {}", dot.instructions);
    let ours = ["workload", "KV", "us", "KV GB/s", "memory read GB/s", "of memory read", &arithmetic];
    let peers = ["faster peer", "over faster peer", "matmul + softmax us", "over matmul + softmax", "candle-nn us", "over candle-nn"];
    println!("| {} | {} |\n|{}", ours.join(" | "), peers.join(" | "), "---|".repeat(ours.len() + peers.len()));
    for (path, workload, kv) in &shapes {
        let read = rates::memory_read(1 << 30);
        println!("{}", Row::measure(workload, *kv)?.cells(path, read, dot.flops));
    }
    Ok(())
}

/// What a reader must know of the peers' build before quoting a ratio.
fn build_note() -> Option<&'static str> {
    (cfg!(target_arch = "x86_64") && !cfg!(target_feature = "avx2")).then_some(
        "NOTE: this is the default build, for any x86-64 processor: the candle in it has no AVX2, FMA or F16C except where it asks at run \
         time (its matmul and F32 dot products do). The other loops of candle-nn's attention are compiled without, so the candle-nn columns \
         are below what candle can do; this crate picks its instructions at run time in either build. For candle at its best run\n\n    \
         RUSTFLAGS=\"-C target-cpu=native\" cargo bench --bench ratios",
    )
}

/// The shapes that the arguments name, or the default ones; none when the arguments are meant for other benches.
fn shapes() -> Result<Vec<(String, Workload, KvDtype)>> {
    let named: Vec<_> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    if named.is_empty() {
        let rows = DEFAULT.iter().flat_map(|(path, kvs)| kvs.iter().map(move |kv| (path, *kv)));
        return rows.map(|(path, kv)| Ok((path.to_string(), find(path)?, kv))).collect();
    }
    let mut shapes = vec![];
    for family in families()? {
        for workload in family.workloads {
            let path = format!("{}/{}", family.name, workload.name);
            if named.iter().any(|name| path.contains(name.as_str())) {
                let kv = workload.kv_dtype();
                shapes.push((path, workload, kv));
            }
        }
    }
    Ok(shapes)
}

/// Seconds of each round, by contestant.
struct Row {
    kv: KvDtype,
    kv_bytes: usize,
    flops: usize,
    ours: Vec<f64>,
    candle_nn: Vec<f64>,
    matmul: Vec<f64>,
}

impl Row {
    fn measure(workload: &Workload, kv: KvDtype) -> Result<Self> {
        let rotation = Rotation::new(workload, kv, ROTATION_BYTES, 1)?;
        let bytes = rotation.kv_bytes();
        let turns = PEER_BYTES.div_ceil(bytes).clamp(2, rotation.turns());
        let peers = if kv == KvDtype::Mxfp4 { None } else { Some(Peers::new(&rotation, turns)?) };
        let mut row = Self { kv, kv_bytes: bytes, flops: workload.flops(), ours: vec![], candle_nn: vec![], matmul: vec![] };
        row.round(&rotation, peers.as_ref(), 0)?;
        (row.ours, row.candle_nn, row.matmul) = (vec![], vec![], vec![]);
        let start = Instant::now();
        while row.ours.len() < *ROUNDS.start() || (row.ours.len() < *ROUNDS.end() && start.elapsed() < ROW_TIME) {
            row.round(&rotation, peers.as_ref(), row.ours.len() + 1)?;
        }
        Ok(row)
    }

    /// One call of each.
    fn round(&mut self, rotation: &Rotation, peers: Option<&Peers>, turn: usize) -> Result<()> {
        self.ours.push(seconds(|| rotation.decode(turn))?);
        if let Some(peers) = peers {
            self.candle_nn.push(seconds(|| peers.candle_nn(turn))?);
            self.matmul.push(seconds(|| peers.matmul_softmax(turn))?);
        }
        Ok(())
    }

    fn cells(&self, path: &str, read: f64, flops: f64) -> String {
        let [_, ours, _] = quartiles(self.ours.clone());
        let rate = self.kv_bytes as f64 / ours;
        let arithmetic = self.flops as f64 / ours;
        format!(
            "| {path} | {} | {:.1} | {:.2} | {:.1} | {:.0}% | {:.0}% | {} | {} | {} |",
            self.kv.name(),
            ours * 1e6,
            rate / 1e9,
            read / 1e9,
            100.0 * rate / read,
            100.0 * arithmetic / flops,
            self.faster_peer().map_or("- | -".to_string(), |(name, times)| format!("{name} | {}", self.ratio(times))),
            self.peer(&self.matmul),
            self.peer(&self.candle_nn)
        )
    }

    /// The peer whose median is less; `None` where no peer reads this cache.
    fn faster_peer(&self) -> Option<(&'static str, &[f64])> {
        let peers = [("matmul + softmax", self.matmul.as_slice()), ("candle-nn", self.candle_nn.as_slice())];
        let median = |times: &[f64]| quartiles(times.to_vec())[1];
        peers.into_iter().filter(|(_, times)| !times.is_empty()).min_by(|(_, a), (_, b)| median(a).total_cmp(&median(b)))
    }

    /// A peer's median time, and the ratio.
    fn peer(&self, times: &[f64]) -> String {
        match times {
            [] => "- | -".to_string(),
            times => format!("{:.0} | {}", quartiles(times.to_vec())[1] * 1e6, self.ratio(times)),
        }
    }

    /// How many times as long as ours a peer's calls took.
    fn ratio(&self, times: &[f64]) -> String {
        let [low, ratio, high] = quartiles(times.iter().zip(&self.ours).map(|(peer, ours)| peer / ours).collect());
        format!("{ratio:.1}x ({low:.1}-{high:.1})")
    }
}

fn seconds<T>(call: impl FnOnce() -> candle::Result<T>) -> Result<f64> {
    let start = Instant::now();
    black_box(call()?);
    Ok(start.elapsed().as_secs_f64())
}

/// First quartile, median and third quartile.
fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values.get(values.len() * quarter / 4).copied().unwrap_or(f64::NAN))
}
