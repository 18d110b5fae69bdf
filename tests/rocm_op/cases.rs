//! The op's contracts, one at a time: over candle's CPU tensors, and over a cache on the device.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::{KvScale, rocm};
use testkit::cases::{Case, CaseSpec, Scales};
use testkit::contracts;
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
    contracts::many_rows(&spec(KvDtype::Bf16, Scales::None)).iter().for_each(|spec| {
        check(spec);
    });
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
            CaseSpec { plan_free: true, ..base.clone() },
            CaseSpec { q_dtype: DType::F32, q_strided: true, page_strided: true, ..base.clone() },
        ];
        specs.iter().chain(&contracts::options(&base)).for_each(|spec| {
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
    refuses(run(&case), &["v_scale", "per token"]);
    Ok(())
}

#[test]
fn nan_in_a_later_querys_token_stays_out_of_the_earlier_ones() -> Result<()> {
    for kv_dtype in [KvDtype::Bf16, KvDtype::F16] {
        let spec = CaseSpec { query_lens: vec![4], lens: vec![100], page_size: 128, kv_heads: 1, ..spec(kv_dtype, Scales::None) };
        let case = spec.build()?;
        let clean = run(&case)?.0;
        let page = case.first_page()?;
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
    forms().into_iter().try_for_each(|(kv_dtype, scales)| contracts::poison_changes_nothing(&spec(kv_dtype, scales), &run))
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
    contracts::empty_contexts_give_zeros(&spec(KvDtype::Bf16, Scales::None), &run)
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
    contracts::merged_parts_are_the_whole(&spec(KvDtype::Bf16, Scales::None), &run)
}

#[test]
fn plans_given_free_and_default_agree() -> Result<()> {
    contracts::plans_agree(&spec(KvDtype::Bf16, Scales::None), device().arch(), true, &run)
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
    let device = fresh_device();
    let refused = |fragments: &[&str], edit: &dyn Fn(&mut Case)| {
        let mut case = case.clone();
        edit(&mut case);
        let before = work(&device);
        refuses(run_on(&device, &case), fragments);
        assert_eq!(work(&device), before, "{fragments:?}");
    };
    contracts::wrong_arguments().iter().for_each(|(fragments, edit)| refused(fragments, edit));
    refused(&["key_cache", "nhd", "4 dims"], &|c| c.options.layout = CacheLayout::Nhd);
    // What these GPUs have no kernel for.
    let f32_cache = CaseSpec { kv_dtype: KvDtype::F32, ..case.spec.clone() }.build()?;
    refused(&["key_cache", "F32", "BF16"], &|c| *c = f32_cache.clone());
    let nhd = CaseSpec { layout: CacheLayout::Nhd, ..case.spec.clone() }.build()?;
    refused(&["layout", "shuffled", "nhd"], &|c| *c = nhd.clone());
    let narrow = CaseSpec { head_dim: 96, ..case.spec.clone() }.build()?;
    refused(&["head_dim", "96"], &|c| *c = narrow.clone());
    if !is_gfx950() {
        let mxfp4 = spec(KvDtype::Mxfp4, Scales::None).build()?;
        refused(&["key_cache", "MXFP4", "gfx950"], &|c| *c = mxfp4.clone());
    }
    run_on(&device, &case)?;
    Ok(())
}
