//! A tile unit in plain Rust, for tests: the instructions as Intel's Software Developer's Manual defines them (LDTILECFG, TILELOADD,
//! TILESTORED, TDPBF16PS), bit for bit but for which NaN a NaN is; it panics where the processor would fault.

use std::cell::RefCell;

use super::{Shapes, TileUnit};

#[derive(Clone, Copy)]
pub(in crate::cpu) struct Emulated;

const ROWS: usize = 16;
const ROW_UNITS: usize = 16;

#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    row_bytes: usize,
    /// Unused rows and columns are zero.
    units: [[u32; ROW_UNITS]; ROWS],
}

thread_local! {
    static TILES: RefCell<Option<[Tile; 8]>> = const { RefCell::new(None) };
}

fn with<R>(f: impl FnOnce(&mut [Tile; 8]) -> R) -> R {
    TILES.with_borrow_mut(|tiles| f(tiles.as_mut().expect("tiles are configured")))
}

impl TileUnit for Emulated {
    unsafe fn configure(shapes: &Shapes) {
        assert!(shapes.palette == 1 && shapes.start_row == 0 && shapes.reserved == [0; 14]);
        assert!(shapes.rows[8..] == [0; 8] && shapes.row_bytes[8..] == [0; 8]);
        let tiles = std::array::from_fn(|tile| {
            let (rows, row_bytes) = (usize::from(shapes.rows[tile]), usize::from(shapes.row_bytes[tile]));
            assert!((1..=ROWS).contains(&rows) && (1..=4 * ROW_UNITS).contains(&row_bytes) && row_bytes.is_multiple_of(4));
            Tile { rows, row_bytes, units: [[0; ROW_UNITS]; ROWS] }
        });
        TILES.set(Some(tiles));
    }

    unsafe fn zero<const TILE: u8>() {
        with(|tiles| tiles[usize::from(TILE)].units = [[0; ROW_UNITS]; ROWS]);
    }

    unsafe fn load<const TILE: u8>(from: *const u8, stride: usize) {
        with(|tiles| {
            let tile = &mut tiles[usize::from(TILE)];
            tile.units = [[0; ROW_UNITS]; ROWS];
            for (r, row) in tile.units[..tile.rows].iter_mut().enumerate() {
                // SAFETY: the caller's pointer is valid for the tile's rows and their bytes.
                unsafe { from.add(r * stride).copy_to_nonoverlapping(row.as_mut_ptr().cast(), tile.row_bytes) }
            }
        });
    }

    unsafe fn store<const TILE: u8>(to: *mut u8, stride: usize) {
        with(|tiles| {
            let tile = &tiles[usize::from(TILE)];
            for (r, row) in tile.units[..tile.rows].iter().enumerate() {
                // SAFETY: as in `load`.
                unsafe { to.add(r * stride).copy_from_nonoverlapping(row.as_ptr().cast(), tile.row_bytes) }
            }
        });
    }

    unsafe fn dot<const C: u8, const A: u8, const B: u8>() {
        assert!(C != A && C != B && A != B, "three tiles");
        with(|tiles| {
            let (a, b) = (tiles[usize::from(A)], tiles[usize::from(B)]);
            let c = &mut tiles[usize::from(C)];
            assert!(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows, "shapes fit");
            for m in 0..c.rows {
                let mut sums = [[0f32; 2]; ROW_UNITS];
                for k in 0..b.rows {
                    for (n, sum) in sums[..c.row_bytes / 4].iter_mut().enumerate() {
                        let ([a_even, a_odd], [b_even, b_odd]) = (pair(a.units[m][k]), pair(b.units[k][n]));
                        *sum = [multiply_add(a_even, b_even, sum[0]), multiply_add(a_odd, b_odd, sum[1])];
                    }
                }
                for (n, [even, odd]) in sums[..c.row_bytes / 4].iter().enumerate() {
                    c.units[m][n] = add(f32::from_bits(c.units[m][n]), add(*even, *odd)).to_bits();
                }
            }
        });
    }

    unsafe fn release() {
        TILES.set(None);
    }
}

/// The two BF16 elements of a unit; subnormal ones are zero.
fn pair(unit: u32) -> [f32; 2] {
    [unit << 16, unit & 0xffff_0000].map(|bits| no_subnormal(f32::from_bits(bits)))
}

fn no_subnormal(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// `a * b + c`, rounded once; the product of two BF16 values is exact in f64.
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    flush(a.mul_add(b, c), f64::from(a) * f64::from(b) + f64::from(c))
}

fn add(a: f32, b: f32) -> f32 {
    let (a, b) = (no_subnormal(a), no_subnormal(b));
    flush(a + b, f64::from(a) + f64::from(b))
}

