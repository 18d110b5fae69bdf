//! The op's contracts, one at a time.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::plan::{DecodePlan, PlanRequest};
use candle_paged_attn::registry::{Arch, CpuIsa};
use candle_paged_attn::{
    DecodeOptions, KvScale, PagedDecode, PlanChoice, explain_call, merge_attention_states, paged_decode, paged_decode_into,
    paged_decode_with_lse,
};
use testkit::assert_same;
use testkit::bits::bits;
use testkit::cases::{Case, CaseSpec, Poison, Scales};
use testkit::reference::floats;

fn decode(case: &Case, options: &DecodeOptions) -> Result<Tensor> {
    paged_decode(&case.q, &case.key_cache, &case.value_cache, &case.block_tables, &case.context_lens, options)
}

/// The error of a call that must fail, with every fragment found in it.
fn refuses(result: Result<Tensor>, fragments: &[&str]) {
    let message = result.expect_err("the call should have been refused").to_string();
    for fragment in fragments {
        assert!(message.contains(fragment), "{message:?} does not name {fragment:?}");
    }
}

#[test]
fn every_layout_dtype_and_query_length() {
    for layout in CacheLayout::ALL {
        for (kv_dtype, scales) in [
            (KvDtype::F32, Scales::None),
            (KvDtype::F16, Scales::None),
            (KvDtype::Bf16, Scales::None),
            (KvDtype::Fp8, Scales::Scalar),
            (KvDtype::Fp8, Scales::PerToken),
            (KvDtype::Mxfp4, Scales::None),
        ] {
            if kv_dtype == KvDtype::Mxfp4 && matches!(layout, CacheLayout::Vllm | CacheLayout::Shuffled) {
                continue;
            }
            for query_len in [1, 4, 16] {
                let spec = CaseSpec {
                    layout,
                    kv_dtype,
                    scales,
                    q_dtype: DType::BF16,
                    query_lens: vec![query_len],
                    lens: vec![0, 1, 255, 256, 257, 1027],
                    head_dim: 128,
                    ..CaseSpec::default()
                };
                spec.build().and_then(|case| case.check()).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
            }
        }
    }
}

#[test]
fn extreme_sizes() {
    let base = CaseSpec { lens: vec![70, 3], ..CaseSpec::default() };
    let sizes = [
        CaseSpec { head_dim: 8, page_size: 1, ..base.clone() },
        CaseSpec { head_dim: 1024, page_size: 8, ..base.clone() },
        CaseSpec { head_dim: 576, page_size: 1024, kv_dtype: KvDtype::Bf16, q_dtype: DType::BF16, ..base.clone() },
        CaseSpec { head_dim: 192, page_size: 7, kv_dtype: KvDtype::Fp8, scales: Scales::PerToken, ..base.clone() },
        CaseSpec { group: 71, kv_heads: 1, ..base.clone() },
        CaseSpec { group: 1, kv_heads: 32, head_dim: 40, ..base.clone() },
        CaseSpec { group: 16, kv_heads: 1, query_lens: vec![300, 1], lens: vec![900, 2000], kv_dtype: KvDtype::Bf16, ..base },
    ];
    for spec in sizes {
        spec.build().and_then(|case| case.check()).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
    }
}

#[test]
fn a_peaked_softmax_stays_accurate() {
    for (kv_dtype, q_dtype) in
        [(KvDtype::F32, DType::F32), (KvDtype::Bf16, DType::BF16), (KvDtype::Bf16, DType::F32), (KvDtype::Fp8, DType::F16)]
    {
        let spec = CaseSpec { kv_dtype, q_dtype, q_factor: 32.0, query_lens: vec![4], lens: vec![777, 1024], ..CaseSpec::default() };
        spec.build().and_then(|case| case.check()).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
    }
}

