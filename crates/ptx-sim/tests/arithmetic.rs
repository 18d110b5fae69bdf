//! Instructions against what Rust computes, on random and odd values.

mod support;

use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use support::run;

/// Values at the edges, then random ones.
fn values() -> Vec<u32> {
    let mut rng = StdRng::seed_from_u64(7);
    let edges = [0, 1, 2, 31, 32, 33, 0x7fff_ffff, 0x8000_0000, u32::MAX, 0x3f80_0000, 0xff80_0000, 0x7f80_0000, 0x7fc0_0000];
    edges.into_iter().chain((0..51).map(|_| rng.random())).collect()
}

/// Pairs `(a, b)` of 64 threads through a body that reads `%r2`, `%r3` and leaves `%r1`.
fn each(body: &str, expected: impl Fn(u32, u32) -> u32) {
    let values = values();
    let load = "mul.wide.u32 %rd2, %r0, 4;\nadd.s64 %rd2, %rd1, %rd2;\nld.global.u32 %r2, [%rd2];\nld.global.u32 %r3, [%rd2+256];\n";
    for shift in [0, 5, 13] {
        let b: Vec<u32> = (0..64).map(|i| values[(i + shift) % 64]).collect();
        let input = [values.clone(), b.clone()].concat();
        let found = run(&format!("{load}{body}"), &input, 64).unwrap();
        for lane in 0..64 {
            let wanted = expected(values[lane], b[lane]);
            let both_nan = f32::from_bits(found[lane]).is_nan() && f32::from_bits(wanted).is_nan();
            assert!(found[lane] == wanted || both_nan, "{body}: {:#x}, {:#x}: {:#x}, {wanted:#x}", values[lane], b[lane], found[lane]);
        }
    }
}

fn floats(f: impl Fn(f32, f32) -> f32) -> impl Fn(u32, u32) -> u32 {
    move |a, b| f(f32::from_bits(a), f32::from_bits(b)).to_bits()
}

#[test]
fn integers() {
    each("add.s32 %r1, %r2, %r3;", u32::wrapping_add);
    each("sub.s32 %r1, %r2, %r3;", u32::wrapping_sub);
    each("mul.lo.s32 %r1, %r2, %r3;", u32::wrapping_mul);
    each("mul.hi.u32 %r1, %r2, %r3;", |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32);
    each("mul.hi.s32 %r1, %r2, %r3;", |a, b| ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32);
    each("mul.wide.s32 %rd3, %r2, %r3;\nshr.u64 %rd3, %rd3, 16;\ncvt.u32.u64 %r1, %rd3;", |a, b| {
        ((i64::from(a as i32) * i64::from(b as i32)) as u64 >> 16) as u32
    });
    each("mad.lo.s32 %r1, %r2, %r3, %r2;", |a, b| a.wrapping_mul(b).wrapping_add(a));
    each("min.s32 %r1, %r2, %r3;", |a, b| (a as i32).min(b as i32) as u32);
    each("max.u32 %r1, %r2, %r3;", u32::max);
    each("div.u32 %r1, %r2, %r3;", |a, b| a.checked_div(b).unwrap_or(u32::MAX));
    each("div.s32 %r1, %r2, %r3;", |a, b| if b == 0 { u32::MAX } else { (a as i32).wrapping_div(b as i32) as u32 });
    each("and.b32 %r1, %r2, %r3;", |a, b| a & b);
    each("xor.b32 %r1, %r2, %r3;", |a, b| a ^ b);
    each("not.b32 %r1, %r2;", |a, _| !a);
    each("neg.s32 %r1, %r2;", |a, _| a.wrapping_neg());
    each("abs.s32 %r1, %r2;", |a, _| (a as i32).unsigned_abs());
    each("shl.b32 %r1, %r2, %r3;", |a, b| a.checked_shl(b).unwrap_or(0));
    each("shr.u32 %r1, %r2, %r3;", |a, b| a.checked_shr(b).unwrap_or(0));
    each("shr.s32 %r1, %r2, %r3;", |a, b| ((a as i32) >> b.min(31)) as u32);
    each("popc.b32 %r1, %r2;", |a, _| a.count_ones());
    each("clz.b32 %r1, %r2;", |a, _| a.leading_zeros());
    each("brev.b32 %r1, %r2;", |a, _| a.reverse_bits());
    each("cvt.s64.s32 %rd3, %r2;\nshr.u64 %rd3, %rd3, 32;\ncvt.u32.u64 %r1, %rd3;", |a, _| ((a as i32) >> 31) as u32);
    each("cvt.u64.u32 %rd3, %r2;\nshr.u64 %rd3, %rd3, 32;\ncvt.u32.u64 %r1, %rd3;", |_, _| 0);
    each("bfi.b32 %r1, %r2, %r3, 8, 12;", |a, b| b & !(0xfff << 8) | (a & 0xfff) << 8);
    each("bfe.u32 %r1, %r2, 8, 12;", |a, _| a >> 8 & 0xfff);
    each("bfe.s32 %r1, %r2, 8, 12;", |a, _| ((a << 12) as i32 >> 20) as u32);
    each("prmt.b32 %r1, %r2, %r3, 0x6240;", |a, b| {
        let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
        u32::from_le_bytes([a[0], b[0], a[2], b[2]])
    });
    each("prmt.b32 %r1, %r2, %r3, 0x8c9d;", |a, b| {
        let sign = |byte: u8| if byte >= 0x80 { 0xff } else { 0 };
        let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
        u32::from_le_bytes([sign(b[1]), sign(a[1]), sign(b[0]), sign(a[0])])
    });
    each("mov.b32 {%h0, %h1}, %r2;\nmov.b32 %r1, {%h1, %h0};", |a, _| a.rotate_left(16));
}

