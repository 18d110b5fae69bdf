//! The numerics module against searches over all codes, the `half` crate, and the values that the ISA documents list.

use cdna_sim::float::{
    Denorm, Fp8Encoding, MiniFloat, Mode, Round, Wide, add_f32, bf16_to_f32, clamp_f16, clamp_f32, class_f32, cvt_f32_fp8, cvt_pk_bf16_f32,
    cvt_pk_f16_f32, cvt_pk_f32_fp8, cvt_pk_fp8_f32, cvt_pkrtz_f16_f32, cvt_scalef32_pk_from, cvt_scalef32_pk_to, e8m0_to_f64, f16_to_f32,
    f32_to_bf16, f32_to_f16, f32_to_i32, f32_to_u32, f64_to_f16, fma_f16, fma_f32, max_f16, max_f32, maximum_f32, med3_f32, min_f16,
    min_f32, minimum_f32, mul_f32, mul_legacy_f32, special,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

const FORMATS: [MiniFloat; 5] = [MiniFloat::E4m3, MiniFloat::E5m2, MiniFloat::E4m3Fnuz, MiniFloat::E5m2Fnuz, MiniFloat::E2m1];

/// Every non-negative finite value of a format, by counting up from zero in steps that double: (value, code) in rising order, then what
/// would follow the largest if the format went on.
fn ladder(format: MiniFloat) -> (Vec<f64>, f64) {
    // (steps per binade, smallest step, largest code)
    let (per_binade, mut step, last) = match format {
        MiniFloat::E4m3 => (8, 2f64.powi(-9), 0x7e),
        MiniFloat::E5m2 => (4, 2f64.powi(-16), 0x7b),
        MiniFloat::E4m3Fnuz => (8, 2f64.powi(-10), 0x7f),
        MiniFloat::E5m2Fnuz => (4, 2f64.powi(-17), 0x7f),
        MiniFloat::E2m1 => (2, 0.5, 0x7),
    };
    let mut values = vec![0.0];
    for code in 1..=last + 1 {
        values.push(values[code - 1] + step);
        if code % per_binade == 0 && code > per_binade {
            step *= 2.0;
        }
    }
    let beyond = values.pop().unwrap();
    (values, beyond)
}

#[test]
fn decoding_counts_up_in_doubling_steps() {
    let largest = [448.0, 57344.0, 240.0, 57344.0, 6.0];
    for (format, largest) in FORMATS.into_iter().zip(largest) {
        let (values, _) = ladder(format);
        assert_eq!(*values.last().unwrap(), largest, "{format:?}");
        let sign_bit = 1u8 << (format.bits() - 1);
        for (code, &value) in values.iter().enumerate() {
            let code = code as u8;
            assert_eq!(f64::from(format.decode(code)), value, "{format:?} {code:#x}");
            if code > 0 {
                assert_eq!(f64::from(format.decode(code | sign_bit)), -value, "{format:?} -{code:#x}");
            }
            assert_eq!(format.table()[usize::from(code)], format.decode(code));
        }
    }
    for nan in [0x7fu8, 0xff] {
        assert!(MiniFloat::E4m3.decode(nan).is_nan());
    }
    for nan in [0x7du8, 0x7e, 0x7f, 0xfd, 0xfe, 0xff] {
        assert!(MiniFloat::E5m2.decode(nan).is_nan());
    }
    assert_eq!(MiniFloat::E5m2.decode(0x7c), f32::INFINITY);
    assert_eq!(MiniFloat::E5m2.decode(0xfc), f32::NEG_INFINITY);
    for format in [MiniFloat::E4m3Fnuz, MiniFloat::E5m2Fnuz] {
        assert_eq!((0..=255u8).filter(|&code| format.decode(code).is_nan()).collect::<Vec<_>>(), [0x80]);
    }
    for format in [MiniFloat::E4m3, MiniFloat::E5m2, MiniFloat::E2m1] {
        assert!(format.decode(1 << (format.bits() - 1)).to_bits() == 0x8000_0000, "{format:?} keeps -0");
    }
}

/// The code that a search over the whole ladder finds.
fn searched(format: MiniFloat, values: &[f64], beyond: f64, x: f64, saturate: bool) -> u8 {
    let sign = if x.is_sign_negative() { 1u8 << (format.bits() - 1) } else { 0 };
    let magnitude = x.abs();
    let mut best = 0;
    for (code, &value) in values.iter().chain([&beyond]).enumerate() {
        let (now, before) = ((value - magnitude).abs(), if best < values.len() { (values[best] - magnitude).abs() } else { f64::MAX });
        if now < before || (now == before && code % 2 == 0) {
            best = code;
        }
    }
    if best < values.len() && magnitude < beyond {
        let fnuz_zero = best == 0 && matches!(format, MiniFloat::E4m3Fnuz | MiniFloat::E5m2Fnuz);
        return if fnuz_zero { 0 } else { sign | best as u8 };
    }
    let saturated = sign | (values.len() - 1) as u8;
    match format {
        MiniFloat::E2m1 => saturated,
        _ if saturate => saturated,
        MiniFloat::E4m3 => sign | 0x7f,
        MiniFloat::E5m2 => sign | 0x7c,
        MiniFloat::E4m3Fnuz | MiniFloat::E5m2Fnuz => 0x80,
    }
}

#[test]
fn encoding_agrees_with_a_search_over_all_codes() {
    let mut rng = StdRng::seed_from_u64(11);
    for format in FORMATS {
        let (values, beyond) = ladder(format);
        let mut inputs =
            vec![0.0, f64::from(f32::MIN_POSITIVE), f64::from(f32::from_bits(1)), f64::from(f32::MAX), f64::INFINITY, beyond, 2.0 * beyond];
        // Each value, each tie, and both neighbours of each tie, as f32 sees them.
        for pair in values.windows(2).map(|w| (w[0], w[1])).chain([(*values.last().unwrap(), beyond)]) {
            let tie = (pair.0 + pair.1) / 2.0;
            let tie32 = tie as f32;
            assert_eq!(f64::from(tie32), tie);
            inputs.extend([pair.0, tie, f64::from(tie32.next_up()), f64::from(tie32.next_down())]);
        }
        inputs.extend((0..100_000).map(|_| f64::from(f32::from_bits(rng.random::<u32>() & 0x7fff_ffff))).filter(|x| !x.is_nan()));
        let spread = values.last().unwrap() * 1.2;
        inputs.extend((0..100_000).map(|_| f64::from((rng.random::<f64>().powi(6) * spread) as f32)));
        for x in inputs.into_iter().flat_map(|x| [x, -x]) {
            for saturate in [false, true] {
                let want = searched(format, &values, beyond, x, saturate);
                assert_eq!(format.encode(x, saturate), want, "{format:?} {x:e} saturate {saturate}");
            }
        }
    }
}

#[test]
fn every_code_survives_a_round_trip() {
    for format in FORMATS {
        for code in 0..=format.mask() {
            let value = format.decode(code);
            let back = format.encode(f64::from(value), false);
            if value.is_nan() {
                assert!(format.decode(back).is_nan());
            } else {
                assert_eq!(back, code, "{format:?} {code:#x}");
            }
        }
    }
}

#[test]
fn overflow_follows_the_documents_table() {
    let nan = f64::NAN;
    let table = [
        // format, ties and infinities: input, FP16_OVFL = 0, FP16_OVFL = 1
        (MiniFloat::E4m3, 464.0, 0x7e, 0x7e),
        (MiniFloat::E4m3, 464.0001, 0x7f, 0x7e),
        (MiniFloat::E4m3, f64::NEG_INFINITY, 0xff, 0xfe),
        (MiniFloat::E4m3, nan, 0x7f, 0x7f),
        (MiniFloat::E5m2, 61439.0, 0x7b, 0x7b),
        (MiniFloat::E5m2, 61440.0, 0x7c, 0x7b),
        (MiniFloat::E5m2, f64::NEG_INFINITY, 0xfc, 0xfb),
        (MiniFloat::E5m2, nan, 0x7f, 0x7f),
        (MiniFloat::E4m3Fnuz, 247.9, 0x7f, 0x7f),
        (MiniFloat::E4m3Fnuz, 248.0, 0x80, 0x7f),
        (MiniFloat::E4m3Fnuz, f64::NEG_INFINITY, 0x80, 0xff),
        (MiniFloat::E4m3Fnuz, nan, 0x80, 0x80),
        (MiniFloat::E5m2Fnuz, 61440.0, 0x80, 0x7f),
        (MiniFloat::E5m2Fnuz, -0.0, 0x00, 0x00),
        (MiniFloat::E4m3Fnuz, -1e-9, 0x00, 0x00),
        (MiniFloat::E4m3, -1e-9, 0x80, 0x80),
        (MiniFloat::E2m1, 5.0, 0x6, 0x6),
        (MiniFloat::E2m1, 5.01, 0x7, 0x7),
        (MiniFloat::E2m1, -1e30, 0xf, 0xf),
        (MiniFloat::E2m1, 0.25, 0x0, 0x0),
        (MiniFloat::E2m1, 0.75, 0x2, 0x2),
        (MiniFloat::E2m1, -0.1, 0x8, 0x8),
    ];
    for (format, x, open, saturated) in table {
        assert_eq!(format.encode(x, false), open, "{format:?} {x}");
        assert_eq!(format.encode(x, true), saturated, "{format:?} {x} saturating");
    }
    assert_eq!([Fp8Encoding::Ocp.fp8(), Fp8Encoding::Ocp.bf8()], [MiniFloat::E4m3, MiniFloat::E5m2]);
    assert_eq!([Fp8Encoding::Fnuz.fp8(), Fp8Encoding::Fnuz.bf8()], [MiniFloat::E4m3Fnuz, MiniFloat::E5m2Fnuz]);
}

#[test]
fn halves_agree_with_the_half_crate() {
    for code in 0..=u16::MAX {
        let (ours, theirs) = (f16_to_f32(code), half::f16::from_bits(code).to_f32());
        assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "f16 {code:#x}");
        assert_eq!(bf16_to_f32(code).to_bits(), u32::from(code) << 16);
        if !ours.is_nan() {
            assert_eq!(f32_to_f16(ours, Round::NearestEven, false), code);
            assert_eq!(f32_to_bf16(bf16_to_f32(code)), if bf16_to_f32(code).is_nan() { code | 0x40 } else { code });
        }
    }
    let mut rng = StdRng::seed_from_u64(12);
    let ties = (0..0x7c00u16).map(|c| (f64::from(f16_to_f32(c)) + f64::from(f16_to_f32(c + 1)).min(65536.0)) / 2.0).map(|t| t as f32);
    let ties = ties.flat_map(|t| [t, t.next_up(), t.next_down(), -t]);
    let random = (0..1_000_000).map(|i| {
        let bits: u32 = rng.random();
        f32::from_bits(if i % 2 == 0 { bits } else { bits & 0x8fff_ffff | 0x3000_0000 })
    });
    for x in ties.chain(random).filter(|x| !x.is_nan()) {
        assert_eq!(f32_to_f16(x, Round::NearestEven, false), half::f16::from_f32(x).to_bits(), "{x:e}");
        assert_eq!(f32_to_bf16(x), half::bf16::from_f32(x).to_bits(), "{x:e}");
        let toward_zero = f16_to_f32(f32_to_f16(x, Round::TowardZero, false));
        let above = f16_to_f32(f32_to_f16(x, Round::Up, false));
        let below = f16_to_f32(f32_to_f16(x, Round::Down, false));
        assert!(below <= x && x <= above && (x.is_infinite() || f16_gap_is_one(below, above)), "{x:e} {below:e} {above:e}");
        assert_eq!(
            toward_zero,
            if x.is_infinite() {
                x
            } else if x > 0.0 {
                below
            } else {
                above
            },
            "{x:e}"
        );
    }
    let quieted = f32_to_bf16(f32::from_bits(0xff80_0001));
    assert_eq!(quieted, 0xffc0);
    assert_eq!(f32_to_f16(f32::from_bits(0x7f80_0001), Round::NearestEven, true), 0x7e00);
    assert_eq!([f32_to_f16(65520.0, Round::NearestEven, false), f32_to_f16(-65520.0, Round::NearestEven, true)], [0x7c00, 0xfbff]);
    assert_eq!(f32_to_f16(f32::INFINITY, Round::NearestEven, true), 0x7c00);
    assert_eq!(f32_to_f16(1e30, Round::TowardZero, false), 0x7bff);
    assert_eq!([f32_to_f16(1e30, Round::Down, false), f32_to_f16(-1e30, Round::Down, false)], [0x7bff, 0xfc00]);
}

