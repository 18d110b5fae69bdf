//! A decode call run by the tile on the simulator: device memory, arguments, launch, and the merge of partial results in float64.

use candle::{Device, Result, Tensor};
use candle_paged_attn::PlanChoice;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::plan::{HostPlan, PlanRequest, TILE_TOKENS, TileRange, capacity, tile_range};
use candle_paged_attn::quant::fp8;
use candle_paged_attn::registry::{Arch, ArchName, Flags, Problem, Selection, select};
use cdna_sim::{Counters, Launch, Memory, Trace};
use testkit::arguments::Arguments;
use testkit::cases::{Case, PlanRows};
use testkit::raw::{Raw, f32s};
use testkit::reference::floats;

use crate::compile::{KERNEL, flags_of, module};

/// What a call left.
pub struct Outcome {
    /// `[rows, q_heads, head_dim]`, in q's dtype if rows were stored directly, else F32.
    pub out: Tensor,
    /// `[rows, q_heads]`.
    pub lse: Tensor,
    pub counters: Counters,
    /// What the waves executed, where that was asked for.
    pub trace: Option<Trace>,
}

/// A call and what the host knows of it.
#[derive(Clone)]
pub struct TileCall {
    pub case: Case,
    pub arch: Arch,
    pub selection: Selection,
    /// `None`: plan-free.
    pub plan: Option<HostPlan>,
    lens: Vec<i32>,
    starts: Vec<usize>,
    max_query: usize,
    q_heads: usize,
    max_pages: usize,
    /// Where the cache's page `i` lies: `first + i * step` in a cache of as many pages as that needs.
    pub spread: Option<(usize, usize)>,
    /// Whether the machine preloads kernel arguments where the kernel asks for it.
    pub preload: bool,
    /// Whether rows stored directly come with their LSE.
    pub wants_lse: bool,
    /// Whether the launch, of one workgroup, is recorded.
    pub traced: bool,
}

impl TileCall {
    pub fn new(case: Case, arch: Arch) -> Result<Self> {
        let spec = &case.spec;
        let PlanRows { lens, query_lens, starts } = case.plan_rows()?;
        assert_eq!(starts.last().map(|&rows| rows as usize), Some(case.q.dims()[0]));
        let plan_free = matches!(case.options.plan, PlanChoice::Free);
        let request = PlanRequest {
            window: spec.window,
            max_partitions: spec.max_partitions,
            workgroup_budget: spec.workgroup_budget,
            ..PlanRequest::new(&lens, &query_lens, if spec.per_head { 1 } else { spec.kv_heads })
        };
        let table = case.block_tables.dims();
        let max_pages = table[table.len() - 1];
        let problem = Problem { max_pages, plan_free, capacity: capacity(&request, &arch)?, ..spec.problem() };
        let plan = if plan_free { None } else { Some(HostPlan::new(&request, &arch)?) };
        Ok(Self {
            selection: select(&problem, &arch)?,
            max_query: problem.query_len,
            q_heads: problem.q_heads,
            case,
            arch,
            plan,
            lens,
            starts: starts.into_iter().map(|start| start as usize).collect(),
            max_pages,
            spread: None,
            preload: true,
            wants_lse: true,
            traced: false,
        })
    }

    /// The same call by one tile group of a workgroup.
    pub fn one_group(mut self) -> Self {
        self.selection.key.flags.dual_group = false;
        self.selection.threads = 256;
        self
    }

    /// The same call by the generic tile: no switch of the schedule is on.
    pub fn generic(&self) -> Self {
        let mut call = self.clone().one_group();
        let flags = &mut call.selection.key.flags;
        *flags = Flags { direct_output: flags.direct_output, mxfp4_tile: flags.mxfp4_tile, ..Flags::default() };
        call
    }

    /// Tiles of each task of each plan row, in order.
    pub fn tasks(&self) -> Vec<Vec<TileRange>> {
        let heads = self.lens.len() / (self.starts.len() - 1).max(1);
        let window = self.case.spec.window;
        let whole = |row: usize| {
            let s = row / heads.max(1);
            tile_range(self.lens[row], self.starts[s + 1] - self.starts[s], window, TILE_TOKENS)
        };
        match &self.plan {
            None => (0..self.lens.len()).map(|row| vec![whole(row)]).collect(),
            Some(plan) => plan
                .reduce
                .iter()
                .map(|&[first, count]| {
                    let tasks = &plan.work[first as usize..(first + count) as usize];
                    tasks.iter().map(|&[_, first, end, _]| TileRange { first, end }).collect()
                })
                .collect(),
        }
    }

    pub fn run(&self) -> Result<Outcome> {
        self.run_with(&[])
    }

