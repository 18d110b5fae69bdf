//! The shape to explain: a workload by name, or sizes from the command line.

use std::fmt;

use anyhow::{Context, Result, bail};
use candle::DType;
use candle_paged_attn::cache::{CacheDims, CacheLayout, KvDtype};
use candle_paged_attn::plan::PlanRequest;
use candle_paged_attn::registry::{Arch, Problem, ScaleMode, preferred_layout};
use clap::Args;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use testkit::errors::of_option;
use testkit::workloads::{self, Fp8Scale, Kv, Workload};

use crate::count;
use crate::options::{KvArg, LayoutArg, QueryArg, ScalesArg};

/// Bounds of the op, and more sequences than any call has.
const MAX_PAGE_SIZE: usize = 1024;
const MAX_HEAD_DIM: usize = 1024;
const MAX_BATCH: usize = 1 << 16;
/// More than any call has, and few enough that no product overflows.
const MAX_HEADS: usize = 1 << 16;
const MAX_QUERY_LEN: usize = 1 << 16;
const MAX_ROWS: usize = 1 << 20;

/// The default batch: one long sequence beside shorter ones, which the two splits share out differently.
const MIXED_CONTEXTS: [usize; 8] = [131_072, 32_768, 16_384, 8192, 4096, 2048, 1024, 512];