/// Whether two F16 values are the same or neighbours.
fn f16_gap_is_one(below: f32, above: f32) -> bool {
    let ordered = |x: f32| {
        let bits = i32::from(half::f16::from_f32(x).to_bits());
        if bits & 0x8000 != 0 { -(bits & 0x7fff) } else { bits }
    };
    (ordered(above) - ordered(below)) <= 1
}

#[test]
fn packed_conversions_place_halves_and_bytes() {
    let mode = Mode::default();
    let (x, y) = (1.5f32.to_bits(), (-2.0f32).to_bits());
    assert_eq!(cvt_pk_fp8_f32(0xaabb_ccdd, x, y, false, MiniFloat::E4m3, &mode), 0xaabb_c03c);
    assert_eq!(cvt_pk_fp8_f32(0xaabb_ccdd, x, y, true, MiniFloat::E4m3, &mode), 0xc03c_ccdd);
    assert_eq!(cvt_pk_fp8_f32(0, x, y, false, MiniFloat::E4m3Fnuz, &mode), 0xc844);
    assert_eq!(cvt_pk_f32_fp8(0xc844_0000, true, MiniFloat::E4m3Fnuz), [x, y]);
    assert_eq!(cvt_pk_f32_fp8(0xc844_0000, false, MiniFloat::E4m3Fnuz), [0, 0]);
    assert_eq!(cvt_f32_fp8(0xc844_0000, 3, MiniFloat::E4m3Fnuz), y);
    let overflow = 1e6f32.to_bits();
    let saturating = Mode { fp16_ovfl: true, ..mode };
    assert_eq!(cvt_pk_fp8_f32(0, overflow, overflow, false, MiniFloat::E4m3, &mode), 0x7f7f);
    assert_eq!(cvt_pk_fp8_f32(0, overflow, overflow, false, MiniFloat::E4m3, &saturating), 0x7e7e);
    assert_eq!(cvt_pk_bf16_f32(x, y, &mode), 0xc000_3fc0);
    assert_eq!(cvt_pk_f16_f32(x, y, &mode), 0xc000_3e00);
    let third = (1.0f32 / 3.0).to_bits();
    assert_eq!([cvt_pk_f16_f32(third, third, &mode) & 0xffff, cvt_pkrtz_f16_f32(third, third, &mode) & 0xffff], [0x3555, 0x3555]);
    let two_thirds = (2.0f32 / 3.0).to_bits();
    assert_eq!([cvt_pk_f16_f32(two_thirds, 0, &mode), cvt_pkrtz_f16_f32(two_thirds, 0, &mode)], [0x3955, 0x3955]);
    let close = 1.9999f32.to_bits();
    assert_eq!([cvt_pk_f16_f32(close, 0, &mode), cvt_pkrtz_f16_f32(close, 0, &mode)], [0x4000, 0x3fff]);
    let small = 2f32.powi(-20).to_bits();
    let flushing = Mode { denorm_16_64: Denorm::FlushBoth, ..mode };
    assert_eq!([cvt_pkrtz_f16_f32(small, 0, &mode), cvt_pkrtz_f16_f32(small, 0, &flushing)], [0x10, 0]);
}

