//! What each schedule of the tile changes, one row a flag: the counts that docs/kernels.md shows.

use anyhow::{Context, Result};
use candle_paged_attn::plan::capacity;
use candle_paged_attn::registry::Arch;
use candle_paged_attn::rocm::specialize;
use cdna_profile::counts::Bytes;
use cdna_profile::{Counts, Tag};

use crate::measure::{Cost, Span, cost, with_flags};
use crate::{named, parse};

/// A schedule beside the one that it is added to.
pub struct Variant {
    /// Its row in the project's list of features.
    pub row: &'static str,
    /// Flags that are on in both.
    pub beside: &'static [&'static str],
    /// Flags that make the difference.
    pub flags: &'static [&'static str],
    /// Options of the shape that is run; one that the registry chooses the flags for.
    pub shape: &'static str,
    pub span: Span,
    /// What it is for.
    pub removes: Removes,
}

/// What a schedule has less of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Removes {
    Instructions,
    Valu,
    Barriers,
    /// Waits that drain K or V.
    Drains,
    ScalarLoads,
    Registers,
    /// Bytes that go through the caches.
    CachedBytes,
    /// The second launch.
    Reducer,
    /// Nothing but predicted time: loads come in another order.
    Time,
}

impl Removes {
    pub fn name(self) -> &'static str {
        match self {
            Self::Instructions => "instructions",
            Self::Valu => "VALU",
            Self::Barriers => "barriers",
            Self::Drains => "drains of K, V",
            Self::ScalarLoads => "scalar loads",
            Self::Registers => "registers",
            Self::CachedBytes => "bytes through caches",
            Self::Reducer => "second launches",
            Self::Time => "predicted us",
        }
    }
}

const fn tile(
    row: &'static str,
    beside: &'static [&'static str],
    flags: &'static [&'static str],
    shape: &'static str,
    removes: Removes,
) -> Variant {
    Variant { row, beside, flags, shape, span: Span::Tile, removes }
}

const fn task(
    row: &'static str,
    beside: &'static [&'static str],
    flags: &'static [&'static str],
    shape: &'static str,
    removes: Removes,
) -> Variant {
    Variant { row, beside, flags, shape, span: Span::Task, removes }
}

const SCALES_LATE: &[&str] = &["FP8_LOOP_SCALES_LATE"];
const SCALES: &[&str] = &["FP8_LOOP_SCALES_LATE", "FP8_SCALES_AFTER_Q"];
const LEAN: &[&str] = &["FP8_LOOP_SCALES_LATE", "FP8_SCALES_AFTER_Q", "FP8_MTP4_LEAN"];
const VPIPE: &[&str] = &["PAGE16_VPIPE"];
const SCALAR16: &[&str] = &["PAGE16_VPIPE", "PAGE16_PAGES_FIRST", "PAGE16_EARLY_K"];
const VPIPE_IDS: &[&str] = &["PAGE16_VPIPE", "PAGE16_PAGES_FIRST"];

const HEAD256_FP8: &str = "--kv fp8 --head-dim 256 --q-heads 8 --page-size 64 --batch 8 --context 8192";
const HEAD256_BF16: &str = "--kv bf16 --head-dim 256 --q-heads 8 --page-size 64 --batch 8 --context 8192";
const PER_TOKEN: &str = "--kv fp8 --scales per-token --batch 8 --context 8192";
const PER_TOKEN_VERIFY: &str = "--kv fp8 --scales per-token --query-len 4 --batch 8 --context 8192";

