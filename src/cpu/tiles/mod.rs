//! The two products in matrix tiles (AMX): C tiles of 16 rows by 16 f32, summed over the units of an A and a B tile.
//!
//! A tile unit multiplies an A tile (16 rows of up to 16 BF16 pairs) by a B tile (as many rows of 16 pairs). Everything the kernels hold is
//! such a tile already, but for the weights: 16 tokens' keys are an A tile and the packed query is B tiles, the output of that is
//! `[token][row]`; the weights, turned to `[row][unit]`, are A tiles and the paired values are B tiles.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(test)]
mod emulated;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(super) use amx::Amx;
#[cfg(test)]
pub(super) use emulated::Emulated;

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::ahead::Ahead;
use super::gemm::{BLOCK, KeyBlock, Scores, Weighted};
use super::isa::Isa;
use super::job::Job;
use super::math::{Math, Pairs};
use super::task::{self, RowBlock};
use super::workspace::{ROW_BLOCK, STEP, Workspace};

/// Rows of an A or C tile, 32-bit columns of a B or C tile, and most units that one multiplication sums over.
const SIDE: usize = 16;
const _: () = assert!(BLOCK == SIDE);

/// Shapes of the eight tiles, as `ldtilecfg` reads them: 0 to 3 are C, 4 and 5 A, 6 and 7 B.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// Tiles for multiplications over `depth` units, 1 to 16.
    const fn new(depth: usize) -> Self {
        let mut shapes = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut tile = 0;
        while tile < 8 {
            let (is_a, is_b) = (tile == 4 || tile == 5, tile >= 6);
            shapes.row_bytes[tile] = if is_a { 4 * depth as u16 } else { 4 * SIDE as u16 };
            shapes.rows[tile] = if is_b { depth as u8 } else { SIDE as u8 };
            tile += 1;
        }
        shapes
    }
}

/// What every item finds configured.
static FULL: Shapes = Shapes::new(SIDE);

/// The tile instructions. The eight tiles belong to the thread.
///
/// # Safety
/// The machine must have the unit, the thread's tiles must be configured (other than for `configure` itself), and the pointers must be
/// valid for the rows and bytes of the tile's shape.
pub(super) trait TileUnit: Copy + 'static {
    /// Gives the tiles their shapes; zeroes them.
    unsafe fn configure(shapes: &Shapes);
    unsafe fn zero<const TILE: u8>();
    /// Rows are `stride` bytes apart, at any alignment.
    unsafe fn load<const TILE: u8>(from: *const u8, stride: usize);
    unsafe fn store<const TILE: u8>(to: *mut u8, stride: usize);
    /// `C += A · B` over BF16 pairs.
    unsafe fn dot<const C: u8, const A: u8, const B: u8>();
    /// Forgets the configuration: until the next one the thread has no tile state to be saved.
    unsafe fn release();
}

/// BF16 pairs in tiles of `T`; what does not fill tiles is left to the vector set's pairs.
#[derive(Clone, Copy)]
pub(super) struct TilePairs<T>(PhantomData<T>);

/// [`task::attend`] in tiles.
///
/// # Safety
/// As [`Isa`] and [`TileUnit`].
#[inline(always)]
pub(super) unsafe fn attend<I: Isa, T: TileUnit>(job: &Job<'_>, block: &RowBlock, range: (usize, usize), work: &Workspace) {
    unsafe {
        T::configure(&FULL);
        task::attend::<I, TilePairs<T>>(job, block, range, work);
        T::release();
    }
}

impl<T: TileUnit> Math for TilePairs<T> {
    const PAIR: usize = Pairs::PAIR;
    const PLAIN: bool = true;

    #[inline(always)]
    unsafe fn dot<I: Isa>(a: I::V, b: I::V, c: I::V) -> I::V {
        unsafe { Pairs::dot::<I>(a, b, c) }
    }

    #[inline(always)]
    unsafe fn scores<I: Isa>(job: &Scores, ahead: &mut Ahead) {
        let depth = deepest(job.chunk_units);
        let product = Product {
            a: job.blocks,
            passes: job.terms,
            chunks: job.chunks,
            steps: job.chunk_units / depth,
            depth,
            b: job.query.cast(),
            b_stride: 4 * job.rows,
            columns: job.rows / SIDE,
            c: job.out,
            c_stride: job.rows,
            add: false,
        };
        unsafe {
            if depth == SIDE {
                return product.run::<I, T>(ahead);
            }
            T::configure(&Shapes::new(depth));
            product.run::<I, T>(ahead);
            T::configure(&FULL);
        }
    }

