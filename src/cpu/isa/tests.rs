//! Each operation of every instruction set that this machine has, against plain f32 or float64.

use std::array::from_fn;

use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
#[cfg(target_arch = "x86_64")]
use crate::registry::CpuIsa;

/// A whole number of vectors of any set.
const N: usize = 16;
type Lanes = [f32; N];

/// Calls a generic check on every set that this machine has; AVX-512 if it has the given one.
macro_rules! on_every_set {
    ($check:ident) => {
        on_every_set!($check, CpuIsa::Avx512)
    };
    ($check:ident, $avx512:expr) => {
        $check::<Portable>();
        #[cfg(target_arch = "aarch64")]
        $check::<Neon>();
        #[cfg(target_arch = "x86_64")]
        if available(CpuIsa::Avx2) {
            $check::<Avx2>();
        }
        #[cfg(target_arch = "x86_64")]
        if available($avx512) {
            $check::<Avx512>();
        }
    };
}

fn map<I: Isa>(a: Lanes, b: Lanes, c: Lanes, f: impl Fn(I::V, I::V, I::V) -> I::V) -> Lanes {
    let mut out = [f32::NAN; N];
    for i in (0..N).step_by(I::LANES) {
        // SAFETY: LANES divides N, and the caller's macro asked for the set.
        unsafe { I::store(out.as_mut_ptr().add(i), f(I::load(a.as_ptr().add(i)), I::load(b.as_ptr().add(i)), I::load(c.as_ptr().add(i)))) }
    }
    out
}

