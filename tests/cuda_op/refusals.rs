//! Hostile input: every wrong argument is an error that names it, and the call after it works.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::{KvScale, paged_decode_into};
use testkit::cases::{Case, CaseSpec, Scales};

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
    let cpu = &Device::Cpu;
    let tensor = |data: &[u32]| Tensor::new(data, cpu).unwrap();
    refused(&["q", "F64"], &|c| c.q = c.q.to_dtype(DType::F64).unwrap());
    refused(&["q", "7", "2 KV heads"], &|c| c.q = c.q.narrow(1, 0, 7).unwrap());
    refused(&["q", "head_dim 32", "64"], &|c| c.q = c.q.narrow(2, 0, 32).unwrap());
    refused(&["q", "contiguous"], &|c| c.q = c.q.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap());
    refused(&["q", "1 rows", "batch 2"], &|c| c.q = c.q.narrow(0, 0, 1).unwrap());
    refused(&["value_cache", "F16", "BF16"], &|c| c.value_cache = c.value_cache.to_dtype(DType::F16).unwrap());
    refused(&["key_cache", "vllm", "5 dims"], &|c| c.options.layout = CacheLayout::Vllm);
    refused(&["context_lens", "sequence 1", "5000"], &|c| c.context_lens = tensor(&[40, 5000]));
    refused(&["context_lens", "[1]", "[2]"], &|c| c.context_lens = tensor(&[40]));
    refused(&["context_lens", "I64"], &|c| c.context_lens = c.context_lens.to_dtype(DType::I64).unwrap());
    let ids = Tensor::new(&[[0u32, 1, 2, 0], [0, 9000, 1, 2]], cpu)?;
    refused(&["block_tables", "9000", "sequence 1", "column 1", "cache of"], &|c| c.block_tables = ids.clone());
    let negative = Tensor::new(&[[0i32, 1, 2, 0], [0, 1, -1, 2]], cpu)?;
    refused(&["block_tables", "-1", "sequence 1", "column 2"], &|c| c.block_tables = negative.clone());
    refused(&["softmax_scale", "NaN"], &|c| c.options.softmax_scale = Some(f32::NAN));
    refused(&["window", "0"], &|c| c.options.window = Some(0));
    refused(&["max_partitions"], &|c| c.options.max_partitions = Some(0));
    refused(&["sinks", "[8]", "[3]"], &|c| c.options.sinks = Some(Tensor::zeros(3, DType::F32, cpu).unwrap()));
    refused(&["k_scale", "Bf16"], &|c| c.options.k_scale = KvScale::Scalar(2.0));
    refused(&["query_start", "sequence 1", "3", "2"], &|c| c.options.query_start = Some(tensor(&[0, 3, 2])));
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
