//! Writes to the cache and the bookkeeping around them: `reshape_and_cache` for a decode step and a prefill chunk, and the page pool.

use std::time::Duration;

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheDims, CacheLayout, KvDtype, PagePool, PagedKvCache, Quantization};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

const DIMS: CacheDims = CacheDims { pages: 2048, page_size: 16, kv_heads: 8, head_dim: 128 };

/// New tokens `[tokens, kv_heads, head_dim]` and slots for them: runs of a page each, pages in random order.
fn tokens(tokens: usize) -> Result<(Tensor, Tensor)> {
    let mut pages: Vec<usize> = (0..DIMS.pages).collect();
    pages.shuffle(&mut StdRng::seed_from_u64(1));
    let slots: Vec<i64> = (0..tokens).map(|t| (pages[t / DIMS.page_size] * DIMS.page_size + t % DIMS.page_size) as i64).collect();
    let kv = Tensor::randn(0f32, 1.0, (tokens, DIMS.kv_heads, DIMS.head_dim), &Device::Cpu)?.to_dtype(DType::BF16)?;
    Ok((kv, Tensor::from_vec(slots, tokens, &Device::Cpu)?))
}

fn writes(criterion: &mut Criterion) {
    let caches = [
        ("bf16", KvDtype::Bf16, Quantization::None),
        ("fp8", KvDtype::Fp8, Quantization::Scalar { k: 0.02, v: 0.02 }),
        ("fp8-per-token", KvDtype::Fp8, Quantization::PerToken),
        ("mxfp4", KvDtype::Mxfp4, Quantization::Block),
    ];
    let mut group = criterion.benchmark_group("reshape_and_cache");
    for (name, dtype, quantization) in caches {
        let config = CacheConfig { layers: 1, dims: DIMS, dtype, layout: Some(CacheLayout::Nhd), quantization };
        let cache = made(PagedKvCache::new(config, &Device::Cpu));
        for count in [64, 4096] {
            let (kv, slots) = made(tokens(count));
            group.throughput(Throughput::Bytes((2 * kv.elem_count() * kv.dtype().size_in_bytes()) as u64));
            group.bench_function(format!("{name}/{count}-tokens"), |b| b.iter(|| made(cache.write(0, &kv, &kv, &slots))));
        }
    }
    group.finish();
}

/// A pool in which 256 sequences hold 1000 tokens each.
fn busy_pool() -> Result<(PagePool, Vec<candle_paged_attn::cache::SeqId>)> {
    let mut pool = PagePool::new(1 << 15, DIMS.page_size)?;
    let sequences: Vec<_> = (0..256).map(|_| pool.allocate()).collect();
    for (at, &sequence) in sequences.iter().enumerate() {
        let prompt: Vec<u32> = (0..1000).map(|token| token * 7 + at as u32).collect();
        pool.append(sequence, &prompt)?;
        pool.commit(sequence)?;
    }
    Ok((pool, sequences))
}

fn pool(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("page_pool");
    group.throughput(Throughput::Elements(256));
    group.bench_function("decode-step-of-256", |b| {
        b.iter_batched(
            || made(busy_pool()),
            |(mut pool, sequences)| {
                for &sequence in &sequences {
                    made(pool.append(sequence, &[1]));
                    made(pool.commit(sequence));
                }
                (pool, sequences)
            },
            BatchSize::PerIteration,
        )
    });
    group.bench_function("batch-of-256", |b| {
        let (mut pool, sequences) = made(busy_pool());
        let appends: Vec<_> = sequences.iter().map(|&sequence| (sequence, made(pool.append(sequence, &[1])))).collect();
        let step: Vec<_> = appends.iter().map(|(sequence, append)| (*sequence, append)).collect();
        b.iter(|| made(pool.batch(&step, &Device::Cpu)))
    });
    group.bench_function("fork-append-free-256", |b| {
        let (mut pool, sequences) = made(busy_pool());
        b.iter(|| {
            for &sequence in &sequences {
                let fork = made(pool.fork(sequence));
                made(pool.append(fork, &[2, 3, 4]));
                made(pool.free(fork));
            }
        })
    });
    group.finish();
}

fn made<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    targets = writes, pool
}
criterion_main!(benches);
