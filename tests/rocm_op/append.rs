//! `AppendAndAttend` over a cache on the device.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{Batch, CacheConfig, CacheDims, CacheLayout, KvDtype, PagePool, PagedKvCache, Quantization};
use candle_paged_attn::{AppendAndAttend, paged_decode};
use testkit::cases::{CaseSpec, Scales};
use testkit::reference::floats;
use testkit::step::{DIMS, Step, config};

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
    let cpu = &Device::Cpu;
    type Edit<'a> = Box<dyn Fn(&mut AppendAndAttend<'_>) + 'a>;
    let wrong: Vec<(&str, Edit<'_>)> = vec![
        ("layer", Box::new(|op| op.layer = 2)),
        ("block_tables", Box::new(|op| op.block_tables = Tensor::new(&[[3i32, 7, 99], [9, -1, -1]], cpu).unwrap())),
        ("context_lens", Box::new(|op| op.context_lens = Tensor::new(&[4000u32, 5], cpu).unwrap())),
        ("slot_mapping", Box::new(|op| op.slot_mapping = Tensor::new(&[1i64, 2, 3, 12 * 16], cpu).unwrap())),
        ("softcap", Box::new(|op| op.options.softcap = Some(-1.))),
    ];
    let after = work(&own);
    for (name, edit) in wrong {
        let mut op = op.clone();
        edit(&mut op);
        let message = op.apply(&step.q, &k, &v).expect_err(name).to_string();
        assert!(message.contains(name), "{message:?} does not name {name}");
    }
    let message = op.apply(&step.q, &k.narrow(0, 0, 3)?, &v.narrow(0, 0, 3)?).unwrap_err().to_string();
    assert!(message.contains("k:") && message.contains("4 rows"), "{message}");
    assert_eq!((counts, work(&own)), (after, after));
    assert_same!(held(&cache), before);
    Ok(())
}

/// A pool's steps on the device and on the CPU: prompts of mixed lengths, a fork that writes into a shared page, decodes.
#[test]
fn a_pools_steps_are_the_cpus() -> Result<()> {
    let cpu = &Device::Cpu;
    let config = CacheConfig { dims: CacheDims { pages: 40, ..DIMS }, ..config(KvDtype::Bf16, Quantization::None, None) };
    let (here, there) = (PagedKvCache::new(config.clone(), device())?, PagedKvCache::new(config.clone(), cpu)?);
    let mut pool = PagePool::new(config.dims.pages, config.dims.page_size)?;
    let (a, b) = (pool.allocate(), pool.allocate());
    let attend = |batch: &Batch| -> Result<()> {
        let rows = batch.slot_mapping.dim(0)?;
        let random = |heads| Tensor::randn(0f32, 1., (rows, heads, 64), cpu)?.to_dtype(DType::BF16);
        let (q, k, v) = (random(8)?, random(2)?, random(2)?);
        let [got, want] = [&here, &there].map(|cache| AppendAndAttend::new(cache, 1, batch)?.apply(&q, &k, &v));
        let (got, want) = (floats(&got?)?, floats(&want?)?);
        let error: f64 = got.iter().zip(&want).map(|(g, w)| (g - w) * (g - w)).sum::<f64>().sqrt();
        assert!(error <= 8e-3 * want.iter().map(|w| w * w).sum::<f64>().sqrt(), "{error}");
        Ok(())
    };
    let prompts = [pool.append(a, &(0..37).collect::<Vec<_>>())?, pool.append(b, &(100..103).collect::<Vec<_>>())?];
    attend(&pool.batch(&[(a, &prompts[0]), (b, &prompts[1])], cpu)?)?;
    pool.commit(a)?;
    pool.commit(b)?;
    let fork = pool.fork(a)?;
    for step in 0..3 {
        let appends = [a, b, fork].map(|sequence| pool.append(sequence, &[step]).unwrap());
        for append in &appends {
            here.copy_pages(&append.copies)?;
            there.copy_pages(&append.copies)?;
        }
        attend(&pool.batch(&[(fork, &appends[2]), (a, &appends[0]), (b, &appends[1])], cpu)?)?;
        [a, b, fork].into_iter().try_for_each(|sequence| pool.commit(sequence))?;
    }
    Ok(())
}

/// The op's cases with their pages put into a cache on the device; no token is new.
#[test]
fn the_op_s_cases_over_a_cache() -> Result<()> {
    for (kv_dtype, scales) in forms() {
        let base = CaseSpec { query_lens: vec![2], lens: vec![700, 0, 130], ..spec(kv_dtype, scales) };
        let mut specs = vec![
            CaseSpec { window: Some(100), ..base.clone() },
            CaseSpec { per_head: true, sinks: true, softcap: Some(7.0), ..base.clone() },
            CaseSpec { query_lens: vec![1, 3, 70], ..base.clone() },
            CaseSpec { plan_free: true, signed_tables: false, q_dtype: DType::F32, q_strided: true, ..base.clone() },
        ];
        if kv_dtype != KvDtype::Mxfp4 {
            specs.push(CaseSpec { layout: CacheLayout::Vllm, max_partitions: Some(2), ..base });
        }
        for spec in specs {
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