#[derive(Args)]
pub struct ShapeArgs {
    /// A shape of benches/workloads.json, FAMILY/NAME (minimax20/decode-b4-q1-ctx8192-bf16); options below change it
    #[arg(long, value_name = "FAMILY/NAME")]
    shape: Option<String>,
    /// Sequences [default: the number of contexts given]
    #[arg(long)]
    batch: Option<usize>,
    /// Tokens of each sequence, the new ones included: one for all, a list (100,2000,30000), or a range to draw from (1024-8192)
    /// [default: a mixed batch, or 8192 each with --batch]
    #[arg(long)]
    context: Option<String>,
    /// New tokens of each sequence [default: 1]
    #[arg(long)]
    query_len: Option<usize>,
    /// Query heads [default: 16]
    #[arg(long)]
    q_heads: Option<usize>,
    /// KV heads [default: 1]
    #[arg(long)]
    kv_heads: Option<usize>,
    /// Elements of a head [default: 128]
    #[arg(long)]
    head_dim: Option<usize>,
    /// Tokens of a page [default: 128]
    #[arg(long)]
    page_size: Option<usize>,
    /// What the cache stores [default: bf16]
    #[arg(long, value_enum)]
    kv: Option<KvArg>,
    /// Dtype of q, k, v and the output [default: bf16, f32 for an F32 cache]
    #[arg(long, value_enum)]
    dtype: Option<QueryArg>,
    /// Granularity of FP8 scales [default: the workload's with --shape, per-token for minimax20's; else scalar]
    #[arg(long, value_enum)]
    scales: Option<ScalesArg>,
    /// Cache layout [default: the arch's preferred one]
    #[arg(long, value_enum)]
    layout: Option<LayoutArg>,
    /// Tokens a block-table row has lanes for [default: the longest context]
    #[arg(long)]
    table_tokens: Option<usize>,
    /// Sliding window, tokens
    #[arg(long)]
    window: Option<usize>,
    /// Attention sinks
    #[arg(long)]
    sinks: bool,
    /// Scores capped by tanh (whatever the cap is)
    #[arg(long)]
    softcap: bool,
    /// Most tasks of a sequence
    #[arg(long)]
    max_partitions: Option<usize>,
    /// Task slots over all KV heads [default: the arch's]
    #[arg(long)]
    workgroup_budget: Option<usize>,
    /// No plan: each sequence is one task, whatever --max-partitions
    #[arg(long)]
    plan_free: bool,
    /// Seed of lengths drawn from a range
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// A call, as far as the registry and the planner ask.
pub struct Shape {
    name: Option<String>,
    context_lens: Vec<i32>,
    query_lens: [usize; 1],
    pub q_heads: usize,
    pub kv_heads: usize,
    head_dim: usize,
    page_size: usize,
    kv: KvDtype,
    query: DType,
    scales: ScaleMode,
    layout: CacheLayout,
    table_tokens: usize,
    window: Option<usize>,
    sinks: bool,
    softcap: bool,
    strided_output: bool,
    max_partitions: Option<usize>,
    workgroup_budget: Option<usize>,
    pub plan_free: bool,
}

impl ShapeArgs {
    /// The shape on `arch`: the named workload or the defaults, changed by what was given.
    ///
    /// Errors name the option that no call could have.
    pub fn resolve(&self, arch: &Arch) -> Result<Shape> {
        if let Some(batch) = self.batch {
            in_range("--batch", batch, MAX_BATCH)?;
        }
        let base = self.shape.as_deref().map(workloads::find).transpose().map_err(|error| of_option("--shape", error))?;
        let base = base.as_ref();
        let context_lens = self.context_lens(base)?;
        let longest = context_lens.iter().copied().max().unwrap_or(0).max(1) as usize;
        let kv = match (self.kv, base) {
            (Some(kv), _) => kv.into(),
            (None, Some(workload)) => kv_of(workload),
            (None, None) => KvDtype::Bf16,
        };
        let table_tokens = self.table_tokens.or(base.filter(|w| w.table_tokens >= longest).map(|w| w.table_tokens)).unwrap_or(longest);
        if table_tokens < longest {
            bail!("--table-tokens {table_tokens} is less than the longest context, {longest}")
        }
        let pick =
            |given: Option<usize>, of_workload: fn(&Workload) -> usize, default: usize| given.or(base.map(of_workload)).unwrap_or(default);
        let shape = Shape {
            name: self.shape.clone(),
            context_lens,
            query_lens: [pick(self.query_len, |w| w.query_len, 1)],
            q_heads: pick(self.q_heads, |w| w.num_q_heads, 16),
            kv_heads: pick(self.kv_heads, |w| w.num_kv_heads, 1),
            head_dim: pick(self.head_dim, |w| w.head_dim, 128),
            page_size: pick(self.page_size, |w| w.page_size, 128),
            kv,
            query: match self.dtype {
                None if kv == KvDtype::F32 => DType::F32,
                None => DType::BF16,
                Some(dtype) => dtype.into(),
            },
            scales: self.scale_mode(kv, base),
            layout: self.layout.map_or_else(|| preferred_layout(arch, kv), CacheLayout::from),
            table_tokens,
            window: self.window,
            sinks: self.sinks,
            softcap: self.softcap,
            strided_output: base.is_some_and(|w| w.strided_output),
            max_partitions: self.max_partitions.or(base.and_then(|w| w.max_partitions)),
            workgroup_budget: self.workgroup_budget,
            plan_free: self.plan_free || base.is_some_and(|w| w.plan_free),
        };
        shape.check()?;
        Ok(shape)
    }

    fn scale_mode(&self, kv: KvDtype, base: Option<&Workload>) -> ScaleMode {
        match (kv, self.scales) {
            (KvDtype::Mxfp4, None) => ScaleMode::Block,
            (_, Some(ScalesArg::None)) => ScaleMode::None,
            (_, Some(ScalesArg::Scalar)) => ScaleMode::Scalar,
            (_, Some(ScalesArg::PerToken)) => ScaleMode::PerToken,
            (KvDtype::Fp8, None) if base.is_some_and(|w| w.fp8_scale == Some(Fp8Scale::PerToken)) => ScaleMode::PerToken,
            (KvDtype::Fp8, None) => ScaleMode::Scalar,
            _ => ScaleMode::None,
        }
    }