    /// Launches the tile, compiled with `flags` besides its own.
    pub fn run_with(&self, flags: &[&str]) -> Result<Outcome> {
        let memory = Memory::new();
        let spec = &self.case.spec;
        let options = &self.case.options;
        let fnuz = self.arch.name == ArchName::Gfx942 && spec.kv_dtype == KvDtype::Fp8;
        let upload = |bytes: &[u8]| if bytes.is_empty() { 0 } else { memory.upload(bytes).unwrap() };
        let lend = |raw: &Raw| {
            let address = raw.bytes.as_ptr() as u64;
            // SAFETY: caches outlive the launch, which only reads them.
            unsafe { memory.register(address, raw.bytes.len()) };
            address
        };
        let ints = |values: &[i32]| upload(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
        let (first, step) = self.spread.unwrap_or((0, 1));
        let stored_pages = self.case.key_cache.dims()[0];
        let pages = first + stored_pages * step;
        let cache = |cache: &Tensor| -> Result<Raw> {
            let raw = if fnuz { Raw::of(cache)?.fnuz() } else { Raw::of(cache)? };
            Ok(if self.spread.is_some() { spread(raw, stored_pages, first, step) } else { raw })
        };
        let (key, value) = (cache(&self.case.key_cache)?, cache(&self.case.value_cache)?);
        let q = Raw::of(&self.case.q)?;
        let tables = if self.spread.is_some() {
            let ids = self.case.block_tables.flatten_all()?.to_vec1::<i32>()?;
            let ids = ids.iter().map(|&id| if id < 0 { id } else { (first + id as usize * step) as i32 });
            Raw::of(&Tensor::from_iter(ids, &Device::Cpu)?)?
        } else {
            Raw::of(&self.case.block_tables)?
        };
        let factor = if fnuz { fp8::FNUZ_SCALE_FACTOR } else { 1.0 };
        let k_scale = Raw::of_scale(&options.k_scale, factor)?;
        let v_scale = Raw::of_scale(&options.v_scale, factor)?;
        let starts: Vec<i32> = self.starts.iter().map(|&s| s as i32).collect();
        let per_head = spec.per_head;
        let direct = self.selection.key.flags.direct_output;
        let (slots, work, reduce) = match &self.plan {
            None => (self.lens.len(), 0, 0),
            Some(plan) => (plan.work.len(), ints(plan.work.as_flattened()), ints(plan.reduce.as_flattened())),
        };
        let heads = if per_head { 1 } else { spec.kv_heads };
        let rows = self.selection.row_groups * self.selection.key.m_tiles * 16;
        let (q_rows, d) = (*self.starts.last().unwrap(), spec.head_dim);
        let vectors = q_rows * self.q_heads;
        let out_bytes = if direct { vectors * d * spec.q_dtype.size_in_bytes() } else { slots * heads * rows * d * 4 };
        let nan = |bytes: usize| upload(&vec![0xff; bytes]);
        let (out, lse, statistics) = (nan(out_bytes), nan(vectors * 4), nan(slots * heads * rows * 8));
        let scale = spec.softmax_scale.unwrap_or((d as f64).sqrt().recip() as f32);

        let mut args = Arguments::default();
        args.u64(work).u64(upload(&tables.bytes) + tables.offset).u64(upload(&q.bytes) + q.offset);
        args.u32(self.max_pages).u32(self.lens.len()).u32(q.strides[0]).u32(q.strides[1]);
        args.u64(if direct { reduce } else { statistics }).u64(lend(&key) + key.offset);
        args.u64(lend(&value) + value.offset).u64(upload(&k_scale.bytes)).u64(upload(&v_scale.bytes));
        args.u64(ints(&self.lens)).u64(if options.query_start.is_some() { ints(&starts) } else { 0 });
        args.u64(out).u64(if direct && self.wants_lse { lse } else { 0 }).u64(self.max_pages as u64);
        for raw in [&key, &value] {
            let [head, token] = if spec.layout == CacheLayout::Nhd { [2, 1] } else { [1, 2] };
            args.u64(raw.strides[0] as u64).u64(raw.strides[head] as u64).u64(raw.strides[token] as u64);
        }
        for raw in [&k_scale, &v_scale] {
            args.u64(raw.strides[0] as u64).u64(raw.strides[1] as u64).u64(raw.strides[2] as u64);
        }
        args.u64((self.q_heads * d) as u64).u64(d as u64);
        args.f32(scale * std::f32::consts::LOG2_E).f32(spec.softcap.unwrap_or(0.0));
        args.u32(spec.window.unwrap_or(0).min(i32::MAX as usize)).u32(self.max_query).u32(spec.kv_heads);
        args.u32(pages).u32(rows).u32(q_rows);

        let mut all = flags_of(&self.selection);
        all.extend(flags.iter().map(|s| s.to_string()));
        let module = module(&self.arch.name.to_string(), &all);
        let kernel = module.kernel(KERNEL).unwrap();
        let grid = [slots as u32, heads as u32, self.selection.row_groups as u32];
        let (counters, trace) = if grid.contains(&0) || vectors == 0 {
            (Counters::default(), None)
        } else {
            let selection = &self.selection;
            let block = [selection.threads as u32, 1, 1];
            let launch = Launch { preload: self.preload, dynamic_lds: selection.staged_bytes, ..Launch::new(grid, block) };
            let outcome = if self.traced {
                assert_eq!(grid, [1; 3], "one workgroup is recorded");
                module.trace(&memory, kernel, &args.0, &launch, [0; 3]).map(|(counters, trace)| (counters, Some(trace)))
            } else {
                module.launch(&memory, kernel, &args.0, &launch).map(|counters| (counters, None))
            };
            outcome.map_err(|e| candle::Error::Msg(e.to_string()))?
        };
        let shape = (q_rows, self.q_heads, d);
        let (out, lse) = if direct {
            let bytes = memory.read(out, out_bytes).unwrap_or_default();
            let lse = memory.read(lse, vectors * 4).unwrap_or_default();
            (Tensor::from_raw_buffer(&bytes, spec.q_dtype, &[q_rows, self.q_heads, d], &Device::Cpu)?, f32s(&lse))
        } else {
            let partial = f32s(&memory.read(out, out_bytes).unwrap_or_default());
            let statistics = f32s(&memory.read(statistics, slots * heads * rows * 8).unwrap_or_default());
            let (out, lse) = self.merge(&partial, &statistics, rows)?;
            (Tensor::from_vec(out, shape, &Device::Cpu)?, lse)
        };
        Ok(Outcome { out, lse: Tensor::from_vec(lse, (q_rows, self.q_heads), &Device::Cpu)?, counters, trace })
    }

    /// What the reducer does, in float64.
    fn merge(&self, partial: &[f32], statistics: &[f32], rows: usize) -> Result<(Vec<f32>, Vec<f32>)> {
        let spec = &self.case.spec;
        let (d, group) = (spec.head_dim, self.q_heads / spec.kv_heads);
        let table_heads = if spec.per_head { spec.kv_heads } else { 1 };
        let grid_y = if spec.per_head { 1 } else { spec.kv_heads };
        let sinks = self.case.options.sinks.as_ref().map(floats).transpose()?;
        let (mut out, mut lse) = (vec![], vec![]);
        for s in 0..self.starts.len() - 1 {
            for token in 0..self.starts[s + 1] - self.starts[s] {
                for head in 0..self.q_heads {
                    let kv = head / group;
                    let plan_row = s * table_heads + if spec.per_head { kv } else { 0 };
                    let [first, count] = self.plan.as_ref().map_or([plan_row as i32, 1], |plan| plan.reduce[plan_row]);
                    let row = token * group + head % group;
                    let parts: Vec<usize> = (first..first + count)
                        .map(|slot| (slot as usize * grid_y + if spec.per_head { 0 } else { kv }) * rows + row)
                        .collect();
                    let mut max = parts.iter().map(|&at| f64::from(statistics[at * 2])).fold(f64::NEG_INFINITY, f64::max);
                    let attended = parts.iter().any(|&at| statistics[at * 2] != f32::NEG_INFINITY);
                    let sink = sinks.as_ref().filter(|_| attended).map(|s| s[head] * std::f64::consts::LOG2_E);
                    max = max.max(sink.unwrap_or(max));
                    let mut sum = sink.map_or(0.0, |s| (s - max).exp2());
                    let mut total = vec![0.0; d];
                    for &at in &parts {
                        let (m, l) = (f64::from(statistics[at * 2]), f64::from(statistics[at * 2 + 1]));
                        assert!(m != f64::NEG_INFINITY || (l == 0.0 && partial[at * d..][..d].iter().all(|&x| x == 0.0)));
                        let weight = if m == f64::NEG_INFINITY { 0.0 } else { (m - max).exp2() };
                        sum += weight * l;
                        total.iter_mut().zip(&partial[at * d..]).for_each(|(t, &x)| *t += weight * f64::from(x));
                    }
                    out.extend(total.iter().map(|&t| if attended { (t / sum) as f32 } else { 0.0 }));
                    lse.push(if attended { ((max + sum.log2()) * std::f64::consts::LN_2) as f32 } else { f32::NEG_INFINITY });
                }
            }
        }
        Ok((out, lse))
    }
}

/// The same pages far apart, in memory that is taken only where they are.
fn spread(raw: Raw, pages: usize, first: usize, step: usize) -> Raw {
    let page = raw.bytes.len() / pages;
    let mut bytes = vec![0; page * (first + pages * step)];
    raw.bytes.chunks(page).enumerate().for_each(|(i, from)| bytes[(first + i * step) * page..][..page].copy_from_slice(from));
    Raw { bytes, ..raw }
}

/// Layouts the tile reads.
pub const LAYOUTS: [CacheLayout; 2] = [CacheLayout::Shuffled, CacheLayout::Vllm];
/// Archs the tile runs on.
pub fn archs() -> [Arch; 2] {
    [Arch::gfx950(), Arch::gfx942(304)]
}
