//! Hostile input: every wrong argument is an error that names it, and the call after it works.

use candle::{Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::plan::{DecodePlan, HostPlan};
use candle_paged_attn::{PlanChoice, paged_decode_into};
use testkit::cases::{Case, CaseSpec, Scales};
use testkit::contracts;

use crate::support::*;

#[test]
fn wrong_arguments_are_named() -> Result<()> {
    let Some(device) = gpu("wrong_arguments_are_named") else { return Ok(()) };
    let case = CaseSpec { lens: vec![40, 50], head_dim: 64, ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let refused = |fragments: &[&str], edit: &dyn Fn(&mut Case)| {
        let mut case = case.clone();
        edit(&mut case);
        for tables in [Tables::Host, Tables::Device] {
            refuses(on(&case, &device, tables).and_then(|case| run(&case)), fragments);
        }
    };
    contracts::wrong_arguments().iter().for_each(|(fragments, edit)| refused(fragments, edit));
    refused(&["key_cache", "vllm", "5 dims"], &|c| c.options.layout = CacheLayout::Vllm);
    let call = on(&case, &device, Tables::Device)?;
    let mut elsewhere = call.clone();
    elsewhere.key_cache = case.key_cache.clone();
    refuses(run(&elsewhere), &["key_cache"]);
    let shared =
        paged_decode_into(&call.q, &call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options);
    refuses(shared, &["out", "shares its storage", "q"]);
    let (out, lse) = run(&call)?;
    case.expected()?.compare(&out, Some(&lse), 8e-3, 2e-3)?;
    Ok(())
}

#[test]
fn a_cache_on_another_gpu_is_refused() -> Result<()> {
    let Some(device) = gpu("a_cache_on_another_gpu_is_refused") else { return Ok(()) };
    let Ok(other) = Device::new_cuda(1) else {
        eprintln!("skipped: a_cache_on_another_gpu_is_refused: one GPU");
        return Ok(());
    };
    let case = spec(KvDtype::Bf16, Scales::None).build()?;
    let call = on(&case, &device, Tables::Host)?;
    let there = on(&case, &other, Tables::Host)?;
    refuses(run(&Case { key_cache: there.key_cache.clone(), ..call.clone() }), &["key_cache", "gpu_id: 1", "gpu_id: 0"]);
    refuses(run(&Case { value_cache: there.value_cache.clone(), ..call.clone() }), &["value_cache", "gpu_id: 1", "gpu_id: 0"]);
    let out = call.q.zeros_like()?;
    let into = paged_decode_into(&out, &call.q, &there.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options);
    refuses(into, &["key_cache", "gpu_id: 1", "gpu_id: 0"]);
    Ok(())
}

/// Tables that nobody validates: whatever they hold, nothing is read or written out of bounds, and the call after is right.
#[test]
fn wild_tables_are_harmless_without_validation() -> Result<()> {
    let Some(device) = gpu("wild_tables_are_harmless_without_validation") else { return Ok(()) };
    let cpu = &Device::Cpu;
    for (kv_dtype, scales, layout) in [
        (KvDtype::Bf16, Scales::None, CacheLayout::Nhd),
        (KvDtype::Fp8, Scales::PerToken, CacheLayout::Hnd),
        (KvDtype::Fp8, Scales::PerToken, CacheLayout::Shuffled),
        (KvDtype::Mxfp4, Scales::None, CacheLayout::Nhd),
    ] {
        let case = CaseSpec { lens: vec![700, 50], query_lens: vec![1, 3], layout, ..spec(kv_dtype, scales) }.build()?;
        let lanes = case.block_tables.dim(1)?;
        let wild: Vec<i32> = (0..2 * lanes as i32).map(|i| [i32::MIN, -1, i32::MAX, 65_536][i as usize % 4].wrapping_add(i)).collect();
        for (lens, starts) in [([i32::MAX, -7], [0u32, 1, 4]), ([i32::MIN, 900_000], [0, 9, 2]), ([3, 3], [u32::MAX, 7, u32::MAX / 2])] {
            let mut call = on(&case, &device, Tables::Device)?;
            call.options.validate = false;
            call.block_tables = Tensor::new(wild.as_slice(), cpu)?.reshape((2, lanes))?.to_device(&device)?;
            call.context_lens = Tensor::new(&lens, cpu)?.to_device(&device)?;
            call.options.query_start = Some(Tensor::new(&starts, cpu)?.to_device(&device)?);
            run(&call)?;
        }
        let (out, lse) = run(&on(&case, &device, Tables::Device)?)?;
        case.expected()?.compare(&out, Some(&lse), 8e-3, 2e-3)?;
    }
    Ok(())
}

/// A row without tasks is cleared by the slot of its number.
#[test]
fn a_plan_with_fewer_slots_than_rows_is_refused() -> Result<()> {
    let Some(device) = gpu("a_plan_with_fewer_slots_than_rows_is_refused") else { return Ok(()) };
    let case = CaseSpec { lens: vec![5, 0], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let mut call = on(&case, &device, Tables::Host)?;
    let plan = HostPlan { work: vec![[0, 0, 1, 0]], reduce: vec![[0, 1], [1, 0]] };
    call.options.plan = PlanChoice::Given(DecodePlan::from_host(plan, &Device::Cpu)?);
    contracts::refuses(run(&call), &["plan", "1 slots", "2 rows"]);
    Ok(())
}