#[test]
fn nan_in_a_later_querys_token_stays_out_of_the_earlier_ones() -> Result<()> {
    // Query 0 of 4 may not see token 99, which only query 3 attends.
    for kv_dtype in [KvDtype::F32, KvDtype::Bf16, KvDtype::F16] {
        let spec = CaseSpec { kv_dtype, query_lens: vec![4], lens: vec![100], page_size: 128, kv_heads: 1, ..CaseSpec::default() };
        let case = spec.build()?;
        let clean = case.run()?.0;
        let page = case.first_page()?;
        for (name, poisoned) in [("key", &case.key_cache), ("value", &case.value_cache)] {
            let nan = Tensor::full(f32::NAN, (1, 1, 1, spec.head_dim), &Device::Cpu)?.to_dtype(kv_dtype.dtype())?;
            let cache = poisoned.slice_assign(&[page..page + 1, 99..100, 0..1, 0..spec.head_dim], &nan)?;
            let mut case = case.clone();
            if name == "key" {
                case.key_cache = cache
            } else {
                case.value_cache = cache
            }
            let out = case.run()?.0;
            let earlier = |t: &Tensor| t.narrow(0, 0, 3).map(|t| bits(&t));
            assert_same!(earlier(&out)?, earlier(&clean)?, "{name} {kv_dtype:?}");
            assert!(floats(&out.narrow(0, 3, 1)?)?.iter().all(|v| v.is_nan()), "the query that owns the NaN shows it");
        }
    }
    Ok(())
}

#[test]
fn poison_never_changes_a_bit() -> Result<()> {
    for kv_dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16] {
        let spec = CaseSpec { kv_dtype, lens: vec![1, 255, 0, 301], query_lens: vec![3], window: Some(100), ..CaseSpec::default() };
        let nan = spec.build()?.run()?;
        let inf = CaseSpec { poison: Poison::Infinity, ..spec }.build()?.run()?;
        assert_same!(bits(&nan.0), bits(&inf.0));
        assert_same!(bits(&nan.1), bits(&inf.1));
    }
    Ok(())
}

#[test]
fn the_thread_count_never_changes_a_bit() -> Result<()> {
    let case = CaseSpec { lens: vec![5000, 37, 2600], kv_dtype: KvDtype::Bf16, query_lens: vec![2], ..CaseSpec::default() }.build()?;
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| case.run().map(|(out, lse)| (bits(&out), bits(&lse))))
    };
    let one = on(1)?;
    assert_eq!(one, on(2)?);
    assert_eq!(one, on(5)?);
    Ok(())
}

#[test]
fn empty_contexts_and_batches() -> Result<()> {
    let spec = CaseSpec { lens: vec![0, -5, 9], sinks: true, max_partitions: Some(1), ..CaseSpec::default() };
    let (out, lse) = spec.build()?.run()?;
    assert!(floats(&out.narrow(0, 0, 2)?)?.iter().all(|v| *v == 0.0));
    assert!(floats(&lse.narrow(0, 0, 2)?)?.iter().all(|v| *v == f64::NEG_INFINITY));
    spec.build()?.check()?;
    let empty = CaseSpec { lens: vec![], ..CaseSpec::default() }.build()?;
    assert_eq!(empty.run()?.0.dims(), [0, 8, 64]);
    Ok(())
}

#[test]
fn four_dimensional_queries_of_any_strides() -> Result<()> {
    let case = CaseSpec { query_lens: vec![4], ..CaseSpec::default() }.build()?;
    let want = case.run()?.0;
    let q4 = case.q.reshape((3, 4, 8, 64))?;
    // A query stored [query_len, batch, heads, dim]: its two leading dims do not fold into one stride.
    let swapped = q4.transpose(0, 1)?.contiguous()?.transpose(0, 1)?;
    let mut four = case.clone();
    for q in [q4, swapped] {
        four.q = q;
        let out = decode(&four, &case.options)?;
        assert_eq!(out.dims(), [3, 4, 8, 64]);
        assert_same!(bits(&out.reshape((12, 8, 64))?), bits(&want));
    }
    Ok(())
}