    fn context_lens(&self, base: Option<&Workload>) -> Result<Vec<i32>> {
        let lens = match (&self.context, base) {
            (None, Some(workload)) => match (self.batch, workload.context) {
                (None, _) => workload.contexts(),
                (Some(batch), Some(context)) => vec![context; batch],
                (Some(batch), None) => Workload { batch, ..workload.clone() }.contexts(),
            },
            (None, None) => self.batch.map_or(MIXED_CONTEXTS.to_vec(), |batch| vec![8192; batch]),
            (Some(text), base) => parse_context(text, self.batch.or(base.map(|w| w.batch)), self.seed)?,
        };
        lens.into_iter().map(|n| i32::try_from(n).ok().with_context(|| format!("--context {n} is more than {} tokens", i32::MAX))).collect()
    }
}

/// `8192`, `100,2000,30000` or `1024-8192` for a batch.
fn parse_context(text: &str, batch: Option<usize>, seed: u64) -> Result<Vec<usize>> {
    let number =
        |part: &str| part.trim().parse::<usize>().with_context(|| format!("--context {text:?}: {part:?} is not a number of tokens"));
    if let Some((low, high)) = text.split_once('-') {
        let (low, high) = (number(low)?, number(high)?);
        if low > high {
            bail!("--context {text:?}: the range is empty")
        }
        let mut rng = StdRng::seed_from_u64(seed);
        return Ok((0..batch.unwrap_or(1)).map(|_| rng.random_range(low..=high)).collect());
    }
    let lens: Vec<usize> = text.split(',').map(number).collect::<Result<_>>()?;
    match (lens.as_slice(), batch) {
        (&[all], batch) => Ok(vec![all; batch.unwrap_or(1)]),
        (many, Some(batch)) if many.len() != batch => bail!("--context lists {} sequences, --batch is {batch}", many.len()),
        _ => Ok(lens),
    }
}

/// Refuses a `value` of `option` that is not from 1 to `most`.
fn in_range(option: &str, value: usize, most: usize) -> Result<()> {
    if value == 0 || value > most {
        bail!("{option} {value} is not from 1 to {most}")
    }
    Ok(())
}

impl Shape {
    /// Refuses what the op refuses, by the option that asks for it.
    fn check(&self) -> Result<()> {
        let Self { q_heads, kv_heads, head_dim, page_size, kv, scales, .. } = *self;
        in_range("--query-len", self.query_lens[0], MAX_QUERY_LEN)?;
        in_range("--batch, --query-len: rows of q", self.context_lens.len() * self.query_lens[0], MAX_ROWS)?;
        in_range("--q-heads", q_heads, MAX_HEADS)?;
        in_range("--kv-heads", kv_heads, MAX_HEADS)?;
        in_range("--page-size", page_size, MAX_PAGE_SIZE)?;
        if head_dim == 0 || !head_dim.is_multiple_of(8) || head_dim > MAX_HEAD_DIM {
            bail!("--head-dim {head_dim} is not a multiple of 8, at least 8 and at most {MAX_HEAD_DIM}")
        }
        if !q_heads.is_multiple_of(kv_heads) {
            bail!("--q-heads {q_heads} is not a multiple of --kv-heads {kv_heads}")
        }
        for (option, value) in [
            ("--window", self.window),
            ("--max-partitions", self.max_partitions),
            ("--workgroup-budget", self.workgroup_budget),
            ("--table-tokens", Some(self.table_tokens)),
        ] {
            if let Some(value) = value {
                in_range(option, value, i32::MAX as usize)?;
            }
        }
        let takes_scales = match kv {
            KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => scales == ScaleMode::None,
            KvDtype::Fp8 => matches!(scales, ScaleMode::None | ScaleMode::Scalar | ScaleMode::PerToken),
            KvDtype::Mxfp4 => scales == ScaleMode::Block,
        };
        if !takes_scales {
            bail!("--scales {}: {} cache {}", scale_name(scales), article(kv), scales_of(kv))
        }
        let dims = CacheDims { pages: 1, page_size, kv_heads, head_dim };
        self.layout.check(dims, kv).map_err(|error| of_option("--layout", error))
    }

