//! A shape, and the kernels that its calls may use.

use anyhow::{Result, bail};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::jit::Specialization;
use candle_paged_attn::plan::{PlanRequest, capacity};
use candle_paged_attn::registry::{Arch, ArchName, M_TILE_ROWS, Problem, ScaleMode, preferred_layout};
use candle_paged_attn::rocm::specialize::{self, WriteKey};
use clap::{Args, ValueEnum};
use serde::Deserialize;
use testkit::workloads::{Fp8Scale, Kv, Workload};

use crate::options::{LayoutArg, QueryArg, ScalesArg};

/// More than any size of a shape, and few enough that no product overflows.
const MOST: usize = 1 << 16;
/// Plan rows, of which any block of a planner holds fewer.
const MOST_ROWS: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvArg {
    F16,
    Bf16,
    Fp8,
    Mxfp4,
}

/// What kernels are specialized on, as a model and an engine know it. Fields are options, and the JSON file's names.
#[derive(Args, Clone, Debug, PartialEq, Deserialize)]
#[group(multiple = true)]
#[serde(deny_unknown_fields, default)]
pub struct Shape {
    /// Query heads (of this GPU's share). Only their number a KV head counts
    #[arg(long, default_value_t = 16)]
    q_heads: usize,
    /// KV heads
    #[arg(long, default_value_t = 1)]
    kv_heads: usize,
    /// Channels of a head
    #[arg(long, default_value_t = 128)]
    head_dim: usize,
    /// Tokens of a page
    #[arg(long, default_value_t = 128)]
    page_size: usize,
    /// Dtypes of the cache, with commas
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["bf16"])]
    kv: Vec<KvArg>,
    /// Scales of FP8 caches
    #[arg(long, value_enum, default_value = "scalar")]
    scales: ScalesArg,
    /// The cache's layout [default: the GPU's own: shuffled, hnd for mxfp4]
    #[arg(long, value_enum)]
    layout: Option<LayoutArg>,
    /// Dtype of q, k, v and the output
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: QueryArg,
    /// New tokens a sequence: 1 decodes, 4 verifies three drafted tokens, 512 is a chunk of a prompt. With commas
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    query_lens: Vec<usize>,
    /// Most sequences of a call: planners come in powers of two up to it
    #[arg(long, default_value_t = 256)]
    max_batch: usize,
    /// Only batches whose sequences all have the same number of new tokens
    #[arg(long)]
    even: bool,
    /// A sliding window
    #[arg(long)]
    window: bool,
    /// Capped scores
    #[arg(long)]
    softcap: bool,
    /// A block table for every KV head
    #[arg(long)]
    per_head_tables: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            q_heads: 16,
            kv_heads: 1,
            head_dim: 128,
            page_size: 128,
            kv: vec![KvArg::Bf16],
            scales: ScalesArg::Scalar,
            layout: None,
            dtype: QueryArg::Bf16,
            query_lens: vec![1],
            max_batch: 256,
            even: false,
            window: false,
            softcap: false,
            per_head_tables: false,
        }
    }
}

impl From<&Workload> for Shape {
    fn from(workload: &Workload) -> Self {
        Self {
            q_heads: workload.num_q_heads,
            kv_heads: workload.num_kv_heads,
            head_dim: workload.head_dim,
            page_size: workload.page_size,
            kv: vec![match workload.kv {
                Kv::Bf16 => KvArg::Bf16,
                Kv::Fp8 => KvArg::Fp8,
                Kv::Mxfp4 => KvArg::Mxfp4,
            }],
            scales: if workload.fp8_scale == Some(Fp8Scale::PerToken) { ScalesArg::PerToken } else { ScalesArg::Scalar },
            query_lens: vec![workload.query_len],
            max_batch: workload.batch,
            even: true,
            ..Self::default()
        }
    }
}

/// What is to be compiled: each kernel once, in the order of the shapes.
#[derive(Default)]
pub struct Kernels {
    pub specializations: Vec<Specialization>,
    /// What there is no kernel for, though the arch has others.
    pub notes: Vec<String>,
}