#[test]
fn strided_outputs() -> Result<()> {
    let case = CaseSpec { query_lens: vec![2], kv_dtype: KvDtype::Bf16, q_dtype: DType::BF16, ..CaseSpec::default() }.build()?;
    let want = case.run()?.0;
    let args = (&case.key_cache, &case.value_cache, &case.block_tables, &case.context_lens, &case.options);
    let wide = Tensor::full(f32::NAN, (6, 10, 64), &Device::Cpu)?.to_dtype(DType::BF16)?;
    let out = wide.narrow(1, 1, 8)?;
    paged_decode_into(&out, &case.q, args.0, args.1, args.2, args.3, args.4)?;
    assert_same!(bits(&out), bits(&want));
    for outside in [wide.narrow(1, 0, 1)?, wide.narrow(1, 9, 1)?] {
        assert!(floats(&outside)?.iter().all(|v| v.is_nan()), "elements outside the view keep their values");
    }
    let swapped = Tensor::full(f32::NAN, (2, 3, 8, 64), &Device::Cpu)?.to_dtype(DType::BF16)?.transpose(0, 1)?;
    paged_decode_into(&swapped, &case.q.reshape((3, 2, 8, 64))?, args.0, args.1, args.2, args.3, args.4)?;
    assert_same!(bits(&swapped.reshape((6, 8, 64))?), bits(&want));
    let shared = paged_decode_into(&case.q, &case.q, args.0, args.1, args.2, args.3, args.4);
    refuses(shared.map(|()| want), &["out", "shares its storage", "q"]);
    Ok(())
}

#[test]
fn merged_parts_equal_the_whole() -> Result<()> {
    // A context of 300 tokens whose first 8 pages of 16 are one part, the rest another; the sinks go to one part only.
    let spec = CaseSpec { lens: vec![300, 300], sinks: true, poison: Poison::NaN, ..CaseSpec::default() };
    let case = spec.build()?;
    let (whole, whole_lse) = case.run()?;
    let part = |from: usize, tokens: u32, sinks: bool| {
        let pages = case.block_tables.dim(1)? - from;
        let tables = case.block_tables.narrow(1, from, pages)?;
        let lens = Tensor::new(&[tokens, tokens], &Device::Cpu)?;
        let options = DecodeOptions { sinks: if sinks { case.options.sinks.clone() } else { None }, ..case.options.clone() };
        paged_decode_with_lse(&case.q, &case.key_cache, &case.value_cache, &tables, &lens, &options)
    };
    let (a, a_lse) = part(0, 128, false)?;
    let (b, b_lse) = part(8, 172, true)?;
    let (merged, lse) = merge_attention_states(&[a, b], &[a_lse, b_lse])?;
    case.expected()?.compare(&merged, Some(&lse), 2e-5, 2e-5)?;
    // An empty part (its out may be anything) leaves the other bit for bit.
    let nothing = Tensor::full(f32::NAN, whole.shape(), &Device::Cpu)?;
    let minus_infinity = Tensor::full(f32::NEG_INFINITY, whole_lse.shape(), &Device::Cpu)?;
    let (same, same_lse) = merge_attention_states(&[nothing, whole.clone()], &[minus_infinity, whole_lse.clone()])?;
    assert_same!((bits(&same), bits(&same_lse)), (bits(&whole), bits(&whole_lse)));
    assert!(merge_attention_states(&[], &[]).is_err());
    assert!(merge_attention_states(std::slice::from_ref(&whole), &[]).is_err());
    Ok(())
}

