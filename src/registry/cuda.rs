//! Selection on NVIDIA GPUs: the tensor-core tile and how its block is cut, or the plain tile for what that does not take.

use std::fmt;

use candle::{DType, Result, bail};

use super::arch::{Arch, ArchName};
use super::flags::Flags;
use super::problem::{M_TILE_ROWS, Problem, ScaleMode};
use super::reason::{self, Reason};
use super::select::{KernelKey, Selection, Tile};
use crate::cache::{CacheLayout, KvDtype};

/// How a block of the tensor-core tile is cut (`kernels/nvidia/traits.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaShape {
    /// Warps that share a chunk of tokens and have 16 query rows (times `m_tiles`) each.
    pub row_warps: usize,
    /// Groups of such warps; each takes every `groups`-th chunk.
    pub groups: usize,
    /// Chunks that a group has room for: one is computed while the others are on their way.
    pub stages: usize,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Products of four warps together that read shared memory themselves (`wgmma`).
    pub warpgroup: bool,
    /// Blocks that share a task.
    pub cluster: usize,
}

impl CudaShape {
    const fn of(row_warps: usize, groups: usize, stages: usize, chunk: usize) -> Self {
        Self { row_warps, groups, stages, chunk, warpgroup: false, cluster: 1 }
    }

    const fn warpgroups(groups: usize, stages: usize) -> Self {
        Self { warpgroup: true, ..Self::of(4, groups, stages, 64) }
    }

    fn rows(&self) -> usize {
        self.row_warps * M_TILE_ROWS
    }

    /// Whether the block is for an FP8 cache's many query rows: four more warps for each group copy its chunks and widen V (`narrow.cuh`).
    fn is_narrow(&self, p: &Problem) -> bool {
        self.warpgroup && p.kv_dtype == KvDtype::Fp8
    }

    fn threads(&self, p: &Problem) -> usize {
        (self.row_warps + if self.is_narrow(p) { 4 } else { 0 }) * self.groups * 32
    }

    /// Bytes of shared memory: the rings of the groups, or what they are merged through, whichever is more; of a cluster, behind these what its blocks
    /// send this one.
    fn shared_bytes(&self, p: &Problem) -> usize {
        let Self { groups, stages, chunk, warpgroup, cluster, .. } = *self;
        let (fp8, rows, head_dim, narrow) = (p.kv_dtype == KvDtype::Fp8, self.rows(), p.head_dim, self.is_narrow(p));
        let scales = match p.scales {
            ScaleMode::PerToken if narrow => 512,
            ScaleMode::PerToken => chunk * 4,
            _ => 0,
        };
        let stage = 2 * chunk * head_dim * if fp8 { 1 } else { 2 } + 2 * scales;
        // Two chunks of widened V.
        let beside = if narrow { 4 * chunk * head_dim } else { 0 };
        let query = if warpgroup { rows * head_dim * 2 } else { 0 };
        let ring = groups * (beside + stages * stage).next_multiple_of(1024) + query;
        let row = head_dim + if fp8 && !narrow { head_dim / 8 } else { 8 };
        let merge = groups * rows * (row + 2) * 4;
        // F32 of its share of the rows' eights of four channels, with what each is weighed by, and a barrier.
        let sent = if cluster > 1 { cluster * (rows * head_dim / 32).div_ceil(cluster) * (8 * 16 + 8) + 16 } else { 0 };
        ring.max(merge) + sent
    }

    fn in_words(&self) -> String {
        let Self { row_warps, groups, stages, chunk, .. } = self;
        let warps = match (row_warps, groups) {
            (1, _) => format!("{groups} warps"),
            (_, 1) => format!("1 group of {row_warps} warps"),
            _ => format!("{groups} groups of {row_warps} warps"),
        };
        let blocks = if self.cluster > 1 { format!(", {} blocks a task", self.cluster) } else { String::new() };
        format!("{warps} on {stages} stages of {chunk} tokens{blocks}")
    }
}

/// Whether a kernel chosen here leaves partial results in F16 (`Traits::DIRECT`): tensor cores on 16-bit caches, and a warpgroup's on FP8, whose groups
/// share a row's channels out among them by fours of eight.
#[cfg(feature = "nvrtc")]
pub(crate) fn leaves_f16(key: &KernelKey) -> bool {
    let shares = |shape: CudaShape| shape.cluster == 1 && (key.head_dim / 8).is_multiple_of(4 * shape.groups);
    key.cuda.is_some_and(|shape| shares(shape) && (shape.warpgroup || key.kv_dtype != KvDtype::Fp8))
}