    #[inline(always)]
    unsafe fn weighted<I: Isa>(job: &Weighted, ahead: &mut Ahead) {
        let units = job.units / SIDE * SIDE;
        let row_tiles = job.rows.div_ceil(SIDE);
        assert!(row_tiles <= ROW_TILES && units <= UNITS);
        unsafe {
            if units > 0 {
                let mut turned = MaybeUninit::<Turned>::uninit();
                let weights = turned.as_mut_ptr().cast::<u32>();
                I::transpose(job.weights, 4 * job.weights_stride, weights, UNITS, units, row_tiles * SIDE);
                let a: [KeyBlock; ROW_TILES] = std::array::from_fn(|i| KeyBlock {
                    data: weights.wrapping_add(i * SIDE * UNITS).cast_const().cast(),
                    token: 4 * UNITS,
                    chunk: 0,
                });
                let product = Product {
                    a: &a[..row_tiles],
                    passes: 1,
                    chunks: 1,
                    steps: units / SIDE,
                    depth: SIDE,
                    b: job.values,
                    b_stride: job.unit,
                    columns: job.width / SIDE,
                    c: job.out,
                    c_stride: job.width,
                    add: true,
                };
                product.run::<I, T>(ahead);
            }
            if units < job.units {
                let weights = job.weights.add(units * job.weights_stride);
                let values = job.values.add(units * job.unit);
                I::weighted::<Pairs>(&Weighted { weights, values, units: job.units - units, ..*job }, ahead);
            }
        }
    }
}

const ROW_TILES: usize = ROW_BLOCK / SIDE;
/// Most units of a run of values.
const UNITS: usize = STEP / Pairs::PAIR;

/// Weights as `[row][unit]`.
#[repr(C, align(64))]
struct Turned([[u32; UNITS]; ROW_BLOCK]);

/// The most units up to a tile's that divide `units`.
fn deepest(units: usize) -> usize {
    (1..=SIDE).rev().find(|&depth| units.is_multiple_of(depth)).unwrap_or(1)
}

/// `c[i][j] = or += sum over k of a[i][k] · b[k][j]`, in tiles. Tile k of a row of A is the `k % steps`-th of `depth` units in the
/// `k / steps % chunks`-th chunk: `passes` times over the same A while B runs on.
struct Product<'a> {
    /// The 16 rows of each row of tiles.
    a: &'a [KeyBlock],
    passes: usize,
    chunks: usize,
    steps: usize,
    depth: usize,
    b: *const u8,
    /// Bytes.
    b_stride: usize,
    columns: usize,
    c: *mut f32,
    /// f32s.
    c_stride: usize,
    /// Whether C is added to rather than written.
    add: bool,
}

/// Where one multiplication of those that make up a C tile reads.
#[derive(Clone, Copy)]
struct At {
    chunk: usize,
    /// Bytes into the chunk.
    within: usize,
    b: *const u8,
}