#[test]
fn plans_given_free_and_default_agree() -> Result<()> {
    let case = CaseSpec { lens: vec![3000, 0, 700], query_lens: vec![2], ..CaseSpec::default() }.build()?;
    case.check()?;
    let lens = [3000, 0, 700];
    let request = PlanRequest { max_partitions: Some(3), ..PlanRequest::new(&lens, &[2], 2) };
    let plan = DecodePlan::new(&request, &Arch::cpu(CpuIsa::Portable), &Device::Cpu)?;
    for choice in [PlanChoice::Given(plan.clone()), PlanChoice::Free] {
        let mut case = case.clone();
        case.options.plan = choice;
        case.check()?;
    }
    // A plan made for other lengths would silently skip or repeat tokens.
    let mut stale = case.clone();
    stale.context_lens = Tensor::new(&[3000u32, 0, 300], &Device::Cpu)?;
    stale.options.plan = PlanChoice::Given(plan);
    refuses(stale.run().map(|(out, _)| out), &["plan row 2", "made for other lengths"]);
    Ok(())
}

#[test]
fn a_call_explains_itself() -> Result<()> {
    let case = CaseSpec { lens: vec![3000, 0, 700], ..CaseSpec::default() }.build()?;
    let summary = explain_call(&case.q, &case.key_cache, &case.value_cache, &case.block_tables, &case.context_lens, &case.options)?;
    assert!(summary.tasks >= 2, "{summary:?}");
    assert!(summary.selection.kernel().starts_with("cpu_") && !summary.selection.reason.to_string().is_empty(), "{summary:?}");
    Ok(())
}

#[test]
fn wrong_arguments_are_named() -> Result<()> {
    let case = CaseSpec { lens: vec![40, 50], ..CaseSpec::default() }.build()?;
    let device = &Device::Cpu;
    let with = |edit: &dyn Fn(&mut Case)| {
        let mut case = case.clone();
        edit(&mut case);
        decode(&case, &case.options)
    };
    let tensor = |data: &[u32]| Tensor::new(data, device).unwrap();
    refuses(with(&|c| c.q = c.q.to_dtype(DType::F64).unwrap()), &["q", "F64"]);
    refuses(with(&|c| c.q = c.q.narrow(1, 0, 7).unwrap()), &["q", "7", "2 KV heads"]);
    refuses(with(&|c| c.q = c.q.narrow(2, 0, 32).unwrap()), &["q", "head_dim 32", "64"]);
    refuses(with(&|c| c.q = c.q.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap()), &["q", "contiguous"]);
    refuses(with(&|c| c.q = c.q.narrow(0, 0, 1).unwrap()), &["q", "1 rows", "batch 2"]);
    refuses(with(&|c| c.key_cache = c.key_cache.to_dtype(DType::I64).unwrap()), &["key_cache", "I64"]);
    refuses(with(&|c| c.value_cache = c.value_cache.to_dtype(DType::BF16).unwrap()), &["value_cache", "BF16", "F32"]);
    refuses(with(&|c| c.value_cache = c.value_cache.narrow(3, 0, 32).unwrap().contiguous().unwrap()), &["value_cache", "32", "64"]);
    refuses(with(&|c| c.options.layout = CacheLayout::Vllm), &["key_cache", "vllm", "5 dims"]);
    refuses(with(&|c| c.context_lens = tensor(&[40, 5000])), &["context_lens", "sequence 1", "5000"]);
    refuses(with(&|c| c.context_lens = tensor(&[40, u32::MAX])), &["context_lens", "sequence 1", "4294967295"]);
    refuses(with(&|c| c.context_lens = tensor(&[40])), &["context_lens", "[1]", "[2]"]);
    refuses(with(&|c| c.context_lens = c.context_lens.to_dtype(DType::I64).unwrap()), &["context_lens", "I64"]);
    refuses(with(&|c| c.block_tables = c.block_tables.to_dtype(DType::F32).unwrap()), &["block_tables", "F32"]);
    let ids = Tensor::new(&[[0u32, 1, 2, 0], [0, 9000, 1, 2]], device)?;
    refuses(with(&|c| c.block_tables = ids.clone()), &["block_tables", "9000", "sequence 1", "column 1", "cache of"]);
    let pages = case.key_cache.dim(0)? as u32;
    let first_past = Tensor::new(&[[0u32, 1, 2, 0], [0, pages, 1, 2]], device)?;
    refuses(with(&|c| c.block_tables = first_past.clone()), &["block_tables", &format!("page id {pages} "), "sequence 1"]);
    let last = Tensor::new(&[[0u32, 1, 2, 0], [0, pages - 1, 1, 2]], device)?;
    with(&|c| c.block_tables = last.clone())?;
    let negative = Tensor::new(&[[0i32, 1, 2, 0], [0, 1, -1, 2]], device)?;
    refuses(with(&|c| c.block_tables = negative.clone()), &["block_tables", "-1", "sequence 1", "column 2"]);
    refuses(with(&|c| c.options.softmax_scale = Some(f32::NAN)), &["softmax_scale", "NaN"]);
    refuses(with(&|c| c.options.softcap = Some(0.0)), &["softcap", "0"]);
    refuses(with(&|c| c.options.window = Some(0)), &["window", "0"]);
    refuses(with(&|c| c.options.max_partitions = Some(0)), &["max_partitions"]);
    refuses(with(&|c| c.options.workgroup_budget = Some(0)), &["workgroup_budget"]);
    refuses(with(&|c| c.options.sinks = Some(Tensor::zeros(3, DType::F32, device).unwrap())), &["sinks", "[8]", "[3]"]);
    refuses(with(&|c| c.options.k_scale = KvScale::Scalar(2.0)), &["k_scale", "F32"]);
    refuses(with(&|c| c.options.query_start = Some(tensor(&[0, 2]))), &["query_start", "[3]", "[2]"]);
    refuses(with(&|c| c.options.query_start = Some(tensor(&[0, 3, 2]))), &["query_start", "sequence 1", "3", "2"]);
    refuses(with(&|c| c.options.query_start = Some(tensor(&[0, 1, 3]))), &["query_start", "3", "2 rows"]);
    refuses(with(&|c| c.options.query_start = Some(tensor(&[1, 1, 2]))), &["query_start", "1"]);
    let op =
        PagedDecode { block_tables: case.block_tables.clone(), context_lens: case.context_lens.clone(), options: case.options.clone() };
    assert_same!(bits(&case.q.apply_op3(&case.key_cache, &case.value_cache, op)?), bits(&case.run()?.0));
    Ok(())
}