#[test]
fn comparisons_and_predicates() {
    let select = |compare: &str| format!("setp.{compare} %p1, %r2, %r3;\nselp.u32 %r1, 1, 0, %p1;");
    each(&select("lt.s32"), |a, b| ((a as i32) < b as i32).into());
    each(&select("lt.u32"), |a, b| (a < b).into());
    each(&select("eq.s32"), |a, b| (a == b).into());
    let select =
        |compare: &str| format!("mov.b32 %f1, %r2;\nmov.b32 %f2, %r3;\nsetp.{compare}.f32 %p1, %f1, %f2;\nselp.u32 %r1, 1, 0, %p1;");
    let ordered = |f: fn(f32, f32) -> bool| move |a, b| u32::from(f(f32::from_bits(a), f32::from_bits(b)));
    each(&select("lt"), ordered(|a, b| a < b));
    each(&select("ge"), ordered(|a, b| a >= b));
    each(&select("geu"), ordered(|a, b| a >= b || a.is_nan() || b.is_nan()));
    each(&select("neu"), ordered(|a, b| a != b));
    each(&select("ne"), ordered(|a, b| a.partial_cmp(&b).is_some_and(|order| order.is_ne())));
    each(&select("nan"), ordered(|a, b| a.is_nan() || b.is_nan()));
    each("setp.lt.u32 %p1, %r2, %r3;\nsetp.eq.or.u32 %p2, %r2, 0, %p1;\nnot.pred %p3, %p2;\nselp.u32 %r1, 7, 9, %p3;", |a, b| {
        if a < b || a == 0 { 9 } else { 7 }
    });
}

#[test]
fn floats_and_conversions() {
    let of = |body: &str| format!("mov.b32 %f1, %r2;\nmov.b32 %f2, %r3;\n{body}\nmov.b32 %r1, %f0;");
    each(&of("add.f32 %f0, %f1, %f2;"), floats(|a, b| a + b));
    each(&of("mul.f32 %f0, %f1, %f2;"), floats(|a, b| a * b));
    each(&of("fma.rn.f32 %f0, %f1, %f2, %f1;"), floats(|a, b| a.mul_add(b, a)));
    each(&of("div.rn.f32 %f0, %f1, %f2;"), floats(|a, b| a / b));
    each(&of("max.f32 %f0, %f1, %f2;"), floats(f32::max));
    each(&of("neg.f32 %f0, %f1;"), floats(|a, _| -a));
    each(&of("abs.f32 %f0, %f1;"), floats(|a, _| a.abs()));
    each(&of("copysign.f32 %f0, %f1, %f2;"), floats(|a, b| b.copysign(a)));
    each(&of("cvt.rn.f32.s32 %f0, %r2;"), |a, _| (a as i32 as f32).to_bits());
    each("mov.b32 %f1, %r2;\ncvt.rzi.s32.f32 %r1, %f1;", |a, _| f32::from_bits(a) as i32 as u32);
    each("mov.b32 %f1, %r2;\ncvt.rzi.u32.f32 %r1, %f1;", |a, _| f32::from_bits(a) as u32);
    let pair = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
    each("mov.b32 %f1, %r2;\nmov.b32 %f2, %r3;\ncvt.rn.bf16x2.f32 %r1, %f1, %f2;", |a, b| {
        let of = |x| Some(f32::from_bits(x)).filter(|x| !x.is_nan()).map_or(0x7fff, |x| bf16::from_f32(x).to_bits());
        pair(of(b), of(a))
    });
    each("mov.b32 %f1, %r2;\nmov.b32 %f2, %r3;\ncvt.rn.f16x2.f32 %r1, %f1, %f2;", |a, b| {
        let of = |x| Some(f32::from_bits(x)).filter(|x| !x.is_nan()).map_or(0x7fff, |x| f16::from_f32(x).to_bits());
        pair(of(b), of(a))
    });
    each("mov.b32 {%h0, %h1}, %r2;\ncvt.f32.f16 %f0, %h1;\nmov.b32 %r1, %f0;", |a, _| f16::from_bits((a >> 16) as u16).to_f32().to_bits());
}