impl Kernels {
    /// Adds every kernel that calls of `shape` may use.
    ///
    /// Errors: no size of a shape, or not one of `archs` has kernels for it.
    pub fn add(&mut self, shape: &Shape, archs: &[Arch]) -> Result<()> {
        shape.check()?;
        for &kv in &shape.kv {
            let mut refused = vec![];
            for arch in archs {
                if let Err(error) = self.add_kv(shape, kv, arch) {
                    refused.push(format!("not compiled: {kv:?} on {}: {error:#}", arch.name));
                }
            }
            if refused.len() == archs.len() {
                bail!("{}", refused.join("\n"))
            }
            refused.into_iter().for_each(|note| self.note(note));
        }
        archs.iter().try_for_each(|arch| self.add_helpers(shape, arch))
    }

    /// Tiles and the cache write of one KV dtype.
    fn add_kv(&mut self, shape: &Shape, kv: KvArg, arch: &Arch) -> Result<()> {
        if arch.name == ArchName::Gfx1250 {
            specialize::select(&Problem::default(), arch).err().into_iter().for_each(|error| self.note(error.to_string()));
        } else {
            let tile = |problem| specialize::tile(&specialize::select(&problem, arch)?);
            let tiles = shape.problems(kv, arch)?.into_iter().map(tile).collect::<candle::Result<Vec<_>>>()?;
            tiles.into_iter().for_each(|tile| self.push(tile));
        }
        self.push(specialize::write(&shape.write_key(kv, arch))?);
        Ok(())
    }

    /// Reducers and planners, whatever the cache stores.
    fn add_helpers(&mut self, shape: &Shape, arch: &Arch) -> Result<()> {
        for ragged in shape.raggedness() {
            for threads in specialize::REDUCER_THREADS {
                self.push(specialize::reduce(arch.name, shape.head_dim, shape.dtype.into(), ragged, threads)?);
            }
            let rows = shape.max_batch * shape.rows_a_sequence();
            let buckets = std::iter::successors(Some(1_usize), |bucket| bucket.checked_mul(2)).take_while(|&bucket| bucket < 2 * rows);
            // A batch that no planner's block holds is planned on the host.
            buckets.map_while(|bucket| specialize::plan(arch, bucket, ragged).ok()).for_each(|plan| self.push(plan));
        }
        Ok(())
    }

    fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    fn push(&mut self, specialization: Specialization) {
        if !self.specializations.contains(&specialization) {
            self.specializations.push(specialization);
        }
    }
}

impl Shape {
    fn check(&self) -> Result<()> {
        let sizes = [("q_heads", self.q_heads), ("kv_heads", self.kv_heads), ("head_dim", self.head_dim), ("page_size", self.page_size)];
        let query_lens = self.query_lens.iter().map(|&len| ("query_lens", len));
        for (name, size) in sizes.into_iter().chain([("max_batch", self.max_batch)]).chain(query_lens) {
            if !(1..=MOST).contains(&size) {
                bail!("{name}: {size} is not from 1 to {MOST}")
            }
        }
        if self.max_batch * self.rows_a_sequence() > MOST_ROWS {
            bail!("max_batch: {} sequences of {} tables each are more than {MOST_ROWS} plan rows", self.max_batch, self.kv_heads)
        }
        if self.kv.is_empty() || self.query_lens.is_empty() {
            bail!("kv and query_lens: at least one each")
        }
        Ok(())
    }

    /// Plan rows.
    fn rows_a_sequence(&self) -> usize {
        if self.per_head_tables { self.kv_heads } else { 1 }
    }

    /// New tokens of the longest sequence. A ragged batch may have any number: as many as fill one to four M-tiles, the most of a workgroup.
    fn longest(&self, ragged: bool) -> Vec<usize> {
        let group = (self.q_heads / self.kv_heads).max(1);
        let any = if ragged { (4 * M_TILE_ROWS).div_ceil(group) } else { 0 };
        self.query_lens.iter().copied().chain(1..=any).collect()
    }

    fn raggedness(&self) -> impl Iterator<Item = bool> + use<> {
        [false, true].into_iter().take(if self.even { 1 } else { 2 })
    }