#[test]
fn scaled_conversions_round_once() {
    let mode = Mode::default();
    let mut rng = StdRng::seed_from_u64(13);
    for _ in 0..200_000 {
        let format = [MiniFloat::E4m3, MiniFloat::E5m2, MiniFloat::E2m1][rng.random_range(0..3)];
        let exponent = rng.random_range(0..255u32);
        // The fraction bits of the scale operand do not count.
        let scale = exponent << 23 | rng.random::<u32>() & 0x7f_ffff;
        let power = 2f64.powi(exponent as i32 - 127);
        let x = [(); 2].map(|_| (rng.random_range(-8.0..8.0f64) * power) as f32);
        let parts = if format == MiniFloat::E2m1 { 4 } else { 2 };
        let part = rng.random_range(0..parts);
        let old: u32 = rng.random();
        let packed = cvt_scalef32_pk_to(old, x.map(f32::to_bits), scale, part, Wide::F32, format, &mode);
        let width = 2 * format.bits();
        let field = packed >> (part * width);
        for (i, x) in x.into_iter().enumerate() {
            let code = (field >> (i as u32 * format.bits())) as u8 & format.mask();
            assert_eq!(code, format.encode(f64::from(x) / power, false));
        }
        let kept = !(((1u64 << width) - 1) << (part * width)) as u32;
        assert_eq!(packed & kept, old & kept);
        let back = cvt_scalef32_pk_from(packed, scale, part, format, Wide::F32, &mode);
        for (i, bits) in back.into_iter().enumerate() {
            let code = (field >> (i as u32 * format.bits())) as u8 & format.mask();
            assert_eq!(bits, ((f64::from(format.decode(code)) * power) as f32).to_bits());
        }
    }
    // E2M1 codes 1..7 are 0.5 1 1.5 2 3 4 6.
    assert_eq!(cvt_scalef32_pk_from(0x72, 128 << 23, 0, MiniFloat::E2m1, Wide::F16, &mode)[0], 0x4a00_4000);
    assert_eq!(cvt_scalef32_pk_from(0x7200, 128 << 23, 1, MiniFloat::E2m1, Wide::Bf16, &mode)[0], 0x4140_4000);
    assert_eq!(cvt_scalef32_pk_to(0, [0x4a00_4000, 0], 128 << 23, 2, Wide::F16, MiniFloat::E2m1, &mode), 0x72_0000);
    assert_eq!(cvt_scalef32_pk_to(0, [0x4140_4000, 0], 128 << 23, 0, Wide::Bf16, MiniFloat::E2m1, &mode), 0x72);
    assert!(f32::from_bits(cvt_scalef32_pk_from(0x11, 255 << 23, 0, MiniFloat::E2m1, Wide::F32, &mode)[0]).is_nan());
    assert_eq!([e8m0_to_f64(0), e8m0_to_f64(127), e8m0_to_f64(254)], [2f64.powi(-127), 1.0, 2f64.powi(127)]);
    assert!(e8m0_to_f64(255).is_nan());
}