/// E4M3 both ways against a crate that knows it.
#[test]
fn e4m3() {
    let load = "mul.wide.u32 %rd2, %r0, 4;\nadd.s64 %rd2, %rd1, %rd2;\nld.global.u32 %r2, [%rd2];\n";
    let bytes: Vec<u32> = (0..256).collect();
    let widen = format!("{load}cvt.u16.u32 %h0, %r2;\ncvt.rn.f16x2.e4m3x2 %r1, %h0;\nand.b32 %r1, %r1, 0xffff;");
    for (byte, half) in bytes.iter().zip(run(&widen, &bytes, 256).unwrap()) {
        let (wanted, found) = (float8::F8E4M3::from_bits(*byte as u8).to_f32(), f16::from_bits(half as u16).to_f32());
        assert!(wanted == found || wanted.is_nan() && found.is_nan(), "{byte:#x}: {found}, {wanted}");
    }
    let mut rng = StdRng::seed_from_u64(8);
    let finite: Vec<u32> =
        (0..256).map(|_| f32::to_bits(rng.random_range(-460.0..460.0f32) * 2f32.powi(rng.random_range(-14..1)))).collect();
    let narrow = format!("{load}mov.b32 %f1, %r2;\ncvt.rn.satfinite.e4m3x2.f32 %h0, %f1, 0f00000000;\ncvt.u32.u16 %r1, %h0;");
    for (bits, found) in finite.iter().zip(run(&narrow, &finite, 256).unwrap()) {
        let x = f32::from_bits(*bits);
        assert_eq!(found >> 8, u32::from(float8::F8E4M3::from_f32(x).to_bits()), "{x}");
    }
}

#[test]
fn approximations_take_subnormals_as_zeros() {
    let of = |body: &str| format!("mov.b32 %f1, %r2;\n{body}\nmov.b32 %r1, %f0;");
    let flushed = |x: f32| if x.is_subnormal() { 0f32.copysign(x) } else { x };
    each(&of("ex2.approx.ftz.f32 %f0, %f1;"), floats(move |a, _| flushed((f64::from(flushed(a))).exp2() as f32)));
    each(&of("lg2.approx.ftz.f32 %f0, %f1;"), floats(move |a, _| f64::from(flushed(a)).log2() as f32));
    each(&of("ex2.approx.f32 %f0, %f1;"), floats(|a, _| f64::from(a).exp2() as f32));
    each(&of("rcp.approx.ftz.f32 %f0, %f1;"), floats(move |a, _| flushed(1.0 / flushed(a))));
}

#[test]
fn shuffles_and_votes() {
    let run = |body: &str| run(body, &[], 32).unwrap();
    let lanes = |f: fn(u32) -> u32| (0..32).map(f).collect::<Vec<_>>();
    assert_eq!(run("shfl.sync.bfly.b32 %r1|%p1, %r0, 5, 31, -1;"), lanes(|i| i ^ 5));
    assert_eq!(run("shfl.sync.idx.b32 %r1, %r0, 9, 31, -1;"), lanes(|_| 9));
    assert_eq!(run("shfl.sync.up.b32 %r1, %r0, 3, 0, -1;"), lanes(|i| if i < 3 { i } else { i - 3 }));
    assert_eq!(run("shfl.sync.down.b32 %r1, %r0, 3, 31, -1;"), lanes(|i| if i > 28 { i } else { i + 3 }));
    // Segments of eight lanes.
    assert_eq!(run("shfl.sync.idx.b32 %r1, %r0, 2, 0x181f, -1;"), lanes(|i| i / 8 * 8 + 2));
    assert_eq!(run("shfl.sync.up.b32 %r1|%p1, %r0, 1, 0, -1;\nselp.u32 %r1, 1, 0, %p1;"), lanes(|i| u32::from(i > 0)));
    assert_eq!(run("setp.gt.u32 %p1, %r0, 20;\nvote.sync.ballot.b32 %r1, %p1, -1;"), lanes(|_| 0xffe0_0000));
    assert_eq!(run("sub.s32 %r2, %r0, 9;\nredux.sync.max.u32 %r1, %r2, -1;"), lanes(|_| u32::MAX));
    assert_eq!(run("sub.s32 %r2, %r0, 9;\nredux.sync.max.s32 %r1, %r2, -1;"), lanes(|_| 22));
    assert_eq!(run("redux.sync.add.u32 %r1, %r0, -1;"), lanes(|_| 496));
    assert_eq!(run("setp.gt.u32 %p1, %r0, 30;\nvote.sync.any.pred %p2, %p1, -1;\nselp.u32 %r1, 1, 0, %p2;"), lanes(|_| 1));
}

