//! A decode call on the simulated device, launch by launch as `src/cuda/decode.rs` makes it: planner, tile, reducer.

use candle::{Device as Cpu, Result, Tensor, bail};
use candle_paged_attn::PagedDecode;
use candle_paged_attn::cache::KvStrides;
use candle_paged_attn::cuda::specialize::{self, leaves_f16, slot_rows};
use candle_paged_attn::cuda::{Decided, Tables};
use candle_paged_attn::plan::PLANNER_THREADS;
use candle_paged_attn::registry::{Arch, ArchName, ScaleMode, Selection};
use ptx_sim::Early;
use testkit::arguments::Arguments;
use testkit::cases::{Case, PlanRows};
use testkit::plans::planner_arguments;
use testkit::raw::Raw;

use crate::device::{Device, Shape};

/// A call that was decided.
pub struct Call<'a> {
    case: &'a Case,
    arch: &'a Arch,
    tables: Tables,
    rows: PlanRows,
    decided: Decided,
}

/// What the launches share: addresses.
struct Places {
    work: u64,
    reduce: u64,
    block_tables: u64,
    context_lens: u64,
    query_start: u64,
    sinks: u64,
    out: u64,
    lse: u64,
    partial: u64,
    statistics: u64,
}

impl<'a> Call<'a> {
    pub fn new(case: &'a Case, arch: &'a Arch, tables: Tables) -> Result<Self> {
        let rows = case.plan_rows()?;
        let op = PagedDecode::new(&case.block_tables, &case.context_lens, &case.options);
        let decided = Decided::of(&op, [&case.q, &case.key_cache, &case.value_cache], tables, arch)?;
        Ok(Self { case, arch, tables, rows, decided })
    }

    pub fn selection(&self) -> &Selection {
        self.decided.selection()
    }

    /// Output and LSE.
    pub fn run(&self) -> Result<(Tensor, Tensor)> {
        let device = Device::default();
        let places = self.place(&device)?;
        if self.rows.queries() > 0 {
            if self.decided.is_planned_here() {
                self.launch_planner(&device, &places)?;
            }
            self.launch_tile(&device, &places)?;
            if self.decided.is_split() {
                self.launch_reducer(&device, &places)?;
            }
        }
        self.results(&device, &places)
    }

    fn place(&self, device: &Device) -> Result<Places> {
        let (spec, options, selection) = (&self.case.spec, &self.case.options, self.selection());
        let (plan_rows, slots) = (self.decided.plan_rows(), self.decided.slots());
        let [work, reduce] = match self.decided.host_plan() {
            Some(plan) => [plan.work.as_flattened(), plan.reduce.as_flattened()].map(|records| device.ints(records)),
            None if self.decided.is_planned_here() => [16 * slots, 8 * plan_rows].map(|bytes| device.unwritten(bytes)),
            None => [0; 2],
        };
        let states = if self.decided.is_split() { slots * self.heads() * slot_rows(selection) } else { 0 };
        let channel = if leaves_f16(selection) { 2 } else { 4 };
        Ok(Places {
            work,
            reduce,
            block_tables: device.tensor(&Raw::of(&self.case.block_tables)?),
            context_lens: device.ints(&self.rows.lens),
            query_start: if options.query_start.is_some() { device.ints(&self.rows.starts) } else { 0 },
            sinks: options.sinks.as_ref().map(Raw::of).transpose()?.map_or(0, |raw| device.tensor(&raw)),
            out: device.unwritten(self.rows.queries() * self.out_row() * spec.q_dtype.size_in_bytes()),
            lse: device.unwritten(self.rows.queries() * self.q_heads() * 4),
            partial: device.unwritten(states * spec.head_dim * channel),
            statistics: device.unwritten(states * 8),
        })
    }

    fn launch_planner(&self, device: &Device, places: &Places) -> Result<()> {
        let (spec, rows) = (&self.case.spec, self.decided.plan_rows());
        let addresses = [places.context_lens, places.query_start, places.work, places.reduce];
        let numbers = [rows, spec.heads_of_tables(), self.decided.query_len(), spec.window.unwrap_or(0), self.decided.slots()];
        let kernel = specialize::plan(self.arch, rows, places.query_start != 0)?;
        device.launch(&kernel, Shape::new([1; 3], PLANNER_THREADS), &planner_arguments(addresses, numbers, spec.max_partitions))
    }

    fn launch_tile(&self, device: &Device, places: &Places) -> Result<()> {
        let selection = self.selection();
        let cluster = selection.key.cuda.map_or(1, |shape| shape.cluster);
        let Places { work, reduce, block_tables, context_lens, query_start, .. } = *places;
        let settled: &[u64] = if self.is_settled() { &[work, reduce, block_tables, context_lens, query_start] } else { &[] };
        let shape = Shape {
            grid: [self.decided.slots() * self.heads() * cluster, 1, selection.row_groups],
            threads: selection.threads,
            cluster,
            dynamic_shared: selection.lds_bytes,
            early: self.overlapping(Early { settled, starts_next: false }),
        };
        device.launch(&specialize::tile(selection)?, shape, &self.tile_arguments(device, places)?)
    }

    /// Whether the tile reads what is `settled` early: with tables on the host, to have both.
    fn is_settled(&self) -> bool {
        self.tables == Tables::Host
    }