#[test]
fn minimum_and_maximum_follow_ieee_mode_and_zero_signs() {
    let ieee = Mode::default();
    let plain = Mode { ieee: false, ..ieee };
    let (signaling, quiet) = (0x7f80_0001u32, 0x7fc0_0000u32);
    let (zero, minus_zero, one, two) = (0u32, 0x8000_0000u32, 1f32.to_bits(), 2f32.to_bits());
    for mode in [&ieee, &plain] {
        assert_eq!(
            [min_f32(one, two, mode), max_f32(one, two, mode), min_f32(two, one, mode), max_f32(two, one, mode)],
            [one, two, one, two]
        );
        assert_eq!([min_f32(quiet, one, mode), max_f32(one, quiet, mode)], [one, one]);
        assert_eq!([min_f32(zero, minus_zero, mode), min_f32(minus_zero, zero, mode)], [minus_zero; 2]);
        assert_eq!([max_f32(zero, minus_zero, mode), max_f32(minus_zero, zero, mode)], [zero; 2]);
        assert_eq!([maximum_f32(quiet, one, mode), minimum_f32(one, signaling, mode)], [quiet, signaling | 0x40_0000]);
        assert_eq!([maximum_f32(minus_zero, zero, mode), minimum_f32(zero, minus_zero, mode)], [zero, minus_zero]);
    }
    assert_eq!([min_f32(signaling, one, &ieee), min_f32(signaling, one, &plain)], [signaling | 0x40_0000, one]);
    assert_eq!([max_f32(one, signaling, &ieee), max_f32(one, signaling, &plain)], [signaling | 0x40_0000, one]);
    assert_eq!([min_f16(0x7d01, 0x3c00, &ieee), min_f16(0x7d01, 0x3c00, &plain)], [0x7f01, 0x3c00]);
    assert_eq!([max_f16(0x8000, 0, &ieee), max_f16(0xbc00, 0x3c00, &ieee)], [0, 0x3c00]);
    let mut rng = StdRng::seed_from_u64(14);
    for _ in 0..10_000 {
        let mut x = [(); 3].map(|_| rng.random_range(-3..3i32) as f32);
        let bits = x.map(f32::to_bits);
        x.sort_by(f32::total_cmp);
        assert_eq!(f32::from_bits(med3_f32(bits[0], bits[1], bits[2], &ieee)), x[1]);
    }
    assert_eq!(med3_f32(two, quiet, one, &ieee), one);
    // The idiom that clamps before a conversion: NaN goes to the smaller bound's side, infinities to the bounds.
    assert_eq!(med3_f32(f32::INFINITY.to_bits(), two, one, &ieee), two);
}

