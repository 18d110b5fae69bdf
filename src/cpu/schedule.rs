//! Which items a call consists of, on which thread they run, and with which kernel.

use std::cell::Cell;

use candle::{Result, bail};
use rayon::prelude::*;

use super::finish::{Rows, partial_len, store_partial};
use super::isa::{self, Portable};
#[cfg(target_arch = "x86_64")]
use super::isa::{Avx2, Avx512};
#[cfg(target_arch = "x86_64")]
use super::job::KvData;
use super::job::{Job, Output};
#[cfg(target_arch = "x86_64")]
use super::math::Pairs;
use super::math::Singles;
use super::task::{RowBlock, attend};
#[cfg(any(test, all(target_arch = "x86_64", target_os = "linux")))]
#[cfg(any(target_arch = "x86_64", test))]
use super::tiles;
use super::workspace::{PAD, ROW_BLOCK, STEP, Workspace};
use crate::plan::TILE_TOKENS;
use crate::registry::CpuIsa;

const _: () = assert!(TILE_TOKENS.is_multiple_of(STEP));

/// Attends a row block over a token range; the result stays in the workspace.
pub(super) type Kernel = unsafe fn(&Job<'_>, &RowBlock, (usize, usize), &Workspace);

/// An entry point: the generic kernel compiled for one instruction set.
macro_rules! entry {
    ($name:ident, $isa:ty, $math:ty $(, $features:literal)?) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn $name(job: &Job<'_>, block: &RowBlock, range: (usize, usize), work: &Workspace) {
            unsafe { attend::<$isa, $math>(job, block, range, work) }
        }
    };
}

