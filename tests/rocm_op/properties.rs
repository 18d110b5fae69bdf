//! Random calls: dtypes, layouts, lengths, ragged batches, views, windows, sinks, per-head tables, poison; staged, over device tensors,
//! over a cache and from a recorded file in turn.
//!
//! The same calls every time, as each wants kernels of its own, which are compiled once; PROPTEST_CASES draws more.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::{Case as Recorded, rocm};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use testkit::cases::{Case, CaseSpec, Poison, Scales};

use crate::support::*;

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").map_or(48, |n| n.parse().expect("PROPTEST_CASES is a number"))
}

fn kv() -> impl Strategy<Value = (KvDtype, Scales, CacheLayout)> {
    let layouts = |kv| match kv {
        KvDtype::Mxfp4 => vec![CacheLayout::Hnd, CacheLayout::Nhd],
        _ => vec![CacheLayout::Shuffled, CacheLayout::Vllm],
    };
    let mut forms = forms();
    forms.push((KvDtype::Fp8, Scales::ScalarTensor));
    prop::sample::select(forms).prop_flat_map(move |(kv, scales)| (Just(kv), Just(scales), prop::sample::select(layouts(kv))))
}

/// Context lengths: empty, negative, short, and past a few tiles.
fn length() -> impl Strategy<Value = i64> {
    prop_oneof![1 => Just(0i64), 1 => Just(-1), 3 => 1i64..20, 4 => 1i64..400, 2 => 240i64..270, 1 => 400i64..1500]
}

fn batch() -> impl Strategy<Value = (Vec<i64>, Vec<usize>)> {
    prop_oneof![
        3 => (prop::collection::vec(length(), 0..5), 1usize..=8).prop_map(|(lens, q)| (lens, vec![q])),
        2 => prop::collection::vec((length(), prop_oneof![4 => 0usize..6, 1 => 20usize..40]), 2..4).prop_map(|pairs| pairs.into_iter().unzip()),
    ]
}

prop_compose! {
    fn random_spec()(
        (kv_dtype, scales, layout) in kv(),
        (head_dim, page_size) in (prop::sample::select(vec![64usize, 128, 128, 192, 256]), prop::sample::select(vec![16usize, 16, 32, 64, 128])),
        (lens, query_lens) in batch(),
        (kv_heads, group) in (1usize..=3, prop::sample::select(vec![1usize, 3, 4, 8, 16, 32])),
        q_dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::BF16, DType::BF16]),
        (per_head, sinks, plan_free, page_strided, q_strided, signed_tables) in any::<(bool, bool, bool, bool, bool, bool)>(),
        (window, softcap) in (prop::option::of(1usize..300), prop::option::of(1f32..30.0)),
        (softmax_scale, q_factor) in (prop::option::of(-1.2f32..1.2), prop_oneof![3 => Just(1f32), 1 => Just(6.0)]),
        (max_partitions, workgroup_budget) in (prop::option::of(1usize..6), prop::option::of(1usize..40)),
        poison in prop_oneof![Just(Poison::NaN), Just(Poison::Infinity)],
        seed in any::<u64>(),
    ) -> CaseSpec {
        CaseSpec {
            seed, kv_heads, group, head_dim, page_size, layout, kv_dtype, q_dtype, scales, lens, query_lens, per_head, window, softcap, sinks,
            softmax_scale: softmax_scale.map(|scale| scale / (head_dim as f32).sqrt()), q_factor, plan_free, max_partitions, workgroup_budget, poison, page_strided, q_strided, signed_tables,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, rng_seed: RngSeed::Fixed(7), ..ProptestConfig::default() })]

    #[test]
    fn random_calls_match_the_reference(spec in random_spec()) {
        let checked = || -> candle::Result<()> {
            let case = spec.build()?;
            let (out, lse) = run(&case)?;
            compare(&case, &out, Some(&lse))?;
            let staged = (bits(&out), bits(&lse));
            let (out, lse) = OnDevice::new(&case, device())?.decode_with_lse()?;
            compare(&case, &out.to_tensor()?, Some(&lse.to_tensor()?))?;
            compare(&case, &over_a_cache(&case, device())?, None)?;
            // And from a recorded file, whose pages have other numbers.
            let Case { q, key_cache, value_cache, block_tables, context_lens, options, .. } = &case;
            let file = Recorded::capture(q, key_cache, value_cache, block_tables, context_lens, options)?.to_bytes()?;
            let Recorded { q, key_cache, value_cache, block_tables, context_lens, options, .. } = &Recorded::from_bytes(&file)?;
            let replayed = rocm::paged_decode(device(), q, key_cache, value_cache, block_tables, context_lens, options)?;
            if (bits(&replayed.0), bits(&replayed.1)) != staged {
                candle::bail!("replayed, the call gives other bits")
            }
            Ok(())
        };
        checked().map_err(|e| TestCaseError::fail(e.to_string()))?;
    }
}
