//! The reducer against float64, over partials amid poison.

use cdna_sim::{Memory, Module};
use half::{bf16, f16};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng, rngs::StdRng};
use rayon::prelude::*;
use testkit::arguments::Arguments;
use testkit::raw::bytes;

use crate::build::{launch, module, upload, words};
use crate::require_clang;

const Q_HEADS: usize = 6;

/// A specialization.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    arch: &'static str,
    head_dim: usize,
    /// PA_QUERY: BF16, F16, F32.
    dtype: usize,
    ragged: bool,
    threads: u32,
}

impl Kernel {
    fn module(&self) -> Module {
        let numbers = [self.head_dim, self.dtype, usize::from(self.ragged), self.threads as usize].map(|n| n.to_string());
        let names = ["PA_HEAD_DIM", "PA_QUERY", "PA_RAGGED", "PA_THREADS"];
        let defines: Vec<_> = names.into_iter().zip(numbers.iter().map(String::as_str)).collect();
        module("reduce", self.arch, &defines)
    }

    fn chunks(&self) -> usize {
        self.head_dim / [256, 128, 64].into_iter().find(|chunk| self.head_dim.is_multiple_of(*chunk)).unwrap()
    }

    fn element(&self) -> usize {
        if self.dtype == 2 { 4 } else { 2 }
    }
}

/// Partials of a batch: `[slots, heads, rows]` statistics and outputs, NaN where no task wrote.
struct Case {
    kernel: Kernel,
    query_lens: Vec<usize>,
    kv_heads: usize,
    per_head: bool,
    rows: usize,
    reduce: Vec<[i32; 2]>,
    statistics: Vec<[f32; 2]>,
    partial: Vec<f32>,
    sinks: Option<Vec<f32>>,
    out_row: usize,
    out_head: usize,
}

