//! The kernels against float64, through [`Job`].

use std::io::Write;
use std::sync::Once;

use candle::{Layout, Shape};
use float8::F8E4M3;
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::isa::available;
use super::schedule::{emulated_tiles, holds_bf16, run_with};
use super::*;
use crate::cache::{CacheDims, CacheLayout, KvDtype, KvStrides};
use crate::plan::{HostPlan, TILE_TOKENS};
use crate::registry::CpuIsa;

const ISAS: [CpuIsa; 6] = [CpuIsa::AmxBf16, CpuIsa::Avx512Bf16, CpuIsa::Avx512, CpuIsa::Avx2, CpuIsa::Neon, CpuIsa::Portable];

/// The instruction sets that this machine has. The others are named once, past the harness's capture: a run says what it did not test.
fn isas() -> impl Iterator<Item = CpuIsa> {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let skipped: Vec<_> = ISAS.into_iter().filter(|&isa| !available(isa)).map(CpuIsa::name).collect();
        let _ = writeln!(std::io::stderr(), "CPU kernels skipped, not on this machine: {}", skipped.join(", "));
    });
    ISAS.into_iter().filter(|&isa| available(isa))
}

/// A way to run a call.
#[derive(Clone, Copy, Debug)]
enum Way {
    Isa(CpuIsa),
    /// The kernel of AMX-BF16, its instructions emulated.
    EmulatedTiles,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum QDtype {
    F32,
    F16,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Scales {
    Scalar,
    PerToken,
}

/// What a call looks like; data follow from the seed.
#[derive(Clone, Debug)]
struct Spec {
    layout: CacheLayout,
    kv: KvDtype,
    q: QDtype,
    scales: Scales,
    head_dim: usize,
    page_size: usize,
    kv_heads: usize,
    group: usize,
    /// (query_len, context_len) of each sequence.
    sequences: Vec<(usize, usize)>,
    per_head: bool,
    window: Option<usize>,
    softcap: Option<f32>,
    sinks: bool,
    softmax_scale: f32,
    /// Most partitions a row.
    parts: usize,
    /// Values of pages are spaced out by this many elements.
    page_gap: usize,
    seed: u64,
}

impl Spec {
    fn new(kv: KvDtype, q: QDtype) -> Self {
        Self {
            layout: CacheLayout::Nhd,
            kv,
            q,
            scales: Scales::Scalar,
            head_dim: 64,
            page_size: 16,
            kv_heads: 2,
            group: 4,
            sequences: vec![(1, 300), (1, 77)],
            per_head: false,
            window: None,
            softcap: None,
            sinks: false,
            softmax_scale: 0.125,
            parts: 1,
            page_gap: 0,
            seed: 1,
        }
    }
}

enum Stored {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    Fp8(Vec<F8E4M3>),
    Mxfp4(Vec<u8>),
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Poison {
    Nan,
    Infinite,
    Plain,
}

/// One cache with its scales.
struct Cache {
    stored: Stored,
    strides: KvStrides,
    /// F32 `[P, Hkv, S]`, or the E8M0 `[P, Hkv, S, D/32]`.
    token_scales: Vec<f32>,
    block_scales: Vec<u8>,
    scalar: f32,
    scales: Scales,
    dims: CacheDims,
}

fn normal(rng: &mut StdRng) -> f32 {
    let (u, v): (f32, f32) = (1.0 - rng.random::<f32>(), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

impl Cache {
    fn new(spec: &Spec, dims: CacheDims, key: bool, poison: Poison) -> Self {
        let shape = if key { spec.layout.key_shape(dims, spec.kv) } else { spec.layout.value_shape(dims, spec.kv) };
        let mut strides = Layout::contiguous(shape.clone()).stride().to_vec();
        strides[0] += spec.page_gap;
        let len = shape[0] * strides[0] + 3;
        let layout = Layout::new(Shape::from(shape), strides, 3);
        let strides = if key { spec.layout.key_strides(&layout) } else { spec.layout.value_strides(&layout) };
        let (wild, byte) = match poison {
            Poison::Nan => (f32::NAN, 0xff),
            Poison::Infinite => (f32::INFINITY, 0x7f),
            Poison::Plain => (1.5, 0x31),
        };
        let stored = match spec.kv {
            KvDtype::F32 => Stored::F32(vec![wild; len]),
            KvDtype::F16 => Stored::F16(vec![f16::from_f32(wild); len]),
            KvDtype::Bf16 => Stored::Bf16(vec![bf16::from_f32(wild); len]),
            KvDtype::Fp8 => Stored::Fp8(vec![F8E4M3::from_bits(byte); len]),
            KvDtype::Mxfp4 => Stored::Mxfp4(vec![byte; len]),
        };
        let tokens = dims.pages * dims.kv_heads * dims.page_size;
        Self {
            stored,
            strides,
            token_scales: vec![wild; tokens],
            block_scales: vec![if poison == Poison::Plain { 127 } else { 0xff }; tokens * dims.head_dim / 32],
            scalar: match (spec.kv, key) {
                (KvDtype::Fp8, true) => 0.75,
                (KvDtype::Fp8, false) => 1.25,
                _ => 1.0,
            },
            scales: spec.scales,
            dims,
        }
    }

    fn token(&self, page: usize, head: usize, slot: usize) -> usize {
        (page * self.dims.kv_heads + head) * self.dims.page_size + slot
    }

    fn fill(&mut self, page: usize, head: usize, slot: usize, rng: &mut StdRng) {
        let token = self.token(page, head, slot);
        self.token_scales[token] = rng.random_range(0.5..2.0);
        let blocks = self.dims.head_dim / 32;
        self.block_scales[token * blocks..(token + 1) * blocks].iter_mut().for_each(|s| *s = rng.random_range(125..130));
        let per = if matches!(self.stored, Stored::Mxfp4(_)) { 2 } else { 1 };
        for d in 0..self.dims.head_dim / per {
            let at = self.strides.offset(page, head, slot, d);
            match &mut self.stored {
                Stored::F32(x) => x[at] = normal(rng),
                Stored::F16(x) => x[at] = f16::from_f32(normal(rng)),
                Stored::Bf16(x) => x[at] = bf16::from_f32(normal(rng)),
                Stored::Fp8(x) => x[at] = F8E4M3::from_f32(normal(rng)),
                Stored::Mxfp4(x) => x[at] = rng.random(),
            }
        }
    }

    fn set_all(&mut self, page: usize, head: usize, slot: usize, value: f32) {
        for d in 0..self.dims.head_dim {
            let at = self.strides.offset(page, head, slot, d);
            match &mut self.stored {
                Stored::F32(x) => x[at] = value,
                Stored::F16(x) => x[at] = f16::from_f32(value),
                Stored::Bf16(x) => x[at] = bf16::from_f32(value),
                Stored::Fp8(x) => x[at] = F8E4M3::from_bits(0x7f),
                Stored::Mxfp4(_) => unreachable!(),
            }
        }
    }

    fn value(&self, page: usize, head: usize, slot: usize, dim: usize) -> f64 {
        const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let token = self.token(page, head, slot);
        let at = |d| self.strides.offset(page, head, slot, d);
        let stored = match &self.stored {
            Stored::F32(x) => f64::from(x[at(dim)]),
            Stored::F16(x) => x[at(dim)].to_f64(),
            Stored::Bf16(x) => x[at(dim)].to_f64(),
            Stored::Fp8(x) => f64::from(x[at(dim)].to_f32()),
            Stored::Mxfp4(x) => {
                let nibble = x[at(dim / 2)] >> (4 * (dim % 2)) & 15;
                let scale = self.block_scales[token * (self.dims.head_dim / 32) + dim / 32];
                let scale = if scale == 255 { f64::NAN } else { (f64::from(scale) - 127.0).exp2() };
                return E2M1[usize::from(nibble & 7)] * if nibble & 8 != 0 { -scale } else { scale };
            }
        };
        stored * f64::from(if self.scales == Scales::PerToken { self.token_scales[token] } else { self.scalar })
    }

    fn view(&self) -> KvView<'_> {
        let CacheDims { kv_heads, page_size, head_dim, .. } = self.dims;
        let (data, mxfp4) = match &self.stored {
            Stored::F32(x) => (KvData::F32(x), false),
            Stored::F16(x) => (KvData::F16(x), false),
            Stored::Bf16(x) => (KvData::Bf16(x), false),
            Stored::Fp8(x) => (KvData::Fp8(x), false),
            Stored::Mxfp4(x) => (KvData::Mxfp4(x), true),
        };
        let scale = match (mxfp4, self.scales) {
            (true, _) => {
                let blocks = head_dim / 32;
                let (page_stride, head_stride, token_stride) = (kv_heads * page_size * blocks, page_size * blocks, blocks);
                Scale::Block { data: &self.block_scales, start: 0, page_stride, head_stride, token_stride }
            }
            (false, Scales::Scalar) => Scale::Scalar(self.scalar),
            (false, Scales::PerToken) => Scale::PerToken {
                data: &self.token_scales,
                start: 0,
                page_stride: kv_heads * page_size,
                head_stride: page_size,
                token_stride: 1,
            },
        };
        KvView { data, strides: self.strides, scale }
    }
}

enum Floats {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Floats {
    fn new(dtype: QDtype, values: Vec<f32>) -> Self {
        match dtype {
            QDtype::F32 => Self::F32(values),
            QDtype::F16 => Self::F16(values.into_iter().map(f16::from_f32).collect()),
            QDtype::Bf16 => Self::Bf16(values.into_iter().map(bf16::from_f32).collect()),
        }
    }

    fn get(&self, i: usize) -> f64 {
        match self {
            Self::F32(x) => f64::from(x[i]),
            Self::F16(x) => x[i].to_f64(),
            Self::Bf16(x) => x[i].to_f64(),
        }
    }
}

/// A call with its data.
struct Case {
    spec: Spec,
    dims: CacheDims,
    query: Floats,
    key: Cache,
    value: Cache,
    table: Vec<i32>,
    max_pages: usize,
    rows: Vec<Row>,
    query_rows: usize,
    sinks: Vec<f32>,
    plan: HostPlan,
}

/// Results as f32.
struct Results {
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl Case {
    fn new(spec: Spec, poison: Poison) -> Self {
        let mut rng = StdRng::seed_from_u64(spec.seed);
        let heads = if spec.per_head { spec.kv_heads } else { 1 };
        let longest = spec.sequences.iter().map(|s| s.1).max().unwrap_or(0) + 2 * spec.page_size;
        let max_pages = longest.div_ceil(spec.page_size);
        let tables = spec.sequences.len() * heads;
        let dims = CacheDims { pages: tables * max_pages + 2, page_size: spec.page_size, kv_heads: spec.kv_heads, head_dim: spec.head_dim };
        let mut pages: Vec<i32> = (0..dims.pages as i32).collect();
        pages.shuffle(&mut rng);
        let mut key = Cache::new(&spec, dims, true, poison);
        let mut value = Cache::new(&spec, dims, false, poison);
        let mut table = vec![-1; tables * max_pages];
        let (mut rows, mut start) = (vec![], 0);
        for (sequence, &(query_len, context)) in spec.sequences.iter().enumerate() {
            for head in 0..heads {
                // With per-head tables the heads may differ in length.
                let context_len = if spec.per_head && context > 5 { context - head * 3 } else { context };
                rows.push(Row { query_start: start, query_len, context_len });
                let first_query = context_len as i64 - query_len as i64;
                let first = first_seen(first_query, spec.window);
                for t in first..context_len {
                    let column = (sequence * heads + head) * max_pages + t / spec.page_size;
                    if table[column] < 0 {
                        table[column] = pages.pop().expect("enough pages");
                    }
                    let own = if spec.per_head { head..head + 1 } else { 0..spec.kv_heads };
                    for h in own {
                        key.fill(table[column] as usize, h, t % spec.page_size, &mut rng);
                        value.fill(table[column] as usize, h, t % spec.page_size, &mut rng);
                    }
                }
            }
            start += query_len;
        }
        let q_heads = spec.kv_heads * spec.group;
        let query = (0..start * q_heads * spec.head_dim).map(|_| normal(&mut rng)).collect();
        let plan = hand_plan(&rows, spec.parts);
        let sinks = (0..q_heads).map(|_| normal(&mut rng)).collect();
        Self { query: Floats::new(spec.q, query), dims, key, value, table, max_pages, rows, query_rows: start, sinks, plan, spec }
    }

    fn q_heads(&self) -> usize {
        self.spec.kv_heads * self.spec.group
    }

    fn page(&self, row: usize, column: usize) -> usize {
        self.table[row * self.max_pages + column] as usize
    }

    fn job(&self, isa: CpuIsa) -> Job<'_> {
        let data = match &self.query {
            Floats::F32(x) => QueryData::F32(x),
            Floats::F16(x) => QueryData::F16(x),
            Floats::Bf16(x) => QueryData::Bf16(x),
        };
        let head_stride = self.spec.head_dim;
        let heads = if self.spec.per_head { self.spec.kv_heads } else { 1 };
        Job {
            isa,
            dims: self.dims,
            q_heads: self.q_heads(),
            query: QueryView { data, start: 0, row_stride: self.q_heads() * head_stride, head_stride },
            key: self.key.view(),
            value: self.value.view(),
            table: PageTable {
                ids: Ids::I32(&self.table),
                start: 0,
                sequence_stride: heads * self.max_pages,
                head_stride: if self.spec.per_head { self.max_pages } else { 0 },
                column_stride: 1,
            },
            rows: &self.rows,
            per_head: self.spec.per_head,
            softmax_scale: self.spec.softmax_scale,
            window: self.spec.window,
            softcap: self.spec.softcap,
            sinks: self.spec.sinks.then_some(&self.sinks),
            plan: &self.plan,
        }
    }

    /// Every instruction set that this machine has, and the emulated one where it would be used.
    fn ways(&self) -> Vec<Way> {
        let tiles = holds_bf16(&self.job(CpuIsa::AmxBf16)).then_some(Way::EmulatedTiles);
        isas().map(Way::Isa).chain(tiles).collect()
    }

    fn run(&self, way: Way) -> Results {
        self.run_by(|output| match way {
            Way::Isa(isa) => run(&self.job(isa), output).expect("runs"),
            Way::EmulatedTiles => run_with(&self.job(CpuIsa::AmxBf16), output, emulated_tiles).expect("runs"),
        })
    }

    fn run_by(&self, f: impl FnOnce(&mut Output<'_>)) -> Results {
        let (rows, heads, dim) = (self.query_rows, self.q_heads(), self.spec.head_dim);
        let mut out = Floats::new(self.spec.q, vec![f32::NAN; rows * heads * dim]);
        let mut lse = vec![f32::NAN; rows * heads];
        let data = match &mut out {
            Floats::F32(x) => OutputData::F32(x),
            Floats::F16(x) => OutputData::F16(x),
            Floats::Bf16(x) => OutputData::Bf16(x),
        };
        f(&mut Output { data, start: 0, row_stride: heads * dim, head_stride: dim, lse: Some(&mut lse) });
        Results { out: (0..rows * heads * dim).map(|i| out.get(i) as f32).collect(), lse }
    }

    /// Output and LSE in float64.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let (heads, dim) = (self.q_heads(), self.spec.head_dim);
        let mut out = vec![0.0; self.query_rows * heads * dim];
        let mut lse = vec![f64::NEG_INFINITY; self.query_rows * heads];
        for (plan_row, row) in self.rows.iter().enumerate() {
            let own = match self.spec.per_head {
                true => plan_row % self.spec.kv_heads..plan_row % self.spec.kv_heads + 1,
                false => 0..self.spec.kv_heads,
            };
            for kv_head in own {
                let cached = |cache: &Cache| -> Vec<f64> {
                    let first_query = row.context_len as i64 - row.query_len as i64;
                    let first = first_seen(first_query, self.spec.window);
                    let at = |t: usize, d| cache.value(self.page(plan_row, t / self.spec.page_size), kv_head, t % self.spec.page_size, d);
                    (0..row.context_len * dim).map(|i| if i / dim < first { f64::NAN } else { at(i / dim, i % dim) }).collect()
                };
                let (keys, values) = (cached(&self.key), cached(&self.value));
                for i in 0..row.query_len {
                    for g in 0..self.spec.group {
                        let place = (row.query_start + i) * heads + kv_head * self.spec.group + g;
                        let position = row.context_len as i64 - row.query_len as i64 + i as i64;
                        let to = &mut out[place * dim..(place + 1) * dim];
                        lse[place] = self.attend(place, position, &keys, &values, to);
                    }
                }
            }
        }
        (out, lse)
    }

    fn attend(&self, place: usize, position: i64, keys: &[f64], values: &[f64], out: &mut [f64]) -> f64 {
        if position < 0 {
            return f64::NEG_INFINITY;
        }
        let dim = out.len();
        let first = first_seen(position, self.spec.window);
        let scores: Vec<f64> = (first..=position as usize)
            .map(|t| {
                let dot: f64 = (0..dim).map(|d| self.query.get(place * dim + d) * keys[t * dim + d]).sum();
                let s = dot * f64::from(self.spec.softmax_scale);
                self.spec.softcap.map_or(s, |c| f64::from(c) * (s / f64::from(c)).tanh())
            })
            .collect();
        let sink = self.spec.sinks.then(|| f64::from(self.sinks[place % self.q_heads()]));
        let top = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let mut total = sink.map_or(0.0, |s| (s - top).exp());
        for (t, s) in scores.iter().enumerate() {
            let p = (s - top).exp();
            total += p;
            out.iter_mut().enumerate().for_each(|(d, o)| *o += p * values[(first + t) * dim + d]);
        }
        out.iter_mut().for_each(|o| *o /= total);
        top + total.ln()
    }

    fn tolerance(&self) -> f64 {
        let kv = match self.spec.kv {
            KvDtype::F32 => 1e-5,
            KvDtype::F16 => 2e-3,
            KvDtype::Bf16 | KvDtype::Fp8 | KvDtype::Mxfp4 => 8e-3,
        };
        let q = match self.spec.q {
            QDtype::F32 => 1e-5,
            QDtype::F16 => 2e-3,
            QDtype::Bf16 => 8e-3,
        };
        f64::max(kv, q)
    }

    fn check(&self) {
        let (out, lse) = self.reference();
        for way in self.ways() {
            self.compare(&format!("{way:?}"), &self.run(way), &out, &lse);
        }
    }

    fn compare(&self, what: &str, got: &Results, out: &[f64], lse: &[f64]) {
        let dim = self.spec.head_dim;
        for (i, expected) in out.chunks(dim).enumerate() {
            let got_row = &got.out[i * dim..(i + 1) * dim];
            let (row, head) = (i / self.q_heads(), i % self.q_heads());
            if expected.iter().any(|x| x.is_nan()) {
                assert!(got_row.iter().any(|x| x.is_nan()), "{what}: row {row} head {head} should be NaN: {:?}", self.spec);
                continue;
            }
            let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
            let error = expected.iter().zip(got_row).map(|(x, y)| (x - f64::from(*y)).powi(2)).sum::<f64>().sqrt();
            // An F16 output cannot resolve less than 2^-24.
            let grain = if self.spec.q == QDtype::F16 { 2f64.powi(-25) * (dim as f64).sqrt() } else { 0.0 };
            let allowed = self.tolerance() * norm + grain;
            assert!(
                error <= allowed,
                "{what}: row {row} head {head} is {error:.2e} off, {allowed:.2e} allowed ({:?}.. for {:?}..): {:?}",
                &got_row[..4],
                &expected[..4],
                self.spec
            );
            let close = got.lse[i] as f64 == lse[i] || (f64::from(got.lse[i]) - lse[i]).abs() <= 3e-5 * (1.0 + lse[i].abs());
            assert!(close, "{what}: lse of row {row} head {head} is {} for {}: {:?}", got.lse[i], lse[i], self.spec);
        }
    }
}

/// Each row in up to `parts` tasks; slots out of row order, with padding records between rows.
fn hand_plan(rows: &[Row], parts: usize) -> HostPlan {
    let mut plan = HostPlan { work: vec![], reduce: vec![[0, 0]; rows.len()] };
    for row in (0..rows.len()).rev() {
        let tiles = rows[row].context_len.div_ceil(TILE_TOKENS);
        let n = tiles.min(parts);
        plan.reduce[row] = [plan.work.len() as i32, n as i32];
        plan.work.extend((0..n).map(|i| [row as i32, (i * tiles / n) as i32, ((i + 1) * tiles / n) as i32, i as i32]));
        plan.work.push([-1, 0, 0, 0]);
    }
    plan
}

const KV: [KvDtype; 5] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8, KvDtype::Mxfp4];
const Q: [QDtype; 3] = [QDtype::F32, QDtype::F16, QDtype::Bf16];

fn first_seen(position: i64, window: Option<usize>) -> usize {
    window.map_or(0, |window| (i128::from(position) - window as i128 + 1).max(0) as usize)
}

fn fits(spec: &Spec) -> bool {
    let dims = CacheDims { pages: 1, page_size: spec.page_size, kv_heads: spec.kv_heads, head_dim: spec.head_dim };
    spec.layout.check(dims, spec.kv).is_ok()
}

#[test]
fn every_layout_and_dtype() {
    for layout in CacheLayout::ALL {
        for kv in KV {
            for q in Q {
                for scales in [Scales::Scalar, Scales::PerToken] {
                    let spec = Spec { layout, scales, seed: 7, ..Spec::new(kv, q) };
                    if fits(&spec) {
                        Case::new(spec, Poison::Nan).check();
                    }
                }
            }
        }
    }
}

#[test]
fn every_head_dim() {
    for head_dim in [8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 192, 256, 576, 1024] {
        for kv in KV {
            for layout in CacheLayout::ALL {
                let spec = Spec { head_dim, layout, sequences: vec![(2, 70)], softmax_scale: 0.09, ..Spec::new(kv, QDtype::F32) };
                if fits(&spec) {
                    Case::new(spec, Poison::Nan).check();
                }
            }
        }
    }
}

#[test]
fn every_page_size() {
    for page_size in [1, 2, 3, 8, 16, 24, 32, 64, 100, 128, 256, 1000, 1024] {
        for kv in KV {
            for layout in CacheLayout::ALL {
                let spec = Spec { page_size, layout, sequences: vec![(3, 331), (1, 1)], page_gap: 64, ..Spec::new(kv, QDtype::Bf16) };
                if fits(&spec) {
                    Case::new(spec, Poison::Infinite).check();
                }
            }
        }
    }
}

#[test]
fn groups_and_query_lengths() {
    for group in [1, 2, 3, 5, 8, 16, 17, 40] {
        for query_len in [1, 2, 5, 16] {
            for kv in [KvDtype::F32, KvDtype::Bf16] {
                let spec = Spec { group, kv_heads: 1, sequences: vec![(query_len, 130), (query_len, 64)], ..Spec::new(kv, QDtype::F32) };
                Case::new(spec, Poison::Nan).check();
            }
        }
    }
}

#[test]
fn a_prefill_chunk_beside_decodes() {
    for kv in [KvDtype::F32, KvDtype::Bf16, KvDtype::Fp8] {
        for window in [None, Some(100)] {
            let spec = Spec { sequences: vec![(1, 200), (300, 650), (4, 4)], group: 3, parts: 2, window, ..Spec::new(kv, QDtype::Bf16) };
            Case::new(spec, Poison::Nan).check();
        }
    }
}

#[test]
fn contexts_shorter_than_the_query_and_empty_ones() {
    for kv in KV {
        let sequences = vec![(5, 3), (4, 0), (1, 0), (3, 1), (2, 2), (1, 65)];
        for sinks in [false, true] {
            Case::new(Spec { sequences: sequences.clone(), sinks, ..Spec::new(kv, QDtype::F32) }, Poison::Nan).check();
        }
    }
}

#[test]
fn a_peaked_softmax_keeps_its_accuracy() {
    for kv in KV {
        for q in Q {
            for softmax_scale in [4.0, -4.0] {
                Case::new(Spec { softmax_scale, sequences: vec![(2, 500)], parts: 2, ..Spec::new(kv, q) }, Poison::Nan).check();
            }
        }
    }
}

fn draw(rng: &mut StdRng) -> Spec {
    let mut pick = |list: &[usize]| list[rng.random_range(0..list.len())];
    let (head_dim, page_size) = (pick(&[8, 24, 32, 64, 96, 128, 160]), pick(&[1, 3, 8, 16, 16, 32, 64, 128, 1000]));
    let (kv_heads, group) = (pick(&[1, 1, 2, 3]), pick(&[1, 2, 4, 7, 16, 20]));
    let (layout, kv, q) = (CacheLayout::ALL[pick(&[0, 1, 2, 3])], KV[pick(&[0, 1, 2, 3, 4])], Q[pick(&[0, 1, 2])]);
    let (parts, page_gap) = (pick(&[1, 1, 2, 3, 8]), pick(&[0, 0, 32, 640]));
    let sequences =
        (0..pick(&[1, 2, 3])).map(|_| (pick(&[1, 1, 2, 4, 9, 16, 70]), pick(&[0, 1, 5, 15, 63, 64, 65, 255, 257, 400, 700]))).collect();
    let window = [None, Some(1), Some(5), Some(63), Some(100), Some(300), Some(usize::MAX)][pick(&[0, 0, 0, 1, 2, 3, 4, 5, 6])];
    let softcap = [None, Some(0.7), Some(20.0)][pick(&[0, 0, 1, 2])];
    Spec {
        layout,
        kv,
        q,
        scales: if rng.random() { Scales::Scalar } else { Scales::PerToken },
        head_dim,
        page_size,
        kv_heads,
        group,
        sequences,
        per_head: rng.random_range(0..3) == 0,
        window,
        softcap,
        sinks: rng.random_range(0..3) == 0,
        softmax_scale: [0.1, 0.3, -0.2, 0.0][rng.random_range(0..4)],
        parts,
        page_gap,
        seed: rng.random(),
    }
}

#[test]
fn random_calls() {
    let mut rng = StdRng::seed_from_u64(0x5eed);
    let mut done = 0;
    while done < 300 {
        let spec = draw(&mut rng);
        if fits(&spec) {
            Case::new(spec, Poison::Nan).check();
            done += 1;
        }
    }
}

#[test]
fn unowned_tokens_never_change_a_bit() {
    let mut rng = StdRng::seed_from_u64(0x9015);
    let mut done = 0;
    while done < 60 {
        let spec = draw(&mut rng);
        if !fits(&spec) {
            continue;
        }
        done += 1;
        let cases = [Poison::Nan, Poison::Infinite, Poison::Plain].map(|poison| Case::new(spec.clone(), poison));
        for way in cases[0].ways() {
            let bits = cases.each_ref().map(|case| bits(&case.run(way)));
            assert!(bits[0] == bits[2] && bits[1] == bits[2], "{way:?}: {spec:?}");
        }
    }
}

fn bits(results: &Results) -> Vec<u32> {
    results.out.iter().chain(&results.lse).map(|x| x.to_bits()).collect()
}

#[test]
fn later_tokens_never_reach_earlier_queries() {
    for kv in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8] {
        for (layout, window) in CacheLayout::ALL.into_iter().flat_map(|layout| [(layout, None), (layout, Some(20))]) {
            for value in [f32::NAN, f32::INFINITY] {
                let spec = Spec { layout, window, sequences: vec![(4, 97)], ..Spec::new(kv, QDtype::F32) };
                let mut case = Case::new(spec, Poison::Nan);
                for t in [if window.is_some() { 74 } else { 95 }, 95] {
                    let (page, slot) = (case.page(0, t / 16), t % 16);
                    case.key.set_all(page, 0, slot, value);
                    case.value.set_all(page, 0, slot, value);
                }
                case.check();
            }
        }
    }
}

#[test]
fn the_thread_count_never_changes_a_bit() {
    let spec = Spec { sequences: vec![(4, 2000), (1, 3000), (70, 900)], group: 8, parts: 4, ..Spec::new(KvDtype::Bf16, QDtype::Bf16) };
    let case = Case::new(spec, Poison::Nan);
    for way in case.ways() {
        let runs = [1, 2, 5].map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            bits(&pool.install(|| case.run(way)))
        });
        assert!(runs[0] == runs[1] && runs[0] == runs[2], "{way:?}");
    }
}