    /// The calls whose kernels may differ: each query length, even and ragged, split over workgroups and not (then with sinks, too, which the
    /// reducer adds), one sequence and many.
    fn problems(&self, kv: KvArg, arch: &Arch) -> Result<Vec<Problem>> {
        let mut problems = vec![];
        for (ragged, query_len) in self.raggedness().flat_map(|ragged| self.longest(ragged).into_iter().map(move |len| (ragged, len))) {
            let splits = [(None, false), (Some(1), false), (Some(1), true)];
            for ((max_partitions, sinks), batch) in splits.into_iter().flat_map(|split| [1, self.max_batch].map(|batch| (split, batch))) {
                let (context_lens, query_lens) = (vec![1; batch * self.rows_a_sequence()], [query_len]);
                let heads = self.kv_heads / self.rows_a_sequence();
                let request = PlanRequest { max_partitions, ..PlanRequest::new(&context_lens, &query_lens, heads) };
                let problem = Problem {
                    batch,
                    q_heads: self.q_heads,
                    kv_heads: self.kv_heads,
                    head_dim: self.head_dim,
                    page_size: self.page_size,
                    query_len,
                    query_dtype: self.dtype.into(),
                    kv_dtype: kv.into(),
                    layout: self.layout(kv, arch),
                    scales: self.scale_mode(kv),
                    per_head_tables: self.per_head_tables,
                    ragged,
                    windowed: self.window,
                    softcap: self.softcap,
                    sinks,
                    max_partitions,
                    capacity: capacity(&request, arch)?,
                    ..Problem::default()
                };
                problems.extend(table_widths(kv).into_iter().map(|max_pages| Problem { max_pages, ..problem.clone() }));
            }
        }
        Ok(problems)
    }

    fn write_key(&self, kv: KvArg, arch: &Arch) -> WriteKey {
        WriteKey {
            arch: arch.name,
            head_dim: self.head_dim,
            page_size: self.page_size,
            dtype: self.dtype.into(),
            kv_dtype: kv.into(),
            scales: self.scale_mode(kv),
            layout: self.layout(kv, arch),
        }
    }

    fn layout(&self, kv: KvArg, arch: &Arch) -> CacheLayout {
        self.layout.map_or_else(|| preferred_layout(arch, kv.into()), CacheLayout::from)
    }

    fn scale_mode(&self, kv: KvArg) -> ScaleMode {
        match (kv, self.scales) {
            (KvArg::Mxfp4, _) => ScaleMode::Block,
            (KvArg::F16 | KvArg::Bf16, _) | (_, ScalesArg::None) => ScaleMode::None,
            (_, ScalesArg::Scalar) => ScaleMode::Scalar,
            (_, ScalesArg::PerToken) => ScaleMode::PerToken,
        }
    }
}

/// Widths of block tables between which kernels differ: of MXFP4 caches, whose tiles keep page ids in LDS while they fit, every 4 KiB of ids up to
/// what no workgroup has.
fn table_widths(kv: KvArg) -> Vec<usize> {
    match kv {
        KvArg::Mxfp4 => (0..=40).map(|step| 1 + step * 1024).collect(),
        _ => vec![Problem::default().max_pages],
    }
}