impl Case {
    fn random(kernel: Kernel, seed: u64, counts: &[usize]) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let kv_heads = *[1, 2, 3, 6].choose(&mut rng).unwrap();
        let per_head = rng.random_bool(0.4);
        let sequences = rng.random_range(1..=3);
        let longest = rng.random_range(1..=4);
        let query_lens = (0..sequences).map(|_| if kernel.ragged { rng.random_range(0..=longest) } else { longest }).collect::<Vec<_>>();
        let group = Q_HEADS / kv_heads;
        let rows = (longest * group).next_multiple_of(16);
        let heads = if per_head { 1 } else { kv_heads };
        let mut reduce = Vec::new();
        let mut slots = rng.random_range(0..3);
        for _ in 0..sequences * if per_head { kv_heads } else { 1 } {
            let count = *counts.choose(&mut rng).unwrap();
            reduce.push([slots as i32, count as i32]);
            slots += count;
        }
        slots += 1;
        let mut statistics = vec![[f32::NAN; 2]; slots * heads * rows];
        let mut partial = vec![f32::NAN; slots * heads * rows * kernel.head_dim];
        for (plan_row, &[first, count]) in reduce.iter().enumerate() {
            let sequence = if per_head { plan_row / kv_heads } else { plan_row };
            let empty_row = rng.random_range(0..20);
            for slot in first as usize..(first + count) as usize {
                for head in 0..heads {
                    for row in 0..query_lens[sequence] * group {
                        let at = (slot * heads + head) * rows + row;
                        let empty = rng.random_bool(0.2) || row == empty_row;
                        let level = if rng.random_bool(0.1) { 40.0 } else { 4.0 };
                        let [max, sum] = [rng.random_range(-level..level), rng.random_range(1.0..256.0f32)];
                        statistics[at] = if empty { [f32::NEG_INFINITY, 0.0] } else { [max, sum] };
                        let out = &mut partial[at * kernel.head_dim..][..kernel.head_dim];
                        out.fill_with(|| if empty { 0.0 } else { sum * rng.random_range(-1.0..1.0) });
                    }
                }
            }
        }
        let sink = |rng: &mut StdRng| *[f32::NEG_INFINITY, -3.0, 0.5, 8.0, 40.0].choose(rng).unwrap();
        let sinks = rng.random_bool(0.5).then(|| (0..Q_HEADS).map(|_| sink(&mut rng)).collect());
        let out_head = kernel.head_dim + rng.random_range(0..2);
        let out_row = Q_HEADS * out_head + rng.random_range(0..3);
        Self { kernel, query_lens, kv_heads, per_head, rows, reduce, statistics, partial, sinks, out_row, out_head }
    }

    /// Output and natural log-sum-exp of one query row and head.
    fn expected(&self, sequence: usize, token: usize, head: usize) -> (Vec<f64>, f64) {
        let (group, dim) = (Q_HEADS / self.kv_heads, self.kernel.head_dim);
        let kv_head = head / group;
        let (heads, tile_head) = if self.per_head { (1, 0) } else { (self.kv_heads, kv_head) };
        let [first, count] = self.reduce[if self.per_head { sequence * self.kv_heads + kv_head } else { sequence }];
        let at = |slot: i32| (slot as usize * heads + tile_head) * self.rows + token * group + head % group;
        let parts: Vec<usize> = (first..first + count).map(at).filter(|&at| self.statistics[at][1] > 0.0).collect();
        if parts.is_empty() {
            return (vec![0.0; dim], f64::NEG_INFINITY);
        }
        let ln_2 = std::f64::consts::LN_2;
        let max = |at: usize| f64::from(self.statistics[at][0]) * ln_2;
        let sink = self.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
        let top = parts.iter().map(|&at| max(at)).fold(sink, f64::max);
        let total = (sink - top).exp() + parts.iter().map(|&at| f64::from(self.statistics[at][1]) * (max(at) - top).exp()).sum::<f64>();
        let value = |at: usize, d: usize| f64::from(self.partial[at * dim + d]) * (max(at) - top).exp() / total;
        ((0..dim).map(|d| parts.iter().map(|&at| value(at, d)).sum()).collect(), top + total.ln())
    }

    fn check(&self, module: &Module) {
        let memory = Memory::new();
        let starts: Vec<i32> = (0..=self.query_lens.len()).map(|n| self.query_lens[..n].iter().sum::<usize>() as i32).collect();
        let tokens = starts[self.query_lens.len()] as usize;
        let longest = self.query_lens.iter().copied().max().unwrap_or(0);
        if tokens == 0 {
            return;
        }
        let floats = |data: &[f32]| upload(&memory, &bytes(data, f32::to_le_bytes));
        let ints = |data: &[i32]| upload(&memory, &bytes(data, i32::to_le_bytes));
        let (out, lse) =
            (upload(&memory, &vec![0xFF; tokens * self.out_row * self.kernel.element()]), floats(&vec![f32::NAN; tokens * Q_HEADS]));
        let pointers = [
            ints(self.reduce.as_flattened()),
            floats(&self.partial),
            floats(self.statistics.as_flattened()),
            self.sinks.as_deref().map_or(0, floats),
            if self.kernel.ragged { ints(&starts) } else { 0 },
            out,
            lse,
        ];
        let sizes = [longest, Q_HEADS, self.kv_heads, self.rows, usize::from(self.per_head), tokens].map(|n| n as i32);
        let mut args = Arguments::default();
        args.longs(pointers).longs([self.out_row as u64, self.out_head as u64]).ints(sizes);
        let grid = [longest * self.kernel.chunks(), Q_HEADS, self.query_lens.len()].map(|n| n as u32);
        launch(module, &memory, &args, grid, self.kernel.threads);
        let out = self.values(&memory, out, tokens * self.out_row);
        let lse = self.read_f32(&memory, lse, tokens * Q_HEADS);
        for (sequence, &queries) in self.query_lens.iter().enumerate() {
            for (token, head) in (0..queries).flat_map(|token| (0..Q_HEADS).map(move |head| (token, head))) {
                let row = starts[sequence] as usize + token;
                let got = &out[row * self.out_row + head * self.out_head..][..self.kernel.head_dim];
                let (want, want_lse) = self.expected(sequence, token, head);
                let place = format!("{:?} sequence {sequence} token {token} head {head}", self.kernel);
                let off = error(got, &want, if self.kernel.dtype == 1 { 1e-4 } else { 0.0 });
                assert!(off <= [4e-3, 5e-4, 5e-6][self.kernel.dtype], "{place}: {off} off");
                let got_lse = f64::from(lse[row * Q_HEADS + head]);
                assert!(
                    got_lse == want_lse || (got_lse - want_lse).abs() <= 1e-6 * want_lse.abs().max(4.0),
                    "{place}: LSE {got_lse}, not {want_lse}"
                );
            }
        }
        let gaps = (0..out.len())
            .filter(|at| at % self.out_row / self.out_head >= Q_HEADS || at % self.out_row % self.out_head >= self.kernel.head_dim);
        assert!(gaps.map(|at| out[at]).all(f64::is_nan), "{:?} wrote between rows", self.kernel);
    }

    fn read_f32(&self, memory: &Memory, address: u64, count: usize) -> Vec<f32> {
        words(memory, address, count).into_iter().map(|word| f32::from_bits(word as u32)).collect()
    }

    fn values(&self, memory: &Memory, address: u64, count: usize) -> Vec<f64> {
        if self.kernel.dtype == 2 {
            return self.read_f32(memory, address, count).into_iter().map(f64::from).collect();
        }
        let data = memory.read(address, 2 * count).unwrap();
        let value =
            |&bits: &[u8; 2]| if self.kernel.dtype == 0 { bf16::from_le_bytes(bits).to_f64() } else { f16::from_le_bytes(bits).to_f64() };
        data.as_chunks::<2>().0.iter().map(value).collect()
    }
}

