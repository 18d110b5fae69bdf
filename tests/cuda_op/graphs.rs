//! Calls captured in a CUDA graph.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype, PagedKvCache, Quantization};
use candle_paged_attn::plan::{DecodePlan, PlanRequest};
use candle_paged_attn::{PlanChoice, cuda, paged_decode_into};
use testkit::cases::{CaseSpec, Scales};
use testkit::reference::attention;
use testkit::step::{DIMS, config};

use crate::support::*;

/// The GPU with events left untracked, as graphs want it, from before its first tensor on.
fn captured_gpu(test: &str) -> Option<LoneGpu> {
    let gpu = lone_gpu(test)?;
    if let Device::Cuda(cuda) = &gpu.device {
        // SAFETY: all work is on the device's one stream.
        unsafe { cuda.disable_event_tracking() };
    }
    Some(gpu)
}

/// A replay plans for and reads what the tensors hold by then.
#[test]
fn a_replay_sees_changed_inputs() -> Result<()> {
    let Some(gpu) = captured_gpu("a_replay_sees_changed_inputs") else { return Ok(()) };
    let device = &gpu.device;
    let of = |lens: Vec<i64>| CaseSpec { lens, ..spec(KvDtype::Bf16, Scales::None) };
    let long = of(vec![5000, 300]).build()?;
    let mut call = on(&long, device, Tables::Device)?;
    call.options.validate = false;
    let out = Tensor::full(half::bf16::NAN, call.q.shape(), &Device::Cpu)?.to_device(device)?;
    let run =
        || paged_decode_into(&out, &call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options);
    let graph = Graph::of(device, run)?;
    // Shorter contexts: the tables' first lanes still hold.
    for lens in [[5000i32, 300], [777, 20], [1, 0]] {
        let lens = Tensor::new(&lens, &Device::Cpu)?;
        overwrite(&call.context_lens, &lens)?;
        graph.replay()?;
        let mut expected = long.clone();
        expected.context_lens = lens;
        expected.expected()?.compare(&out.to_device(&Device::Cpu)?, None, 8e-3, 0.)?;
    }
    Ok(())
}

/// Replays go on in the scratch memory that they were captured with when another call has come to need more, and nobody else gets it.
#[test]
fn a_replay_after_a_larger_call() -> Result<()> {
    let Some(gpu) = captured_gpu("a_replay_after_a_larger_call") else { return Ok(()) };
    let device = &gpu.device;
    let of = |query_len| CaseSpec {
        lens: vec![5000, 300],
        query_lens: vec![query_len],
        kv_heads: 4,
        group: 16,
        ..spec(KvDtype::Bf16, Scales::None)
    };
    let (case, larger) = (of(1).build()?, of(4).build()?);
    let mut call = on(&case, device, Tables::Device)?;
    call.options.validate = false;
    let out = Tensor::zeros(call.q.shape(), call.q.dtype(), device)?;
    let decode =
        || paged_decode_into(&out, &call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options);
    let graph = Graph::of(device, decode)?;
    run(&on(&larger, device, Tables::Device)?)?;
    let others = Tensor::full(7f32, 1 << 18, &Device::Cpu)?;
    let others = (0..16).map(|_| others.to_device(device)).collect::<Result<Vec<_>>>()?;
    graph.replay()?;
    case.expected()?.compare(&out.to_device(&Device::Cpu)?, None, 8e-3, 0.)?;
    assert!(others.iter().all(|other| other.to_vec1::<f32>().unwrap().iter().all(|&x| x == 7.0)));
    Ok(())
}

