//! The scratch of one worker: a few arrays whose sizes depend on head_dim and the row block, never on the context.

use std::cell::Cell;

use super::gemm::BLOCK;

/// Tokens of a step: scores of so many tokens are in flight at once. A multiple of the key block; it divides the planner's tile.
pub(super) const STEP: usize = 64;
/// Query rows of a row block: so many rows share one pass over their keys and values.
pub(crate) const ROW_BLOCK: usize = 64;
/// Vectors of output dims and of query rows are padded to this many f32.
pub(super) const PAD: usize = 16;
/// Key blocks of a step.
pub(super) const BLOCKS: usize = STEP / BLOCK;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

thread_local! {
    static ARENA: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Pointers into the arena; contents are initialized, with values left over from earlier use.
pub(super) struct Workspace {
    /// Query rows, padded.
    pub rows: usize,
    /// head_dim, padded.
    pub width: usize,
    /// Units `[terms][units][rows]`.
    pub query: *mut u32,
    /// `[STEP][rows]`.
    pub scores: *mut f32,
    /// Units `[STEP][rows]` at most.
    pub weights: *mut u32,
    /// `[rows][width]`.
    pub out: *mut f32,
    /// `[STEP][head_dim]` elements, or `[chunks][STEP][x]`.
    pub keys: *mut u8,
    /// Units `[STEP][width]` at most.
    pub values: *mut u32,
    /// `[STEP][head_dim]` elements: values on their way, or query rows.
    pub staged: *mut u8,
    /// A row of zeros, `[width]`.
    pub zeros: *const u8,
    pub max: *mut f32,
    pub sum: *mut f32,
    pub factor: *mut f32,
    pub after: *mut f32,
    pub last: *mut f32,
    pub key_scales: *mut f32,
    pub value_scales: *mut f32,
}

/// Terms a query may be split into.
pub(super) const MAX_TERMS: usize = 2;

impl Workspace {
    /// Runs `f` on this thread's scratch, sized for `rows` query rows of `head_dim`.
    pub fn with<R>(rows: usize, head_dim: usize, f: impl FnOnce(&Workspace) -> R) -> R {
        let (rows, width) = (rows.next_multiple_of(PAD), head_dim.next_multiple_of(PAD));
        let sizes = [
            MAX_TERMS * width * rows,
            STEP * rows,
            STEP * rows,
            rows * width,
            STEP * width,
            STEP * width,
            STEP.max(rows) * width,
            width,
            rows,
            rows,
            rows,
            rows,
            rows,
            STEP,
            STEP,
        ];
        let lines: usize = sizes.iter().map(|size| size.div_ceil(16)).sum();
        // Taken out of its cell while in use: a worker that waits inside another call may start this one.
        let mut arena = ARENA.take();
        if arena.len() < lines {
            arena.resize(lines, Line([0.0; 16]));
        }
        let mut at = 0;
        let [query, scores, weights, out, keys, values, staged, zeros, max, sum, factor, after, last, key_scales, value_scales] = sizes
            .map(|size| {
                let pointer = arena[at..].as_mut_ptr().cast::<f32>();
                at += size.div_ceil(16);
                pointer
            });
        // SAFETY: `zeros` spans `width` floats of the arena.
        unsafe { zeros.write_bytes(0, width) };
        let workspace = Workspace {
            rows,
            width,
            query: query.cast(),
            scores,
            weights: weights.cast(),
            out,
            keys: keys.cast(),
            values: values.cast(),
            staged: staged.cast(),
            zeros: zeros.cast_const().cast(),
            max,
            sum,
            factor,
            after,
            last,
            key_scales,
            value_scales,
        };
        let result = f(&workspace);
        ARENA.set(arena);
        result
    }
}