impl fmt::Display for CudaShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row_warps, groups, stages, chunk, warpgroup, cluster } = self;
        write!(f, "{}{row_warps}x{groups}s{stages}c{chunk}", if *warpgroup { "wg" } else { "w" })?;
        if *cluster > 1 { write!(f, "k{cluster}") } else { Ok(()) }
    }
}

/// Query rows of a block of the plain tile.
pub(crate) fn plain_rows(head_dim: usize) -> usize {
    if head_dim < 256 { 8 } else { 4 }
}

/// Threads of a block of the plain tile.
const PLAIN_THREADS: usize = 128;

/// Shared memory of the plain tile: the query in F32, and what its four warps are merged through.
fn plain_shared_bytes(head_dim: usize) -> usize {
    let rows = plain_rows(head_dim);
    rows * head_dim * 4 + 4 * rows * (head_dim + 2) * 4
}

/// Query rows of one block of a kernel chosen here.
#[cfg(feature = "nvrtc")]
pub(crate) fn block_rows(key: &KernelKey) -> usize {
    key.cuda.map_or_else(|| plain_rows(key.head_dim), |shape| shape.rows())
}

/// Why the tensor-core tile does not take the problem, or `None` where it does.
fn misses_tensor_cores(p: &Problem, arch: &Arch) -> Option<&'static str> {
    let fp8 = p.kv_dtype == KvDtype::Fp8;
    let head_dims: &[usize] = if fp8 { &[128, 256] } else { &[64, 128, 256] };
    match p.kv_dtype {
        KvDtype::F32 => Some("F32 (never TF32)"),
        KvDtype::Mxfp4 => Some("MXFP4"),
        KvDtype::Fp8 if arch.name == ArchName::Sm80 => Some("FP8 (no conversion instruction)"),
        _ if p.query_dtype == DType::F32 => Some("an F32 query"),
        // The products are in the cache's type, which would round the query.
        KvDtype::Bf16 if p.query_dtype == DType::F16 => Some("an F16 query on a BF16 cache"),
        _ if !matches!(p.layout, CacheLayout::Nhd | CacheLayout::Hnd) => Some("the layout"),
        _ if !head_dims.contains(&p.head_dim) => Some("the head_dim"),
        _ => None,
    }
}

/// The cuts for a problem, the fastest first, and why they are; docs/cuda-notes.md has the measurements.
fn shapes(p: &Problem, arch: &Arch) -> (Vec<CudaShape>, For) {
    let rows = p.query_rows();
    if rows > M_TILE_ROWS { shapes_of_many_rows(p, arch, rows) } else { decode_shapes(p, arch) }
}

/// Blocks that can share each of `tasks` tasks at a time, a power of two: those of a cluster run in one part of the GPU (132 SMs take 66 clusters of
/// two, 30 of four, 15 of eight, 7 of sixteen).
fn cluster_of(tasks: usize, arch: &Arch) -> usize {
    let sms = arch.compute_units;
    let room = [(16, sms * 6 / 7), (8, sms * 10 / 11), (4, sms * 10 / 11), (2, sms)];
    let fits = |&(blocks, room): &(usize, usize)| tasks.saturating_mul(blocks) <= room && (blocks <= 8 || sms >= SMS_WITH_WIDE_CLUSTERS);
    if arch.name == ArchName::Sm90 { room.into_iter().find(fits).map_or(1, |(blocks, _)| blocks) } else { 1 }
}

/// Every part of such a GPU has the 16 SMs of the largest clusters; of others eight are certain.
const SMS_WITH_WIDE_CLUSTERS: usize = 132;

/// Blocks that share a task of a call whose rows are not split, of `row_blocks` blocks of query rows: each has a tile at least; of decode on up to half
/// the SMs sixteen have half a tile.
fn cluster(p: &Problem, arch: &Arch, row_blocks: usize) -> usize {
    let blocks = if p.one_partition() { cluster_of(p.workgroups().saturating_mul(row_blocks), arch) } else { 1 };
    let halves = p.task_tiles >= 8 && is_one_matrix_tile(p) && p.workgroups().saturating_mul(16) <= arch.compute_units / 2;
    let has_work = |&blocks: &usize| blocks <= p.task_tiles || (blocks == 16 && halves);
    std::iter::successors(Some(blocks), |&fewer| (fewer > 1).then_some(fewer / 2)).find(has_work).unwrap_or(1)
}

/// Whether a KV head's query rows fill no more than one matrix tile: decode.
fn is_one_matrix_tile(p: &Problem) -> bool {
    p.m_tiles() == 1
}