/// Every schedule that is written.
pub const VARIANTS: &[Variant] = &[
    tile("K1", &[], &["BF16_MTP_FUSED"], "--kv bf16 --query-len 4 --batch 8 --context 8192", Removes::Barriers),
    tile("K2", &[], &["BF16_DECODE_NT_KV"], "--kv bf16 --batch 8 --context 8192", Removes::CachedBytes),
    task("K2", &[], &["DECODE_Q_EARLY"], "--kv bf16 --batch 4 --context 8192", Removes::Valu),
    task("K2", &[], &["DECODE_Q_EARLY"], "--kv fp8 --batch 4 --context 8192", Removes::Instructions),
    tile("K3", &[], SCALES_LATE, PER_TOKEN, Removes::Instructions),
    task("K3", SCALES_LATE, &["FP8_SCALES_AFTER_Q"], PER_TOKEN, Removes::Drains),
    tile("K4", SCALES, &["FP8_MTP4_LEAN"], PER_TOKEN_VERIFY, Removes::Barriers),
    tile(
        "K4",
        LEAN,
        &["FP8_MTP4_Q_LDS"],
        "--kv fp8 --scales per-token --q-heads 8 --query-len 4 --batch 8 --context 8192",
        Removes::Registers,
    ),
    tile("K4", LEAN, &["FP8_MTP4_PAGES_AHEAD"], PER_TOKEN_VERIFY, Removes::Instructions),
    tile("K5", &[], VPIPE, "--kv fp8 --page-size 16 --batch 8 --context 8192", Removes::Time),
    tile("K5", &[], VPIPE, "--kv bf16 --page-size 16 --batch 8 --context 8192", Removes::Time),
    tile("K5", &[], VPIPE, "--kv fp8 --scales per-token --page-size 16 --batch 8 --context 8192", Removes::Time),
    tile("K5", VPIPE, &["PAGE16_PAGES_FIRST"], "--kv fp8 --page-size 16 --batch 8 --context 8192", Removes::Drains),
    tile("K5", VPIPE, &["PAGE16_PAGES_FIRST"], "--kv bf16 --page-size 16 --batch 8 --context 8192", Removes::Drains),
    tile("K5", VPIPE_IDS, &["PAGE16_EARLY_K"], "--kv fp8 --page-size 16 --batch 8 --context 8192", Removes::Time),
    tile("K6", &[], &["FP8_DECODE_NT_V"], "--kv fp8 --batch 8 --context 32768", Removes::CachedBytes),
    task("K7", &[], &["DIRECT_OUTPUT"], "--kv bf16 --batch 64 --context 1024 --max-partitions 1", Removes::Reducer),
    tile("K8", SCALAR16, &["DUAL_GROUP"], "--kv fp8 --page-size 16 --batch 1 --context 30720 --max-partitions 1", Removes::Time),
    tile("K8", VPIPE_IDS, &["DUAL_GROUP"], "--kv bf16 --page-size 16 --batch 1 --context 30720 --max-partitions 1", Removes::Time),
    tile("K8", &[], &["DUAL_GROUP"], "--kv fp8 --batch 1 --context 30720 --max-partitions 1", Removes::Time),
    tile("K8", &[], &["DUAL_GROUP"], "--kv bf16 --batch 1 --context 30720 --max-partitions 1", Removes::Time),
    tile(
        "K8",
        &["MXFP4_TILE", "MXFP4_STAGED_PAGES"],
        &["DUAL_GROUP"],
        "--kv mxfp4 --page-size 16 --batch 1 --context 30720 --max-partitions 1",
        Removes::Time,
    ),
    task("K9", &[], &["PACKED_Q_ABSMAX"], "--kv fp8 --batch 8 --context 8192", Removes::Valu),
    task("K9", &[], &["PACKED_Q_ABSMAX"], "--kv fp8 --query-len 4 --batch 8 --context 8192", Removes::Valu),
    tile("K10", &[], &["HEAD256_PIPE"], HEAD256_FP8, Removes::Time),
    tile("K10", &[], &["HEAD256_PIPE"], HEAD256_BF16, Removes::Time),
    tile("K10", &["HEAD256_PIPE"], &["HEAD256_INTERIOR_UNMASKED"], HEAD256_BF16, Removes::Instructions),
    task("K11", &[], &["KERNARG_PRELOAD"], "--kv bf16 --batch 4 --context 8192", Removes::ScalarLoads),
    task("K11", &[], &["KERNARG_PRELOAD"], "--kv mxfp4 --page-size 16 --batch 4 --context 8192", Removes::ScalarLoads),
    tile("K12", &[], &["FP8_PACK_NO_OLD"], "--kv fp8 --batch 8 --context 8192", Removes::Valu),
    tile("K12", &[], &["FP8_PACK_NO_OLD"], "--kv fp8 --query-len 4 --batch 8 --context 8192", Removes::Valu),
    tile("K13", &["MXFP4_TILE"], &["MXFP4_STAGED_PAGES"], "--kv mxfp4 --page-size 16 --batch 8 --context 8192", Removes::ScalarLoads),
];

/// What a schedule costs, without and with its flags.
pub struct Measured {
    pub variant: &'static Variant,
    pub costs: [Cost; 2],
}

impl Variant {
    /// Compiles and runs both.
    pub fn measure(&'static self, arch: &Arch) -> Result<Measured> {
        let shape = parse(self.shape).shape.resolve(arch).context(self.shape)?;
        let problem = shape.problem(capacity(&shape.request(), arch)?);
        let chosen = specialize::select(&problem, arch)?;
        let with = |flags: &[&[&str]]| {
            let names: Vec<String> = flags.concat().iter().map(|name| name.to_string()).collect();
            cost(with_flags(&chosen, named(&names)?, arch), problem.query_len, self.span)
        };
        Ok(Measured { variant: self, costs: [with(&[self.beside])?, with(&[self.beside, self.flags])?] })
    }
}

impl Measured {
    /// What the schedule is to have less of, before and after.
    pub fn claimed(&self) -> [f64; 2] {
        self.costs.each_ref().map(|cost| match self.variant.removes {
            Removes::Instructions => cost.counts.instructions,
            Removes::Valu => cost.counts.valu,
            Removes::Barriers => cost.counts.barriers,
            Removes::Drains => drains(&cost.counts),
            Removes::ScalarLoads => cost.counts.scalar_loads,
            Removes::Registers => cost.registers as f64,
            Removes::CachedBytes => cached(&cost.counts),
            Removes::Reducer => f64::from(u8::from(cost.reduced)),
            Removes::Time => cost.us,
        })
    }
}

/// Waits that drain K or V.
pub fn drains(counts: &Counts) -> f64 {
    [Tag::Key, Tag::Value].iter().filter_map(|tag| counts.drained.get(tag)).sum()
}

/// Bytes of K and V that go through the caches.
fn cached(counts: &Counts) -> f64 {
    let of = |tag| counts.loaded.get(&tag).map_or(0.0, |bytes: &Bytes| bytes.cached);
    of(Tag::Key) + of(Tag::Value)
}