/// A whole step: new tokens written, the plan made, attended; every input changes from replay to replay.
#[test]
fn a_captured_step_writes_plans_and_attends() -> Result<()> {
    let Some(gpu) = captured_gpu("a_captured_step_writes_plans_and_attends") else { return Ok(()) };
    let device = &gpu.device;
    let cpu = &Device::Cpu;
    for (dtype, quantization, layout, tolerance) in [
        (KvDtype::Bf16, Quantization::None, CacheLayout::Nhd, 8e-3),
        (KvDtype::Fp8, Quantization::PerToken, CacheLayout::Hnd, 8e-3),
        (KvDtype::Fp8, Quantization::Scalar { k: 0.02, v: 0.03 }, CacheLayout::Shuffled, 8e-3),
        (KvDtype::Mxfp4, Quantization::Block, CacheLayout::Nhd, 8e-3),
    ] {
        let cache = PagedKvCache::new(config(dtype, quantization, Some(layout)), device)?;
        let random = |heads: usize| Tensor::randn(0f32, 1., (2, heads, DIMS.head_dim), cpu)?.to_dtype(DType::BF16);
        let there = |t: Tensor| t.to_device(device);
        let (q, k, v) = (there(random(8)?)?, there(random(2)?)?, there(random(2)?)?);
        let slots = there(Tensor::new(&[0i64, 16], cpu)?)?;
        let tables = Tensor::new(&[[0u32, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]], cpu)?;
        let lens = there(Tensor::new(&[1u32, 1], cpu)?)?;
        let mut options = cache.decode_options(1)?;
        options.validate = false;
        let out = there(Tensor::full(half::bf16::NAN, (2, 8, DIMS.head_dim), cpu)?)?;
        let (layer, on_device) = (cache.layer(1)?, tables.to_device(device)?);
        let step = || {
            cache.write(1, &k, &v, &slots)?;
            paged_decode_into(&out, &q, &layer.key, &layer.value, &on_device, &lens, &options)
        };
        let graph = Graph::of(device, step)?;
        for token in 0..90usize {
            for (to, from) in [(&q, random(8)?), (&k, random(2)?), (&v, random(2)?)] {
                overwrite(to, &from)?;
            }
            let page = token / 16 * 2;
            let at = |page: usize| (page * 16 + token % 16) as i64;
            overwrite(&slots, &Tensor::new(&[at(page), at(page + 1)], cpu)?)?;
            overwrite(&lens, &Tensor::new(&[token as u32 + 1; 2], cpu)?)?;
            overwrite(&out, &Tensor::full(half::bf16::NAN, out.shape(), cpu)?)?;
            graph.replay()?;
            if token % 17 == 0 || token == 89 {
                let (keys, values) = cache.gather(1, &(0..12).collect::<Vec<_>>(), 12 * 16)?;
                let paged = |t: &Tensor| t.reshape((12, 16, DIMS.kv_heads, DIMS.head_dim));
                let want = attention(&q.to_device(cpu)?, &paged(&keys)?, &paged(&values)?, &tables, &lens, &Default::default())?;
                want.compare(&out.to_device(cpu)?, None, tolerance, 0.).unwrap_or_else(|e| panic!("{dtype:?} token {token}: {e}"));
            }
        }
    }
    Ok(())
}

/// A plan on the device that is given to the calls of a graph, and refreshed there by overwriting its records.
#[test]
fn a_given_plan_is_refreshed_between_replays() -> Result<()> {
    let Some(gpu) = captured_gpu("a_given_plan_is_refreshed_between_replays") else { return Ok(()) };
    let device = &gpu.device;
    let case = CaseSpec { lens: vec![4000, 300], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let mut call = on(&case, device, Tables::Device)?;
    call.options.validate = false;
    let plan = |lens: &[i32], place: &Device| DecodePlan::new(&PlanRequest::new(lens, &[1], 2), &cuda::arch_of(device)?, place);
    let given = plan(&[4000, 300], device)?;
    call.options.plan = PlanChoice::Given(given.clone());
    let out = Tensor::full(half::bf16::NAN, call.q.shape(), &Device::Cpu)?.to_device(device)?;
    let run =
        || paged_decode_into(&out, &call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options);
    let graph = Graph::of(device, run)?;
    for lens in [[4000i32, 300], [4000, 17], [300, 300]] {
        let fresh = plan(&lens, &Device::Cpu)?;
        overwrite(given.work_info(), fresh.work_info())?;
        overwrite(given.reduce_info(), fresh.reduce_info())?;
        let lens = Tensor::new(&lens, &Device::Cpu)?;
        overwrite(&call.context_lens, &lens)?;
        overwrite(&out, &Tensor::full(half::bf16::NAN, out.shape(), &Device::Cpu)?)?;
        graph.replay()?;
        let mut expected = case.clone();
        expected.context_lens = lens;
        expected.expected()?.compare(&out.to_device(&Device::Cpu)?, None, 8e-3, 0.)?;
    }
    Ok(())
}

#[test]
fn what_a_graph_cannot_take_is_refused() -> Result<()> {
    let Some(gpu) = captured_gpu("what_a_graph_cannot_take_is_refused") else { return Ok(()) };
    let device = &gpu.device;
    let case = CaseSpec { lens: vec![400, 30], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let call = on(&case, device, Tables::Host)?;
    let error = Graph::of(device, || run(&call).map(|_| ())).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("graph"), "{error}");
    let cache = PagedKvCache::new(config(KvDtype::Bf16, Quantization::None, None), device)?;
    let k = Tensor::zeros((1, DIMS.kv_heads, DIMS.head_dim), DType::BF16, device)?;
    let slots = Tensor::new(&[3i64], &Device::Cpu)?;
    let error = Graph::of(device, || cache.write(0, &k, &k, &slots)).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("slot_mapping") && error.contains("graph"), "{error}");
    Ok(())
}
