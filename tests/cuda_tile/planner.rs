//! The device planner gives the host planner's records.

use candle::{Result, bail};
use candle_paged_attn::cuda::specialize;
use candle_paged_attn::plan::{HostPlan, PLANNER_THREADS};
use candle_paged_attn::registry::Arch;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;
use testkit::plans::{Batch, plan_of};

use crate::cases::all_right;
use crate::device::{Device, Shape};
use crate::require_nvrtc;

/// The device's plan.
fn plan(batch: &Batch, arch: &Arch, capacity: usize) -> Result<HostPlan> {
    let device = Device::default();
    let rows = batch.lens.len();
    let [work, reduce] = [16 * capacity, 8 * rows].map(|bytes| device.unwritten(bytes));
    let arguments = batch.arguments(|data| device.upload(data), [work, reduce], capacity);
    device.launch(&specialize::plan(arch, rows, batch.ragged())?, Shape::new([1; 3], PLANNER_THREADS), &arguments)?;
    Ok(plan_of(&device.read_i32(work, 4 * capacity), &device.read_i32(reduce, 2 * rows)))
}

fn check(batch: &Batch, arch: &Arch, what: &str) -> Result<()> {
    let want = HostPlan::new(&batch.request(&batch.query_lens()), arch)?;
    let got = plan(batch, arch, want.capacity()).map_err(|error| error.context(format!("{arch}: {what}")))?;
    if got != want {
        bail!("{arch}: {what}, {} rows: {got:?}, not {want:?}", batch.lens.len())
    }
    Ok(())
}

#[test]
fn records_are_the_hosts() {
    require_nvrtc!();
    for (arch, batches) in [(Arch::sm90(), 0..200), (Arch::sm89(), 200..220), (Arch::sm80(), 220..240)] {
        let check = |seed| {
            let mut rng = StdRng::seed_from_u64(seed);
            let batch = Batch::random(&mut rng, [1, 16, 64, 128, 256][seed as usize % 5]);
            let is_empty = batch.queries.is_empty() || batch.lens.is_empty();
            if is_empty { Ok(()) } else { check(&batch, &arch, &format!("batch {seed}")) }
        };
        all_right(batches.into_par_iter().map(check).collect());
    }
}

/// The most that a plan row or a batch can be, and batches around the number of slots.
#[test]
fn extremes() {
    require_nvrtc!();
    let mut rng = StdRng::seed_from_u64(12);
    let longest = vec![i32::MAX; 256];
    let random: Vec<i32> = (0..200).map(|_| rng.random_range(0..100_000)).collect();
    let one = vec![i32::MAX];
    let check = |(lens, slots): (&Vec<i32>, usize)| {
        let lens = lens.clone();
        let batch =
            Batch { lens, queries: vec![1], heads_per_row: 1, kv_heads: 1, window: None, max_partitions: None, budget: Some(slots) };
        check(&batch, &Arch::sm90(), &format!("{slots} slots"))
    };
    let batches = [(&longest, 256), (&longest, 257), (&longest, 1023), (&random, 264), (&random, 528), (&one, 1 << 14)];
    all_right(batches.into_par_iter().map(check).collect());
}