impl From<KvArg> for KvDtype {
    fn from(kv: KvArg) -> Self {
        match kv {
            KvArg::F16 => Self::F16,
            KvArg::Bf16 => Self::Bf16,
            KvArg::Fp8 => Self::Fp8,
            KvArg::Mxfp4 => Self::Mxfp4,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};

    use super::*;

    fn kernels(shape: &Shape, arch: &Arch) -> Vec<String> {
        let mut kernels = Kernels::default();
        kernels.add(shape, std::slice::from_ref(arch)).unwrap();
        kernels.specializations.into_iter().map(|spec| spec.kernel).collect()
    }

    #[test]
    fn options_and_json_have_the_same_defaults() {
        let command = Shape::augment_args(Command::new("test"));
        let of_options = Shape::from_arg_matches(&command.get_matches_from(["test"])).unwrap();
        let of_json: Shape = serde_json::from_str("{}").unwrap();
        assert_eq!((&of_options, &of_json), (&Shape::default(), &Shape::default()));
        assert!(serde_json::from_str::<Shape>(r#"{"heads": 1}"#).is_err());
    }

    #[test]
    fn a_shape_has_the_kernels_of_all_its_calls() {
        let shape = Shape { query_lens: vec![1, 4], max_batch: 5, ..Shape::default() };
        let mut names = kernels(&shape, &Arch::gfx950());
        let ragged = names.iter().filter(|name| name.ends_with("_ragged")).count();
        assert_eq!(ragged, 3 + 4, "{names:?}");
        names.retain(|name| !name.ends_with("_ragged"));
        let wanted = [
            "pa_bf16_d128_p128_m1_nt",
            "pa_bf16_d128_p128_m1_nt_direct_dual",
            "pa_bf16_d128_p128_m1_nt_dual",
            "pa_bf16_d128_p128_m4_mtp_fused",
            "pa_bf16_d128_p128_m4_mtp_fused_direct",
            "pa_write_bf16_d128_p128_bf16_shuffled",
            "pa_reduce_d128_bf16_t64",
            "pa_reduce_d128_bf16_t1024",
            "pa_plan_r1_minmax",
            "pa_plan_r2_minmax",
            "pa_plan_r4_minmax",
            "pa_plan_r8_minmax",
        ];
        for name in wanted {
            assert!(names.iter().any(|n| n == name), "{name}: {names:?}");
        }
        // Tiles come ragged too, under the same names, and then with every number of M-tiles.
        let count = |name: &str| names.iter().filter(|n| *n == name).count();
        assert_eq!(
            [count("pa_bf16_d128_p128_m1_nt"), count("pa_bf16_d128_p128_m3_mtp_fused"), count("pa_bf16_d128_p128_m4_mtp_fused_direct")],
            [2, 1, 2]
        );
    }

    #[test]
    fn tables_of_every_width_have_their_mxfp4_tiles() {
        let shape = Shape { kv: vec![KvArg::Mxfp4], even: true, max_batch: 1, page_size: 16, ..Shape::default() };
        let mut kernels = Kernels::default();
        kernels.add(&shape, &[Arch::gfx950()]).unwrap();
        let is = |spec: &Specialization, name: &str| spec.defines.iter().any(|(define, value)| define == name && value == "1");
        for (dual, staged) in [(true, true), (false, true), (false, false)] {
            let there = |spec: &&Specialization| {
                is(spec, "PA_DIRECT_OUTPUT") && is(spec, "PA_DUAL_GROUP") == dual && is(spec, "PA_MXFP4_STAGED_PAGES") == staged
            };
            assert_eq!(kernels.specializations.iter().filter(there).count(), 1, "two groups: {dual}, ids staged: {staged}");
        }
    }

    #[test]
    fn gfx1250_has_a_note_in_place_of_the_tile() {
        let mut kernels = Kernels::default();
        kernels.add(&Shape::default(), &[Arch::gfx1250()]).unwrap();
        assert!(kernels.notes.len() == 1 && kernels.notes[0].contains("gfx1250"), "{:?}", kernels.notes);
        assert!(kernels.specializations.iter().all(|spec| !spec.defines.iter().any(|(name, _)| name == "PA_M_TILES")));
    }

    #[test]
    fn a_cache_that_one_gpu_has_no_kernel_for_is_a_note() {
        let shape = Shape { kv: vec![KvArg::Bf16, KvArg::Mxfp4], even: true, ..Shape::default() };
        let mut kernels = Kernels::default();
        kernels.add(&shape, &[Arch::gfx942(304), Arch::gfx950()]).unwrap();
        assert!(kernels.notes.len() == 1 && kernels.notes[0].contains("gfx942"), "{:?}", kernels.notes);
        let mxfp4 = kernels.specializations.iter().filter(|spec| spec.kernel.contains("mxfp4"));
        assert!(mxfp4.clone().count() > 0 && mxfp4.into_iter().all(|spec| spec.arch == ArchName::Gfx950));
        let error = Kernels::default().add(&shape, &[Arch::gfx942(304)]).unwrap_err();
        assert!(error.to_string().contains("MXFP4"), "{error}");
    }

    #[test]
    fn bad_shapes_are_named() {
        let error = |shape: Shape| Kernels::default().add(&shape, &[Arch::gfx950()]).unwrap_err();
        assert!(format!("{:#}", error(Shape { head_dim: 100, ..Shape::default() })).contains("head_dim"));
        assert!(error(Shape { max_batch: 0, ..Shape::default() }).to_string().contains("max_batch"));
        assert!(error(Shape { kv: vec![], ..Shape::default() }).to_string().contains("kv"));
    }
}
