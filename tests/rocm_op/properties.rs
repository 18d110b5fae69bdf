//! Random calls: dtypes, layouts, lengths, ragged batches, views, windows, sinks, per-head tables, poison; staged, over device tensors,
//! over a cache and from a recorded file in turn.
//!
//! The same calls every time, as each wants kernels of its own, which are compiled once; PROPTEST_CASES draws more.

use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::{Case as Recorded, rocm};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use testkit::cases::{Case, CaseSpec, Scales};
use testkit::random::{gpu_calls, stored};

use crate::support::*;

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").map_or(48, |n| n.parse().expect("PROPTEST_CASES is a number"))
}

fn calls() -> impl Strategy<Value = CaseSpec> {
    let mut forms = forms();
    forms.push((KvDtype::Fp8, Scales::ScalarTensor));
    let layouts = |kv| match kv {
        KvDtype::Mxfp4 => vec![CacheLayout::Hnd, CacheLayout::Nhd],
        _ => vec![CacheLayout::Shuffled, CacheLayout::Vllm],
    };
    let q_factors = prop_oneof![3 => Just(1f32), 1 => Just(6.0)];
    gpu_calls(stored(forms, layouts).boxed(), 240..270, q_factors.boxed())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, rng_seed: RngSeed::Fixed(7), ..ProptestConfig::default() })]

    #[test]
    fn random_calls_match_the_reference(spec in calls()) {
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
