//! The op's contracts, one at a time: over candle's CPU tensors, and over a cache on the device.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::plan::{DecodePlan, PlanRequest};
use candle_paged_attn::rocm;
use candle_paged_attn::{KvScale, PlanChoice, merge_attention_states};
use testkit::cases::{Case, CaseSpec, Poison, Scales};
use testkit::reference::floats;

use crate::support::*;

#[test]
fn every_layout_dtype_and_query_length() {
    for (kv_dtype, scales) in forms() {
        let layouts = match kv_dtype {
            KvDtype::Mxfp4 => [CacheLayout::Hnd, CacheLayout::Nhd],
            _ => [CacheLayout::Shuffled, CacheLayout::Vllm],
        };
        for layout in layouts {
            for query_len in [1, 4, 16] {
                let spec = spec(kv_dtype, scales);
                check(&CaseSpec { layout, query_lens: vec![query_len], lens: vec![0, 1, 255, 256, 257, 1027], head_dim: 128, ..spec });
            }
        }
    }
}

#[test]
fn every_head_dim_page_size_and_group() {
    let sizes = [(64, 8, 1, 4), (64, 128, 3, 1), (128, 64, 32, 1), (192, 32, 5, 2), (256, 16, 16, 1), (512, 128, 8, 1), (1024, 16, 2, 1)];
    for (head_dim, page_size, group, kv_heads) in sizes {
        for (kv_dtype, scales) in [(KvDtype::Bf16, Scales::None), (KvDtype::F16, Scales::None), (KvDtype::Fp8, Scales::PerToken)] {
            let page_size = page_size.max(kv_dtype.elements_per_16_bytes());
            check(&CaseSpec { head_dim, page_size, group, kv_heads, lens: vec![270, 3], ..spec(kv_dtype, scales) });
        }
        if is_gfx950() && head_dim <= 256 {
            check(&CaseSpec { head_dim, page_size, group, kv_heads, lens: vec![270, 3], ..spec(KvDtype::Mxfp4, Scales::None) });
        }
    }
}

#[test]
fn pages_larger_than_a_tile() {
    for page_size in [256, 512, 1024] {
        check(&CaseSpec { page_size, lens: vec![1300, 511, 3], ..spec(KvDtype::Bf16, Scales::None) });
    }
}

#[test]
fn many_rows_are_split_over_workgroups() {
    let base = spec(KvDtype::Bf16, Scales::None);
    check(&CaseSpec { group: 16, kv_heads: 1, query_lens: vec![9], lens: vec![300, 20], ..base.clone() });
    check(&CaseSpec { group: 16, kv_heads: 1, query_lens: vec![70, 1], lens: vec![300, 400], ..base.clone() });
    check(&CaseSpec { group: 5, kv_heads: 2, query_lens: vec![0, 33, 1, 2], lens: vec![9, 300, 1, 259], per_head: true, ..base });
}

#[test]
fn a_peaked_softmax_stays_accurate() {
    for (kv_dtype, scales) in forms() {
        for query_lens in [vec![1], vec![4]] {
            check(&CaseSpec { q_factor: 32.0, query_lens, lens: vec![777, 1024], head_dim: 128, ..spec(kv_dtype, scales) });
        }
    }
}

#[test]
fn every_option_in_every_form() {
    for (kv_dtype, scales) in forms() {
        let base = CaseSpec { query_lens: vec![2], lens: vec![700, 0, 130], ..spec(kv_dtype, scales) };
        let specs = [
            CaseSpec { window: Some(100), ..base.clone() },
            CaseSpec { softcap: Some(3.0), ..base.clone() },
            CaseSpec { sinks: true, ..base.clone() },
            CaseSpec { per_head: true, window: Some(33), ..base.clone() },
            CaseSpec { softmax_scale: Some(-0.2), ..base.clone() },
            CaseSpec { plan_free: true, ..base.clone() },
            CaseSpec { plan_free: true, sinks: true, ..base.clone() },
            CaseSpec { max_partitions: Some(1), ..base.clone() },
            CaseSpec { max_partitions: Some(2), workgroup_budget: Some(1), ..base.clone() },
            CaseSpec { query_lens: vec![1, 3, 5], window: Some(64), sinks: true, softcap: Some(20.0), ..base.clone() },
            CaseSpec { q_dtype: DType::F16, signed_tables: false, ..base.clone() },
            CaseSpec { q_dtype: DType::F32, q_strided: true, page_strided: true, ..base.clone() },
        ];
        specs.iter().for_each(|spec| {
            check(spec);
        });
    }
}