#[test]
fn clamp_and_class() {
    let dx10 = Mode::default();
    let keep = Mode { dx10_clamp: false, ..dx10 };
    assert_eq!(
        [clamp_f32(-0.0, &dx10).to_bits(), clamp_f32(0.25, &dx10).to_bits(), clamp_f32(7.0, &dx10).to_bits()],
        [0, 0x3e80_0000, 0x3f80_0000]
    );
    assert!(clamp_f32(f32::NAN, &dx10) == 0.0 && clamp_f32(f32::NAN, &keep).is_nan());
    assert_eq!(
        [clamp_f16(0x8000, &dx10), clamp_f16(0x4000, &dx10), clamp_f16(0x3800, &dx10), clamp_f16(0x7e00, &keep)],
        [0, 0x3c00, 0x3800, 0x7e00]
    );
    let classes = [0x7f80_0001u32, 0x7fc0_0000, 0xff80_0000, 0xbf80_0000, 0x8000_0001, 0x8000_0000, 0, 1, 0x3f80_0000, 0x7f80_0000];
    for (i, x) in classes.into_iter().enumerate() {
        for bit in 0..10 {
            assert_eq!(class_f32(x, 1 << bit), i == bit, "{x:#x} bit {bit}");
        }
    }
}

#[test]
fn mode_fields_and_denormals() {
    let mode = Mode::from_bits(1 << 23 | 1 << 9 | 0b01_10_11_01);
    assert_eq!((mode.round_32, mode.round_16_64), (Round::Up, Round::TowardZero));
    assert_eq!((mode.denorm_32, mode.denorm_16_64), (Denorm::FlushSources, Denorm::FlushResults));
    assert_eq!((mode.fp16_ovfl, mode.ieee, mode.dx10_clamp), (true, true, false));
    let keep = Mode::default();
    assert!(keep.ieee && keep.dx10_clamp && !keep.fp16_ovfl && keep.denorm_32 == Denorm::Keep);
    let flush = Mode::from_bits(0x300);
    let (tiny, one, min) = (0x8000_0001u32, 1f32.to_bits(), f32::MIN_POSITIVE.to_bits());
    assert_eq!([mul_f32(tiny, one, &keep), mul_f32(tiny, one, &flush)], [tiny, 0x8000_0000]);
    assert_eq!([mul_f32(min, 0.5f32.to_bits(), &keep), mul_f32(min, 0.5f32.to_bits(), &flush)], [0x40_0000, 0]);
    assert_eq!([add_f32(tiny, one, &keep), fma_f32(tiny, one, tiny, &flush)], [one, 0x8000_0000]);
    assert_eq!([mul_legacy_f32(0, f32::NAN.to_bits(), &keep), mul_legacy_f32(one, one, &keep)], [0, one]);
    let results_only = Mode { denorm_32: Denorm::FlushResults, ..keep };
    assert_eq!(mul_f32(tiny, 2f32.powi(120).to_bits(), &results_only), (-2f32.powi(-29)).to_bits());
}

