//! Rates of the kernels beside the machine's own, measured in the same minute: `cargo test --release cpu_rates -- --ignored --nocapture`.

use std::hint::black_box;
use std::time::Instant;

use float8::F8E4M3;
use half::{bf16, f16};
use rayon::prelude::*;

use super::*;
use crate::cache::{CacheDims, CacheLayout, KvDtype};
use crate::plan::{HostPlan, TILE_TOKENS};

const HEADS: usize = 16;
const DIM: usize = 128;
const PAGE: usize = 128;
/// KV bytes that calls rotate over, so that nothing is read from a cache.
const ROTATED: usize = 1 << 30;

/// K and V of many calls, in one dtype.
struct Pool {
    kv: KvDtype,
    per_token: bool,
    f32: [Vec<f32>; 2],
    u16: [Vec<u16>; 2],
    u8: [Vec<u8>; 2],
    token_scales: Vec<f32>,
    block_scales: Vec<u8>,
    pages: usize,
}

impl Pool {
    fn new(kv: KvDtype, per_token: bool) -> Self {
        let pages = ROTATED / (2 * PAGE * DIM * kv.bits() / 8);
        let elements = pages * PAGE * DIM;
        let noise = |i: usize| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u32;
        let fill = |wanted: bool| if wanted { elements } else { 0 };
        let f32s = |seed: usize| (0..fill(kv == KvDtype::F32)).into_par_iter().map(|i| noise(i + seed) as f32 / 8e6 - 1.0).collect();
        let u16s = |seed: usize| {
            let value = |i: usize| noise(i + seed) as f32 / 8e6 - 1.0;
            let bits = |i: usize| if kv == KvDtype::F16 { f16::from_f32(value(i)).to_bits() } else { bf16::from_f32(value(i)).to_bits() };
            (0..fill(matches!(kv, KvDtype::F16 | KvDtype::Bf16))).into_par_iter().map(bits).collect()
        };
        let u8s = |seed: usize| match kv {
            KvDtype::Fp8 => (0..elements).into_par_iter().map(|i| (noise(i + seed) & 0xbf) as u8).collect(),
            KvDtype::Mxfp4 => (0..elements / 2).into_par_iter().map(|i| noise(i + seed) as u8).collect(),
            _ => vec![],
        };
        Self {
            kv,
            per_token,
            f32: [f32s(1), f32s(7)],
            u16: [u16s(1), u16s(7)],
            u8: [u8s(1), u8s(7)],
            token_scales: vec![0.5; if per_token { pages * PAGE } else { 0 }],
            block_scales: vec![126; if kv == KvDtype::Mxfp4 { pages * PAGE * DIM / 32 } else { 0 }],
            pages,
        }
    }

    fn view(&self, which: usize, layout: CacheLayout) -> KvView<'_> {
        let dims = self.dims();
        let data = match self.kv {
            KvDtype::F32 => KvData::F32(&self.f32[which]),
            // SAFETY: f16, bf16 and F8E4M3 are transparent over their bits.
            KvDtype::F16 => KvData::F16(unsafe { std::mem::transmute::<&[u16], &[f16]>(&self.u16[which]) }),
            KvDtype::Bf16 => KvData::Bf16(unsafe { std::mem::transmute::<&[u16], &[bf16]>(&self.u16[which]) }),
            KvDtype::Fp8 => KvData::Fp8(unsafe { std::mem::transmute::<&[u8], &[F8E4M3]>(&self.u8[which]) }),
            KvDtype::Mxfp4 => KvData::Mxfp4(&self.u8[which]),
        };
        let strides = if which == 0 {
            layout.key_strides(&candle::Layout::contiguous(layout.key_shape(dims, self.kv)))
        } else {
            layout.value_strides(&candle::Layout::contiguous(layout.value_shape(dims, self.kv)))
        };
        let scale = if self.kv == KvDtype::Mxfp4 {
            let blocks = DIM / 32;
            Scale::Block {
                data: &self.block_scales,
                start: 0,
                page_stride: PAGE * blocks,
                head_stride: PAGE * blocks,
                token_stride: blocks,
            }
        } else if self.per_token {
            Scale::PerToken { data: &self.token_scales, start: 0, page_stride: PAGE, head_stride: PAGE, token_stride: 1 }
        } else {
            Scale::Scalar(1.0)
        };
        KvView { data, strides, scale }
    }

    fn dims(&self) -> CacheDims {
        CacheDims { pages: self.pages, page_size: PAGE, kv_heads: 1, head_dim: DIM }
    }
}