/// Whether a call on an NVIDIA GPU that leaves its plan open is walked without one: clusters of blocks walk few short rows of one matrix tile, which have
/// at most `tokens` tokens each, faster than tasks of them are merged by a second launch. `p` is the call without a plan (`plan_free`). False elsewhere.
pub fn walks_whole_rows(p: &Problem, tokens: usize, arch: &Arch) -> bool {
    let pairs = p.workgroups();
    let most = (512 * cluster_of(pairs, arch)).min(2048);
    let is_tile = misses_tensor_cores(p, arch).is_none() && is_one_matrix_tile(p);
    arch.name.is_cuda() && is_tile && pairs <= arch.compute_units / 4 && (arch.name.tile_tokens() + 1..=most).contains(&tokens)
}

fn shapes_of_many_rows(p: &Problem, arch: &Arch, rows: usize) -> (Vec<CudaShape>, For) {
    let row_warps = if rows > 2 * M_TILE_ROWS { 4 } else { 2 };
    let cluster = cluster(p, arch, rows.div_ceil(row_warps * M_TILE_ROWS));
    let of = |(groups, stages, chunk)| CudaShape { cluster, ..CudaShape::of(row_warps, groups, stages, chunk) };
    let mut shapes = vec![];
    // Over FP8 a warpgroup has the query in two E4M3 parts, about as much as BF16 holds.
    let rounds_query = p.kv_dtype == KvDtype::Fp8 && p.query_dtype == DType::F16;
    let by_warpgroup = arch.name == ArchName::Sm90 && p.head_dim == 128 && cluster == 1 && !rounds_query;
    if by_warpgroup {
        // One group leaves room for a second block on the SM, which pays where tasks come in turns: where all have room at once, of few rows.
        let (tasks, sms) = (p.workgroups(), arch.compute_units);
        let groups = if tasks > 2 * sms || (tasks > sms && 4 * p.pairs() <= 3 * sms) { 1 } else { 2 };
        shapes.push(match (p.kv_dtype, p.scales) {
            (KvDtype::Fp8, ScaleMode::PerToken) if groups == 1 => CudaShape::warpgroups(1, 3),
            (KvDtype::Fp8, _) => CudaShape::warpgroups(groups, 4),
            _ => CudaShape::warpgroups(groups, 3),
        });
    }
    shapes.extend([(2, 3, 32), (2, 2, 32), (1, 2, 32), (1, 2, 16)].map(of));
    (shapes, For::Rows { rows, by_warpgroup })
}

fn decode_shapes(p: &Problem, arch: &Arch) -> (Vec<CudaShape>, For) {
    let sms = arch.compute_units;
    let fp8 = p.kv_dtype == KvDtype::Fp8;
    let cluster = cluster(p, arch, 1);
    let of = |(groups, stages, chunk)| CudaShape { cluster, ..CudaShape::of(1, groups, stages, chunk) };
    let blocks = p.workgroups();
    let (best, why) = match (blocks, p.task_tiles) {
        (tasks, tiles) if cluster > 1 => (cluster_cut(fp8, cluster, tiles, tasks * cluster > sms * 3 / 4), For::Unsplit(tasks)),
        // Whole rows, two a SM at most, the longest first: an SM each.
        (rows, 9..=32) if !fp8 && (sms + 1..=sms * 2).contains(&rows) && are_whole_in_order(p) => ((8, 3, 16), For::Unsplit(rows)),
        _ if blocks > sms => (if fp8 { (4, 2, 32) } else { (4, 3, 16) }, For::ManyBlocks { blocks, sms }),
        // In more than half of an SM's shared memory: two blocks of a call on one would leave another one idle.
        (_, 0..=1) => (if fp8 { (4, 4, 32) } else { (4, 4, 16) }, For::OneTile(arch.name.tile_tokens())),
        (_, 2..=16) if fp8 => ((4, 4, 32), For::ABlockEach),
        _ => (if fp8 { (8, 2, 32) } else { (4, 2, 32) }, For::ABlockEach),
    };
    let smaller = [(4, 3, 32), (4, 3, 16), (4, 2, 32), (4, 2, 16), (2, 2, 16)];
    let shapes = [best].into_iter().chain(smaller).map(of).collect();
    (shapes, why)
}