#[test]
fn f16_fma_rounds_once() {
    let mode = Mode::default();
    let mut rng = StdRng::seed_from_u64(15);
    for _ in 0..500_000 {
        let [a, b, c]: [u16; 3] = [(); 3].map(|_| rng.random());
        let x = [a, b, c].map(|bits| f64::from(half::f16::from_bits(bits).to_f32()));
        if x.iter().any(|x| !x.is_finite()) {
            continue;
        }
        // In units of 2^-48 everything is an integer below 2^82.
        let unit = 2f64.powi(48);
        let exact = (x[0] * 2f64.powi(24)) as i128 * (x[1] * 2f64.powi(24)) as i128 + (x[2] * unit) as i128;
        let got = fma_f16(a, b, c, &mode);
        assert_eq!(got & 0x7fff, nearest_f16(exact.unsigned_abs()), "{a:#x} {b:#x} {c:#x}");
        if exact != 0 {
            assert_eq!(got >> 15 == 1, exact < 0);
        }
    }
}

/// The F16 magnitude nearest to `units` of 2^-48, by binary search over codes; ties to even.
fn nearest_f16(units: u128) -> u16 {
    let value = |code: u16| match code {
        0x7c00.. => 65536u128 << 48,
        _ => (f64::from(half::f16::from_bits(code).to_f32()) * 2f64.powi(48)) as u128,
    };
    let (mut low, mut high) = (0u16, 0x7c00u16);
    if units >= value(high) {
        return high;
    }
    while high - low > 1 {
        let middle = (low + high) / 2;
        if value(middle) <= units { low = middle } else { high = middle }
    }
    let (down, up) = (units - value(low), value(high) - units);
    if down < up || (down == up && low % 2 == 0) { low } else { high }
}