/// Seconds of the fastest and the median of `calls` calls of one shape, each on pages of its own.
fn time_calls(pool: &Pool, layout: CacheLayout, batch: usize, context: usize, query_len: usize, calls: usize) -> (f64, f64) {
    let hot = std::env::var_os("CPU_RATES_HOT").is_some();
    let columns = context.div_ceil(PAGE);
    let per_call = batch * columns;
    // Pages in an order that no prefetcher knows.
    let scattered: Vec<u32> = (0..pool.pages).map(|i| ((i * 7919) % pool.pages) as u32).collect();
    let query: Vec<bf16> = (0..batch * query_len * HEADS * DIM).map(|i| bf16::from_f32((i % 13) as f32 * 0.1 - 0.6)).collect();
    let query_f32: Vec<f32> = query.iter().map(|x| x.to_f32()).collect();
    let query_f16: Vec<f16> = query_f32.iter().map(|&x| f16::from_f32(x)).collect();
    let rows: Vec<Row> = (0..batch).map(|b| Row { query_start: b * query_len, query_len, context_len: context }).collect();
    let tiles = context.div_ceil(TILE_TOKENS);
    let parts = if batch == 1 { 1 } else { 8usize.div_ceil(batch).min(tiles) };
    let mut plan = HostPlan { work: vec![], reduce: vec![] };
    for row in 0..batch {
        plan.reduce.push([plan.work.len() as i32, parts as i32]);
        plan.work.extend((0..parts).map(|i| [row as i32, (i * tiles / parts) as i32, ((i + 1) * tiles / parts) as i32, i as i32]));
    }
    let mut out = vec![bf16::ZERO; query.len()];
    let mut times: Vec<f64> = (0..calls)
        .map(|call| {
            let start = if hot { 0 } else { call * per_call % (pool.pages - per_call + 1) };
            let data = match pool.kv {
                KvDtype::F32 => QueryData::F32(&query_f32),
                KvDtype::F16 => QueryData::F16(&query_f16),
                _ => QueryData::Bf16(&query),
            };
            let job = Job {
                isa: detect(),
                dims: pool.dims(),
                q_heads: HEADS,
                query: QueryView { data, start: 0, row_stride: HEADS * DIM, head_stride: DIM },
                key: pool.view(0, layout),
                value: pool.view(1, layout),
                table: PageTable { ids: Ids::U32(&scattered), start, sequence_stride: columns, head_stride: 0, column_stride: 1 },
                rows: &rows,
                per_head: false,
                softmax_scale: 0.088,
                window: None,
                softcap: None,
                sinks: None,
                plan: &plan,
            };
            let mut output = Output { data: OutputData::Bf16(&mut out), start: 0, row_stride: HEADS * DIM, head_stride: DIM, lse: None };
            let begin = Instant::now();
            run(&job, &mut output).expect("runs");
            begin.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[0], times[calls / 2])
}

/// Bytes a second that two threads sum out of 1 GiB.
fn read_rate(buffer: &[u64]) -> f64 {
    let begin = Instant::now();
    let sum = |part: &[u64]| {
        part.chunks_exact(64).fold([0u64; 64], |mut sum, x| {
            (0..64).for_each(|i| sum[i] = sum[i].wrapping_add(x[i]));
            sum
        })
    };
    buffer.par_chunks(buffer.len() / 64).for_each(|part| {
        black_box(sum(part));
    });
    size_of_val(buffer) as f64 / begin.elapsed().as_secs_f64()
}

/// Flop a second of independent 512-bit multiply-adds on registers, on `threads` threads, best of many short runs: f32, and BF16 pairs.
#[cfg(target_arch = "x86_64")]
fn peaks(threads: usize) -> (f64, f64) {
    use std::arch::x86_64::*;
    const ROUNDS: usize = 20_000;
    #[target_feature(enable = "avx512f")]
    fn singles() -> f32 {
        let mut acc = [_mm512_set1_ps(1.0); 24];
        let (a, b) = (black_box(_mm512_set1_ps(0.5)), black_box(_mm512_set1_ps(0.25)));
        for _ in 0..ROUNDS {
            for x in &mut acc {
                *x = _mm512_fmadd_ps(a, b, *x);
            }
        }
        acc.iter().map(|&x| _mm512_reduce_add_ps(x)).sum()
    }
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn pairs() -> f32 {
        let mut acc = [_mm512_set1_ps(1.0); 24];
        let one: __m512bh = unsafe { std::mem::transmute(black_box(_mm512_set1_epi32(0x3f00_3f00))) };
        for _ in 0..ROUNDS {
            for x in &mut acc {
                *x = _mm512_dpbf16_ps(*x, one, one);
            }
        }
        acc.iter().map(|&x| _mm512_reduce_add_ps(x)).sum()
    }
    let once = |f: &(dyn Fn() -> f32 + Sync)| {
        let begin = Instant::now();
        (0..threads).into_par_iter().with_max_len(1).for_each(|_| {
            black_box(f());
        });
        begin.elapsed().as_secs_f64()
    };
    let time = |f: &(dyn Fn() -> f32 + Sync)| (0..40).map(|_| once(f)).fold(f64::MAX, f64::min);
    let work = (threads * ROUNDS * 24 * 16 * 2) as f64;
    let f32 = if is_x86_feature_detected!("avx512f") { work / time(&|| unsafe { singles() }) } else { f64::NAN };
    let bf16 = if is_x86_feature_detected!("avx512bf16") { 2.0 * work / time(&|| unsafe { pairs() }) } else { f64::NAN };
    (f32, bf16)
}

#[cfg(not(target_arch = "x86_64"))]
fn peaks(threads: usize) -> (f64, f64) {
    let _ = threads;
    (f64::NAN, f64::NAN)
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

#[test]
#[ignore = "a measurement"]
fn cpu_rates() {
    println!("isa {:?}; {HEADS} query heads, 1 KV head, head_dim {DIM}, page {PAGE}; A B A B medians (best in brackets)", detect());
    println!("| call | KV | layout | GB/s | GFLOP/s | memory GB/s | roof GFLOP/s | of memory | of roof |");
    println!("|---|---|---|---|---|---|---|---|---|");
    let buffer = vec![1u64; ROTATED / 8];
    let kinds = [
        (KvDtype::Bf16, false),
        (KvDtype::F32, false),
        (KvDtype::F16, false),
        (KvDtype::Fp8, false),
        (KvDtype::Fp8, true),
        (KvDtype::Mxfp4, false),
    ];
    let filter = std::env::var("CPU_RATES").unwrap_or_default();
    for (kv, per_token) in kinds {
        let pool = Pool::new(kv, per_token);
        for (batch, context, query_len) in [(4, 8192, 1), (3, 32768, 4)] {
            for layout in CacheLayout::ALL {
                let name =
                    format!("{batch}x{context} q{query_len} {}{} {}", kv.name(), if per_token { " per token" } else { "" }, layout.name());
                if layout.check(pool.dims(), kv).is_err() || !name.contains(&filter) {
                    continue;
                }
                let (mut best, mut mid, mut memory, mut roof) = (f64::MAX, vec![], vec![], vec![]);
                for _ in 0..5 {
                    let (fast, middle) = time_calls(&pool, layout, batch, context, query_len, if query_len > 1 { 3 } else { 11 });
                    best = best.min(fast);
                    mid.push(middle);
                    memory.push(read_rate(&buffer));
                    let (f32, bf16) = peaks(2);
                    roof.push(if matches!(kv, KvDtype::F32 | KvDtype::F16) { f32 } else { bf16 });
                }
                let bytes = (batch * context * DIM * 2 * kv.bits()) as f64 / 8.0;
                let flop = (batch * context * DIM * 4 * HEADS * query_len) as f64;
                let (time, memory, roof) = (median(mid), median(memory), median(roof));
                println!(
                    "| {batch}x{context} q{query_len} | {}{} | {} | {:.1} ({:.1}) | {:.0} ({:.0}) | {:.1} | {:.0} | {:.2} | {:.2} |",
                    kv.name(),
                    if per_token { " per token" } else { "" },
                    layout.name(),
                    bytes / time / 1e9,
                    bytes / best / 1e9,
                    flop / time / 1e9,
                    flop / best / 1e9,
                    memory / 1e9,
                    roof / 1e9,
                    bytes / time / memory,
                    flop / time / roof
                );
            }
        }
        if kv == KvDtype::Bf16 {
            let (best, middle) = time_calls(&pool, CacheLayout::Nhd, 1, 16, 1, 4001);
            println!("1x16 tokens: {:.2} us (best {:.2})", middle * 1e6, best * 1e6);
        }
    }
}

/// One core on a small job, best of many short runs: what the arithmetic costs, whatever else the machine does meanwhile.
#[test]
#[ignore = "a measurement"]
fn cpu_core_rates() {
    let filter = std::env::var("CPU_RATES").unwrap_or_default();
    println!("| call | KV | layout | GB/s | GFLOP/s | roof | of roof |\n|---|---|---|---|---|---|---|");
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    for kv in [KvDtype::Bf16, KvDtype::F32, KvDtype::F16, KvDtype::Fp8, KvDtype::Mxfp4] {
        let data = Pool::new(kv, false);
        for (context, query_len) in [(4096, 1), (512, 4)] {
            for layout in CacheLayout::ALL {
                let name = format!("1x{context} q{query_len} {} {}", kv.name(), layout.name());
                if layout.check(data.dims(), kv).is_err() || !name.contains(&filter) {
                    continue;
                }
                let (best, roof) = pool.install(|| (time_calls(&data, layout, 1, context, query_len, 400).0, peaks(1)));
                let roof = if matches!(kv, KvDtype::F32 | KvDtype::F16) { roof.0 } else { roof.1 };
                let bytes = (context * DIM * 2 * kv.bits()) as f64 / 8.0;
                let flop = (context * DIM * 4 * HEADS * query_len) as f64;
                println!(
                    "| 1x{context} q{query_len} | {} | {} | {:.1} | {:.0} | {:.0} | {:.2} |",
                    kv.name(),
                    layout.name(),
                    bytes / best / 1e9,
                    flop / best / 1e9,
                    roof / 1e9,
                    flop / best / roof
                );
            }
        }
    }
}