#[test]
fn scales_of_one_side_and_in_a_tensor() -> Result<()> {
    check(&spec(KvDtype::Fp8, Scales::ScalarTensor));
    // K has a scale per token, V one for the cache.
    let mut case = CaseSpec { lens: vec![300, 40], ..spec(KvDtype::Fp8, Scales::PerToken) }.build()?;
    case.options.v_scale = KvScale::Scalar(0.75);
    let message = run(&case).unwrap_err().to_string();
    assert!(message.contains("v_scale") && message.contains("per token"), "{message}");
    Ok(())
}

#[test]
fn nan_in_a_later_querys_token_stays_out_of_the_earlier_ones() -> Result<()> {
    for kv_dtype in [KvDtype::Bf16, KvDtype::F16] {
        let spec = CaseSpec { query_lens: vec![4], lens: vec![100], page_size: 128, kv_heads: 1, ..spec(kv_dtype, Scales::None) };
        let case = spec.build()?;
        let clean = run(&case)?.0;
        let page = case.block_tables.flatten_all()?.to_vec1::<i32>()?[0] as usize;
        let nan = Tensor::full(f32::NAN, (1, 1, 8, 1, 8), &Device::Cpu)?.to_dtype(kv_dtype.dtype())?;
        let mut poisoned = case.clone();
        // Token 99, which only query 3 attends: chunk 12 of 8 tokens, the fourth in it.
        poisoned.key_cache = case.key_cache.slice_assign(&[page..page + 1, 0..1, 0..8, 99..100, 0..8], &nan)?;
        let out = run(&poisoned)?.0;
        let earlier = |t: &Tensor| t.narrow(0, 0, 3).map(|t| bits(&t));
        assert_same!(earlier(&out)?, earlier(&clean)?, "key {kv_dtype:?}");
        assert!(floats(&out.narrow(0, 3, 1)?)?.iter().all(|v| v.is_nan()), "the query that owns the NaN shows it");
    }
    Ok(())
}

#[test]
fn poison_never_changes_a_bit() -> Result<()> {
    for (kv_dtype, scales) in forms() {
        let spec = CaseSpec { lens: vec![1, 255, 0, 301], query_lens: vec![3], window: Some(100), ..spec(kv_dtype, scales) };
        let nan = run(&spec.build()?)?;
        let inf = run(&CaseSpec { poison: Poison::Infinity, ..spec }.build()?)?;
        assert_same!(bits(&nan.0), bits(&inf.0), "{kv_dtype:?}");
        assert_same!(bits(&nan.1), bits(&inf.1), "{kv_dtype:?}");
    }
    Ok(())
}