#[test]
fn special_functions() {
    let f = |bits: u32| f32::from_bits(bits);
    let mut rng = StdRng::seed_from_u64(16);
    for _ in 0..100_000 {
        let x: f32 = rng.random_range(-120.0..120.0);
        let positive = x.abs() + 0.001;
        let close = |got: u32, want: f64| ((f64::from(f(got)) - want) / want).abs() <= 2f64.powi(-24);
        assert!(close(special::exp_f32(x.to_bits()), f64::from(x).exp2()));
        assert!(close(special::rcp_f32(x.to_bits()), 1.0 / f64::from(x)));
        assert!(close(special::rsq_f32(positive.to_bits()), f64::from(positive).sqrt().recip()));
        assert!(close(special::sqrt_f32(positive.to_bits()), f64::from(positive).sqrt()));
        assert!(close(special::log_f32(positive.to_bits()), f64::from(positive).log2()));
        let turn = std::f64::consts::TAU * f64::from(x);
        assert!((f64::from(f(special::sin_f32(x.to_bits()))) - turn.sin()).abs() < 1e-7);
        assert!((f64::from(f(special::cos_f32(x.to_bits()))) - turn.cos()).abs() < 1e-7);
    }
    assert_eq!([f(special::exp_f32(0xff80_0000)), f(special::exp_f32((-126f32).to_bits()))], [0.0, f32::MIN_POSITIVE]);
    assert_eq!([f(special::exp_f32((-127f32).to_bits())), f(special::exp_f32(128f32.to_bits()))], [0.0, f32::INFINITY]);
    assert_eq!(
        [f(special::log_f32(1)), f(special::log_f32(0)), f(special::rcp_f32(0x8000_0000))],
        [f32::NEG_INFINITY, f32::NEG_INFINITY, f32::NEG_INFINITY]
    );
    assert_eq!([special::rcp_f32(2f32.powi(127).to_bits()), special::rcp_f32(1)], [0, 0x7f80_0000]);
    assert_eq!([special::rsq_f32(0x8000_0000), special::sqrt_f32(0x8000_0000)], [0xff80_0000, 0x8000_0000]);
    assert!(f(special::log_f32((-1f32).to_bits())).is_nan() && f(special::rsq_f32((-1f32).to_bits())).is_nan());
    assert_eq!([f(special::sin_f32(300f32.to_bits())), f(special::cos_f32(300f32.to_bits()))], [0.0, 1.0]);
    let mode = Mode::default();
    let rounded =
        |x: f32| [special::rndne_f32, special::floor_f32, special::ceil_f32, special::trunc_f32].map(|op| f(op(x.to_bits(), &mode)));
    assert_eq!(rounded(2.5), [2.0, 2.0, 3.0, 2.0]);
    assert_eq!(rounded(-3.5), [-4.0, -4.0, -3.0, -3.0]);
    assert_eq!(special::rndne_f32((-0.25f32).to_bits(), &mode), 0x8000_0000);
    assert_eq!(
        [f(special::fract_f32((-1e-9f32).to_bits(), &mode)), f(special::fract_f32(2.75f32.to_bits(), &mode))],
        [1.0 - f32::EPSILON / 2.0, 0.75]
    );
    assert!(f(special::fract_f32(0x7f80_0000, &mode)).is_nan());
    for x in [1.0f32, -0.75, 3e-42, 1e38, 6.5] {
        let (mantissa, exponent) = (special::frexp_mant_f32(x.to_bits()), special::frexp_exp_f32(x.to_bits()));
        assert!((0.5..1.0).contains(&f(mantissa).abs()), "{x:e}");
        assert_eq!(f(special::ldexp_f32(mantissa, exponent, &mode)), x);
    }
    assert_eq!([special::frexp_exp_f32(0), special::frexp_exp_f32(0x7f80_0000)], [0, 0]);
    assert_eq!(
        [f(special::ldexp_f32(1f32.to_bits(), -150, &mode)), f(special::ldexp_f32(1f32.to_bits(), i32::MAX, &mode))],
        [0.0, f32::INFINITY]
    );
    assert_eq!(special::ldexp_f32(0x3fff_ffff, -127, &mode), 0x0080_0000);
}

