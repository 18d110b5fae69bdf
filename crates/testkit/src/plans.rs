//! Random batches to plan for, and what a planner on a device is told of them.

use candle_paged_attn::plan::{HostPlan, PlanRequest};
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::arguments::Arguments;
use crate::raw::bytes;

/// A batch, with per-head tables `heads_per_row` plan rows a sequence.
pub struct Batch {
    pub lens: Vec<i32>,
    /// One for all, or one a sequence.
    pub queries: Vec<usize>,
    pub heads_per_row: usize,
    pub kv_heads: usize,
    pub window: Option<usize>,
    pub max_partitions: Option<usize>,
    pub budget: Option<usize>,
}

impl Batch {
    /// Of up to `most` rows, with lengths of every kind.
    pub fn random(rng: &mut StdRng, most: usize) -> Self {
        let heads_per_row = *[1, 1, 1, 2, 3].choose(rng).unwrap();
        let per_head = heads_per_row > 1;
        let sequences = rng.random_range(0..=most / heads_per_row);
        let sequences = if rng.random_bool(0.3) { sequences.min(4) } else { sequences };
        let extreme = rng.random_bool(0.3);
        let longest = *[300, 4096, 32768, 1 << 20].choose(rng).unwrap();
        let len = |rng: &mut StdRng| match rng.random_range(0..10) {
            0 if extreme => *[0, -1, i32::MAX, i32::MIN, i32::MAX - 255, 1].choose(rng).unwrap(),
            1 if extreme => i32::MAX - rng.random_range(0..1000),
            2 => rng.random_range(0..longest) / 256 * 256,
            _ => rng.random_range(0..=longest),
        };
        let lens = (0..sequences * heads_per_row).map(|_| len(rng)).collect();
        let queries = match rng.random_bool(0.5) {
            true => (0..sequences).map(|_| *[0, 0, 1, 1, 4, 8, 700].choose(rng).unwrap()).collect(),
            false => vec![rng.random_range(0..=8)],
        };
        let option = |rng: &mut StdRng, values: &[usize]| *values.choose(rng).unwrap();
        let window = [None, None, Some(option(rng, &[1, 100, 256, 1000, 5000, i32::MAX as usize]))].choose(rng).copied().unwrap();
        let max_partitions = [None, None, Some(option(rng, &[1, 2, 3, 7, 64]))].choose(rng).copied().unwrap();
        let budget = [None, Some(option(rng, &[1, 64, 511, 512, 4000]))].choose(rng).copied().unwrap();
        Self { lens, queries, heads_per_row, kv_heads: if per_head { 1 } else { rng.random_range(1..=8) }, window, max_partitions, budget }
    }

    pub fn ragged(&self) -> bool {
        self.queries.len() != 1
    }

    /// New tokens by plan row.
    pub fn query_lens(&self) -> Vec<usize> {
        match self.ragged() {
            true => self.queries.iter().flat_map(|&n| std::iter::repeat_n(n, self.heads_per_row)).collect(),
            false => self.queries.clone(),
        }
    }

    pub fn request<'a>(&'a self, query_lens: &'a [usize]) -> PlanRequest<'a> {
        let limits = PlanRequest::new(&self.lens, query_lens, self.kv_heads);
        PlanRequest { window: self.window, max_partitions: self.max_partitions, workgroup_budget: self.budget, ..limits }
    }

    /// The planner kernel's arguments, `PlanArgs`: `place` puts bytes into device memory, `records` are where work and reduce records go.
    pub fn arguments(&self, place: impl Fn(&[u8]) -> u64, records: [u64; 2], capacity: usize) -> Arguments {
        let starts = std::iter::once(0).chain(self.queries.iter().scan(0, |sum, &n| {
            *sum += n as i32;
            Some(*sum)
        }));
        let starts = if self.ragged() { place(&bytes(&starts.collect::<Vec<_>>(), i32::to_le_bytes)) } else { 0 };
        let places = [place(&bytes(&self.lens, i32::to_le_bytes)), starts, records[0], records[1]];
        planner_arguments(
            places,
            [self.lens.len(), self.heads_per_row, self.queries[0], self.window.unwrap_or(0), capacity],
            self.max_partitions,
        )
    }
}

/// `PlanArgs`: addresses of lengths, query starts, work and reduce records; rows, rows a sequence, the longest query, window and slots.
pub fn planner_arguments(places: [u64; 4], numbers: [usize; 5], max_partitions: Option<usize>) -> Arguments {
    let mut arguments = Arguments::default();
    arguments.longs(places).ints(numbers.map(|n| n as i32)).ints([max_partitions.map_or(-1, |most| most as i32)]);
    arguments
}

/// A plan of the words that a planner wrote.
pub fn plan_of(work: &[i32], reduce: &[i32]) -> HostPlan {
    HostPlan { work: work.as_chunks().0.to_vec(), reduce: reduce.as_chunks().0.to_vec() }
}