/// A result that is tiny becomes zero. It is tiny if it is below 2^-126 when rounded to 24 bits of an exponent without bounds.
fn flush(rounded: f32, wide: f64) -> f32 {
    const TINY: f64 = f32::MIN_POSITIVE as f64 * (1.0 - 1.0 / (1u64 << 25) as f64);
    if rounded.abs() <= f32::MIN_POSITIVE && wide.abs() < TINY { 0f32.copysign(rounded) } else { rounded }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    type Side = [[u32; 16]; 16];

    fn unit(low: f32, high: f32) -> u32 {
        u32::from(bf16::from_f32(low).to_bits()) | u32::from(bf16::from_f32(high).to_bits()) << 16
    }

    /// C after `dot` with A and B of `depth` units.
    unsafe fn product<T: TileUnit>(depth: usize, a: &Side, b: &Side, c: &Side) -> Side {
        let mut out = [[0xdead_beef; 16]; 16];
        unsafe {
            T::configure(&Shapes::new(depth));
            T::load::<3>(c.as_ptr().cast(), 64);
            T::load::<5>(a.as_ptr().cast(), 64);
            T::load::<6>(b.as_ptr().cast(), 64);
            T::dot::<3, 5, 6>();
            T::store::<3>(out.as_mut_ptr().cast(), 64);
            T::release();
        }
        out
    }

    /// C[0][0] from one row of pairs, C otherwise zero.
    fn cell(pairs: &[([f32; 2], [f32; 2])], c: f32) -> f32 {
        let (mut a, mut b, mut start) = ([[0; 16]; 16], [[0; 16]; 16], [[0; 16]; 16]);
        for (k, (x, y)) in pairs.iter().enumerate() {
            (a[0][k], b[k][0]) = (unit(x[0], x[1]), unit(y[0], y[1]));
        }
        start[0][0] = c.to_bits();
        f32::from_bits(unsafe { product::<Emulated>(pairs.len(), &a, &b, &start) }[0][0])
    }

    #[test]
    fn even_and_odd_elements_sum_apart_and_meet_c_last() {
        let big = 2f32.powi(30);
        // In one running sum the 1 would be lost to 2^30; apart, 2^30 - 2^30 is left for the even ones and 1 for the odd ones.
        assert_eq!(cell(&[([big, 1.0], [1.0, 1.0]), ([-big, 0.0], [1.0, 1.0])], 0.0), 1.0);
        // C meets the sum of the pairs, not the pairs one by one.
        assert_eq!(cell(&[([1.0, 0.0], [1.0, 0.0])], big), big);
        assert_eq!(cell(&[([-big, 0.0], [1.0, 0.0]), ([1.0, 0.0], [1.0, 0.0])], big), 0.0);
        assert_eq!(cell(&[([3.0, 5.0], [7.0, 11.0])], 0.5), 76.5);
    }

    #[test]
    fn subnormals_are_zeros() {
        let (tiny, small) = (2f32.powi(-130), 2f32.powi(-100));
        assert_eq!(cell(&[([tiny, 0.0], [2f32.powi(60), 0.0])], 0.0), 0.0);
        assert_eq!(cell(&[([small, 0.0], [small, 0.0])], 0.0), 0.0);
        assert_eq!(cell(&[([2f32.powi(-60), 0.0], [2f32.powi(-67), 0.0])], 0.0), 0.0);
        assert_eq!(cell(&[([0.0, 0.0], [0.0, 0.0])], tiny), 0.0);
        assert_eq!(cell(&[([2f32.powi(-60), 0.0], [2f32.powi(-66), 0.0])], 0.0), f32::MIN_POSITIVE);
        // A difference of normal numbers that is not one.
        assert_eq!(cell(&[([-1.0, 0.0], [2f32.powi(-126), 0.0])], 1.5 * 2f32.powi(-126)), 0.0);
        // Just below 2^-126, where rounding with and without bounds on the exponent part.
        assert_eq!(flush(f32::MIN_POSITIVE, 2f64.powi(-126) * (1.0 - 2f64.powi(-24))), 0.0);
        assert_eq!(flush(f32::MIN_POSITIVE, 2f64.powi(-126) * (1.0 - 2f64.powi(-26))), f32::MIN_POSITIVE);
    }

    #[test]
    fn a_tile_product_is_a_matrix_product() {
        let mut rng = StdRng::seed_from_u64(3);
        for depth in 1..=16 {
            let mut side = || -> Side { std::array::from_fn(|_| std::array::from_fn(|_| unit(rng.random(), rng.random()))) };
            let (a, b) = (side(), side());
            let c: Side = std::array::from_fn(|_| std::array::from_fn(|_| rng.random::<f32>().to_bits()));
            let got = unsafe { product::<Emulated>(depth, &a, &b, &c) };
            for m in 0..16 {
                for n in 0..16 {
                    let term = |k: usize| {
                        let ([a0, a1], [b0, b1]) = (pair(a[m][k]), pair(b[k][n]));
                        f64::from(a0) * f64::from(b0) + f64::from(a1) * f64::from(b1)
                    };
                    let expected = f64::from(f32::from_bits(c[m][n])) + (0..depth).map(term).sum::<f64>();
                    let error = (f64::from(f32::from_bits(got[m][n])) - expected).abs();
                    assert!(error <= 1e-6 * (1.0 + expected), "depth {depth}, {m}, {n}: {error}");
                }
            }
        }
    }

    /// Runs where there is AMX: the processor and the emulation agree on every bit.
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn the_processor_agrees() {
        use super::super::Amx;
        if !Amx::available() {
            println!("no AMX here: nothing was compared");
            return;
        }
        let mut rng = StdRng::seed_from_u64(5);
        for round in 0..400 {
            // Narrow exponents, then all of them: subnormals, infinities, results that overflow and that vanish.
            let mut element = || match round % 2 {
                0 => u32::from(bf16::from_f32(rng.random_range(-2.0..2.0)).to_bits()),
                _ => u32::from(rng.random::<u16>()),
            };
            let mut side = || -> Side { std::array::from_fn(|_| std::array::from_fn(|_| element() | element() << 16)) };
            let (a, b, c) = (side(), side(), side());
            let depth = round % 16 + 1;
            let (real, emulated) = unsafe { (product::<Amx>(depth, &a, &b, &c), product::<Emulated>(depth, &a, &b, &c)) };
            for (x, y) in real.as_flattened().iter().zip(emulated.as_flattened()) {
                let both_nan = f32::from_bits(*x).is_nan() && f32::from_bits(*y).is_nan();
                assert!(x == y || both_nan, "round {round}: {x:08x} for {y:08x}");
            }
        }
    }
}