#[test]
fn integer_conversions_saturate() {
    let cases =
        [(f32::NAN, 0, 0), (1e30, i32::MAX, u32::MAX), (-1e30, i32::MIN, 0), (-1.9, -1, 0), (2.9, 2, 2), (f32::NEG_INFINITY, i32::MIN, 0)];
    for (x, signed, unsigned) in cases {
        assert_eq!((f32_to_i32(x), f32_to_u32(x)), (signed, unsigned), "{x}");
    }
}

/// Around every midpoint of two neighbours, by as little as f64 can tell: the rounding is one step.
#[test]
fn doubles_round_to_halves_once() {
    for code in 0..0x7c00u16 {
        let value = f64::from(f16_to_f32(code));
        let next = if code == 0x7bff { 65536.0 } else { f64::from(f16_to_f32(code + 1)) };
        let middle = (value + next) / 2.0;
        let even = code + (code & 1);
        for sign in [0, 0x8000] {
            let round = |x: f64| f64_to_f16(if sign == 0 { x } else { -x });
            assert_eq!(round(value), sign | code);
            assert_eq!(round(middle.next_down()), sign | code, "{code:#x}");
            assert_eq!(round(middle), sign | even, "{code:#x}");
            assert_eq!(round(middle.next_up()), sign | (code + 1), "{code:#x}");
        }
    }
    assert_eq!([f64_to_f16(f64::INFINITY), f64_to_f16(1e300), f64_to_f16(-1e-300), f64_to_f16(f64::NAN)], [0x7c00, 0x7c00, 0x8000, 0x7e00]);
}