impl Product<'_> {
    /// Four C tiles at a time where there are as many: independent sums hide the latency of a multiplication.
    #[inline(always)]
    unsafe fn run<I: Isa, T: TileUnit>(&self, ahead: &mut Ahead) {
        let (rows, columns) = (self.a.len(), self.columns);
        let (even_rows, even_columns) = (rows / 2 * 2, columns / 2 * 2);
        unsafe {
            for i in (0..even_rows).step_by(2) {
                for j in (0..even_columns).step_by(2) {
                    self.square::<I, T>(i, j, ahead);
                }
            }
            if even_columns < columns {
                for i in (0..rows).step_by(4) {
                    match rows - i {
                        1 => self.column::<I, T, 1>(i, even_columns, ahead),
                        2 => self.column::<I, T, 2>(i, even_columns, ahead),
                        3 => self.column::<I, T, 3>(i, even_columns, ahead),
                        _ => self.column::<I, T, 4>(i, even_columns, ahead),
                    }
                }
            }
            if even_rows < rows {
                for j in (0..even_columns).step_by(4) {
                    match even_columns - j {
                        2 => self.row::<I, T, 2>(even_rows, j, ahead),
                        _ => self.row::<I, T, 4>(even_rows, j, ahead),
                    }
                }
            }
        }
    }

    /// C tiles (i, j) to (i + 1, j + 1).
    #[inline(always)]
    unsafe fn square<I: Isa, T: TileUnit>(&self, i: usize, j: usize, ahead: &mut Ahead) {
        unsafe {
            self.open::<T, 0>(i, j);
            self.open::<T, 1>(i, j + 1);
            self.open::<T, 2>(i + 1, j);
            self.open::<T, 3>(i + 1, j + 1);
            let mut at = self.start();
            for _ in 0..self.multiplications() {
                self.load_b::<T, 6>(at, j);
                self.load_a::<T, 4>(at, i);
                T::dot::<0, 4, 6>();
                self.load_b::<T, 7>(at, j + 1);
                T::dot::<1, 4, 7>();
                self.ask::<I>(ahead);
                self.load_a::<T, 5>(at, i + 1);
                T::dot::<2, 5, 6>();
                T::dot::<3, 5, 7>();
                self.ask::<I>(ahead);
                at = self.next(at);
            }
            self.close::<T, 0>(i, j);
            self.close::<T, 1>(i, j + 1);
            self.close::<T, 2>(i + 1, j);
            self.close::<T, 3>(i + 1, j + 1);
        }
    }

    /// C tiles (i, j) to (i + M - 1, j), M up to 4.
    #[inline(always)]
    unsafe fn column<I: Isa, T: TileUnit, const M: usize>(&self, i: usize, j: usize, ahead: &mut Ahead) {
        unsafe {
            self.open::<T, 0>(i, j);
            if M > 1 {
                self.open::<T, 1>(i + 1, j);
            }
            if M > 2 {
                self.open::<T, 2>(i + 2, j);
            }
            if M > 3 {
                self.open::<T, 3>(i + 3, j);
            }
            let mut at = self.start();
            for _ in 0..self.multiplications() {
                self.load_b::<T, 6>(at, j);
                self.load_a::<T, 4>(at, i);
                T::dot::<0, 4, 6>();
                self.ask::<I>(ahead);
                if M > 1 {
                    self.load_a::<T, 5>(at, i + 1);
                    T::dot::<1, 5, 6>();
                    self.ask::<I>(ahead);
                }
                if M > 2 {
                    self.load_a::<T, 4>(at, i + 2);
                    T::dot::<2, 4, 6>();
                    self.ask::<I>(ahead);
                }
                if M > 3 {
                    self.load_a::<T, 5>(at, i + 3);
                    T::dot::<3, 5, 6>();
                    self.ask::<I>(ahead);
                }
                at = self.next(at);
            }
            self.close::<T, 0>(i, j);
            if M > 1 {
                self.close::<T, 1>(i + 1, j);
            }
            if M > 2 {
                self.close::<T, 2>(i + 2, j);
            }
            if M > 3 {
                self.close::<T, 3>(i + 3, j);
            }
        }
    }

    /// C tiles (i, j) to (i, j + N - 1), N 2 or 4.
    #[inline(always)]
    unsafe fn row<I: Isa, T: TileUnit, const N: usize>(&self, i: usize, j: usize, ahead: &mut Ahead) {
        unsafe {
            self.open::<T, 0>(i, j);
            self.open::<T, 1>(i, j + 1);
            if N > 2 {
                self.open::<T, 2>(i, j + 2);
                self.open::<T, 3>(i, j + 3);
            }
            let mut at = self.start();
            for _ in 0..self.multiplications() {
                self.load_a::<T, 4>(at, i);
                self.load_b::<T, 6>(at, j);
                T::dot::<0, 4, 6>();
                self.ask::<I>(ahead);
                self.load_b::<T, 7>(at, j + 1);
                T::dot::<1, 4, 7>();
                self.ask::<I>(ahead);
                if N > 2 {
                    self.load_b::<T, 6>(at, j + 2);
                    T::dot::<2, 4, 6>();
                    self.ask::<I>(ahead);
                    self.load_b::<T, 7>(at, j + 3);
                    T::dot::<3, 4, 7>();
                    self.ask::<I>(ahead);
                }
                at = self.next(at);
            }
            self.close::<T, 0>(i, j);
            self.close::<T, 1>(i, j + 1);
            if N > 2 {
                self.close::<T, 2>(i, j + 2);
                self.close::<T, 3>(i, j + 3);
            }
        }
    }

    /// How many make up a C tile.
    fn multiplications(&self) -> usize {
        self.passes * self.chunks * self.steps
    }

    fn start(&self) -> At {
        At { chunk: 0, within: 0, b: self.b }
    }

    #[inline(always)]
    fn next(&self, at: At) -> At {
        let (mut chunk, mut within) = (at.chunk, at.within + 4 * self.depth);
        if within == 4 * self.depth * self.steps {
            within = 0;
            chunk = if chunk + 1 == self.chunks { 0 } else { chunk + 1 };
        }
        At { chunk, within, b: at.b.wrapping_add(self.depth * self.b_stride) }
    }

    /// Asks for the `depth` lines of one tile, about. Done once for each tile of keys or values that is multiplied, this asks for all that
    /// the next step reads.
    #[inline(always)]
    unsafe fn ask<I: Isa>(&self, ahead: &mut Ahead) {
        for _ in 0..self.depth.div_ceil(2) {
            unsafe { ahead.ask::<I>() }
        }
    }

    #[inline(always)]
    unsafe fn load_a<T: TileUnit, const TILE: u8>(&self, at: At, i: usize) {
        unsafe {
            let rows = self.a.get_unchecked(i);
            T::load::<TILE>(rows.data.add(at.chunk * rows.chunk + at.within), rows.token);
        }
    }

    #[inline(always)]
    unsafe fn load_b<T: TileUnit, const TILE: u8>(&self, at: At, j: usize) {
        unsafe { T::load::<TILE>(at.b.add(4 * SIDE * j), self.b_stride) }
    }

    fn c(&self, i: usize, j: usize) -> *mut u8 {
        self.c.wrapping_add(i * SIDE * self.c_stride + j * SIDE).cast()
    }

    #[inline(always)]
    unsafe fn open<T: TileUnit, const TILE: u8>(&self, i: usize, j: usize) {
        unsafe {
            match self.add {
                true => T::load::<TILE>(self.c(i, j), 4 * self.c_stride),
                false => T::zero::<TILE>(),
            }
        }
    }

    #[inline(always)]
    unsafe fn close<T: TileUnit, const TILE: u8>(&self, i: usize, j: usize) {
        unsafe { T::store::<TILE>(self.c(i, j), 4 * self.c_stride) }
    }
}
