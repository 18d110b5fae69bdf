//! Random calls against the float64 reference: shapes, layouts, dtypes, lengths, ragged batches, views, windows, sinks, per-head tables, poison.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use proptest::prelude::*;
use testkit::cases::{CaseSpec, Poison, Scales};
use testkit::random::{BatchSizes, batches};

/// Cases a run draws: 640 (CI's bar is 500), or as PROPTEST_CASES says.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").map_or(640, |n| n.parse().expect("PROPTEST_CASES is a number"))
}

fn dtypes() -> impl Strategy<Value = (KvDtype, Scales)> {
    prop_oneof![
        (prop_oneof![Just(KvDtype::F32), Just(KvDtype::F16), Just(KvDtype::Bf16)], Just(Scales::None)),
        (Just(KvDtype::Fp8), prop_oneof![Just(Scales::None), Just(Scales::Scalar), Just(Scales::ScalarTensor), Just(Scales::PerToken)]),
        (Just(KvDtype::Mxfp4), Just(Scales::None)),
    ]
}

/// Sizes that the layout and dtype admit.
fn geometry() -> impl Strategy<Value = (CacheLayout, KvDtype, Scales, usize, usize)> {
    (dtypes(), prop::sample::select(CacheLayout::ALL.to_vec()), 1usize..=24, 1usize..=150).prop_map(
        |((kv, scales), layout, eighths, page)| {
            let x = kv.elements_per_16_bytes();
            match (kv, layout) {
                (KvDtype::Mxfp4, CacheLayout::Vllm | CacheLayout::Shuffled) => {
                    (CacheLayout::Hnd, kv, scales, eighths.div_ceil(4) * 32, page)
                }
                (KvDtype::Mxfp4, _) => (layout, kv, scales, eighths.div_ceil(4) * 32, page),
                (_, CacheLayout::Vllm | CacheLayout::Shuffled) => {
                    (layout, kv, scales, (eighths * 8).next_multiple_of(x), page.next_multiple_of(x))
                }
                _ => (layout, kv, scales, eighths * 8, page),
            }
        },
    )
}

prop_compose! {
    fn spec()(
        (layout, kv_dtype, scales, head_dim, page_size) in geometry(),
        (lens, query_lens) in batches(BatchSizes { edges: 240..270, even: (0..6, 1..=16), ragged: (2..5, 20..70) }),
        (kv_heads, group) in (1usize..=3, prop_oneof![3 => 1usize..=8, 1 => Just(16usize), 1 => 17usize..=20]),
        q_dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::BF16]),
        (per_head, sinks, plan_free, page_strided, q_strided, signed_tables) in any::<(bool, bool, bool, bool, bool, bool)>(),
        (window, softcap) in (prop::option::of(1usize..300), prop::option::of(1f32..30.0)),
        // Scores stay below about 40: an F32 score of hundreds holds fewer digits than the F32 bar asks of the output.
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
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_calls_match_the_reference(spec in spec()) {
        let case = spec.build().map_err(|e| TestCaseError::fail(format!("building: {e}")))?;
        case.check().map_err(|e| TestCaseError::fail(e.to_string()))?;
    }
}
