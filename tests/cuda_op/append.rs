//! `AppendAndAttend` over a cache on the GPU.

use std::sync::{Arc, Mutex};

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheDims, CacheLayout, ExpectedCalls, KvDtype, PagedKvCache, Quantization};
use candle_paged_attn::jit::{JitEvent, JitSettings};
use candle_paged_attn::plan::{DecodePlan, PlanRequest};
use candle_paged_attn::{AppendAndAttend, DecodeOptions, PlanChoice, cuda};
use testkit::cases::{CaseSpec, Scales};
use testkit::contracts;
use testkit::step::{Step, check_pools_steps, config, wrong_arguments};

use crate::support::*;

/// The op with its small tensors on the GPU.
fn on_device<'a>(op: &AppendAndAttend<'a>, device: &Device) -> Result<AppendAndAttend<'a>> {
    let mut op = op.clone();
    for tensor in [&mut op.slot_mapping, &mut op.block_tables, &mut op.context_lens] {
        *tensor = tensor.to_device(device)?;
    }
    Ok(op)
}

#[test]
fn it_writes_and_then_attends() -> Result<()> {
    let Some(device) = gpu("it_writes_and_then_attends") else { return Ok(()) };
    for (dtype, quantization, layout) in caches() {
        for tables in [Tables::Host, Tables::Device] {
            let step = Step::new()?;
            let cache = PagedKvCache::new(config(dtype, quantization, Some(layout)), &*device)?;
            let (mut op, k, v) = step.prefill(&cache, &device)?;
            if tables == Tables::Device {
                op = on_device(&op, &device)?;
            }
            let out = op.apply(&step.q.to_device(&device)?, &k, &v)?.to_device(&Device::Cpu)?;
            let what = format!("{dtype:?} {quantization:?} {layout:?}, tables on the {tables:?}");
            step.check(&cache, &out, 8e-3, &what)?;
        }
    }
    Ok(())
}

#[test]
fn an_error_changes_nothing() -> Result<()> {
    let Some(device) = gpu("an_error_changes_nothing") else { return Ok(()) };
    let (step, cpu) = (Step::new()?, &Device::Cpu);
    let cache = PagedKvCache::new(config(KvDtype::Bf16, Quantization::None, None), &*device)?;
    let (op, k, v) = step.prefill(&cache, &device)?;
    let q = step.q.to_device(&device)?;
    let held = || bits(&cache.layer(1).unwrap().key.to_device(cpu).unwrap());
    let before = held();
    for (name, edit) in wrong_arguments() {
        for tables in [Tables::Host, Tables::Device] {
            let mut op = op.clone();
            edit(&mut op);
            op.options.validate = true;
            if tables == Tables::Device {
                op = on_device(&op, &device)?;
            }
            refuses(op.apply(&q, &k, &v), &[name]);
        }
    }
    refuses(op.apply(&q, &k.narrow(0, 0, 3)?, &v.narrow(0, 0, 3)?), &["k:", "4 rows"]);
    refuses(op.apply(&q, &k.to_device(cpu)?, &v), &[]);
    let layer = cache.layer(1)?;
    refuses(op.apply(&layer.key.narrow(1, 0, 1)?.squeeze(1)?.narrow(0, 0, 4)?, &k, &v), &["q:", "shares its storage"]);
    // What only the kernels refuse.
    let mut strided = on_device(&op, &device)?;
    strided.context_lens = Tensor::new(&[[40u32, 0], [5, 0]], cpu)?.to_device(&device)?.narrow(1, 0, 1)?.squeeze(1)?;
    refuses(strided.apply(&q, &k, &v), &["context_lens", "contiguous"]);
    let on_cpu = PagedKvCache::new(config(KvDtype::Bf16, Quantization::None, None), cpu)?;
    refuses(AppendAndAttend { cache: &on_cpu, ..op.clone() }.apply(&q, &k, &v), &["key_cache"]);
    assert_same!(held(), before);
    op.apply(&q, &k, &v)?;
    assert_ne!(held(), before);
    Ok(())
}

#[test]
fn a_pools_steps_are_the_cpus() -> Result<()> {
    let Some(device) = gpu("a_pools_steps_are_the_cpus") else { return Ok(()) };
    check_pools_steps(Some(CacheLayout::Nhd), |config| PagedKvCache::new(config, &*device), &device)
}

/// The op's cases with their pages put into a cache on the GPU; no token is new.
#[test]
fn the_op_s_cases_over_a_cache() -> Result<()> {
    let Some(device) = gpu("the_op_s_cases_over_a_cache") else { return Ok(()) };
    for (kv_dtype, scales) in forms().into_iter().chain([(KvDtype::Mxfp4, Scales::None)]) {
        for spec in contracts::over_a_cache(&CaseSpec { head_dim: 64, ..spec(kv_dtype, scales) }, CacheLayout::Hnd) {
            let case = spec.build()?;
            for tables in [Tables::Host, Tables::Device] {
                let out = over_a_cache(&case, &device, tables)?;
                case.expected()?.compare(&out, None, spec.cuda_tolerance(), 0.).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
            }
        }
    }
    Ok(())
}

