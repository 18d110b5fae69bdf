//! The op's contracts beyond single forms: sizes at their bounds, what a call must not depend on, calls that agree with each other, random calls.

use candle::{DType, Device, IndexOp, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::{DecodeOptions, KvScale, cuda, explain_call, paged_decode_into};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use testkit::cases::{Case, CaseSpec, Scales};
use testkit::contracts;
use testkit::random::{gpu_calls, stored};
use testkit::reference::floats;

use crate::support::*;

#[test]
fn extreme_sizes() {
    let Some(device) = gpu("extreme_sizes") else { return };
    let base = CaseSpec { lens: vec![70, 3], ..CaseSpec::default() };
    let bf16 = CaseSpec { kv_dtype: KvDtype::Bf16, q_dtype: DType::BF16, ..base.clone() };
    let sizes = [
        CaseSpec { head_dim: 8, page_size: 1, ..base.clone() },
        CaseSpec { head_dim: 1024, page_size: 8, ..base.clone() },
        CaseSpec { head_dim: 576, page_size: 1024, ..bf16.clone() },
        CaseSpec { head_dim: 192, page_size: 7, kv_dtype: KvDtype::Fp8, scales: Scales::PerToken, ..base.clone() },
        CaseSpec { group: 71, kv_heads: 1, ..base.clone() },
        CaseSpec { group: 71, kv_heads: 1, head_dim: 128, ..bf16.clone() },
        CaseSpec { group: 1, kv_heads: 32, head_dim: 40, ..base },
        CaseSpec { group: 16, kv_heads: 1, head_dim: 128, query_lens: vec![300, 1], lens: vec![900, 2000], ..bf16 },
    ];
    sizes.iter().for_each(|spec| {
        check(&device, spec);
    });
}

#[test]
fn pages_larger_than_a_tile() {
    let Some(device) = gpu("pages_larger_than_a_tile") else { return };
    for page_size in [256, 512, 1024] {
        check(&device, &CaseSpec { page_size, lens: vec![1300, 511, 3], ..spec(KvDtype::Bf16, Scales::None) });
    }
}

#[test]
fn many_rows_are_split_over_blocks() {
    let Some(device) = gpu("many_rows_are_split_over_blocks") else { return };
    contracts::many_rows(&spec(KvDtype::Bf16, Scales::None)).iter().for_each(|spec| {
        check(&device, spec);
    });
}

#[test]
fn a_peaked_softmax_stays_accurate() {
    let Some(device) = gpu("a_peaked_softmax_stays_accurate") else { return };
    for (kv_dtype, scales) in forms() {
        for query_lens in [vec![1], vec![4]] {
            check(&device, &CaseSpec { q_factor: 32.0, query_lens, lens: vec![777, 1024], ..spec(kv_dtype, scales) });
        }
    }
}

/// Decode and verify of one row in every form of a cache.
fn one_row(tokens: i64) -> impl Iterator<Item = CaseSpec> {
    decode_and_verify().map(move |base| CaseSpec { page_size: 128, lens: vec![tokens], ..base })
}

/// Token 5 is some powers of two above all others, which together weigh as much: each of them is next to nothing beside it.
#[test]
fn a_long_tail_behind_a_peak_is_not_lost() -> Result<()> {
    let Some(device) = gpu("a_long_tail_behind_a_peak_is_not_lost") else { return Ok(()) };
    for tail in one_row(9000) {
        for bits in [11.0, 13.0, 15.0] {
            check_call(&device, &peaked(&tail, bits)?);
        }
    }
    Ok(())
}

#[test]
fn large_scores_are_as_good_however_they_add_up() -> Result<()> {
    let Some(device) = gpu("large_scores_are_as_good_however_they_add_up") else { return Ok(()) };
    let of_both_signs: fn(usize) -> f32 = |channel| if channel % 4 == 0 { -0.5 } else { 1.5 };
    // Half of the score is three channels'.
    let outliers: fn(usize) -> f32 = |channel| if (1..4).contains(&channel) { 64.0 / 3.0 } else { 64.0 / 125.0 };
    for base in one_row(900) {
        for key in [of_both_signs, outliers] {
            for bits in [7.0, 11.0, 19.0, 24.0, 31.0, 38.0] {
                check_call(&device, &rivals(&base, bits, key)?);
            }
        }
    }
    Ok(())
}

/// Token 9 weighs about as much as the peak at token 5, whose key is the same in every channel; its own is `key` times that: what is lost in sums of many
/// products tells them apart.
fn rivals(spec: &CaseSpec, bits: f64, key: fn(usize) -> f32) -> Result<Case> {
    let case = peaked(spec, bits)?;
    let (page, dtype) = (case.first_page()?, case.key_cache.dtype());
    let places = |token| [page..page + 1, token..token + 1, 0..1, 0..spec.head_dim];
    let keys = case.key_cache.to_dtype(DType::F32)?;
    let factors: Vec<f32> = (0..spec.head_dim).map(key).collect();
    let rival = keys.i((page..page + 1, 5..6))?.broadcast_mul(&Tensor::new(factors, &Device::Cpu)?)?;
    let key_cache = keys.slice_assign(&places(9), &rival)?.to_dtype(dtype)?;
    let k_scale = match &case.options.k_scale {
        KvScale::Tensor(scales) => {
            let peak = scales.i((page..page + 1, 0..1, 5..6))?;
            KvScale::Tensor(scales.slice_assign(&[page..page + 1, 0..1, 9..10], &peak)?)
        }
        other => other.clone(),
    };
    let options = DecodeOptions { k_scale, ..case.options.clone() };
    Ok(Case { key_cache, options, ..case })
}

/// A case whose keys are next to nothing but for token 5, with queries that are all positive.
fn peaked(spec: &CaseSpec, bits: f64) -> Result<Case> {
    let case = spec.build()?;
    let q = case.q.abs()?;
    let length = (q.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()? as f64) * spec.head_dim as f64 / q.elem_count() as f64;
    let page = case.first_page()?;
    let scale = match &case.options.k_scale {
        KvScale::None => 1.0,
        KvScale::Scalar(scale) => *scale as f64,
        KvScale::Tensor(scales) => scales.i((page, 0, 5))?.to_scalar::<f32>()? as f64,
    };
    let top = bits * std::f64::consts::LN_2 * (spec.head_dim as f64).sqrt() / (length * scale);
    let peak = Tensor::full(top as f32, (1, 1, 1, spec.head_dim), &Device::Cpu)?;
    let small = (case.key_cache.to_dtype(DType::F32)? * 0.02)?;
    let key = small.slice_assign(&[page..page + 1, 5..6, 0..1, 0..spec.head_dim], &peak)?.to_dtype(case.key_cache.dtype())?;
    Ok(Case { q, key_cache: key, ..case })
}

/// Of 4 queries only the last attends token 99, and with a window of 50 only the first token 47.
#[test]
fn nan_stays_out_of_the_rows_that_do_not_attend_it() -> Result<()> {
    let Some(device) = gpu("nan_stays_out_of_the_rows_that_do_not_attend_it") else { return Ok(()) };
    // Tensor cores keep K out, in the tiles of decode and of verify; V too what computes without them.
    let tensor_cores = forms().map(|(kv_dtype, scales)| spec(kv_dtype, scales)).into_iter();
    let tensor_cores =
        tensor_cores.flat_map(|form| [form.clone(), CaseSpec { group: 16, ..form }]).map(|form| (form, &["key", "k_scale"][..]));
    let plain = [
        spec(KvDtype::F32, Scales::None),
        CaseSpec { head_dim: 80, ..spec(KvDtype::Fp8, Scales::PerToken) },
        CaseSpec { q_dtype: DType::F32, ..spec(KvDtype::Bf16, Scales::None) },
    ]
    .map(|form| (form, &["key", "value", "k_scale", "v_scale"][..]));
    for (form, sides) in tensor_cores.chain(plain) {
        let base = CaseSpec { query_lens: vec![4], lens: vec![100], page_size: 128, kv_heads: 1, ..form };
        for side in sides.iter().filter(|side| base.scales == Scales::PerToken || !side.ends_with("scale")) {
            check_isolated(&device, &base, side, 99, 3)?;
            check_isolated(&device, &CaseSpec { window: Some(50), ..base.clone() }, side, 99, 3)?;
            check_isolated(&device, &CaseSpec { window: Some(50), ..base.clone() }, side, 47, 0)?;
        }
    }
    Ok(())
}

/// Panics unless NaN in `side` of `token` is in the rows of query `owner` of 4, and changes no bit of the others.
fn check_isolated(device: &Device, spec: &CaseSpec, side: &str, token: usize, owner: usize) -> Result<()> {
    let mut case = spec.build()?;
    let clean = run(&on(&case, device, Tables::Host)?)?.0;
    let page = case.first_page()?;
    let poison_cache = |cache: &mut Tensor| -> Result<()> {
        let at = [page..page + 1, token..token + 1, 0..1, 0..spec.head_dim];
        let nan = Tensor::full(f32::NAN, (1, 1, 1, spec.head_dim), &Device::Cpu)?;
        *cache = cache.to_dtype(DType::F32)?.slice_assign(&at, &nan)?.to_dtype(spec.kv_dtype.dtype())?;
        Ok(())
    };
    let poison_scale = |scale: &mut KvScale| -> Result<()> {
        let KvScale::Tensor(scale) = scale else { panic!("scales in a tensor") };
        *scale = scale.slice_assign(&[page..page + 1, 0..1, token..token + 1], &Tensor::full(f32::NAN, (1, 1, 1), &Device::Cpu)?)?;
        Ok(())
    };
    match side {
        "key" => poison_cache(&mut case.key_cache)?,
        "value" => poison_cache(&mut case.value_cache)?,
        "k_scale" => poison_scale(&mut case.options.k_scale)?,
        _ => poison_scale(&mut case.options.v_scale)?,
    }
    let out = run(&on(&case, device, Tables::Host)?)?.0;
    for query in 0..4 {
        let row = |t: &Tensor| t.narrow(0, query, 1);
        if query == owner {
            assert!(floats(&row(&out)?)?.iter().all(|v| v.is_nan()), "query {query} attends the NaN in {side} of token {token}: {spec:?}");
        } else {
            assert_same!(bits(&row(&out)?), bits(&row(&clean)?), "query {query}, {side} of token {token}: {spec:?}");
        }
    }
    Ok(())
}

/// Rows of several tasks: an infinity in V is one in its channel, whatever the partial results are stored in, and nothing else.
#[test]
fn an_infinity_stays_in_its_channel() -> Result<()> {
    let Some(device) = gpu("an_infinity_stays_in_its_channel") else { return Ok(()) };
    for (kv_dtype, group, query_len) in [(KvDtype::Bf16, 4, 1), (KvDtype::Bf16, 16, 4), (KvDtype::F16, 4, 1), (KvDtype::F16, 16, 4)] {
        let base = CaseSpec { group, kv_heads: 1, query_lens: vec![query_len], lens: vec![9000], ..spec(kv_dtype, Scales::None) };
        let mut case = base.build()?;
        let clean = run(&on(&case, &device, Tables::Host)?)?.0;
        let page = case.first_page()?;
        let infinity = Tensor::full(f32::INFINITY, (1, 1, 1, 1), &Device::Cpu)?.to_dtype(kv_dtype.dtype())?;
        case.value_cache = case.value_cache.slice_assign(&[page..page + 1, 5..6, 0..1, 3..4], &infinity)?;
        let out = run(&on(&case, &device, Tables::Host)?)?.0;
        for (channel, (with, without)) in floats(&out)?.iter().zip(floats(&clean)?).enumerate() {
            match channel % base.head_dim {
                3 => assert_eq!(*with, f64::INFINITY, "{base:?}"),
                other => assert!((with - without).abs() < 8e-3, "channel {other}: {with}, {without} without the infinity: {base:?}"),
            }
        }
    }
    Ok(())
}

/// V's scales grow and shrink by powers of two along a row, up to 2^30 between its tokens: whatever unit a kernel keeps its output in follows them.
#[test]
fn token_scales_of_all_sizes() -> Result<()> {
    let Some(device) = gpu("token_scales_of_all_sizes") else { return Ok(()) };
    let base = CaseSpec { lens: vec![1300, 70], kv_heads: 1, page_size: 16, ..spec(KvDtype::Fp8, Scales::PerToken) };
    let verify = CaseSpec { query_lens: vec![4], group: 16, ..base.clone() };
    for form in [base, verify] {
        for exponent in [|page: usize| page as i32 % 31, |page: usize| -(page as i32 % 31), |page: usize| (page as i32 * 7) % 41 - 20] {
            let mut case = form.build()?;
            let KvScale::Tensor(scales) = &case.options.v_scale else { panic!("scales in a tensor") };
            let pages = scales.dim(0)?;
            // Pages in the order of the rows' tables.
            let mut factors = vec![1f32; pages];
            for row in case.block_tables.to_vec2::<i32>()? {
                row.iter().enumerate().filter(|(_, id)| **id >= 0).for_each(|(i, &id)| factors[id as usize] = 2f32.powi(exponent(i)));
            }
            let factors = Tensor::from_vec(factors, (pages, 1, 1), &Device::Cpu)?;
            case.options.v_scale = KvScale::Tensor(scales.broadcast_mul(&factors)?);
            check_call(&device, &case);
        }
    }
    Ok(())
}

/// A NaN that is a cache's factor is in every row that attends a token.
#[test]
fn a_factor_that_is_nan_shows() -> Result<()> {
    let Some(device) = gpu("a_factor_that_is_nan_shows") else { return Ok(()) };
    let base = CaseSpec { lens: vec![300, 40], ..spec(KvDtype::Fp8, Scales::ScalarTensor) };
    for form in [base.clone(), CaseSpec { query_lens: vec![4], group: 16, ..base.clone() }, CaseSpec { head_dim: 80, ..base }] {
        for key in [true, false] {
            let mut case = form.build()?;
            let side = if key { &mut case.options.k_scale } else { &mut case.options.v_scale };
            *side = KvScale::Tensor(Tensor::new(&[f32::NAN], &Device::Cpu)?);
            let out = run(&on(&case, &device, Tables::Host)?)?.0;
            assert!(floats(&out)?.iter().all(|v| v.is_nan()), "{} factor: {form:?}", if key { "K's" } else { "V's" });
        }
    }
    Ok(())
}

#[test]
fn poison_never_changes_a_bit() -> Result<()> {
    let Some(device) = gpu("poison_never_changes_a_bit") else { return Ok(()) };
    let call = run_with(&device, Tables::Host);
    let forms = forms().into_iter().chain([(KvDtype::F32, Scales::None)]);
    forms.map(|(kv_dtype, scales)| spec(kv_dtype, scales)).try_for_each(|spec| contracts::poison_changes_nothing(&spec, &call))
}

#[test]
fn empty_contexts_and_caches() -> Result<()> {
    let Some(device) = gpu("empty_contexts_and_caches") else { return Ok(()) };
    let base = spec(KvDtype::Bf16, Scales::None);
    check(&device, &CaseSpec { lens: vec![0, -5, 9], ..base.clone() });
    contracts::empty_contexts_give_zeros(&base, &run_with(&device, Tables::Host))
}

/// Four dims whose first two are rows of one stride are the same call, and so are others: q's and the output's.
#[test]
fn four_dimensional_queries() -> Result<()> {
    let Some(device) = gpu("four_dimensional_queries") else { return Ok(()) };
    let swapped = |t: &Tensor| t.transpose(0, 1)?.contiguous()?.transpose(0, 1);
    // Direct stores and the reducer's, the tensor-core tile and the plain one.
    for (lens, form) in [
        (vec![70, 40, 9], spec(KvDtype::Bf16, Scales::None)),
        (vec![3000, 40, 900], spec(KvDtype::Bf16, Scales::None)),
        (vec![900, 40, 9], CaseSpec { group: 16, ..spec(KvDtype::Fp8, Scales::PerToken) }),
        (vec![900, 40, 9], spec(KvDtype::F32, Scales::None)),
    ] {
        let case = CaseSpec { query_lens: vec![4], lens, ..form }.build()?;
        let (rows, heads, head_dim) = case.q.dims3()?;
        let (want, want_lse) = run(&on(&case, &device, Tables::Host)?)?;
        let four = case.q.reshape((3, 4, heads, head_dim))?;
        for q in [four.clone(), swapped(&four)?] {
            let call = on(&Case { q, ..case.clone() }, &device, Tables::Host)?;
            let (out, lse) = run(&call)?;
            assert_eq!(out.dims(), [3, 4, heads, head_dim]);
            assert_same!((bits(&out), bits(&lse)), (bits(&want), bits(&want_lse)), "{:?}", case.spec);
            let out =
                swapped(&Tensor::full(f32::NAN, (3, 4, heads, head_dim), &Device::Cpu)?.to_dtype(case.q.dtype())?)?.to_device(&device)?;
            paged_decode_into(&out, &call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options)?;
            let out = out.to_device(&Device::Cpu)?.reshape((rows, heads, head_dim))?;
            assert_same!(bits(&out), bits(&want), "into a swapped output: {:?}", case.spec);
        }
    }
    Ok(())
}

#[test]
fn strided_outputs_keep_what_is_between() -> Result<()> {
    let Some(device) = gpu("strided_outputs_keep_what_is_between") else { return Ok(()) };
    let case = CaseSpec { query_lens: vec![2], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let call = on(&case, &device, Tables::Device)?;
    let want = run(&call)?.0;
    let into = |out: &Tensor| {
        paged_decode_into(out, &call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options)
    };
    let wide = Tensor::full(half::bf16::NAN, (6, 10, 128), &Device::Cpu)?.to_device(&device)?;
    into(&wide.narrow(1, 1, 8)?)?;
    let wide = wide.to_device(&Device::Cpu)?;
    assert_same!(bits(&wide.narrow(1, 1, 8)?), bits(&want));
    for outside in [wide.narrow(1, 0, 1)?, wide.narrow(1, 9, 1)?] {
        assert!(floats(&outside)?.iter().all(|v| v.is_nan()), "elements outside the view keep their values");
    }
    Ok(())
}

#[test]
fn merged_parts_equal_the_whole() -> Result<()> {
    let Some(device) = gpu("merged_parts_equal_the_whole") else { return Ok(()) };
    contracts::merged_parts_are_the_whole(&spec(KvDtype::Bf16, Scales::None), &run_with(&device, Tables::Device))
}

#[test]
fn plans_given_free_and_default_agree() -> Result<()> {
    let Some(device) = gpu("plans_given_free_and_default_agree") else { return Ok(()) };
    let (base, arch) = (spec(KvDtype::Bf16, Scales::None), cuda::arch_of(&device)?);
    [Tables::Host, Tables::Device]
        .into_iter()
        .try_for_each(|tables| contracts::plans_agree(&base, &arch, tables == Tables::Host, &run_with(&device, tables)))
}

#[test]
fn a_call_explains_itself() -> Result<()> {
    let Some(device) = gpu("a_call_explains_itself") else { return Ok(()) };
    let case = CaseSpec { lens: vec![3000, 0, 700], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    for tables in [Tables::Host, Tables::Device] {
        let Case { q, key_cache, value_cache, block_tables, context_lens, options, .. } = &on(&case, &device, tables)?;
        let summary = explain_call(q, key_cache, value_cache, block_tables, context_lens, options)?;
        assert!(summary.tasks >= 2, "{summary:?}");
        assert!(summary.selection.kernel().contains("bf16_d128_p16") && !summary.selection.reason.to_string().is_empty(), "{summary:?}");
    }
    Ok(())
}

#[test]
fn scales_in_a_tensor_and_of_one_side() -> Result<()> {
    let Some(device) = gpu("scales_in_a_tensor_and_of_one_side") else { return Ok(()) };
    check(&device, &spec(KvDtype::Fp8, Scales::ScalarTensor));
    // One side has a scale per token, the other one for the cache, or none: decode, verify and the plain tile.
    let base = CaseSpec { lens: vec![300, 40], ..spec(KvDtype::Fp8, Scales::PerToken) };
    let one = Tensor::new(&[1.5f32], &Device::Cpu)?;
    for form in [base.clone(), CaseSpec { query_lens: vec![3], group: 16, ..base.clone() }, CaseSpec { head_dim: 80, ..base.clone() }] {
        for other in [KvScale::Scalar(0.75), KvScale::Tensor(one.clone()), KvScale::None] {
            let mut case = form.build()?;
            case.options.v_scale = other.clone();
            check_call(&device, &case);
            let mut case = form.build()?;
            case.options.k_scale = other;
            check_call(&device, &case);
        }
    }
    let mut case = base.build()?;
    case.options.v_scale = KvScale::Tensor(Tensor::zeros((2, 2, 2), DType::F32, &Device::Cpu)?);
    refuses(run(&on(&case, &device, Tables::Host)?), &["v_scale", "[2, 2, 2]"]);
    case.options.v_scale = KvScale::Scalar(f32::INFINITY);
    refuses(run(&on(&case, &device, Tables::Host)?), &["v_scale", "inf"]);
    let mut mxfp4 = spec(KvDtype::Mxfp4, Scales::None).build()?;
    mxfp4.options.k_scale = KvScale::None;
    refuses(run(&on(&mxfp4, &device, Tables::Host)?), &["k_scale", "MXFP4", "E8M0"]);
    Ok(())
}

#[test]
fn an_f32_query_is_not_rounded() {
    let Some(device) = gpu("an_f32_query_is_not_rounded") else { return };
    for (kv_dtype, scales) in [(KvDtype::Bf16, Scales::None), (KvDtype::Fp8, Scales::PerToken), (KvDtype::Mxfp4, Scales::None)] {
        check(&device, &CaseSpec { q_dtype: DType::F32, lens: vec![500, 30], ..spec(kv_dtype, scales) });
    }
}

fn calls() -> impl Strategy<Value = CaseSpec> {
    let more = [(KvDtype::F32, Scales::None), (KvDtype::Mxfp4, Scales::None), (KvDtype::Fp8, Scales::ScalarTensor)];
    let layouts = |kv| match kv {
        KvDtype::Mxfp4 => vec![CacheLayout::Hnd, CacheLayout::Nhd],
        _ => CacheLayout::ALL.to_vec(),
    };
    gpu_calls(stored(forms().into_iter().chain(more).collect(), layouts).boxed(), 120..270, Just(1.0).boxed())
}

/// The same calls every time, as each wants kernels of its own, which are compiled once; PROPTEST_CASES draws more.
#[test]
fn random_calls_match_the_reference() {
    let Some(device) = gpu("random_calls_match_the_reference") else { return };
    let cases = std::env::var("PROPTEST_CASES").map_or(32, |n| n.parse().expect("PROPTEST_CASES is a number"));
    let config = Config { cases, failure_persistence: None, rng_seed: RngSeed::Fixed(7), ..Config::default() };
    let checked = TestRunner::new(config).run(&calls(), |spec| {
        check(&device, &spec);
        Ok(())
    });
    checked.unwrap_or_else(|e| panic!("{e}"));
}
