//! Numbers at the ends of their dtypes, against float64.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::{DecodeOptions, paged_decode_with_lse};
use testkit::reference::{attention, floats};

const CPU: Device = Device::Cpu;

/// One sequence: q of `q` times a random sign pattern, keys and values of `kv`, 40 tokens, 8 channels.
fn check(dtype: DType, q: f32, k: f32, v: f32, options: &DecodeOptions) -> Result<()> {
    let signs = |shape: (usize, usize, usize, usize), size: f32, seed: u32| -> Result<Tensor> {
        let n = shape.0 * shape.1 * shape.2 * shape.3;
        let mut state = seed;
        let values: Vec<f32> = (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if state >> 31 == 0 { size } else { -size * (0.5 + (state >> 16 & 0xff) as f32 / 512.0) }
            })
            .collect();
        Tensor::from_vec(values, shape, &CPU)?.to_dtype(dtype)
    };
    let query = signs((1, 1, 4, 8), q, 1)?.squeeze(0)?;
    let (key, value) = (signs((3, 16, 2, 8), k, 2)?, signs((3, 16, 2, 8), v, 3)?);
    let (tables, lens) = (Tensor::new(&[[2u32, 0, 1]], &CPU)?, Tensor::new(&[40u32], &CPU)?);
    let (out, lse) = paged_decode_with_lse(&query, &key, &value, &tables, &lens, options)?;
    let expected = attention(&query, &key, &value, &tables, &lens, options)?;
    let tolerance = if dtype == DType::F32 { 1e-5 } else { 8e-3 };
    match expected.compare(&out, Some(&lse), tolerance, 1e-5) {
        Ok(_) => Ok(()),
        Err(e) => candle::bail!("{dtype:?} q {q:e} k {k:e} v {v:e}: {e}; got {:?}", &floats(&out)?[..8]),
    }
}

fn report(results: Vec<Result<()>>) {
    let failures: Vec<String> = results.into_iter().filter_map(|r| r.err()).map(|e| e.to_string()).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Scores of 1e4 to 1e12: one key takes all.
#[test]
fn large_scores() {
    let plain = DecodeOptions::default();
    let mut results = vec![];
    for q in [1e2, 1e3, 1e4, 1e5, 1e6] {
        results.push(check(DType::F32, q, q, 1.0, &plain));
        results.push(check(DType::BF16, q, q, 1.0, &plain));
    }
    results.push(check(DType::F16, 65504.0, 65504.0, 1.0, &plain));
    results.push(check(DType::F16, 65504.0, 65504.0, 65504.0, &plain));
    report(results);
}

/// Subnormal keys and values.
#[test]
fn subnormals() {
    let plain = DecodeOptions::default();
    report(vec![check(DType::F32, 1.0, 1e-40, 1.0, &plain), check(DType::F16, 1.0, 6e-8, 1.0, &plain)]);
    report(vec![check(DType::F16, 1.0, 1.0, 6e-8, &plain), check(DType::BF16, 1.0, 1e-40, 1.0, &plain)]);
}

/// Sinks that take everything, or nothing.
#[test]
fn extreme_sinks() {
    let with = |x: f32| DecodeOptions { sinks: Some(Tensor::full(x, 4, &CPU).unwrap()), ..Default::default() };
    report([f32::NEG_INFINITY, -3e38, -1e30, 1e30, 2e38].into_iter().map(|x| check(DType::F32, 1.0, 1.0, 1.0, &with(x))).collect());
}

/// A sink that times log2(e) passes the largest float takes everything all the same; its LSE is the largest that F32 powers of two hold.
#[test]
fn the_largest_sink() -> Result<()> {
    let (q, cache) = (Tensor::ones((1, 2, 8), DType::F32, &CPU)?, Tensor::ones((1, 16, 1, 8), DType::F32, &CPU)?);
    let options = DecodeOptions { sinks: Some(Tensor::full(f32::MAX, 2, &CPU)?), ..Default::default() };
    let (tables, lens) = (Tensor::new(&[[0u32]], &CPU)?, Tensor::new(&[16u32], &CPU)?);
    let (out, lse) = paged_decode_with_lse(&q, &cache, &cache, &tables, &lens, &options)?;
    assert!(floats(&out)?.iter().all(|&x| x == 0.0));
    assert!(floats(&lse)?.iter().all(|&x| x.is_finite() && x > 2e38));
    Ok(())
}

/// Scores of -inf alone have no softmax: both the output and the LSE say so, so that merging does not drop the row.
#[test]
fn scores_of_minus_infinity() -> Result<()> {
    let q = Tensor::full(f32::NEG_INFINITY, (1, 2, 8), &CPU)?;
    let cache = Tensor::ones((1, 16, 1, 8), DType::F32, &CPU)?;
    let (tables, lens) = (Tensor::new(&[[0u32]], &CPU)?, Tensor::new(&[16u32], &CPU)?);
    let (out, lse) = paged_decode_with_lse(&q, &cache, &cache, &tables, &lens, &DecodeOptions::default())?;
    assert!(floats(&out)?.iter().chain(&floats(&lse)?).all(|x| x.is_nan()));
    Ok(())
}

/// Relative L2 of an F32 row. Sums of a million weights are off by 4e-6 in the median of draws, by 1.3e-5 in one of 300.
const F32_BAR: f64 = 2e-5;

/// A context of a million tokens of 8 channels on one page that repeats.
#[test]
fn a_million_tokens() -> Result<()> {
    let (key, value) = (Tensor::randn(0f32, 1., (1, 1024, 1, 8), &CPU)?, Tensor::randn(0f32, 1., (1, 1024, 1, 8), &CPU)?);
    let q = Tensor::randn(0f32, 1., (1, 1, 8), &CPU)?;
    let tables = Tensor::zeros((1, 1024), DType::U32, &CPU)?;
    let lens = Tensor::new(&[1u32 << 20], &CPU)?;
    let options = DecodeOptions::default();
    let (out, lse) = paged_decode_with_lse(&q, &key, &value, &tables, &lens, &options)?;
    attention(&q, &key, &value, &tables, &lens, &options)?.compare(&out, Some(&lse), F32_BAR, 1e-5)?;
    Ok(())
}