/// Equal bits, or NaN both.
fn alike(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

fn same(got: Lanes, expected: Lanes, what: &str) {
    got.into_iter().zip(expected).for_each(|(got, expected)| assert!(alike(got, expected), "{what}: {got:e} for {expected:e}"));
}

/// Ordinary numbers with a special one here and there.
fn operands(rng: &mut StdRng) -> Lanes {
    const SPECIAL: [f32; 8] = [0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX];
    from_fn(|_| if rng.random_range(0..3) == 0 { SPECIAL[rng.random_range(0..8)] } else { rng.random_range(-8.0..8.0) })
}

#[test]
fn arithmetic_is_that_of_f32() {
    fn check<I: Isa>() {
        let mut rng = StdRng::seed_from_u64(1);
        for _ in 0..200 {
            let [a, b, c] = from_fn(|_| operands(&mut rng));
            let each = |f: fn(f32, f32) -> f32| from_fn(|i| f(a[i], b[i]));
            same(map::<I>(a, b, c, |a, b, _| unsafe { I::add(a, b) }), each(|a, b| a + b), "add");
            same(map::<I>(a, b, c, |a, b, _| unsafe { I::sub(a, b) }), each(|a, b| a - b), "sub");
            same(map::<I>(a, b, c, |a, b, _| unsafe { I::mul(a, b) }), each(|a, b| a * b), "mul");
            same(map::<I>(a, b, c, |a, b, _| unsafe { I::div(a, b) }), each(|a, b| a / b), "div");
            same(map::<I>(a, b, c, |a, b, _| unsafe { I::max(a, b) }), each(|a, b| if a > b { a } else { b }), "max");
            same(map::<I>(a, b, c, |_, _, _| unsafe { I::splat(a[3]) }), [a[3]; N], "splat");
            let less = map::<I>(a, b, c, |a, b, c| unsafe { I::select(I::less(a, b), c, a) });
            same(less, from_fn(|i| if a[i] < b[i] { c[i] } else { a[i] }), "less");
            let and = map::<I>(a, b, c, |a, b, c| unsafe { I::select(I::and(I::less(a, b), I::less(b, c)), b, a) });
            same(and, from_fn(|i| if a[i] < b[i] && b[i] < c[i] { b[i] } else { a[i] }), "and");
            // Fused or not.
            let sum = map::<I>(a, b, c, |a, b, c| unsafe { I::mul_add(a, b, c) });
            for i in 0..N {
                let expected = [a[i].mul_add(b[i], c[i]), a[i] * b[i] + c[i]];
                assert!(expected.iter().any(|&x| alike(sum[i], x)), "mul_add: {:e} for {expected:?}", sum[i]);
            }
        }
    }
    on_every_set!(check);
}

#[test]
fn any_sees_each_lane() {
    fn check<I: Isa>() {
        for lane in 0..=I::LANES {
            let mut a = [1.0; N];
            a[..I::LANES].iter_mut().skip(lane).take(1).for_each(|x| *x = -1.0);
            // SAFETY: as in `map`.
            let any = unsafe { I::any(I::less(I::load(a.as_ptr()), I::splat(0.0))) };
            assert_eq!(any, lane < I::LANES, "lane {lane}");
        }
    }
    on_every_set!(check);
}

#[test]
fn rounding_and_powers_of_two() {
    fn check<I: Isa>() {
        let mut rng = StdRng::seed_from_u64(2);
        for n in -200..=128 {
            let a: Lanes = from_fn(|_| rng.random_range(0.5..1.0));
            let x = from_fn(|i| n as f32 + (i as f32 - 8.0) / 16.0);
            let round = map::<I>(x, x, x, |x, _, _| unsafe { I::round(x) });
            assert_eq!(round, x.map(f32::round_ties_even));
            let scaled = map::<I>(a, [n as f32; N], a, |a, n, _| unsafe { I::scale2(a, n) });
            for i in 0..N {
                let expected = f64::from(a[i]) * f64::from(n).exp2();
                let allowed = if n > -125 { 0.0 } else { f64::from(f32::from_bits(1)) };
                assert!((f64::from(scaled[i]) - expected).abs() <= allowed, "{:e} * 2^{n} is not {:e}", a[i], scaled[i]);
            }
        }
        assert!(map::<I>([f32::NAN; N], [f32::NAN; N], [0.0; N], |a, n, _| unsafe { I::scale2(a, n) }).iter().all(|x| x.is_nan()));
    }
    on_every_set!(check);
}

#[test]
fn exponential_and_tangent() {
    fn check<I: Isa>() {
        let mut rng = StdRng::seed_from_u64(3);
        for _ in 0..2000 {
            let x: Lanes = from_fn(|_| rng.random_range(-170.0..1.0));
            let y = map::<I>(x, x, x, |x, _, _| unsafe { exp2::<I>(x) });
            for i in 0..N {
                let expected = f64::from(x[i]).exp2();
                let allowed = 3e-7 * expected + f64::from(f32::from_bits(1));
                assert!((f64::from(y[i]) - expected).abs() <= allowed, "2^{} is not {:e} but {expected:e}", x[i], y[i]);
            }
            let x: Lanes = from_fn(|i| rng.random_range(-1.0..1.0) * [0.01, 1.0, 4.0, 40.0][i % 4]);
            let y = map::<I>(x, x, x, |x, _, _| unsafe { tanh::<I>(x) });
            for i in 0..N {
                let expected = f64::from(x[i]).tanh();
                assert!((f64::from(y[i]) - expected).abs() <= 4e-7 * expected.abs(), "tanh {} is not {:e} but {expected:e}", x[i], y[i]);
            }
        }
        let ends: Lanes = from_fn(|i| [f32::NEG_INFINITY, f32::NAN, -1e30, 0.0][i % 4]);
        same(map::<I>(ends, ends, ends, |x, _, _| unsafe { exp2::<I>(x) }), from_fn(|i| [0.0, f32::NAN, 0.0, 1.0][i % 4]), "exp2");
        let ends: Lanes = from_fn(|i| [f32::NEG_INFINITY, f32::NAN, f32::INFINITY, 1e30][i % 4]);
        same(map::<I>(ends, ends, ends, |x, _, _| unsafe { tanh::<I>(x) }), from_fn(|i| [-1.0, f32::NAN, 1.0, 1.0][i % 4]), "tanh");
    }
    on_every_set!(check);
}

#[test]
fn bf16_pairs() {
    fn check<I: Isa>() {
        let mut rng = StdRng::seed_from_u64(4);
        for round in 0..500u32 {
            let [mut low, high, c]: [Lanes; 3] = from_fn(|_| from_fn(|_| rng.random_range(-4.0..4.0)));
            // A tie, and one bit to either side of it.
            low[..3].copy_from_slice(&[0x3f80_8000, 0x3f81_8000, 0x3f80_8001].map(|bits: u32| f32::from_bits(bits ^ round << 16)));
            low[3..6].copy_from_slice(&[f32::NAN, f32::INFINITY, f32::MAX]);
            let packed = map::<I>(low, high, c, |low, high, _| unsafe { I::pairs(low, high) });
            for i in 0..N {
                let (got, expected) = (packed[i].to_bits() as u16, bf16::from_f32(low[i]));
                assert!(got == expected.to_bits() || expected.is_nan() && bf16::from_bits(got).is_nan(), "{:e} became {got:x}", low[i]);
                assert_eq!((packed[i].to_bits() >> 16) as u16, bf16::from_f32(high[i]).to_bits());
            }
            let [a, b, c]: [[[bf16; 2]; N]; 3] = from_fn(|_| from_fn(|_| from_fn(|_| bf16::from_f32(rng.random_range(-4.0..4.0)))));
            let pack = |x: [[bf16; 2]; N]| x.map(|[low, high]| f32::from_bits(u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16));
            let sums = map::<I>(pack(a), pack(b), c.map(|c| c[0].to_f32()), |a, b, c| unsafe { I::dot_pairs(a, b, c) });
            for i in 0..N {
                let expected = c[i][0].to_f64() + a[i][0].to_f64() * b[i][0].to_f64() + a[i][1].to_f64() * b[i][1].to_f64();
                assert!((f64::from(sums[i]) - expected).abs() <= 1e-5, "{} for {expected}", sums[i]);
            }
        }
    }
    on_every_set!(check, CpuIsa::Avx512Bf16);
}

#[test]
fn every_16_bit_code_decodes() {
    fn check<I: Isa>() {
        let codes: Vec<u16> = (0..=u16::MAX).collect();
        // Odd starts and lengths: neither aligned nor a whole number of vectors.
        for (from, n) in [(0, 65536), (1, 65533), (7, 5), (32765, 16), (3, 0)] {
            let part = &codes[from..from + n];
            let mut out = vec![-7.0; n + 1];
            // SAFETY: `out` has room for n, and the macro asked for the set.
            unsafe { I::f16_to_f32(part.as_ptr(), out.as_mut_ptr(), n) };
            part.iter()
                .zip(&out)
                .for_each(|(&code, &got)| assert!(alike(got, f16::from_bits(code).to_f32_const()), "{code:x} became {got}"));
            assert_eq!(out[n], -7.0);
            // SAFETY: as above.
            unsafe { I::bf16_to_f32(part.as_ptr(), out.as_mut_ptr(), n) };
            part.iter().zip(&out).for_each(|(&code, &got)| assert!(alike(got, bf16::from_bits(code).to_f32()), "{code:x} became {got}"));
            assert_eq!(out[n], -7.0);
        }
    }
    on_every_set!(check);
}

#[test]
fn a_prefetch_takes_any_address() {
    fn check<I: Isa>() {
        // SAFETY: the macro asked for the set; a prefetch never faults.
        [0, 1, 0x1000, usize::MAX].into_iter().for_each(|at| unsafe { I::prefetch(std::ptr::without_provenance(at)) });
    }
    on_every_set!(check);
}