entry!(portable, Portable, Singles);
#[cfg(target_arch = "aarch64")]
entry!(neon, isa::Neon, Singles, "neon");
#[cfg(target_arch = "x86_64")]
entry!(avx2, Avx2, Singles, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
entry!(avx512, Avx512, Singles, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl");
#[cfg(target_arch = "x86_64")]
entry!(avx512_pairs, Avx512, Pairs, "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi");

/// Tiles multiply; vectors do the rest.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")]
unsafe fn amx_pairs(job: &Job<'_>, block: &RowBlock, range: (usize, usize), work: &Workspace) {
    unsafe { tiles::attend::<Avx512, tiles::Amx>(job, block, range, work) }
}

/// The same kernel with the tile instructions emulated, on any machine: its vectors are AVX-512 where there is AVX-512.
#[cfg(test)]
pub(super) unsafe fn emulated_tiles(job: &Job<'_>, block: &RowBlock, range: (usize, usize), work: &Workspace) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")]
    unsafe fn avx512(job: &Job<'_>, block: &RowBlock, range: (usize, usize), work: &Workspace) {
        unsafe { tiles::attend::<Avx512, tiles::Emulated>(job, block, range, work) }
    }
    #[cfg(target_arch = "x86_64")]
    if isa::available(CpuIsa::Avx512Bf16) {
        return unsafe { avx512(job, block, range, work) };
    }
    unsafe { tiles::attend::<Portable, tiles::Emulated>(job, block, range, work) }
}

/// Whether the cache's elements are BF16 values, so that BF16 products are exact.
#[cfg(any(target_arch = "x86_64", test))]
pub(super) fn holds_bf16(job: &Job<'_>) -> bool {
    [&job.key.data, &job.value.data].iter().all(|data| matches!(data, KvData::Bf16(_) | KvData::Fp8(_) | KvData::Mxfp4(_)))
}

/// The kernel for this job: BF16 pairs where the instruction set multiplies them and the cache's elements are BF16 values.
fn kernel(job: &Job<'_>) -> Result<Kernel> {
    if !isa::available(job.isa) {
        bail!("paged-decode: this machine does not have {:?}", job.isa)
    }
    #[cfg(target_arch = "x86_64")]
    let pairs = holds_bf16(job);
    Ok(match job.isa {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        CpuIsa::AmxBf16 if pairs => amx_pairs,
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx512Bf16 if pairs => avx512_pairs,
        #[cfg(target_arch = "x86_64")]
        CpuIsa::AmxBf16 | CpuIsa::Avx512Bf16 | CpuIsa::Avx512 => avx512,
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx2 => avx2,
        #[cfg(target_arch = "aarch64")]
        CpuIsa::Neon => neon,
        _ => portable,
    })
}

/// One row block over one partition.
struct Item {
    block: RowBlock,
    tokens: (usize, usize),
    /// Where its partial goes; `None`: it is the only one and writes the output itself.
    partial: Option<usize>,
}

/// A row block whose partials `first..first + len` of the buffer are to be merged; none: a row without tasks.
struct Merge {
    block: RowBlock,
    first: usize,
    len: usize,
}

struct Schedule {
    items: Vec<Item>,
    merges: Vec<Merge>,
    partials: usize,
}

impl Schedule {
    fn new(job: &Job<'_>) -> Self {
        let mut schedule = Self { items: Vec::with_capacity(job.plan.work.len()), merges: Vec::new(), partials: 0 };
        for row in 0..job.rows.len() {
            let heads = if job.per_head { row % job.dims.kv_heads..row % job.dims.kv_heads + 1 } else { 0..job.dims.kv_heads };
            for head in heads {
                row_blocks(job, row, head, |block| schedule.push(job, row, block));
            }
        }
        schedule
    }

    fn push(&mut self, job: &Job<'_>, row: usize, block: RowBlock) {
        let [first, count] = job.plan.reduce[row].map(|x| x.max(0) as usize);
        let len = partial_len(&block, job.dims.head_dim);
        for (i, record) in job.plan.work[first..first + count].iter().enumerate() {
            let tokens = (record[1].max(0) as usize * TILE_TOKENS, record[2].max(0) as usize * TILE_TOKENS);
            let partial = (count > 1).then_some(self.partials + i * len);
            self.items.push(Item { block, tokens, partial });
        }
        if count != 1 {
            self.merges.push(Merge { block, first: self.partials, len: count * len });
            self.partials += count * len;
        }
    }

    /// Multiplications in the call, about.
    fn cost(&self, job: &Job<'_>) -> usize {
        let tokens = |item: &Item| item.tokens.1.min(item.block.context_len).saturating_sub(item.tokens.0);
        self.items.iter().map(|item| tokens(item) * item.block.rows.next_multiple_of(PAD) * job.dims.head_dim).sum()
    }
}

/// Splits a plan row's flattened query rows of one head into blocks of like size.
fn row_blocks(job: &Job<'_>, row: usize, head: usize, mut each: impl FnMut(RowBlock)) {
    let facts = job.rows[row];
    let group = job.q_heads / job.dims.kv_heads;
    let total = facts.query_len * group;
    let blocks = total.div_ceil(ROW_BLOCK).max(1);
    let size = total.div_ceil(blocks).next_multiple_of(PAD);
    for first in (0..total).step_by(size.max(PAD)) {
        each(RowBlock {
            sequence: if job.per_head { row / job.dims.kv_heads } else { row },
            head,
            query_start: facts.query_start,
            query_len: facts.query_len,
            context_len: facts.context_len,
            group,
            first,
            rows: size.min(total - first),
        });
    }
}

/// Below this cost a call stays on its thread: waking another takes longer.
const INLINE_COST: usize = 1 << 20;

thread_local! {
    static PARTIALS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// A buffer that items write disjoint parts of.
struct Shared(*mut f32);
// SAFETY: `Schedule` gives every item a part of its own.
unsafe impl Send for Shared {}
unsafe impl Sync for Shared {}

impl Shared {
    fn at(&self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

/// Runs one validated call. The result's bits depend on the job alone: items are fixed by its plan, and partials merge in plan order.
pub(crate) fn run(job: &Job<'_>, output: &mut Output<'_>) -> Result<()> {
    run_with(job, output, kernel(job)?)
}

pub(super) fn run_with(job: &Job<'_>, output: &mut Output<'_>, kernel: Kernel) -> Result<()> {
    let schedule = Schedule::new(job);
    let rows = Rows::new(output);
    let mut partials = PARTIALS.take();
    if partials.len() < schedule.partials {
        partials.resize(schedule.partials, 0.0);
    }
    let buffer = Shared(partials.as_mut_ptr());
    let attend = |item: &Item| {
        Workspace::with(item.block.rows, job.dims.head_dim, |work| {
            // SAFETY: `kernel` was chosen for an available instruction set, and the job was checked.
            unsafe { kernel(job, &item.block, item.tokens, work) };
            match item.partial {
                None => rows.finish(job, &item.block, work),
                // SAFETY: the part is this item's alone, inside the buffer.
                Some(offset) => unsafe { store_partial(&item.block, job.dims.head_dim, work, buffer.at(offset)) },
            }
        });
    };
    let serial = schedule.items.len() == 1 || schedule.cost(job) < INLINE_COST || rayon::current_num_threads() == 1;
    if serial {
        schedule.items.iter().for_each(attend);
    } else {
        schedule.items.par_iter().with_max_len(1).for_each(attend);
    }
    let merge = |room: &mut Vec<f32>, merge: &Merge| match merge.len {
        0 => rows.clear(job, &merge.block, room),
        len => rows.merge(job, &merge.block, &partials[merge.first..merge.first + len], room),
    };
    let room = || vec![0.0; job.dims.head_dim];
    if serial {
        let mut room = if schedule.merges.is_empty() { Vec::new() } else { room() };
        schedule.merges.iter().for_each(|item| merge(&mut room, item));
    } else {
        schedule.merges.par_iter().for_each_init(room, merge);
    }
    PARTIALS.set(partials);
    Ok(())
}