#[test]
fn runs_are_bit_identical() -> Result<()> {
    let case = CaseSpec { lens: vec![3000, 37, 1600], query_lens: vec![2], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let (first, again) = (run(&case)?, run(&case)?);
    assert_same!((bits(&first.0), bits(&first.1)), (bits(&again.0), bits(&again.1)));
    Ok(())
}

#[test]
fn empty_contexts_and_batches() -> Result<()> {
    let base = spec(KvDtype::Bf16, Scales::None);
    for max_partitions in [None, Some(1)] {
        let spec = CaseSpec { lens: vec![0, -5, 9], sinks: max_partitions.is_none(), max_partitions, ..base.clone() };
        let (out, lse) = run(&spec.build()?)?;
        assert!(floats(&out.narrow(0, 0, 2)?)?.iter().all(|v| *v == 0.0));
        assert!(floats(&lse.narrow(0, 0, 2)?)?.iter().all(|v| *v == f64::NEG_INFINITY));
        check(&spec);
    }
    let empty = CaseSpec { lens: vec![], ..base.clone() }.build()?;
    assert_eq!(run(&empty)?.0.dims(), [0, 8, 64]);
    // A cache without a page, and tables without a lane.
    let mut none = CaseSpec { lens: vec![0, 0], ..base }.build()?;
    for (pages, lanes) in [(0, 3), (2, 0)] {
        none.key_cache = Tensor::zeros((pages, 2, 8, 16, 8), DType::BF16, &Device::Cpu)?;
        none.value_cache = Tensor::zeros((pages, 2, 2, 64, 8), DType::BF16, &Device::Cpu)?;
        none.block_tables = Tensor::zeros((2, lanes), DType::U32, &Device::Cpu)?;
        let (out, lse) = run(&none)?;
        assert!(floats(&out)?.iter().all(|v| *v == 0.0) && floats(&lse)?.iter().all(|v| *v == f64::NEG_INFINITY));
    }
    Ok(())
}

#[test]
fn four_dimensional_queries_of_any_strides() -> Result<()> {
    let case = CaseSpec { query_lens: vec![4], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let want = run(&case)?.0;
    let q4 = case.q.reshape((3, 4, 8, 64))?;
    let swapped = q4.transpose(0, 1)?.contiguous()?.transpose(0, 1)?;
    let mut four = case.clone();
    for q in [q4, swapped] {
        four.q = q;
        let out = run(&four)?.0;
        assert_eq!(out.dims(), [3, 4, 8, 64]);
        assert_same!(bits(&out.reshape((12, 8, 64))?), bits(&want));
    }
    Ok(())
}

#[test]
fn merged_parts_equal_the_whole() -> Result<()> {
    let case = CaseSpec { lens: vec![300, 300], sinks: true, ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let part = |from: usize, tokens: u32, sinks: bool| {
        let mut part = case.clone();
        part.block_tables = case.block_tables.narrow(1, from, case.block_tables.dim(1)? - from)?;
        part.context_lens = Tensor::new(&[tokens, tokens], &Device::Cpu)?;
        part.options.sinks = case.options.sinks.clone().filter(|_| sinks);
        run(&part)
    };
    let ((a, a_lse), (b, b_lse)) = (part(0, 128, false)?, part(8, 172, true)?);
    let (merged, lse) = merge_attention_states(&[a, b], &[a_lse, b_lse])?;
    case.expected()?.compare(&merged, Some(&lse), 8e-3, 2e-3)?;
    Ok(())
}

#[test]
fn plans_given_free_and_default_agree() -> Result<()> {
    let case = CaseSpec { lens: vec![3000, 0, 700], query_lens: vec![2], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let lens = [3000, 0, 700];
    let request = PlanRequest { max_partitions: Some(3), ..PlanRequest::new(&lens, &[2], 2) };
    let plan = DecodePlan::new(&request, device().arch(), &Device::Cpu)?;
    for plan in [PlanChoice::Default, PlanChoice::Given(plan.clone()), PlanChoice::Free] {
        let mut case = case.clone();
        case.options.plan = plan;
        let (out, lse) = run(&case)?;
        case.expected()?.compare(&out, Some(&lse), 8e-3, 2e-3)?;
    }
    let mut stale = case.clone();
    stale.context_lens = Tensor::new(&[3000u32, 0, 300], &Device::Cpu)?;
    stale.options.plan = PlanChoice::Given(plan);
    let message = run(&stale).unwrap_err().to_string();
    assert!(message.contains("plan row 2") && message.contains("made for other lengths"), "{message}");
    Ok(())
}

#[test]
fn a_call_explains_itself() -> Result<()> {
    let case = CaseSpec { lens: vec![3000, 0, 700], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let Case { q, key_cache, value_cache, block_tables, context_lens, options, .. } = &case;
    let summary = rocm::explain_call(device(), q, key_cache, value_cache, block_tables, context_lens, options)?;
    assert!(summary.tasks >= 2, "{summary:?}");
    assert!(summary.selection.kernel().starts_with("pa_bf16_d64_p16") && !summary.selection.reason.to_string().is_empty(), "{summary:?}");
    Ok(())
}

#[test]
fn wrong_arguments_are_named_and_nothing_is_launched() -> Result<()> {
    let case = CaseSpec { lens: vec![40, 50], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let cpu = &Device::Cpu;
    let device = fresh_device();
    let refuses = |fragments: &[&str], edit: &dyn Fn(&mut Case)| {
        let mut case = case.clone();
        edit(&mut case);
        let before = work(&device);
        let message = run_on(&device, &case).expect_err("the call should have been refused").to_string();
        assert_eq!(work(&device), before, "{message}");
        for fragment in fragments {
            assert!(message.contains(fragment), "{message:?} does not name {fragment:?}");
        }
    };
    let tensor = |data: &[u32]| Tensor::new(data, cpu).unwrap();
    refuses(&["q", "F64"], &|c| c.q = c.q.to_dtype(DType::F64).unwrap());
    refuses(&["q", "7", "2 KV heads"], &|c| c.q = c.q.narrow(1, 0, 7).unwrap());
    refuses(&["q", "head_dim 32", "64"], &|c| c.q = c.q.narrow(2, 0, 32).unwrap());
    refuses(&["q", "contiguous"], &|c| c.q = c.q.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap());
    refuses(&["q", "1 rows", "batch 2"], &|c| c.q = c.q.narrow(0, 0, 1).unwrap());
    refuses(&["value_cache", "F16", "BF16"], &|c| c.value_cache = c.value_cache.to_dtype(DType::F16).unwrap());
    refuses(&["key_cache", "nhd", "4 dims"], &|c| c.options.layout = CacheLayout::Nhd);
    refuses(&["context_lens", "sequence 1", "5000"], &|c| c.context_lens = tensor(&[40, 5000]));
    refuses(&["context_lens", "[1]", "[2]"], &|c| c.context_lens = tensor(&[40]));
    refuses(&["context_lens", "I64"], &|c| c.context_lens = c.context_lens.to_dtype(DType::I64).unwrap());
    let ids = Tensor::new(&[[0u32, 1, 2, 0], [0, 9000, 1, 2]], cpu)?;
    refuses(&["block_tables", "9000", "sequence 1", "column 1", "cache of"], &|c| c.block_tables = ids.clone());
    refuses(&["softmax_scale", "NaN"], &|c| c.options.softmax_scale = Some(f32::NAN));
    refuses(&["window", "0"], &|c| c.options.window = Some(0));
    refuses(&["sinks", "[8]", "[3]"], &|c| c.options.sinks = Some(Tensor::zeros(3, DType::F32, cpu).unwrap()));
    refuses(&["k_scale", "Bf16"], &|c| c.options.k_scale = KvScale::Scalar(2.0));
    refuses(&["query_start", "sequence 1", "3", "2"], &|c| c.options.query_start = Some(tensor(&[0, 3, 2])));
    // What these GPUs have no kernel for.
    let f32_cache = CaseSpec { kv_dtype: KvDtype::F32, ..case.spec.clone() }.build()?;
    refuses(&["key_cache", "F32", "BF16"], &|c| *c = f32_cache.clone());
    let nhd = CaseSpec { layout: CacheLayout::Nhd, ..case.spec.clone() }.build()?;
    refuses(&["layout", "shuffled", "nhd"], &|c| *c = nhd.clone());
    let narrow = CaseSpec { head_dim: 96, ..case.spec.clone() }.build()?;
    refuses(&["head_dim", "96"], &|c| *c = narrow.clone());
    if !is_gfx950() {
        let mxfp4 = spec(KvDtype::Mxfp4, Scales::None).build()?;
        refuses(&["key_cache", "MXFP4", "gfx950"], &|c| *c = mxfp4.clone());
    }
    run_on(&device, &case)?;
    Ok(())
}