/// Lanes part at branches, loop each as often as it has to, and meet again.
#[test]
fn lanes_part_and_meet() {
    let body = "
        mov.u32 %r1, 0;
        setp.lt.u32 %p1, %r0, 7;
        @%p1 bra $few;
        mov.u32 %r2, %r0;
    $loop:
        add.s32 %r1, %r1, %r2;
        sub.s32 %r2, %r2, 1;
        setp.ne.s32 %p2, %r2, 0;
        @%p2 bra $loop;
        bra.uni $meet;
    $few:
        mov.u32 %r1, 1000;
    $meet:
        shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1;";
    let sum = |i: u32| if i < 7 { 1000 } else { i * (i + 1) / 2 };
    assert_eq!(run(body, &[], 32).unwrap(), (0..32).map(|i| sum(i ^ 1)).collect::<Vec<_>>());
}

#[test]
fn every_lane_has_its_own_memory() {
    let body = "
        .local .align 16 .b8 own[64];
        mov.u64 %rd2, own;
        and.b32 %r2, %r0, 3;
        mul.wide.u32 %rd3, %r2, 4;
        add.u64 %rd3, %rd2, %rd3;
        st.local.v4.u32 [%rd2], {%r0, %r0, %r0, %r0};
        add.s32 %r3, %r0, 100;
        st.local.u32 [%rd3], %r3;
        ld.local.v2.u32 {%r4, %r5}, [%rd2+8];
        mov.u32 %r1, %r5;";
    let expected: Vec<u32> = (0..64).map(|i| if i % 4 == 3 { i + 100 } else { i }).collect();
    assert_eq!(run(body, &[], 64).unwrap(), expected);
    assert!(run("ld.local.u32 %r1, [0];", &[], 32).is_err());
}

/// A signed value fills the register that it is loaded into.
#[test]
fn loads_extend_signs() {
    let input = [0xffff_fffe, 5, 0x8000_0000, 7];
    let load = |load: &str| {
        format!(
            "and.b32 %r2, %r0, 1;\nmul.wide.u32 %rd2, %r2, 8;\nadd.s64 %rd2, %rd1, %rd2;\n{load}\nshr.u64 %rd3, %rd3, 32;\ncvt.u32.u64 %r1, %rd3;"
        )
    };
    let halves = |wanted: u32| (0..32).map(|_| wanted).collect::<Vec<_>>();
    assert_eq!(run(&load("ld.global.s32 %rd3, [%rd2];"), &input, 32).unwrap(), halves(u32::MAX));
    assert_eq!(run(&load("ld.global.v2.s32 {%rd3, %rd4}, [%rd2];"), &input, 32).unwrap(), halves(u32::MAX));
    assert_eq!(run(&load("ld.global.v2.s32 {_, %rd3}, [%rd2];"), &input, 32).unwrap(), halves(0));
    // A conversion reads the low bits of a wider register.
    assert_eq!(run(&load("ld.global.u32 %rd3, [%rd2];\ncvt.s64.s32 %rd3, %rd3;"), &input, 32).unwrap(), halves(u32::MAX));
    assert_eq!(run(&load("ld.global.u32 %rd3, [%rd2];"), &input, 32).unwrap(), halves(0));
}

#[test]
fn zeros_and_nans() {
    let float = |body: &str| {
        let body = format!(
            "mov.f32 %f1, 0f80000000;\nmov.f32 %f2, 0f00000000;\nmov.f32 %f3, 0f7F800000;\nmov.f32 %f4, 0fFFC00001;\n{body}\nmov.b32 %r1, %f0;"
        );
        run(&body, &[], 32).unwrap()[0]
    };
    for [a, b] in [["%f1", "%f2"], ["%f2", "%f1"]] {
        assert_eq!(float(&format!("min.f32 %f0, {a}, {b};")), 0x8000_0000);
        assert_eq!(float(&format!("max.f32 %f0, {a}, {b};")), 0);
    }
    assert_eq!(float("max.f32 %f0, %f4, %f1;"), 0x8000_0000);
    assert_eq!(float("min.f32 %f0, %f4, %f4;"), 0x7fff_ffff);
    assert_eq!(float("sub.f32 %f0, %f3, %f3;"), 0x7fff_ffff);
    assert_eq!(float("mul.f32 %f0, %f3, %f2;"), 0x7fff_ffff);
    // Not arithmetic: the bits are left alone.
    assert_eq!(float("mov.f32 %f0, %f4;"), 0xffc0_0001);
}