    /// What is legal and yet worth saying.
    pub fn note(&self) -> Option<String> {
        let new = self.query_lens[0];
        let short = self.context_lens.iter().filter(|&&context| (context as usize) < new).count();
        let is = if short == 1 { "sequence has" } else { "sequences have" };
        (short > 0).then(|| {
            format!(
                "{short} {is} fewer context tokens than the {} there are: rows before the context's start attend nothing and give 0",
                tokens(new)
            )
        })
    }

    /// Tokens of each sequence.
    pub fn context_lens(&self) -> &[i32] {
        &self.context_lens
    }

    pub fn request(&self) -> PlanRequest<'_> {
        PlanRequest {
            window: self.window,
            max_partitions: self.max_partitions,
            workgroup_budget: self.workgroup_budget,
            max_context_len: self.context_lens.iter().max().and_then(|&longest| usize::try_from(longest).ok()),
            ..PlanRequest::new(&self.context_lens, &self.query_lens, self.kv_heads)
        }
    }

    pub fn problem(&self, capacity: usize) -> Problem {
        Problem {
            batch: self.context_lens.len(),
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            page_size: self.page_size,
            query_len: self.query_lens[0],
            query_dtype: self.query,
            kv_dtype: self.kv,
            layout: self.layout,
            scales: self.scales,
            max_pages: self.table_tokens.div_ceil(self.page_size),
            windowed: self.window.is_some(),
            softcap: self.softcap,
            sinks: self.sinks,
            output_like_query: !self.strided_output,
            plan_free: self.plan_free,
            max_partitions: self.max_partitions,
            capacity,
            ..Problem::default()
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(name) = &self.name {
            write!(f, "{name}: ")?;
        }
        let low = self.context_lens.iter().min().unwrap_or(&0);
        let high = self.context_lens.iter().max().unwrap_or(&0);
        let context = if low == high { low.to_string() } else { format!("{low} to {high}") };
        let (batch, query_len) = (self.context_lens.len(), self.query_lens[0]);
        let scales = match self.scales {
            ScaleMode::None => "",
            ScaleMode::Scalar => " one scale",
            ScaleMode::PerToken => " per-token scales",
            ScaleMode::Block => " block scales",
        };
        write!(
            f,
            "{batch} x {context} tokens, {query_len} new, {} on {}, ",
            count(self.q_heads, "query head"),
            count(self.kv_heads, "KV head")
        )?;
        write!(f, "head_dim {}, page {}, {}{scales}, {}", self.head_dim, self.page_size, self.kv.name(), self.layout.name())
    }
}

fn tokens(new: usize) -> String {
    if new == 1 { "1 new token".to_string() } else { format!("{new} new tokens") }
}

fn scale_name(scales: ScaleMode) -> &'static str {
    match scales {
        ScaleMode::None => "none",
        ScaleMode::Scalar => "scalar",
        ScaleMode::PerToken => "per-token",
        ScaleMode::Block => "block",
    }
}

fn article(kv: KvDtype) -> &'static str {
    match kv {
        KvDtype::F32 => "an F32",
        KvDtype::F16 => "an F16",
        KvDtype::Bf16 => "a BF16",
        KvDtype::Fp8 => "an FP8",
        KvDtype::Mxfp4 => "an MXFP4",
    }
}

fn scales_of(kv: KvDtype) -> &'static str {
    match kv {
        KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => "takes no scales (fp8 does)",
        KvDtype::Fp8 => "takes one scale or one a token",
        KvDtype::Mxfp4 => "always has its block scales; leave --scales out",
    }
}

fn kv_of(workload: &Workload) -> KvDtype {
    match workload.kv {
        Kv::Bf16 => KvDtype::Bf16,
        Kv::Fp8 => KvDtype::Fp8,
        Kv::Mxfp4 => KvDtype::Mxfp4,
    }
}

