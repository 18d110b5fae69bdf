//! What the host decides in a call: the plan, of 256 sequences of random lengths, on each kind of split; the kernel; and a whole call of the CPU whose
//! attention is next to nothing.

use std::collections::HashMap;

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::plan::{HostPlan, PlanRequest};
use candle_paged_attn::registry::{Arch, CpuIsa, Problem, select};
use candle_paged_attn::{DecodeOptions, paged_decode};
use criterion::{Criterion, criterion_group, criterion_main};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

fn plans(criterion: &mut Criterion) {
    let mut rng = StdRng::seed_from_u64(1);
    let mut group = criterion.benchmark_group("plan");
    for batch in [1, 16, 256] {
        let context_lens: Vec<i32> = (0..batch).map(|_| rng.random_range(1024..=32768)).collect();
        let request = PlanRequest::new(&context_lens, &[1], 1);
        for (name, arch) in [("cpu", Arch::cpu(CpuIsa::Portable)), ("gfx950", Arch::gfx950()), ("gfx1250", Arch::gfx1250())] {
            group.bench_function(format!("{batch}-sequences/{name}"), |b| b.iter(|| HostPlan::new(&request, &arch)));
        }
    }
    group.finish();
}

fn kernels(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("select");
    let decode = Problem { batch: 32, q_heads: 64, kv_heads: 4, layout: CacheLayout::Nhd, capacity: 132, ..Problem::default() };
    let shuffled = Problem { layout: CacheLayout::Shuffled, ..decode.clone() };
    let fp8 = Problem { kv_dtype: KvDtype::Fp8, ..decode.clone() };
    for (name, problem, arch) in [
        ("cpu", &decode, Arch::cpu(CpuIsa::Portable)),
        ("gfx950", &shuffled, Arch::gfx950()),
        ("sm90", &decode, Arch::sm90()),
        ("sm90-fp8", &fp8, Arch::sm90()),
    ] {
        group.bench_function(name, |b| b.iter(|| select(std::hint::black_box(problem), &arch)));
        let key = select(problem, &arch).expect("the problem has a kernel").key;
        let loaded = HashMap::from([(key, name)]);
        group.bench_function(format!("{name}-found"), |b| b.iter(|| loaded.get(std::hint::black_box(&key))));
    }
    group.finish();
}

/// One sequence of 16 tokens.
fn calls(criterion: &mut Criterion) {
    let call = || -> Result<_> {
        let tensor = |dims: &[usize]| Tensor::randn(0f32, 1., dims, &Device::Cpu)?.to_dtype(DType::BF16);
        let (q, cache) = (tensor(&[1, 16, 128])?, tensor(&[4, 16, 1, 128])?);
        Ok((q, cache, Tensor::new(&[[2u32]], &Device::Cpu)?, Tensor::new(&[16u32], &Device::Cpu)?))
    };
    let (q, cache, tables, lens) = call().expect("tensors on the CPU");
    let options = DecodeOptions::default();
    criterion.bench_function("call/16-tokens", |b| b.iter(|| paged_decode(&q, &cache, &cache, &tables, &lens, &options)));
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1));
    targets = plans, kernels, calls
}
criterion_main!(benches);