#[test]
fn quantized_caches_refuse_the_wrong_scales() -> Result<()> {
    let fp8 = CaseSpec { kv_dtype: KvDtype::Fp8, scales: Scales::PerToken, ..CaseSpec::default() }.build()?;
    let mut wrong = fp8.clone();
    wrong.options.v_scale = KvScale::Tensor(Tensor::zeros((2, 2, 2), DType::F32, &Device::Cpu)?);
    refuses(decode(&wrong, &wrong.options), &["v_scale", "[2, 2, 2]"]);
    wrong.options.v_scale = KvScale::Scalar(f32::INFINITY);
    refuses(decode(&wrong, &wrong.options), &["v_scale", "inf"]);
    let mut mxfp4 = CaseSpec { kv_dtype: KvDtype::Mxfp4, ..CaseSpec::default() }.build()?;
    mxfp4.options.k_scale = KvScale::None;
    refuses(decode(&mxfp4, &mxfp4.options), &["k_scale", "MXFP4", "E8M0"]);
    Ok(())
}

#[test]
fn an_f32_query_is_not_rounded() -> Result<()> {
    for (kv_dtype, scales) in [(KvDtype::Bf16, Scales::None), (KvDtype::Fp8, Scales::PerToken), (KvDtype::Mxfp4, Scales::None)] {
        let case = CaseSpec { kv_dtype, scales, q_dtype: DType::F32, lens: vec![500, 30], ..CaseSpec::default() }.build()?;
        let (out, lse) = case.run()?;
        case.expected()?.compare(&out, Some(&lse), 1e-5, 1e-5)?;
    }
    Ok(())
}
