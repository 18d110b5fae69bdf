//! Host planning time: 256 sequences of random lengths, on each kind of split.

use candle_paged_attn::plan::{HostPlan, PlanRequest};
use candle_paged_attn::registry::{Arch, CpuIsa};
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

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1));
    targets = plans
}
criterion_main!(benches);
