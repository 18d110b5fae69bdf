//! Random calls against the float64 reference: shapes, layouts, dtypes, lengths, ragged batches, views, windows, sinks, per-head tables, poison.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use proptest::prelude::*;
use testkit::cases::{CaseSpec, Scales};
use testkit::random::{BatchSizes, Sizes, calls};

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
fn geometry() -> impl Strategy<Value = (KvDtype, Scales, CacheLayout, usize, usize)> {
    (dtypes(), prop::sample::select(CacheLayout::ALL.to_vec()), 1usize..=24, 1usize..=150).prop_map(
        |((kv, scales), layout, eighths, page)| {
            let x = kv.elements_per_16_bytes();
            match (kv, layout) {
                (KvDtype::Mxfp4, CacheLayout::Vllm | CacheLayout::Shuffled) => {
                    (kv, scales, CacheLayout::Hnd, eighths.div_ceil(4) * 32, page)
                }
                (KvDtype::Mxfp4, _) => (kv, scales, layout, eighths.div_ceil(4) * 32, page),
                (_, CacheLayout::Vllm | CacheLayout::Shuffled) => {
                    (kv, scales, layout, (eighths * 8).next_multiple_of(x), page.next_multiple_of(x))
                }
                _ => (kv, scales, layout, eighths * 8, page),
            }
        },
    )
}

fn spec() -> impl Strategy<Value = CaseSpec> {
    calls(Sizes {
        stored: geometry().boxed(),
        batches: BatchSizes { edges: 240..270, even: (0..6, 1..=16), ragged: (2..5, 20..70) },
        groups: prop_oneof![3 => 1usize..=8, 1 => Just(16usize), 1 => 17usize..=20].boxed(),
        q_dtypes: vec![DType::F32, DType::F16, DType::BF16],
        // Scores stay below about 40: an F32 score of hundreds holds fewer digits than the F32 bar asks of the output.
        q_factors: prop_oneof![3 => Just(1f32), 1 => Just(6.0)].boxed(),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_calls_match_the_reference(spec in spec()) {
        let case = spec.build().map_err(|e| TestCaseError::fail(format!("building: {e}")))?;
        case.check().map_err(|e| TestCaseError::fail(e.to_string()))?;
    }
}