/// Groups, stages and tokens a chunk of a decode block, one of `cluster` that share a task of `tiles` tiles; `fills`: such blocks are more than 3/4
/// of the SMs.
fn cluster_cut(fp8: bool, cluster: usize, tiles: usize, fills: bool) -> (usize, usize, usize) {
    match (fp8, tiles.div_ceil(cluster)) {
        // Where a block walks long, in more than half of an SM's shared memory.
        (true, 9..) => (8, 3, 32),
        (false, 9..) => (4, 3, 32),
        // Else in half of it, so that the next call's blocks come up beside these; but not where two on an SM would leave another one idle.
        (true, _) if fills && cluster <= 4 => (8, 3, 16),
        (false, _) if fills && cluster == 4 => (4, 3, 32),
        (true, _) if cluster <= tiles => (4, 3, 32),
        _ => (4, 3, 16),
    }
}

/// Whether a plan has a slot a row: whole rows, the longest first.
fn are_whole_in_order(p: &Problem) -> bool {
    !p.plan_free && p.workgroups() <= p.pairs()
}

/// Warps that share a row of the reducer: for up to 8 partial results, up to 32, and more.
#[cfg(feature = "nvrtc")]
pub const REDUCER_WARPS: [usize; 3] = [1, 4, 8];

/// Warps of the reducer for a plan whose rows may have `partials` partial results each.
pub(crate) fn reducer_warps(partials: usize) -> usize {
    match partials {
        0..=8 => 1,
        9..=32 => 4,
        _ => 8,
    }
}

/// Whether a plan row may have several tasks. With no more slots than rows it may, too: an empty row leaves its slot to others.
fn merges_tasks(p: &Problem) -> bool {
    !p.one_partition() && p.capacity > 1
}

/// What a cut is for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum For {
    Rows { rows: usize, by_warpgroup: bool },
    ManyBlocks { blocks: usize, sms: usize },
    OneTile(usize),
    Unsplit(usize),
    ABlockEach,
}

impl fmt::Display for For {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Rows { rows, by_warpgroup } => {
                write!(f, "{}for {rows} query rows of a KV head", if by_warpgroup { "warpgroup products " } else { "" })
            }
            // A third would have room in the shared memory where the cache is FP8, but not in the registers.
            Self::ManyBlocks { blocks, sms } => {
                let turns = if blocks > sms.saturating_mul(2) { " in turns" } else { "" };
                write!(f, "2 blocks a SM for {blocks}{turns} on {sms} SMs")
            }
            Self::OneTile(tokens) => write!(f, "few warps for tasks of one tile, {tokens} tokens"),
            Self::Unsplit(1) => f.write_str("for a task that is a whole row"),
            Self::Unsplit(tasks) => write!(f, "for {tasks} tasks that are whole rows"),
            Self::ABlockEach => f.write_str("one block a SM"),
        }
    }
}

