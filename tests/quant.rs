//! The codecs against independent definitions of the formats and a brute-force nearest search in f64.

use candle_paged_attn::quant::{fp8, mxfp4};
use half::{bf16, f16};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// A format, defined by formula rather than by our tables.
struct Format {
    mantissa: u32,
    bias: i32,
    /// Magnitude codes `0..=largest` are finite.
    largest: u32,
}

const OCP: Format = Format { mantissa: 3, bias: 7, largest: 0x7E };
const FNUZ: Format = Format { mantissa: 3, bias: 8, largest: 0x7F };
const E2M1: Format = Format { mantissa: 1, bias: 1, largest: 7 };

impl Format {
    fn value(&self, code: u32) -> f64 {
        let (exponent, fraction) = ((code >> self.mantissa) as i32, f64::from(code % (1 << self.mantissa)) / f64::from(1 << self.mantissa));
        if exponent == 0 { fraction * 2f64.powi(1 - self.bias) } else { (1.0 + fraction) * 2f64.powi(exponent - self.bias) }
    }

    /// The nearest code by trying all, ties to the even one.
    fn nearest(&self, magnitude: f64) -> u32 {
        let magnitude = magnitude.min(self.value(self.largest));
        (0..=self.largest)
            .min_by(|&a, &b| {
                let (da, db) = ((self.value(a) - magnitude).abs(), (self.value(b) - magnitude).abs());
                da.total_cmp(&db).then((a % 2).cmp(&(b % 2)))
            })
            .unwrap()
    }
}

/// Every f16 and bf16, every midpoint and value of the formats with their f32 neighbours, and random bit patterns.
fn sweep() -> Vec<f32> {
    let mut values: Vec<f32> = (0..=u16::MAX).flat_map(|b| [f16::from_bits(b).to_f32(), bf16::from_bits(b).to_f32()]).collect();
    for format in [OCP, FNUZ, E2M1] {
        for code in 0..=format.largest {
            let (a, b) = (format.value(code), format.value(code + 1));
            for exact in [a, (a + b) / 2.0] {
                let bits = (exact as f32).to_bits();
                for near in [bits.saturating_sub(1), bits, bits + 1] {
                    values.extend([f32::from_bits(near), -f32::from_bits(near)]);
                }
            }
        }
    }
    let mut rng = StdRng::seed_from_u64(11);
    values.extend((0..100_000).map(|_| f32::from_bits(rng.random())));
    values.extend((0..100_000).map(|_| rng.random_range(-8.0f32..8.0)));
    values.extend((0..50_000).map(|_| rng.random_range(-0.05f32..0.05)));
    values.extend([0.0, -0.0, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(1), f32::MIN_POSITIVE]);
    values
}

#[test]
fn decoding_every_code_follows_the_formats() {
    for code in 0..=255u8 {
        let sign = if code >= 0x80 { -1.0 } else { 1.0 };
        let (ocp, fnuz) = (fp8::decode_e4m3(code), fp8::decode_e4m3_fnuz(code));
        if code & 0x7F == 0x7F {
            assert!(ocp.is_nan(), "{code:#x}");
        } else {
            assert_eq!(f64::from(ocp), sign * OCP.value(u32::from(code & 0x7F)), "{code:#x}");
            assert_eq!(ocp.is_sign_negative(), code >= 0x80);
        }
        if code == 0x80 {
            assert!(fnuz.is_nan());
        } else {
            assert_eq!(f64::from(fnuz), sign * FNUZ.value(u32::from(code & 0x7F)), "{code:#x}");
        }
        let e8m0 = mxfp4::decode_e8m0(code);
        if code == 255 { assert!(e8m0.is_nan()) } else { assert_eq!(f64::from(e8m0), 2f64.powi(i32::from(code) - 127)) }
    }
    let e2m1: Vec<f32> = (0..16).map(mxfp4::decode_e2m1).collect();
    assert_eq!(e2m1, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]);
    assert!(e2m1[8].is_sign_negative());
    assert_eq!(mxfp4::decode_e2m1(0xF3), 1.5, "only the low nibble counts");
    assert_eq!((fp8::decode_e4m3(0x7E), fp8::decode_e4m3_fnuz(0x7F)), (fp8::E4M3_MAX, fp8::E4M3_FNUZ_MAX));
}

#[test]
fn encoding_takes_the_nearest_code() {
    for value in sweep() {
        if value.is_nan() {
            assert_eq!((fp8::encode_e4m3(value), fp8::encode_e4m3_fnuz(value), mxfp4::encode_e2m1(value)), (0x7F, 0x80, 7));
            continue;
        }
        let (magnitude, negative) = (f64::from(value.abs()), value.is_sign_negative());
        let signed = |code: u32, sign: u32| (if negative { code | sign } else { code }) as u8;
        assert_eq!(fp8::encode_e4m3(value), signed(OCP.nearest(magnitude), 0x80), "{value:e}");
        assert_eq!(mxfp4::encode_e2m1(value), signed(E2M1.nearest(magnitude), 8), "{value:e}");
        let fnuz = FNUZ.nearest(magnitude);
        assert_eq!(fp8::encode_e4m3_fnuz(value), if fnuz == 0 { 0 } else { signed(fnuz, 0x80) }, "{value:e}");
    }
}

