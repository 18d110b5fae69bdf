//! The device planner gives the host planner's records.

use candle_paged_attn::plan::{HostPlan, PlannerBlock, Split, batch_bucket};
use candle_paged_attn::registry::Arch;
use cdna_sim::{Counters, Memory, Module};
use rand::{Rng, SeedableRng, rngs::StdRng};
use rayon::prelude::*;
use testkit::plans::{Batch, plan_of};

use crate::build::{launch, module, upload, words};
use crate::require_clang;

/// Planners for up to these many rows.
const BUCKETS: [usize; 5] = [1, 16, 64, 128, 256];
const LARGE_BUCKETS: [usize; 2] = [1024, 4096];

fn planner(arch: &str, bucket: usize, split: Split, ragged: bool) -> Module {
    planner_of(&Arch::gfx950(), arch, bucket, split, ragged)
}

/// The planner of `plans`' tiles and order for the simulated `arch`.
fn planner_of(plans: &Arch, arch: &str, bucket: usize, split: Split, ragged: bool) -> Module {
    let flag = |on| if on { "1" } else { "0" };
    let (bucket, tile) = (bucket.to_string(), plans.name.tile_tokens().to_string());
    let defines = [
        ("PA_BUCKET", &*bucket),
        ("PA_TILE", &*tile),
        ("PA_MIN_MAX", flag(split == Split::MinMax)),
        ("PA_RAGGED", flag(ragged)),
        ("PA_LONGEST_FIRST", flag(plans.name.is_cuda())),
    ];
    module("plan", arch, &defines)
}

/// The device's plan; records start as garbage.
fn plan(batch: &Batch, module: &Module, capacity: usize) -> (HostPlan, Counters) {
    let memory = Memory::new();
    let rows = batch.lens.len();
    let [work, reduce] = [16 * capacity, 8 * rows].map(|size| upload(&memory, &vec![0xAB; size]));
    let args = batch.arguments(|data| upload(&memory, data), [work, reduce], capacity);
    let counters = launch(module, &memory, &args, [1, 1, 1], 256);
    let read = |address, count| if count == 0 { Vec::new() } else { words(&memory, address, count) };
    (plan_of(&read(work, 4 * capacity), &read(reduce, 2 * rows)), counters)
}

/// Random batches of up to `most` rows give the host's records.
fn agrees(arch: &Arch, name: &str, split: Split, buckets: &[usize], batches: u64) {
    let planners: Vec<_> =
        buckets.iter().flat_map(|&bucket| [false, true].map(|ragged| planner_of(arch, name, bucket, split, ragged))).collect();
    let most = buckets[buckets.len() - 1];
    (0..batches).into_par_iter().for_each(|seed| {
        let mut rng = StdRng::seed_from_u64(seed);
        let batch = Batch::random(&mut rng, most);
        if batch.queries.is_empty() || batch.lens.is_empty() {
            return;
        }
        let query_lens = batch.query_lens();
        let want = HostPlan::with_split(&batch.request(&query_lens), arch, split).unwrap();
        let bucket = buckets.iter().position(|&bucket| bucket >= batch.lens.len()).unwrap();
        let (got, _) = plan(&batch, &planners[2 * bucket + usize::from(batch.ragged())], want.work.len());
        assert!(got == want, "{name} {split:?} batch {seed} of {} rows", batch.lens.len());
    });
}

#[test]
fn min_max_records_are_the_hosts() {
    require_clang!();
    agrees(&Arch::gfx942(304), "gfx942", Split::MinMax, &BUCKETS, 1500);
    agrees(&Arch::gfx950(), "gfx950", Split::MinMax, &BUCKETS, 1500);
}

#[test]
fn proportional_records_are_the_hosts() {
    require_clang!();
    agrees(&Arch::gfx950(), "gfx950", Split::Proportional, &BUCKETS, 500);
    agrees(&Arch::gfx942(304), "gfx942", Split::Proportional, &LARGE_BUCKETS, 100);
    agrees(&Arch::gfx950(), "gfx950", Split::Proportional, &LARGE_BUCKETS, 100);
}

/// The most that a plan row or a batch can be: 2^23 tiles a row, 2^31 in all, a million slots.
#[test]
fn extremes() {
    require_clang!();
    for (rows, capacity, split) in [(256, 512, Split::MinMax), (1, 1 << 20, Split::MinMax), (4096, 8192, Split::Proportional)] {
        let batch = Batch {
            lens: vec![i32::MAX; rows],
            queries: vec![1],
            heads_per_row: 1,
            kv_heads: 1,
            window: None,
            max_partitions: None,
            budget: Some(capacity),
        };
        let want = HostPlan::with_split(&batch.request(&[1]), &Arch::gfx950(), split).unwrap();
        let (got, _) = plan(&batch, &planner("gfx950", rows, split, false), capacity);
        assert!(got == want, "{rows} rows");
    }
}

/// The same planner with NVIDIA's smaller tiles, 2^24 a row and 2^32 in all, and its order, the longest tasks first.
#[test]
fn nvidias_tiles_and_order() {
    require_clang!();
    let arch = Arch::sm90();
    agrees(&arch, "gfx950", Split::MinMax, &BUCKETS, 500);
    let planner = planner_of(&arch, "gfx950", 256, Split::MinMax, false);
    let longest = vec![i32::MAX; 256];
    let mut rng = StdRng::seed_from_u64(12);
    let random: Vec<i32> = (0..200).map(|_| rng.random_range(0..100_000)).collect();
    for (lens, slots) in [(&longest, 256), (&longest, 257), (&longest, 512), (&longest, 1023), (&random, 264), (&random, 528)] {
        let batch = Batch {
            lens: lens.clone(),
            queries: vec![1],
            heads_per_row: 1,
            kv_heads: 1,
            window: None,
            max_partitions: None,
            budget: Some(slots),
        };
        let want = HostPlan::new(&batch.request(&[1]), &arch).unwrap();
        let (got, _) = plan(&batch, &planner, slots);
        assert!(got == want, "{} rows in {slots} slots", lens.len());
    }
}

/// 256 sequences of 1K to 32K in 512 slots take at most 4,000 instructions on any wave.
#[test]
fn a_plan_is_few_instructions() {
    require_clang!();
    for name in ["gfx942", "gfx950"] {
        let mut rng = StdRng::seed_from_u64(11);
        let batch = Batch {
            lens: (0..256).map(|_| rng.random_range(1024..=32768)).collect(),
            queries: vec![1],
            heads_per_row: 1,
            kv_heads: 1,
            window: None,
            max_partitions: None,
            budget: Some(512),
        };
        let (got, counters) = plan(&batch, &planner(name, 256, Split::MinMax, false), 512);
        assert_eq!(got, HostPlan::new(&batch.request(&[1]), &Arch::gfx950()).unwrap());
        println!("{name}: {} instructions on the longest wave", counters.longest_wave);
        assert!(counters.longest_wave <= 4000);
    }
}

/// The kernel's LDS is what the host reckons with.
#[test]
fn lds_is_as_planned() {
    require_clang!();
    for (arch, name) in [(Arch::gfx942(304), "gfx942"), (Arch::gfx950(), "gfx950")] {
        for rows in [1, 100, 256, 4096] {
            let split = Split::of(rows, &arch);
            let module = planner(name, batch_bucket(rows), split, true);
            let lds = module.kernel("test").unwrap().group_segment_size;
            assert_eq!(lds, PlannerBlock::new(rows, &arch).unwrap().lds_bytes, "{name} {rows} rows");
        }
    }
}
