//! `AppendAndAttend` over a cache on the device.

use candle::{Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype, PagedKvCache, Quantization};
use candle_paged_attn::paged_decode;
use testkit::cases::{CaseSpec, Scales};
use testkit::contracts;
use testkit::reference::floats;
use testkit::step::{Step, check_pools_steps, config, wrong_arguments};

use crate::support::*;

fn kinds() -> Vec<(KvDtype, Quantization, f64)> {
    let mut kinds = vec![
        (KvDtype::Bf16, Quantization::None, 8e-3),
        (KvDtype::F16, Quantization::None, 8e-3),
        (KvDtype::Fp8, Quantization::None, 0.08),
        (KvDtype::Fp8, Quantization::Scalar { k: 0.02, v: 0.03 }, 0.08),
        (KvDtype::Fp8, Quantization::PerToken, 0.08),
    ];
    if is_gfx950() {
        kinds.push((KvDtype::Mxfp4, Quantization::Block, 1e-2));
    }
    kinds
}

#[test]
fn it_writes_and_then_attends() -> Result<()> {
    for (dtype, quantization, tolerance) in kinds() {
        let step = Step::new()?;
        let cache = PagedKvCache::new(config(dtype, quantization, None), device())?;
        let (op, k, v) = step.prefill(&cache, &Device::Cpu)?;
        let out = op.apply(&step.q, &k, &v)?;
        step.check(&cache, &out, tolerance, &format!("{dtype:?} {quantization:?}"))?;
    }
    Ok(())
}

#[test]
fn one_synchronization_and_at_most_three_launches_a_step() -> Result<()> {
    let own = fresh_device();
    let step = Step::new()?;
    let cache = PagedKvCache::new(config(KvDtype::Fp8, Quantization::Scalar { k: 0.5, v: 0.5 }, None), &own)?;
    let (op, k, v) = step.prefill(&cache, &Device::Cpu)?;
    op.apply(&step.q, &k, &v)?;
    let before = own.counts();
    op.apply(&step.q, &k, &v)?;
    let after = own.counts();
    // The write and the tile, whose rows are one task each.
    assert_eq!(after.launches - before.launches, 2);
    assert_eq!((after.copies - before.copies, after.synchronizations - before.synchronizations), (2, 1));
    assert_eq!((after.fills, after.live_bytes), (before.fills, before.live_bytes));
    Ok(())
}

#[test]
fn an_error_changes_nothing() -> Result<()> {
    let step = Step::new()?;
    let own = fresh_device();
    let cache = PagedKvCache::new(config(KvDtype::Bf16, Quantization::None, None), &own)?;
    let (op, k, v) = step.prefill(&cache, &Device::Cpu)?;
    let held = |cache: &PagedKvCache| bits(&cache.rocm_layer(1).unwrap().key.to_tensor().unwrap());
    let (before, counts) = (held(&cache), work(&own));
    let after = work(&own);
    for (name, edit) in wrong_arguments() {
        let mut op = op.clone();
        edit(&mut op);
        refuses(op.apply(&step.q, &k, &v), &[name]);
    }
    refuses(op.apply(&step.q, &k.narrow(0, 0, 3)?, &v.narrow(0, 0, 3)?), &["k:", "4 rows"]);
    assert_eq!((counts, work(&own)), (after, after));
    assert_same!(held(&cache), before);
    Ok(())
}

#[test]
fn a_pools_steps_are_the_cpus() -> Result<()> {
    check_pools_steps(None, |config| PagedKvCache::new(config, device()), &Device::Cpu)
}

/// The op's cases with their pages put into a cache on the device; no token is new.
#[test]
fn the_op_s_cases_over_a_cache() -> Result<()> {
    for (kv_dtype, scales) in forms() {
        let base = spec(kv_dtype, scales);
        for spec in contracts::over_a_cache(&base, base.layout) {
            let case = spec.build()?;
            let out = over_a_cache(&case, device())?;
            compare(&case, &out, None).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
        }
    }
    Ok(())
}

#[test]
fn a_cpu_cache_and_a_device_one_agree_on_the_same_codes() -> Result<()> {
    // One factor: the same bytes on gfx942 as anywhere, at twice the scale.
    let step = Step::new()?;
    let config = config(KvDtype::Fp8, Quantization::Scalar { k: 0.02, v: 0.03 }, Some(CacheLayout::Shuffled));
    let (here, there) = (PagedKvCache::new(config.clone(), device())?, PagedKvCache::new(config, &Device::Cpu)?);
    for cache in [&here, &there] {
        let (op, k, v) = step.prefill(cache, &Device::Cpu)?;
        op.apply(&step.q, &k, &v)?;
    }
    let (k, v) = here.gather(1, &[3, 7, 1], 40)?;
    let (k_there, v_there) = there.gather(1, &[3, 7, 1], 40)?;
    assert_eq!((floats(&k)?, floats(&v)?), (floats(&k_there)?, floats(&v_there)?));
    let layer = there.layer(1)?;
    let lens = Tensor::new(&[40u32, 5], &Device::Cpu)?;
    let want = paged_decode(&step.q, &layer.key, &layer.value, &step.block_tables, &lens, &there.decode_options(1)?)?;
    assert!(floats(&want)?.iter().all(|v| v.is_finite()));
    Ok(())
}

#[test]
fn an_empty_step_gives_an_empty_output() -> Result<()> {
    let empty = CaseSpec { lens: vec![], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    assert_eq!(over_a_cache(&empty, device())?.dims(), [0, 8, 64]);
    Ok(())
}