#[test]
fn an_empty_step_gives_an_empty_output() -> Result<()> {
    let Some(device) = gpu("an_empty_step_gives_an_empty_output") else { return Ok(()) };
    let empty = CaseSpec { lens: vec![], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    assert_eq!(over_a_cache(&empty, &device, Tables::Host)?.dims(), [0, 8, 128]);
    Ok(())
}

/// Nothing is compiled or loaded by calls that a cache was warmed up for.
#[test]
fn a_warm_cache_compiles_nothing_more() -> Result<()> {
    let Some(gpu) = lone_gpu("a_warm_cache_compiles_nothing_more") else { return Ok(()) };
    let (device, cpu) = (&gpu.device, &Device::Cpu);
    let dims = CacheDims { pages: 600, page_size: 32, kv_heads: 2, head_dim: 128 };
    for (dtype, quantization, layout) in
        [(KvDtype::Bf16, Quantization::None, CacheLayout::Nhd), (KvDtype::Fp8, Quantization::PerToken, CacheLayout::Hnd)]
    {
        let cache = PagedKvCache::new(CacheConfig { layers: 1, dims, dtype, layout: Some(layout), quantization }, device)?;
        let expected = ExpectedCalls { batch: 9, query_len: 40, max_pages: 64, ragged: true, ..ExpectedCalls::new(16, DType::BF16) };
        assert!(cache.warm_up(&expected)? > 4);
        let loaded = cuda::loaded_kernels(device)?;
        for (batch, query_len, columns) in [(1, 1, 1), (1, 1, 64), (9, 1, 64), (2, 4, 3), (9, 40, 64), (3, 17, 40), (5, 2, 9), (1, 40, 2)] {
            let lens = vec![(columns * dims.page_size) as u32; batch];
            let starts: Vec<u32> = (0..=batch).map(|sequence| (sequence * query_len) as u32).collect();
            let rows = batch * query_len;
            let slots: Vec<i64> = (0..rows as i64).collect();
            let op = AppendAndAttend {
                cache: &cache,
                layer: 0,
                slot_mapping: Tensor::new(slots, device)?,
                block_tables: Tensor::zeros((batch, columns), DType::U32, device)?,
                context_lens: Tensor::new(lens, device)?,
                options: DecodeOptions {
                    query_start: Some(Tensor::new(starts, device)?),
                    max_query_len: Some(query_len),
                    ..DecodeOptions::default()
                },
            };
            let random = |heads: usize| Tensor::randn(0f32, 1., (rows, heads, 128), cpu)?.to_dtype(DType::BF16)?.to_device(device);
            let (context_lens, query_lens) = (vec![(columns * dims.page_size) as i32; batch], vec![query_len; batch]);
            let request = PlanRequest::new(&context_lens, &query_lens, dims.kv_heads);
            let plan = DecodePlan::new(&request, &cuda::arch_of(device)?, device)?;
            for (name, plan) in [("default", PlanChoice::Default), ("free", PlanChoice::Free), ("given", PlanChoice::Given(plan))] {
                let op = AppendAndAttend { options: DecodeOptions { plan, ..op.options.clone() }, ..op.clone() };
                op.apply(&random(16)?, &random(2)?, &random(2)?)?;
                assert_eq!(cuda::loaded_kernels(device)?, loaded, "{dtype:?}: {batch} x {query_len}, {columns} columns, {name} plan");
            }
        }
    }
    Ok(())
}

/// What decides is said before anything is written.
#[test]
fn a_step_explains_itself() -> Result<()> {
    let Some(device) = gpu("a_step_explains_itself") else { return Ok(()) };
    let step = Step::new()?;
    let cache = PagedKvCache::new(config(KvDtype::Bf16, Quantization::None, None), &*device)?;
    let (op, ..) = step.prefill(&cache, &device)?;
    let held = || -> Result<Bits> { Ok(bits(&cache.layer(1)?.key.to_device(&Device::Cpu)?)) };
    let before = held()?;
    let summary = op.explain(&step.q.to_device(&device)?)?;
    assert!(summary.selection.key.arch.is_cuda() && !summary.selection.reason.to_string().is_empty(), "{summary:?}");
    assert_same!(held()?, before);
    Ok(())
}

/// Kernels that are not loaded yet are compiled and kept as the settings say, and what hears of it hears of each.
#[test]
fn kernels_are_compiled_with_the_settings_given() -> Result<()> {
    let Some(gpu) = lone_gpu("kernels_are_compiled_with_the_settings_given") else { return Ok(()) };
    let device = &gpu.device;
    let folder = tempfile::tempdir()?;
    let heard = Arc::new(Mutex::new(vec![]));
    let listener = heard.clone();
    let progress = move |event: &JitEvent| listener.lock().unwrap().push(event.clone());
    let settings =
        JitSettings { cache_dir: Some(folder.path().join("kernels")), progress: Some(Arc::new(progress)), ..JitSettings::default() };
    cuda::set_jit_settings(device, settings)?;
    // A head size that no other test has; of one query token, whose kernels all have code of their own.
    let dims = CacheDims { pages: 4, page_size: 16, kv_heads: 1, head_dim: 104 };
    let config = CacheConfig { layers: 1, dims, dtype: KvDtype::Bf16, layout: None, quantization: Quantization::None };
    let before = cuda::loaded_kernels(device)?;
    let warmed = PagedKvCache::new(config, device).and_then(|cache| {
        cache.warm_up(&ExpectedCalls { batch: 1, query_len: 1, max_pages: 4, ragged: false, ..ExpectedCalls::new(1, DType::BF16) })
    });
    cuda::set_jit_settings(device, JitSettings::default())?;
    assert!(warmed? > 0);
    let heard = heard.lock().unwrap();
    let compiled = heard.iter().filter(|event| matches!(event, JitEvent::Compiled { .. })).count();
    assert_eq!(compiled, cuda::loaded_kernels(device)? - before, "{heard:?}");
    assert!(compiled > 0, "{heard:?}");
    let kept = std::fs::read_dir(folder.path().join("kernels").join(cuda::arch_of(device)?.name.to_string()))?.count();
    assert!(kept >= compiled, "{kept} of {compiled}");
    refuses(cuda::set_jit_settings(&Device::Cpu, JitSettings::default()), &["device", "Cpu", "is not a CUDA device"]);
    Ok(())
}