#[cfg(test)]
mod tests {
    use candle_paged_attn::plan::{HostPlan, Split};
    use clap::Parser;

    use super::*;

    #[test]
    fn contexts_are_one_for_all_a_list_or_a_range() {
        assert_eq!(parse_context("8192", Some(3), 0).unwrap(), [8192; 3]);
        assert_eq!(parse_context("1, 20,300", None, 0).unwrap(), [1, 20, 300]);
        let drawn = parse_context("5-9", Some(100), 7).unwrap();
        assert!(drawn.len() == 100 && drawn.iter().all(|n| (5..=9).contains(n)));
        assert_eq!(drawn, parse_context("5-9", Some(100), 7).unwrap());
        assert_ne!(drawn, parse_context("5-9", Some(100), 8).unwrap());
        for bad in ["", "x", "1,", "9-5", "-5", "1-2-3", "1,2"] {
            assert!(parse_context(bad, Some(3), 0).is_err(), "{bad:?}");
        }
    }
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        shape: ShapeArgs,
    }

    fn resolve(line: &str) -> Result<Shape> {
        let line = Line::try_parse_from(std::iter::once("explain").chain(line.split_whitespace()))?;
        line.shape.resolve(&Arch::from_name("cpu")?)
    }

    #[test]
    fn shapes_that_no_call_has_are_refused_by_option() {
        for line in [
            "--page-size 0",
            "--page-size 2048",
            "--batch 0",
            "--batch 99999999999",
            "--query-len 0",
            "--q-heads 0",
            "--kv-heads 0",
            "--kv-heads 3",
            "--head-dim 12",
            "--head-dim 0",
            "--window 0",
            "--max-partitions 0",
            "--workgroup-budget 0",
            "--scales per-token --kv bf16",
            "--scales none --kv mxfp4",
            "--layout vllm --page-size 4 --kv bf16",
            "--layout vllm --kv mxfp4",
            "--context 99999999999999",
            "--shape minimax20",
        ] {
            let error = format!("{:#}", resolve(line).err().unwrap_or_else(|| panic!("{line} was accepted")));
            assert!(error.contains(line.split(' ').next().unwrap()), "{line}: {error}");
        }
    }

    #[test]
    fn queries_and_scales_are_as_asked() {
        let problem = |line: &str| resolve(line).unwrap().problem(1);
        for (line, dtype) in
            [("", DType::BF16), ("--kv f32", DType::F32), ("--dtype f16", DType::F16), ("--kv f32 --dtype bf16", DType::BF16)]
        {
            assert_eq!(problem(line).query_dtype, dtype, "{line}");
        }
        let shape = "--shape minimax20/decode-b4-q1-ctx8192-fp8";
        assert_eq!(problem(shape).scales, ScaleMode::PerToken);
        assert_eq!(problem(&format!("{shape} --scales scalar")).scales, ScaleMode::Scalar);
    }

    #[test]
    fn the_default_batch_sets_the_splits_apart() {
        let shape = resolve("").unwrap();
        for name in ["cpu", "gfx942", "gfx950", "sm90"] {
            let arch = Arch::from_name(name).unwrap();
            let plan = |split| HostPlan::with_split(&shape.request(), &arch, split).unwrap();
            assert_ne!(plan(Split::Proportional), plan(Split::MinMax), "{name}");
        }
    }

    #[test]
    fn legal_shapes_pass_and_short_contexts_are_said() {
        assert!(resolve("--context 0").unwrap().note().unwrap().contains("1 sequence has fewer context tokens than the 1 new token"));
        assert!(resolve("--context 3 --query-len 8 --batch 2").unwrap().note().unwrap().contains("2 sequences have"));
        assert!(resolve("--context 8 --query-len 8").unwrap().note().is_none());
        for family in workloads::families().unwrap() {
            family.workloads.iter().for_each(|w| drop(resolve(&format!("--shape {}/{}", family.name, w.name)).unwrap()));
        }
    }
}
