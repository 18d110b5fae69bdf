//! What each kernel is specialized on: from the registry's selection, or a shape, to the compiler's macros. Pure.

use candle::{DType, Result, bail};

pub use crate::gpu::specialize::WriteKey;
use crate::gpu::specialize::{self as shared, defines, kv_code, layout_code, mark, query_code, query_name, scales_code, specialization};
use crate::jit::{Source, Specialization};
use crate::plan::{PlannerBlock, Split};
pub use crate::registry::REDUCER_WARPS;
use crate::registry::{self, Arch, ArchName, M_TILE_ROWS, Selection, block_rows, reducer_warps};

/// The attention kernel of a selection for an NVIDIA GPU.
///
/// Errors: a selection for another arch.
pub fn tile(selection: &Selection) -> Result<Specialization> {
    let key = &selection.key;
    if !key.arch.is_cuda() {
        bail!("arch: {} has no NVIDIA kernels", key.arch)
    }
    let mut number = vec![
        ("PA_HEAD_DIM", key.head_dim),
        ("PA_PAGE", key.page_size),
        ("PA_GROUP", key.group),
        ("PA_QUERY", query_code(key.query_dtype)?),
        ("PA_KV", kv_code(key.kv_dtype)),
        ("PA_SCALES", scales_code(key.scales)),
        ("PA_LAYOUT", layout_code(key.layout)),
        ("PA_TILE", key.tile_tokens),
        ("PA_SHARED_BYTES", selection.lds_bytes),
    ];
    match &key.cuda {
        None => number.push(("PA_ROWS", block_rows(key))),
        Some(shape) => number.extend([
            ("PA_M_TILES", block_rows(key) / (shape.row_warps * M_TILE_ROWS)),
            ("PA_ROW_WARPS", shape.row_warps),
            ("PA_GROUPS", shape.groups),
            ("PA_STAGES", shape.stages),
            ("PA_CHUNK", shape.chunk),
            ("PA_CLUSTER", shape.cluster),
            ("PA_WARPGROUP", usize::from(shape.warpgroup)),
            ("PA_PARTIAL", usize::from(leaves_f16(selection))),
        ]),
    }
    let switches =
        [("PA_PER_HEAD", key.per_head_tables), ("PA_RAGGED", key.ragged), ("PA_WINDOW", key.windowed), ("PA_SOFTCAP", key.softcap)];
    Ok(Specialization {
        arch: key.arch,
        source: if key.cuda.is_some() { Source::Tile } else { Source::Plain },
        kernel: selection.kernel(),
        defines: defines(&number, &switches),
        options: vec![],
    })
}

/// How a row of the reducer is shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReducerCut {
    /// Warps of a block ([`REDUCER_WARPS`]).
    pub warps: usize,
    /// Blocks that share the channels: 1, or with more than one warp [`REDUCER_SPLIT`].
    pub split: usize,
    /// Whether partial results are F16 ([`leaves_f16`]).
    pub f16: bool,
}

impl ReducerCut {
    /// Threads of a block.
    pub fn threads(&self) -> usize {
        if self.warps == 1 { 256 } else { self.warps * 32 }
    }

    /// The grid's x and y for sequences of `query_len` query rows of `q_heads`: with one warp a row a block has as many rows as its lanes can take
    /// 16 bytes each, or 32 a row.
    pub fn grid(&self, query_len: usize, q_heads: usize, head_dim: usize) -> [usize; 2] {
        if self.warps > 1 {
            return [query_len.saturating_mul(self.split), q_heads];
        }
        let lanes = head_dim.div_ceil(if self.f16 { 8 } else { 4 }).next_power_of_two().min(32);
        [query_len.saturating_mul(q_heads).div_ceil(self.threads() / lanes), 1]
    }
}

/// Whether the kernel of a selection leaves partial results in F16; the others are F32.
pub fn leaves_f16(selection: &Selection) -> bool {
    registry::leaves_f16(&selection.key)
}

/// Query rows that the partial results of each (slot, KV head) of a call have room for.
pub fn slot_rows(selection: &Selection) -> usize {
    selection.row_groups * block_rows(&selection.key)
}

/// Blocks that share the channels of a row where any do.
pub const REDUCER_SPLIT: usize = 4;

/// The cut for `rows` (sequence, query token, query head) of up to `partials` partial results each: blocks share channels where most of the SMs
/// would be idle without that.
pub(crate) fn reducer_cut(partials: usize, rows: usize, selection: &Selection, sms: usize) -> ReducerCut {
    let head_dim = selection.key.head_dim;
    let warps = reducer_warps(partials);
    let divides = head_dim.is_power_of_two() && (64..=512).contains(&head_dim);
    let split = if warps > 1 && divides && rows <= sms / 2 { REDUCER_SPLIT } else { 1 };
    ReducerCut { warps, split, f16: leaves_f16(selection) }
}

/// The reducer of partial results of `head_dim` channels into an output of `output` dtype.
pub fn reduce(arch: ArchName, head_dim: usize, output: DType, ragged: bool, per_head: bool, cut: ReducerCut) -> Result<Specialization> {
    let ReducerCut { warps, split, f16 } = cut;
    let marks = [mark(f16, "_halves"), mark(split > 1, "_split"), mark(ragged, "_ragged"), mark(per_head, "_per_head")].concat();
    let kernel = format!("pa_reduce_d{head_dim}_{}_w{warps}{marks}", query_name(output)?);
    let number = [("PA_HEAD_DIM", head_dim), ("PA_QUERY", query_code(output)?), ("PA_WARPS", warps), ("PA_SPLIT", split)];
    let switches = [("PA_PARTIAL", f16), ("PA_RAGGED", ragged), ("PA_PER_HEAD", per_head)];
    Ok(specialization(arch, Source::Reduce, kernel, defines(&number, &switches)))
}

/// The device planner for `rows` plan rows.
///
/// Errors: more rows than a block has shared memory for; such a batch is planned on the host.
pub fn plan(arch: &Arch, rows: usize, ragged: bool) -> Result<Specialization> {
    let PlannerBlock { bucket, lds_bytes, .. } = PlannerBlock::new(rows, arch)?;
    if lds_bytes > STATIC_SHARED {
        bail!("plan: {rows} rows are more than a planner's block holds on {}; plan on the host", arch.name)
    }
    // Past 256 rows a thread has several, which the min-max split of the device does not do.
    if Split::of(rows, arch) == Split::MinMax && bucket > crate::plan::PLANNER_THREADS {
        bail!("plan: {rows} rows, the device plans up to {}; plan on the host", crate::plan::PLANNER_THREADS)
    }
    shared::plan(arch, rows, ragged)
}

/// Shared memory that a kernel may declare.
const STATIC_SHARED: usize = 48 << 10;

/// The kernel that writes new tokens into their pages.
pub fn write(key: &WriteKey) -> Result<Specialization> {
    write_with(key, key.dtype, false)
}

/// [`write()`] for a v of dtype `value` beside a k of the key's. `latest`: of tokens that share a slot the last one stays; otherwise none share one.
pub fn write_with(key: &WriteKey, value: DType, latest: bool) -> Result<Specialization> {
    let mut spec = shared::write(key)?;
    let (code, name) = (query_code(value)?, query_name(value)?);
    spec.kernel += &[&if value == key.dtype { String::new() } else { format!("_v_{name}") }, mark(latest, "_latest")].concat();
    spec.defines.extend(defines(&[("PA_VALUE", code)], &[("PA_LATEST", latest)]));
    Ok(spec)
}