/// The tile, and how the plan's slots are merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Why {
    tile: Chosen,
    /// Slots, and warps of the reducer; `None` where nothing is merged.
    merge: Option<(usize, usize)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Chosen {
    TensorCores(CudaShape, For),
    /// And what of the problem tensor cores do not take.
    Plain(&'static str),
}

impl Why {
    fn new(p: &Problem, tile: Chosen) -> Self {
        let rows = p.batch.saturating_mul(if p.per_head_tables { p.kv_heads } else { 1 });
        let merge = merges_tasks(p).then(|| (p.capacity, reducer_warps(p.capacity.div_ceil(rows.max(1)))));
        Self { tile, merge }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tile {
            Chosen::TensorCores(shape, why) => write!(f, "tensor cores, {}, {why}; ", shape.in_words())?,
            Chosen::Plain(misses) => write!(f, "the plain tile, without tensor cores: {misses}; ")?,
        }
        match self.merge {
            Some((slots, warps)) => write!(f, "{slots} slots, a reducer of {warps} warp{} a row", if warps == 1 { "" } else { "s" }),
            None => f.write_str("no reducer"),
        }
    }
}

/// `pa_ARCH_KV_dHEAD_pPAGE_CUT`.
pub(super) fn kernel_name(key: &KernelKey) -> String {
    let cut = key.cuda.map_or_else(|| "plain".to_string(), |shape| shape.to_string());
    format!("pa_{}_{}_d{}_p{}_{cut}", key.arch, key.kv_dtype.name(), key.head_dim, key.page_size)
}

pub(super) fn select(p: &Problem, arch: &Arch) -> Result<Selection> {
    select_among(p, arch, misses_tensor_cores(p, arch))
}

/// The plain tile, for tensors that are not aligned to what the tensor-core tile loads at a time.
#[cfg(feature = "cuda")]
pub(crate) fn select_plain(p: &Problem, arch: &Arch) -> Result<Selection> {
    select_among(p, arch, Some("tensors that are not aligned to 16 bytes"))
}

/// The tensor-core tile, or where `misses` says why not, the plain one.
fn select_among(p: &Problem, arch: &Arch, misses: Option<&'static str>) -> Result<Selection> {
    let name = arch.name;
    let step = if p.kv_dtype == KvDtype::Mxfp4 { 32 } else { 8 };
    if !p.head_dim.is_multiple_of(step) || p.head_dim > 1024 {
        bail!("head_dim: {name} kernels take multiples of {step} up to 1024, got {}", p.head_dim)
    }
    if p.page_size > 1024 {
        bail!("page_size: {name} kernels take 1 to 1024, got {}", p.page_size)
    }
    if p.scales != ScaleMode::None && !matches!(p.kv_dtype, KvDtype::Fp8 | KvDtype::Mxfp4) {
        bail!("scales: {name} kernels apply scales to FP8 and MXFP4 caches, the cache is {:?}", p.kv_dtype)
    }
    let fits = |shape: &CudaShape| shape.shared_bytes(p) <= arch.lds_bytes;
    let (shape, chosen) = match misses {
        Some(what) => (None, Chosen::Plain(what)),
        None => {
            let (shapes, why) = shapes(p, arch);
            match shapes.into_iter().find(fits) {
                Some(shape) => (Some(shape), Chosen::TensorCores(shape, why)),
                None => (None, Chosen::Plain("the shared memory holds no two stages")),
            }
        }
    };
    let (rows, threads, shared) = match &shape {
        Some(shape) => (shape.rows(), shape.threads(p), shape.shared_bytes(p)),
        None => (plain_rows(p.head_dim), PLAIN_THREADS, plain_shared_bytes(p.head_dim)),
    };
    if shared > arch.lds_bytes {
        bail!("head_dim: a tile of head_dim {} needs {shared} bytes of shared memory, {name} has {}", p.head_dim, arch.lds_bytes)
    }
    Ok(Selection {
        cpu_isa: None,
        threads,
        lds_bytes: shared,
        staged_bytes: 0,
        row_groups: p.query_rows().div_ceil(rows).max(1),
        waves_per_eu: 0,
        merges_tasks: merges_tasks(p),
        reason: Reason(reason::Why::Cuda(Why::new(p, chosen))),
        key: KernelKey { cuda: shape, ..KernelKey::new(p, name, Tile { m_tiles: 1, tokens: name.tile_tokens(), flags: Flags::default() }) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_what_the_kernels_ask_for() {
        let problem = |kv_dtype, scales| Problem { kv_dtype, scales, layout: CacheLayout::Nhd, ..Problem::default() };
        let bf16 = problem(KvDtype::Bf16, ScaleMode::None);
        assert_eq!(CudaShape::of(1, 8, 3, 16).shared_bytes(&bf16), 8 * 3 * 2 * 16 * 256);
        assert_eq!(CudaShape::warpgroups(3, 2).shared_bytes(&bf16), 3 * 2 * 2 * 64 * 256 + 64 * 256);
        let parts = CudaShape { cluster: 4, ..CudaShape::of(1, 8, 3, 16) };
        assert_eq!(parts.shared_bytes(&bf16), 8 * 3 * 2 * 16 * 256 + 16 * 4 * (8 * 16 + 8) + 16);
        let token = problem(KvDtype::Fp8, ScaleMode::PerToken);
        assert_eq!(CudaShape::of(1, 8, 3, 32).shared_bytes(&token), 8 * (3 * (2usize * 32 * 128 + 256)).next_multiple_of(1024));
        assert_eq!(plain_shared_bytes(128), 8 * 128 * 4 + 4 * 8 * 130 * 4);
    }

    fn nhd() -> Problem {
        Problem { layout: CacheLayout::Nhd, capacity: 132, ..Problem::default() }
    }

    fn fp8() -> Problem {
        Problem { kv_dtype: KvDtype::Fp8, ..nhd() }
    }

    fn cut(p: &Problem, arch: Arch) -> Option<CudaShape> {
        select(p, &arch).unwrap().key.cuda
    }

    /// The reason that a call is given, which `explain` shows.
    fn reason(p: &Problem) -> String {
        select(p, &Arch::sm90()).unwrap().reason.to_string()
    }

    #[test]
    fn what_tensor_cores_do_not_take_goes_to_the_plain_tile() {
        for (p, what) in [
            (Problem { head_dim: 80, ..nhd() }, "the head_dim"),
            (Problem { layout: CacheLayout::Vllm, ..nhd() }, "the layout"),
            (Problem { query_dtype: DType::F32, ..nhd() }, "an F32 query"),
            (Problem { query_dtype: DType::F16, ..nhd() }, "an F16 query on a BF16 cache"),
            (Problem { kv_dtype: KvDtype::F32, ..nhd() }, "F32 (never TF32)"),
        ] {
            assert_eq!(cut(&p, Arch::sm90()), None, "{what}");
            assert!(reason(&p).starts_with(&format!("the plain tile, without tensor cores: {what}; ")), "{}", reason(&p));
        }
        // These pairs lose nothing: the cache's type holds the query's values, or F16 products scale them.
        for (query_dtype, kv_dtype) in [(DType::BF16, KvDtype::F16), (DType::F16, KvDtype::F16), (DType::F16, KvDtype::Fp8)] {
            assert!(cut(&Problem { query_dtype, kv_dtype, ..nhd() }, Arch::sm90()).is_some(), "{query_dtype:?} {kv_dtype:?}");
        }
        // A warpgroup over FP8 would round an F16 query to two parts of E4M3.
        let verify = |query_dtype| cut(&Problem { query_len: 4, query_dtype, ..fp8() }, Arch::sm90()).unwrap();
        assert_eq!((verify(DType::BF16).warpgroup, verify(DType::F16).warpgroup), (true, false));
        assert_eq!(cut(&fp8(), Arch::sm80()), None);
        assert!(cut(&fp8(), Arch::sm89()).is_some());
    }

    #[test]
    fn decode_is_cut_by_blocks_and_tokens() {
        let sm90 = |p: Problem| cut(&p, Arch::sm90()).unwrap();
        let tiles = |p: Problem, task_tiles| Problem { task_tiles, ..p };
        assert_eq!(sm90(nhd()), CudaShape::of(1, 4, 2, 32));
        assert_eq!([sm90(tiles(fp8(), 17)), sm90(fp8())], [CudaShape::of(1, 8, 2, 32); 2]);
        assert_eq!(sm90(tiles(fp8(), 16)), CudaShape::of(1, 4, 4, 32));
        assert!(reason(&nhd()).ends_with("4 warps on 2 stages of 32 tokens, one block a SM; 132 slots, a reducer of 8 warps a row"));
        // Blocks share a SM's 228 KB, each with a KB more of its own.
        let many = |p: Problem| Problem { batch: 128, capacity: 264, ..p };
        for (p, shape) in [(many(nhd()), CudaShape::of(1, 4, 3, 16)), (many(fp8()), CudaShape::of(1, 4, 2, 32))] {
            assert!(2 * (shape.shared_bytes(&p) + 1024) <= 228 << 10);
            assert!(reason(&p).contains("2 blocks a SM for 264 on 132 SMs; 264 slots, a reducer of 1 warp a row"), "{}", reason(&p));
            assert_eq!(sm90(p), shape);
        }
        assert!(reason(&Problem { capacity: 265, ..many(nhd()) }).contains("2 blocks a SM for 265 in turns on 132 SMs; "));
        // Two blocks of a call never settle on one SM.
        for (p, shape) in [(fp8(), CudaShape::of(1, 4, 4, 32)), (nhd(), CudaShape::of(1, 4, 4, 16))] {
            for capacity in [64, 128] {
                let p = Problem { capacity, ..tiles(p.clone(), 1) };
                assert!((shape.shared_bytes(&p) + 1024) * 2 > 228 << 10);
                assert!(reason(&p).contains("few warps for tasks of one tile, 128 tokens"));
                assert_eq!(sm90(p), shape);
            }
        }
        assert_eq!(select(&nhd(), &Arch::sm90()).unwrap().key.tile_tokens, 128);
    }

    #[test]
    fn clusters_walk_rows_that_are_not_split() {
        let unsplit = |p: Problem, batch, task_tiles| Problem { batch, task_tiles, max_partitions: Some(1), ..p };
        let of = |cluster, shape| CudaShape { cluster, ..shape };
        for (p, shape) in [
            // FP8 blocks on more than 3/4 of the SMs have more warps.
            (unsplit(fp8(), 49, 8), of(2, CudaShape::of(1, 4, 3, 32))),
            (unsplit(fp8(), 50, 8), of(2, CudaShape::of(1, 8, 3, 16))),
            (unsplit(nhd(), 64, 8), of(2, CudaShape::of(1, 4, 3, 16))),
            (unsplit(fp8(), 1, 235), of(16, CudaShape::of(1, 8, 3, 32))),
            (unsplit(nhd(), 1, usize::MAX), of(16, CudaShape::of(1, 4, 3, 32))),
            (Problem { query_len: 4, ..unsplit(fp8(), 1, 235) }, of(16, CudaShape::of(4, 2, 3, 32))),
            // A tile a block at least, of sixteen half a tile; as many clusters as run at once; none where blocks fill the GPU.
            (unsplit(fp8(), 1, 7), of(4, CudaShape::of(1, 4, 3, 32))),
            (unsplit(fp8(), 1, 8), of(16, CudaShape::of(1, 4, 3, 16))),
            (unsplit(nhd(), 1, 15), of(16, CudaShape::of(1, 4, 3, 16))),
            (unsplit(fp8(), 4, 8), of(16, CudaShape::of(1, 4, 3, 16))),
            (unsplit(fp8(), 5, 8), of(8, CudaShape::of(1, 4, 3, 32))),
            (unsplit(nhd(), 30, 16), of(4, CudaShape::of(1, 4, 3, 32))),
            (unsplit(fp8(), 6, 16), of(16, CudaShape::of(1, 4, 3, 32))),
            (unsplit(fp8(), 8, 15), of(8, CudaShape::of(1, 4, 3, 32))),
            (Problem { query_len: 4, ..unsplit(fp8(), 1, 15) }, of(8, CudaShape::of(4, 2, 3, 32))),
            (unsplit(fp8(), 1, 1), CudaShape::of(1, 4, 4, 32)),
            (unsplit(fp8(), 7, 90), of(16, CudaShape::of(1, 4, 3, 32))),
            (unsplit(fp8(), 15, 60), of(8, CudaShape::of(1, 4, 3, 32))),
            (unsplit(fp8(), 30, 30), of(4, CudaShape::of(1, 8, 3, 16))),
            (unsplit(fp8(), 67, 8), CudaShape::of(1, 4, 4, 32)),
        ] {
            assert_eq!(cut(&p, Arch::sm90()), Some(shape), "{p:?}");
            assert!(shape.shared_bytes(&p) <= Arch::sm90().lds_bytes);
            let is_short = p.task_tiles.div_ceil(shape.cluster) <= 8 && p.query_len == 1 && shape.cluster > 1;
            let room = if is_short && p.batch * shape.cluster <= 99 { 2 } else { 1 };
            assert!(room * (shape.shared_bytes(&p) + 1024) <= 228 << 10, "{room} blocks an SM of {p:?}");
            assert!(!select(&p, &Arch::sm90()).unwrap().needs_reducer());
            assert_eq!(cut(&p, Arch::sm89()).unwrap().cluster, 1, "no clusters there");
        }
        let said = "tensor cores, 8 warps on 3 stages of 16 tokens, 2 blocks a task, for 64 tasks that are whole rows; no reducer";
        assert_eq!(reason(&unsplit(fp8(), 64, 8)), said);
        let fewer = Arch { compute_units: 114, ..Arch::sm90() };
        assert_eq!(cut(&unsplit(fp8(), 1, 235), fewer).unwrap().cluster, 8);
    }

    #[test]
    fn whole_rows_in_order_have_a_block_an_sm() {
        let whole = |p: Problem, batch, task_tiles| Problem { batch, capacity: batch, task_tiles, max_partitions: Some(1), ..p };
        let (alone, beside) = (CudaShape::of(1, 8, 3, 16), CudaShape::of(1, 4, 3, 16));
        for (p, shape) in [
            (whole(nhd(), 178, 9), alone),
            // Or so many slots of a plan that may be made again.
            (Problem { max_partitions: None, ..whole(nhd(), 264, 32) }, alone),
            (Problem { kv_heads: 8, q_heads: 64, ..whole(nhd(), 32, 16) }, alone),
            (whole(nhd(), 264, 8), beside),
            (whole(nhd(), 264, 33), beside),
            (whole(nhd(), 265, 16), beside),
            (Problem { capacity: 264, max_partitions: None, ..whole(nhd(), 178, 16) }, beside),
            // As they come.
            (Problem { plan_free: true, max_partitions: None, ..whole(nhd(), 178, 16) }, beside),
            (whole(fp8(), 178, 16), CudaShape::of(1, 4, 2, 32)),
        ] {
            assert_eq!(cut(&p, Arch::sm90()), Some(shape), "{p:?}");
        }
    }

    #[test]
    fn few_short_rows_are_walked_whole() {
        let walked = |p: Problem, batch, tokens| walks_whole_rows(&Problem { batch, plan_free: true, ..p }, tokens, &Arch::sm90());
        assert!(walked(fp8(), 1, 2048) && walked(nhd(), 4, 1024) && walked(fp8(), 33, 1024) && walked(fp8(), 16, 2048));
        assert!(walked(Problem { kv_heads: 8, q_heads: 64, ..fp8() }, 1, 1024));
        for (p, batch, tokens) in [
            (fp8(), 1, 2049),
            (fp8(), 1, 128),
            (fp8(), 33, 1025),
            (fp8(), 34, 1024),
            (Problem { query_len: 2, ..fp8() }, 1, 1024),
            (Problem { layout: CacheLayout::Vllm, ..fp8() }, 1, 1024),
        ] {
            assert!(!walked(p.clone(), batch, tokens), "{batch} rows of {tokens} tokens of {p:?}");
        }
        assert!(!walks_whole_rows(&Problem { plan_free: true, ..fp8() }, 1024, &Arch::sm89()));
    }

    #[test]
    fn more_query_rows_than_16_are_shared_by_warps() {
        let verify = |p: Problem, query_len| Problem { query_len, ..p };
        let token = |p: Problem| Problem { scales: ScaleMode::PerToken, ..p };
        let in_turns = |p: Problem| Problem { batch: 256, capacity: 528, ..p };
        for (p, arch, shape) in [
            (verify(nhd(), 4), Arch::sm90(), CudaShape::warpgroups(2, 3)),
            (Problem { batch: 128, capacity: 264, ..verify(nhd(), 4) }, Arch::sm90(), CudaShape::warpgroups(2, 3)),
            (in_turns(verify(nhd(), 4)), Arch::sm90(), CudaShape::warpgroups(1, 3)),
            // Two blocks an SM, all at once.
            (Problem { batch: 99, capacity: 264, ..verify(nhd(), 4) }, Arch::sm90(), CudaShape::warpgroups(1, 3)),
            (Problem { batch: 100, capacity: 264, ..verify(nhd(), 4) }, Arch::sm90(), CudaShape::warpgroups(2, 3)),
            (Problem { batch: 99, capacity: 132, ..verify(fp8(), 4) }, Arch::sm90(), CudaShape::warpgroups(2, 4)),
            (verify(fp8(), 2), Arch::sm90(), CudaShape::warpgroups(2, 4)),
            (token(verify(fp8(), 2)), Arch::sm90(), CudaShape::warpgroups(2, 4)),
            (in_turns(verify(fp8(), 2)), Arch::sm90(), CudaShape::warpgroups(1, 4)),
            (in_turns(token(verify(fp8(), 2))), Arch::sm90(), CudaShape::warpgroups(1, 3)),
            (verify(nhd(), 4), Arch::sm80(), CudaShape::of(4, 2, 3, 32)),
            (verify(nhd(), 2), Arch::sm80(), CudaShape::of(2, 2, 3, 32)),
            (Problem { head_dim: 256, ..verify(nhd(), 4) }, Arch::sm90(), CudaShape::of(4, 2, 3, 32)),
        ] {
            assert_eq!(cut(&p, arch.clone()), Some(shape), "{p:?} on {arch}");
        }
        for p in [nhd(), fp8(), token(fp8())] {
            let shape = cut(&in_turns(verify(p.clone(), 4)), Arch::sm90()).unwrap();
            assert!(2 * (shape.shared_bytes(&p) + 1024) <= 228 << 10, "{shape}");
        }
        let said = "tensor cores, 2 groups of 4 warps on 3 stages of 64 tokens, warpgroup products for 64 query rows of a KV head; ";
        assert!(reason(&verify(nhd(), 4)).starts_with(said), "{}", reason(&verify(nhd(), 4)));
    }

    #[test]
    fn reducers_have_warps_for_their_partials() {
        assert_eq!([1, 8, 9, 32, 33, 132].map(reducer_warps), [1, 1, 4, 4, 8, 8]);
        for one in [
            Problem { max_partitions: Some(1), ..nhd() },
            Problem { plan_free: true, ..nhd() },
            Problem { capacity: 1, ..nhd() },
            Problem { layout: CacheLayout::Vllm, plan_free: true, ..nhd() },
        ] {
            assert!(reason(&one).ends_with("; no reducer"), "{}", reason(&one));
            assert!(!select(&one, &Arch::sm90()).unwrap().needs_reducer(), "{one:?}");
        }
        // One of 600 rows may be empty, and its slot be another's.
        for several in [nhd(), Problem { batch: 600, capacity: 600, ..nhd() }] {
            assert!(reason(&several).contains("a reducer of") && select(&several, &Arch::sm90()).unwrap().needs_reducer(), "{several:?}");
        }
        // 132 slots for 4 rows, and for the 8 of per-head tables.
        assert!(reason(&Problem { batch: 4, ..nhd() }).ends_with("a reducer of 8 warps a row"));
        assert!(reason(&Problem { batch: 4, kv_heads: 2, per_head_tables: true, ..nhd() }).ends_with("a reducer of 4 warps a row"));
    }
}