    /// `early` where launches overlap the end of the one before.
    fn overlapping<'e>(&self, early: Early<'e>) -> Option<Early<'e>> {
        (self.arch.name == ArchName::Sm90).then_some(early)
    }

    /// `CudaTileArgs`.
    fn tile_arguments(&self, device: &Device, places: &Places) -> Result<Arguments> {
        let Case { spec, q, key_cache, value_cache, block_tables, options, .. } = self.case;
        let (k_scale, k_scale_strides) = self.scale(device, &Raw::of_scale(&options.k_scale, 1.0)?);
        let (v_scale, v_scale_strides) = self.scale(device, &Raw::of_scale(&options.v_scale, 1.0)?);
        let paged = |strides: KvStrides| [strides.page, strides.head, strides.token];
        let max_pages = block_tables.dims()[block_tables.rank() - 1];
        let softmax_scale = spec.softmax_scale.unwrap_or((spec.head_dim as f64).sqrt().recip() as f32);
        let [q_place, key, value] = [q, key_cache, value_cache].map(|tensor| Raw::of(tensor).map(|raw| device.tensor(&raw)));
        let mut arguments = Arguments::default();
        arguments.longs([places.work, places.reduce, places.block_tables, places.context_lens, places.query_start, q_place?, key?, value?]);
        arguments.longs([k_scale, v_scale, places.sinks, places.out, places.lse, places.partial, places.statistics]);
        arguments.longs([max_pages, q.stride()[0], q.stride()[1], self.out_row(), spec.head_dim].map(|stride| stride as u64));
        let caches = [options.layout.key_strides(key_cache.layout()), options.layout.value_strides(value_cache.layout())].map(paged);
        let strides = [caches[0], caches[1], k_scale_strides, v_scale_strides];
        arguments.longs(strides.as_flattened().iter().map(|&stride| stride as u64));
        arguments.f32(softmax_scale * std::f32::consts::LOG2_E).f32(spec.softcap.unwrap_or(0.0));
        let pages = key_cache.dims()[0];
        arguments.ints([spec.window.unwrap_or(0), self.decided.query_len(), spec.kv_heads, pages, max_pages].map(clamp));
        arguments.ints([self.decided.plan_rows(), slot_rows(self.selection()), self.rows.queries()].map(clamp));
        // From each sequence's rows to the next's there is no more than from row to row.
        arguments.longs([0, 0]).ints([i32::from(self.is_settled())]);
        Ok(arguments)
    }

    /// Address and strides, for kernels that read scales.
    fn scale(&self, device: &Device, raw: &Raw) -> (u64, [usize; 3]) {
        match self.selection().key.scales {
            ScaleMode::None => (0, [0; 3]),
            _ => (device.tensor(raw), [0, 1, 2].map(|axis| raw.strides[axis])),
        }
    }

    fn launch_reducer(&self, device: &Device, places: &Places) -> Result<()> {
        let (spec, query_len, q_heads) = (&self.case.spec, self.decided.query_len(), self.q_heads());
        let mut arguments = Arguments::default();
        arguments.longs([places.reduce, places.partial, places.statistics, places.sinks, places.query_start, places.out, places.lse]);
        arguments.longs([self.out_row(), spec.head_dim].map(|stride| stride as u64));
        let rows = slot_rows(self.selection());
        arguments.ints([query_len, q_heads, spec.kv_heads, rows, usize::from(spec.per_head), self.rows.queries()].map(clamp));
        arguments.longs([0]);
        let cut = self.decided.reducer_cut(self.arch);
        let [x, y] = cut.grid(query_len, q_heads, spec.head_dim);
        let ragged = places.query_start != 0;
        let kernel = specialize::reduce(self.arch.name, spec.head_dim, spec.q_dtype, ragged, spec.per_head, cut)?;
        // The tiles had waited for who wrote these, and for all before.
        let settled = [places.reduce, places.query_start];
        let early = self.overlapping(Early { settled: &settled, starts_next: true });
        device.launch(&kernel, Shape { early, ..Shape::new([x, y, spec.lens.len()], cut.threads()) }, &arguments)
    }

    fn results(&self, device: &Device, places: &Places) -> Result<(Tensor, Tensor)> {
        let (spec, rows, heads) = (&self.case.spec, self.rows.queries(), self.q_heads());
        let element = spec.q_dtype.size_in_bytes();
        let bytes = device.read(places.out, rows * self.out_row() * element);
        let gaps = bytes.chunks(self.out_row() * element).flat_map(|row| &row[heads * spec.head_dim * element..]);
        if gaps.into_iter().any(|&byte| byte != 0xff) {
            bail!("a kernel wrote between the output's rows")
        }
        let out = Tensor::from_raw_buffer(&bytes, spec.q_dtype, &[rows, heads + 1, spec.head_dim], &Cpu::Cpu)?;
        let lse = Tensor::from_vec(device.read_f32(places.lse, rows * heads), (rows, heads), &Cpu::Cpu)?;
        Ok((out.narrow(1, 0, heads)?, lse))
    }

    /// KV heads that share a plan row.
    fn heads(&self) -> usize {
        if self.case.spec.per_head { 1 } else { self.case.spec.kv_heads }
    }

    fn q_heads(&self) -> usize {
        self.case.spec.group * self.case.spec.kv_heads
    }

    /// From an output row to the next: there is a head more, which stays unwritten.
    fn out_row(&self) -> usize {
        (self.q_heads() + 1) * self.case.spec.head_dim
    }
}

fn clamp(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