/// Relative L2 distance, infinite where anything is not finite. Values below `least` (F16's subnormals) count as that large.
fn error(got: &[f64], want: &[f64], least: f64) -> f64 {
    let error: f64 = got.iter().zip(want).map(|(a, b)| (a - b).powi(2)).sum();
    let norm: f64 = want.iter().map(|x| x * x).sum();
    match (error.is_finite(), error == 0.0) {
        (false, _) => f64::INFINITY,
        (_, true) => 0.0,
        _ => (error / norm.max(least * least * want.len() as f64)).sqrt(),
    }
}

#[test]
fn merges_partials_as_float64_does() {
    require_clang!();
    let kernels = [
        ("gfx942", 128, 2, false, 64),
        ("gfx950", 128, 0, true, 64),
        ("gfx942", 128, 1, true, 256),
        ("gfx950", 128, 2, true, 1024),
        ("gfx950", 64, 0, false, 64),
        ("gfx942", 64, 2, true, 256),
        ("gfx950", 192, 2, true, 64),
        ("gfx942", 256, 2, false, 64),
        ("gfx950", 512, 0, true, 256),
        ("gfx942", 1024, 2, true, 64),
    ];
    kernels.into_par_iter().for_each(|(arch, head_dim, dtype, ragged, threads)| {
        let kernel = Kernel { arch, head_dim, dtype, ragged, threads };
        let module = kernel.module();
        for seed in 0..6 {
            Case::random(kernel, seed, &[0, 1, 2, 3, 5, 8, 17]).check(&module);
        }
    });
}

/// Counts about each step of the loop, and thousands.
#[test]
fn merges_many_partials() {
    require_clang!();
    for (threads, counts) in [(64, &[2, 8, 9, 16, 17, 33, 4000][..]), (256, &[8, 32, 33, 64, 65, 300]), (1024, &[32, 129, 256, 257, 512])] {
        let kernel = Kernel { arch: "gfx950", head_dim: 128, dtype: 2, ragged: false, threads };
        let module = kernel.module();
        counts.into_par_iter().for_each(|&count| Case::random(kernel, count as u64, &[count]).check(&module));
    }
}