#[test]
fn encoding_a_decoded_code_gives_it_back() {
    for code in 0..=255u8 {
        assert_eq!(fp8::encode_e4m3(fp8::decode_e4m3(code)), if code == 0xFF { 0x7F } else { code });
        assert_eq!(fp8::encode_e4m3_fnuz(fp8::decode_e4m3_fnuz(code)), code);
        assert_eq!(mxfp4::encode_e2m1(mxfp4::decode_e2m1(code)), code & 0xF);
    }
}

#[test]
fn saturation_ties_and_subnormals() {
    for (value, code) in [(448.0, 0x7E), (464.0, 0x7E), (1e30, 0x7E), (f32::INFINITY, 0x7E), (f32::NEG_INFINITY, 0xFE), (-449.0, 0xFE)] {
        assert_eq!(fp8::encode_e4m3(value), code, "{value}");
    }
    let step = 2f32.powi(-9);
    for (value, code) in
        [(step / 2.0, 0), (step * 0.51, 1), (step * 1.5, 2), (step * 2.5, 2), (step * 7.5, 8), (-step / 2.0, 0x80), (-0.0, 0x80)]
    {
        assert_eq!(fp8::encode_e4m3(value), code, "{value:e}");
    }
    for (value, code) in
        [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (5.1, 7), (7.0, 7), (1e9, 7), (-5.0, 14)]
    {
        assert_eq!(mxfp4::encode_e2m1(value), code, "{value}");
    }
    assert_eq!(fp8::encode_e4m3_fnuz(-2f32.powi(-11)), 0, "FNUZ has no negative zero");
    assert_eq!(fp8::encode_e4m3_fnuz(f32::INFINITY), 0x7F);
}

#[test]
fn ocp_moves_to_fnuz_exactly() {
    for code in 0..=255u8 {
        let moved = fp8::decode_e4m3_fnuz(fp8::ocp_to_fnuz(code)) * fp8::FNUZ_SCALE_FACTOR;
        let original = fp8::decode_e4m3(code);
        assert!(moved == original || (moved.is_nan() && original.is_nan()), "{code:#x}: {moved} {original}");
        if code != 0x80 && original.is_finite() {
            assert_eq!(fp8::ocp_to_fnuz(code), code);
        }
    }
}

#[test]
fn agrees_with_candles_own_fp8_type() {
    for value in sweep().into_iter().filter(|v| !v.is_nan()) {
        assert_eq!(fp8::encode_e4m3(value), float8::F8E4M3::from_f32(value).to_bits(), "{value:e}");
    }
}

#[test]
fn token_scales() {
    assert_eq!(fp8::token_scale(0.0), 1.0);
    assert_eq!(fp8::token_scale(448.0), 1.0);
    assert_eq!(fp8::token_scale(7.0), 7.0 / 448.0);
    for tiny in [f32::from_bits(1), f32::MIN_POSITIVE, 1e-36] {
        let scale = fp8::token_scale(tiny);
        assert!(scale >= f32::MIN_POSITIVE && (tiny / scale).is_finite());
    }
    assert_eq!(fp8::encode_e4m3(f32::MAX / fp8::token_scale(f32::MAX)), 0x7E);
    assert!(fp8::token_scale(f32::INFINITY).is_infinite());
}

/// Independent block conversion: search the exponent by comparing with powers of two in f64.
fn reference_scale(values: &[f32]) -> u8 {
    let absmax = values.iter().fold(0f64, |m, v| m.max(f64::from(v.abs())));
    if values.iter().any(|v| !v.is_finite()) {
        return 255;
    }
    if absmax == 0.0 {
        return 127;
    }
    let floor_log2 = (-150..=127).rev().find(|&e| absmax >= 2f64.powi(e)).unwrap();
    ((floor_log2 - 2).max(-127) + 127) as u8
}

#[test]
fn mxfp4_blocks() {
    let mut rng = StdRng::seed_from_u64(12);
    for round in 0..20_000 {
        let magnitude = 2f32.powi(rng.random_range(-149..=127));
        let mut values: [f32; 32] = std::array::from_fn(|_| rng.random_range(-1.0f32..1.0) * magnitude);
        match round % 50 {
            0 => values = [0.0; 32],
            1 => values[rng.random_range(0..32)] = f32::NAN,
            2 => values[rng.random_range(0..32)] = f32::NEG_INFINITY,
            3 => values[31] = f32::MAX,
            4 => values = std::array::from_fn(|_| if rng.random() { magnitude } else { -magnitude }),
            _ => {}
        }
        let mut packed = [0xAA; 16];
        let scale = mxfp4::quantize_block(&values, &mut packed);
        assert_eq!(scale, reference_scale(&values), "{values:?}");
        let mut back = [0.0; 32];
        mxfp4::dequantize_block(&packed, scale, &mut back);
        if scale == 255 {
            assert!(back.iter().all(|v| v.is_nan()));
            continue;
        }
        let factor = 2f64.powi(i32::from(scale) - 127);
        for (i, &value) in values.iter().enumerate() {
            let code = E2M1.nearest(f64::from(value.abs()) / factor);
            let nibble = if i % 2 == 0 { packed[i / 2] & 0xF } else { packed[i / 2] >> 4 };
            assert_eq!(u32::from(nibble & 7), code, "element {i}: {value:e} scale {scale}");
            assert_eq!(f64::from(back[i].abs()), (E2M1.value(code) * factor) as f32 as f64);
            assert!(back[i] == 0.0 || back[i].is_sign_negative() == value.is_sign_negative());
        }
    }
}
