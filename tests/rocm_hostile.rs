//! What a hostile caller gives the ROCm backend: odd shapes, wild tables, plans of other batches, extreme values.
#![cfg(feature = "rocm")]

use candle::{DType, Device, IndexOp, Result, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheDims, CacheLayout, KvDtype, PagedKvCache, Quantization};
use candle_paged_attn::plan::DecodePlan;
use candle_paged_attn::rocm::{PlanShape, RocmDevice, RocmPlan, RocmTensor};
use candle_paged_attn::{AppendAndAttend, DecodeOptions, KvScale, PlanChoice};
use testkit::bits::Bits;
use testkit::cases::{CaseSpec, Scales};
use testkit::reference::floats;

#[allow(dead_code)]
#[path = "rocm_op/support.rs"]
mod support;
use support::*;

fn bf16() -> CaseSpec {
    spec(KvDtype::Bf16, Scales::None)
}

fn up(values: &[i32]) -> RocmTensor {
    RocmTensor::from_slice(values, values.len(), device()).unwrap()
}

#[test]
fn odd_shapes() {
    let fp8 = |scales| spec(KvDtype::Fp8, scales);
    let f16 = spec(KvDtype::F16, Scales::None);
    for spec in [
        CaseSpec { group: 5, kv_heads: 1, query_lens: vec![7], lens: vec![3, 0, 300], page_size: 8, ..bf16() },
        CaseSpec { group: 7, kv_heads: 3, query_lens: vec![8], lens: vec![270], window: Some(257), ..bf16() },
        CaseSpec { group: 12, kv_heads: 1, query_lens: vec![17], lens: vec![20, 5], sinks: true, ..fp8(Scales::PerToken) },
        CaseSpec { group: 32, kv_heads: 1, query_lens: vec![40], lens: vec![41], layout: CacheLayout::Vllm, ..f16.clone() },
        CaseSpec { group: 1, kv_heads: 1, page_size: 1024, lens: vec![1025], ..bf16() },
        CaseSpec { group: 3, kv_heads: 2, query_lens: vec![0, 5, 0, 1], lens: vec![9, 3, 0, 600], window: Some(1), ..fp8(Scales::Scalar) },
        CaseSpec { group: 2, kv_heads: 1, head_dim: 192, query_lens: vec![3], lens: vec![300], q_dtype: DType::F32, ..bf16() },
        CaseSpec { group: 2, kv_heads: 1, head_dim: 1024, query_lens: vec![2], lens: vec![260], ..fp8(Scales::PerToken) },
        CaseSpec { group: 9, kv_heads: 2, per_head: true, query_lens: vec![2], lens: vec![600, 0], window: Some(256), ..bf16() },
    ] {
        check(&spec);
    }
}

#[test]
fn a_plan_of_many_partitions_in_a_call_that_asks_for_one() -> Result<()> {
    let spec = CaseSpec { lens: vec![3000, 700], ..bf16() };
    let case = spec.build()?;
    let mut call = OnDevice::new(&case, device())?;
    let plan = RocmPlan::new(call.plan_shape(&case), device())?;
    plan.refresh(&call.context_lens, None)?;
    let host = plan.host()?;
    assert!(host.reduce.iter().any(|[_, count]| *count > 1));
    for plan in [plan, RocmPlan::from_host(&host, device())?] {
        call.options.plan = PlanChoice::Given(plan);
        call.options.max_partitions = Some(1);
        let (out, lse) = call.decode_with_lse()?;
        compare(&case, &out.to_tensor()?, Some(&lse.to_tensor()?))?;
    }
    // The same over CPU tensors.
    let mut staged = case.clone();
    staged.options.max_partitions = Some(1);
    let plan = DecodePlan::from_tensors(
        Tensor::from_vec(host.work.concat(), (host.work.len(), 4), &Device::Cpu)?,
        Tensor::from_vec(host.reduce.concat(), (host.reduce.len(), 2), &Device::Cpu)?,
    )?;
    staged.options.plan = PlanChoice::Given(plan);
    let (out, lse) = run(&staged)?;
    compare(&case, &out, Some(&lse))?;
    // A plan of one partition in a call that asks for none in particular.
    let one = RocmPlan::new(PlanShape { max_partitions: Some(1), ..call.plan_shape(&case) }, device())?;
    one.refresh(&call.context_lens, None)?;
    (call.options.plan, call.options.max_partitions) = (PlanChoice::Given(one), None);
    compare(&case, &call.decode()?.to_tensor()?, None)?;
    Ok(())
}

#[test]
fn lengths_past_the_tables_end_with_the_tables() -> Result<()> {
    for (kv_dtype, scales) in forms() {
        let case = CaseSpec { lens: vec![300, 40], query_lens: vec![2], kv_heads: 1, ..spec(kv_dtype, scales) }.build()?;
        let mut call = OnDevice::new(&case, device())?;
        call.context_lens = up(&[i32::MAX, i32::MAX - 255]);
        for plan in [PlanChoice::Default, PlanChoice::Free] {
            for window in [None, Some(1), Some(usize::MAX)] {
                (call.options.plan, call.options.window) = (plan.clone(), window);
                call.decode()?.to_tensor()?;
            }
        }
        call.options.validate = true;
        refuses(call.decode(), &["context_lens", "sequence 0"]);
        call.options.validate = false;
        for lens in [[i32::MIN, 0], [-1, i32::MIN + 1]] {
            call.context_lens = up(&lens);
            let (out, lse) = call.decode_with_lse()?;
            assert!(floats(&out.to_tensor()?)?.iter().all(|v| *v == 0.0));
            assert!(floats(&lse.to_tensor()?)?.iter().all(|v| *v == f64::NEG_INFINITY));
        }
    }
    Ok(())
}

#[test]
fn outputs_that_share_memory_are_refused() -> Result<()> {
    let case = CaseSpec { lens: vec![30], q_dtype: DType::F32, ..bf16() }.build()?;
    let call = OnDevice::new(&case, device())?;
    let memory = RocmTensor::zeros(1024, DType::F32, device())?;
    let out = memory.narrow(0, 0, 512)?.reshape((1, 8, 64))?;
    let lse = memory.narrow(0, 256, 8)?.reshape((1, 8))?;
    refuses(call.decode_into(&out, Some(&lse)), &["lse", "shares its storage with out"]);
    Ok(())
}

#[test]
fn scores_at_the_edges() {
    let base = CaseSpec { lens: vec![300, 20], ..bf16() };
    for spec in [
        CaseSpec { softmax_scale: Some(0.0), ..base.clone() },
        CaseSpec { softmax_scale: Some(-0.5), ..base.clone() },
        CaseSpec { softmax_scale: Some(-0.1), sinks: true, ..spec(KvDtype::Fp8, Scales::Scalar) },
        CaseSpec { softcap: Some(1e-30), ..base.clone() },
        CaseSpec { softcap: Some(1e30), sinks: true, ..base.clone() },
        CaseSpec { softcap: Some(1e30), ..spec(KvDtype::F16, Scales::None) },
        CaseSpec { softcap: Some(1.0), softmax_scale: Some(-1e20), ..base.clone() },
        CaseSpec { window: Some(1), query_lens: vec![3], ..base.clone() },
        CaseSpec { window: Some(255), query_lens: vec![3], ..base.clone() },
        CaseSpec { window: Some(1 << 40), query_lens: vec![3], ..base.clone() },
        CaseSpec { window: Some(256), query_lens: vec![1, 300], lens: vec![900, 300], ..base },
    ] {
        check(&spec);
    }
}

#[test]
fn sinks_without_bound() -> Result<()> {
    for (kv_dtype, scales) in [(KvDtype::Bf16, Scales::None), (KvDtype::Fp8, Scales::PerToken)] {
        let mut case = CaseSpec { lens: vec![40, 0], kv_heads: 1, sinks: true, ..spec(kv_dtype, scales) }.build()?;
        case.options.sinks = Some(Tensor::new(&[f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 2e38], &Device::Cpu)?);
        let (out, lse) = run(&case)?;
        let heads: Vec<Vec<f64>> = (0..4).map(|h| floats(&out.i((0, h))?)).collect::<Result<_>>()?;
        let lse0: Vec<f64> = floats(&lse.i(0)?)?;
        case.options.sinks = None;
        let (plain, plain_lse) = run(&case)?;
        assert_eq!(heads[0], floats(&plain.i((0, 0))?)?, "a sink of -inf is none");
        assert_eq!(lse0[0], floats(&plain_lse.i(0)?)?[0]);
        assert!(heads[2].iter().all(|v| v.is_nan()) && lse0[2].is_nan(), "NaN shows");
        assert!(heads[3].iter().all(|v| *v == 0.0) && (lse0[3] - 2e38).abs() < 1e32, "{}", lse0[3]);
        assert!(floats(&out.i(1)?)?.iter().all(|v| *v == 0.0));
    }
    Ok(())
}

#[test]
fn values_at_the_edges() -> Result<()> {
    // F16 near its end, BF16 near its end, subnormals.
    for (kv_dtype, q_dtype, key, value, query) in [
        (KvDtype::F16, DType::F16, 60000f64, 65504f64, 60000f64),
        (KvDtype::F16, DType::F32, 6e-8, 6e-8, 1e30),
        (KvDtype::F16, DType::BF16, 1.0, 6e-8, 1e-30),
        (KvDtype::Bf16, DType::F32, 1e-38, 1e35, 1e30),
        (KvDtype::Bf16, DType::BF16, 1e18, 1e30, 1e18),
        (KvDtype::Bf16, DType::F16, 1e-3, 1e-3, 60000.0),
        (KvDtype::Fp8, DType::F32, 448.0, 448.0, 1e30),
        (KvDtype::Fp8, DType::F32, 0.002, 0.002, 1e-30),
    ] {
        let mut case = CaseSpec { lens: vec![300], kv_heads: 1, q_dtype, ..spec(kv_dtype, Scales::None) }.build()?;
        let level = |t: &Tensor, most: f64| -> Result<Tensor> {
            let dtype = t.dtype();
            let t = t.to_dtype(DType::F32)?;
            (t.lt(0f64)?.where_cond(&t.ones_like()?.neg()?, &t.ones_like()?)? * most)?.to_dtype(dtype)
        };
        case.key_cache = level(&case.key_cache, key)?;
        case.value_cache = level(&case.value_cache, value)?;
        case.q = level(&case.q, query)?;
        let size = (64.0 * key * query).max(1e-30);
        case.options.softmax_scale = Some((2.0 / size.min(1e38)) as f32);
        let (out, lse) = run(&case)?;
        let result = compare(&case, &out, Some(&lse));
        result.unwrap_or_else(|e| panic!("{kv_dtype:?} {q_dtype:?} {key:e} {value:e} {query:e}: {e}"));
    }
    Ok(())
}

#[test]
fn scales_at_the_edges() -> Result<()> {
    let mut case = CaseSpec { lens: vec![300, 70], kv_heads: 2, ..spec(KvDtype::Fp8, Scales::Scalar) }.build()?;
    for (k, v) in [(0.0, 1.0), (1.0, 0.0), (-0.5, -2.0), (-0.0, 1e-38), (1e-30, 1e30)] {
        (case.options.k_scale, case.options.v_scale) = (KvScale::Scalar(k), KvScale::Scalar(v));
        let (out, lse) = run(&case)?;
        compare(&case, &out, Some(&lse)).unwrap_or_else(|e| panic!("scales {k} and {v}: {e}"));
    }
    for wrong in [f32::NAN, f32::INFINITY] {
        (case.options.k_scale, case.options.v_scale) = (KvScale::Scalar(wrong), KvScale::None);
        refuses(run(&case), &["k_scale"]);
        (case.options.k_scale, case.options.v_scale) = (KvScale::None, KvScale::Scalar(wrong));
        refuses(run(&case), &["v_scale"]);
    }
    // Per token: one owned NaN stays in its sequence and head.
    let case = CaseSpec { lens: vec![300, 70], kv_heads: 2, group: 2, ..spec(KvDtype::Fp8, Scales::PerToken) }.build()?;
    let (clean, _) = run(&case)?;
    let page = case.block_tables.to_vec2::<i32>()?[0][2] as usize;
    for key in [true, false] {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut poisoned = case.clone();
            let scale = if key { &mut poisoned.options.k_scale } else { &mut poisoned.options.v_scale };
            let KvScale::Tensor(tensor) = scale else { unreachable!() };
            *tensor = tensor.slice_assign(&[page..page + 1, 1..2, 5..6], &Tensor::full(bad, (1, 1, 1), &Device::Cpu)?)?;
            let (out, _) = run(&poisoned)?;
            assert_same!(bits(&out.i((0, 0..2))?), bits(&clean.i((0, 0..2))?), "{key} {bad}: the other head");
            assert_same!(bits(&out.i(1)?), bits(&clean.i(1)?), "{key} {bad}: the other sequence");
            // An infinite K scale may as well make a score of -inf.
            let shows = floats(&out.i((0, 2..4))?)?.iter().any(|v| !v.is_finite());
            assert!(shows || key && bad == f32::INFINITY, "{key} {bad}: shows");
        }
    }
    Ok(())
}

#[test]
fn every_fp8_code_is_its_value() -> Result<()> {
    // V holds every finite code, attended alone: the output is the codes' values. A NaN code shows in its own sequence and head alone.
    let mut case =
        CaseSpec { lens: vec![16, 16], kv_heads: 2, group: 2, q_dtype: DType::F32, ..spec(KvDtype::Fp8, Scales::Scalar) }.build()?;
    case.options.window = Some(1);
    (case.options.k_scale, case.options.v_scale) = (KvScale::None, KvScale::None);
    let shape = case.value_cache.shape().clone();
    let fill = |nan: u8, nan_page: Option<usize>| -> Result<Tensor> {
        // Shuffled V [pages, heads, 1, 64, 16].
        let pages = shape.dims()[0];
        let codes = (0..pages * 2 * 64 * 16).map(|i| {
            let (page, head, dim) = (i / 2048, i / 1024 % 2, i / 16 % 64);
            let code = (page * 128 + head * 64 + dim) as u8;
            match nan_page == Some(page) && head == 1 && dim == 7 {
                true => float8::F8E4M3::from_bits(nan),
                false => float8::F8E4M3::from_bits(if code & 0x7f == 0x7f { 0 } else { code }),
            }
        });
        Tensor::from_vec(codes.collect::<Vec<_>>(), &shape, &Device::Cpu)
    };
    let tables = case.block_tables.to_vec2::<i32>()?;
    case.value_cache = fill(0, None)?;
    let (clean, _) = run(&case)?;
    let expected = case.expected()?;
    for (got, want) in floats(&clean)?.iter().zip(&expected.out) {
        assert!((got - want).abs() <= want.abs() * 1e-5, "{got} {want}");
    }
    for nan in [0x7f, 0xff] {
        let mut poisoned = case.clone();
        poisoned.value_cache = fill(nan, Some(tables[1][0] as usize))?;
        let (out, _) = run(&poisoned)?;
        assert_same!(bits(&out.i(0)?), bits(&clean.i(0)?));
        assert_same!(bits(&out.i((1, 0..2))?), bits(&clean.i((1, 0..2))?));
        assert!(floats(&out.i((1, 2..4, 7))?)?.iter().all(|v| v.is_nan()), "{nan:#x}");
        assert!(floats(&out.i((1, 2..4, 8))?)?.iter().all(|v| !v.is_nan()));
    }
    Ok(())
}

#[test]
fn threads_share_a_device() -> Result<()> {
    let cases = [
        CaseSpec { lens: vec![700, 40], ..bf16() }.build()?,
        CaseSpec { lens: vec![700, 40], ..spec(KvDtype::Fp8, Scales::Scalar) }.build()?,
    ];
    let wants = cases.iter().map(|case| run(case).map(|(out, lse)| (bits(&out), bits(&lse)))).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (cases, wants) = (&cases, &wants);
            scope.spawn(move || {
                for round in 0..3 {
                    let which = (thread + round) % 2;
                    let (out, lse) = if thread < 2 {
                        run(&cases[which]).unwrap()
                    } else {
                        let (out, lse) = OnDevice::new(&cases[which], device()).unwrap().decode_with_lse().unwrap();
                        (out.to_tensor().unwrap(), lse.to_tensor().unwrap())
                    };
                    assert_same!((bits(&out), bits(&lse)), wants[which], "thread {thread} round {round}");
                }
            });
        }
    });
    Ok(())
}

#[test]
fn a_graph_outlives_everything_it_was_captured_from() -> Result<()> {
    let own = fresh_device();
    let case = CaseSpec { lens: vec![900, 40], ..spec(KvDtype::Fp8, Scales::Scalar) }.build()?;
    let out = RocmTensor::zeros(case.q.dims(), DType::BF16, &own)?;
    let graph = {
        let call = OnDevice::new(&case, &own)?;
        call.decode_into(&out, None)?;
        own.capture(|| {
            refuses(own.capture(|| Ok(())), &["captur"]);
            call.decode_into(&out, None)?;
            // Wrong calls are refused and leave the capture as it is.
            refuses(call.decode_into(&call.q, None), &["out"]);
            refuses(call.decode_into(&out.narrow(0, 0, 1)?, None), &["out"]);
            Ok(())
        })?
    };
    let noise: Vec<_> = (0..40).map(|i| RocmTensor::empty(64 << (i % 14), DType::F32, &own)).collect::<Result<_>>()?;
    noise.iter().try_for_each(|t| t.fill_bytes(0xff))?;
    for _ in 0..2 {
        out.fill_bytes(0xff)?;
        graph.replay()?;
        compare(&case, &out.to_tensor()?, None)?;
    }
    drop(own);
    graph.replay()?;
    compare(&case, &out.to_tensor()?, None)?;
    Ok(())
}

#[test]
fn appends_that_fail_change_nothing() -> Result<()> {
    let cpu = &Device::Cpu;
    let dims = CacheDims { pages: 4, page_size: 16, kv_heads: 2, head_dim: 64 };
    for (dtype, quantization) in [(KvDtype::Bf16, Quantization::None), (KvDtype::Fp8, Quantization::PerToken)] {
        let cache = PagedKvCache::new(CacheConfig { layers: 1, dims, dtype, layout: None, quantization }, device())?;
        let reference = PagedKvCache::new(CacheConfig { layers: 1, dims, dtype, layout: Some(CacheLayout::Nhd), quantization }, cpu)?;
        let k = Tensor::randn(0f32, 1., (5, 2, 64), cpu)?;
        let v = Tensor::randn(0f32, 1., (5, 2, 64), cpu)?;
        // Twice the same slot, the last one, and skipped ones.
        let slots = Tensor::new(&[3i64, 63, 3, i64::MIN, 0], cpu)?;
        cache.write(0, &k, &v, &slots)?;
        reference.write(0, &k, &v, &slots)?;
        let close = |a: &Tensor, b: &Tensor| -> Result<()> {
            for (a, b) in floats(a)?.into_iter().zip(floats(b)?) {
                assert!((a - b).abs() <= 0.13 * b.abs() + 1e-2, "{a} {b}");
            }
            Ok(())
        };
        let (got, want) = (cache.gather(0, &[0, 1, 2, 3], 64)?, reference.gather(0, &[0, 1, 2, 3], 64)?);
        close(&got.0, &want.0)?;
        close(&got.1, &want.1)?;
        let state = || -> Result<Vec<Bits>> {
            let layer = cache.rocm_layer(0)?;
            let mut all = vec![bits(&layer.key.to_tensor()?), bits(&layer.value.to_tensor()?)];
            for scale in [&layer.k_scale, &layer.v_scale] {
                if let KvScale::Tensor(scale) = scale {
                    all.push(bits(&scale.to_tensor()?));
                }
            }
            Ok(all)
        };
        let before = state()?;
        let q = Tensor::randn(0f32, 1., (2, 4, 64), cpu)?;
        let (k, v) = (k.narrow(0, 0, 2)?, v.narrow(0, 0, 2)?);
        type Edit<'a> = &'a dyn Fn(&mut AppendAndAttend<'_>);
        let with = |edit: Edit<'_>, q: &Tensor, k: &Tensor, v: &Tensor| {
            let mut op = AppendAndAttend {
                cache: &cache,
                layer: 0,
                slot_mapping: Tensor::new(&[16i64, 17], cpu).unwrap(),
                block_tables: Tensor::new(&[[1i32, -1]], cpu).unwrap(),
                context_lens: Tensor::new(&[2i32], cpu).unwrap(),
                options: DecodeOptions::default(),
            };
            edit(&mut op);
            op.apply(q, k, v)
        };
        let slots = |values: &[i64]| Tensor::new(values, &Device::Cpu).unwrap();
        refuses(with(&|op| op.slot_mapping = slots(&[16]), &q, &k, &v), &["slot_mapping"]);
        refuses(with(&|op| op.slot_mapping = slots(&[16, 17, 18]), &q, &k, &v), &["slot_mapping"]);
        refuses(with(&|op| op.slot_mapping = slots(&[16, 64]), &q, &k, &v), &["slot_mapping", "64"]);
        refuses(with(&|op| op.slot_mapping = slots(&[16, i64::MAX]), &q, &k, &v), &["slot_mapping"]);
        refuses(with(&|op| op.slot_mapping = slots(&[16, 17]).to_dtype(DType::U32).unwrap(), &q, &k, &v), &["slot_mapping"]);
        refuses(with(&|op| op.block_tables = Tensor::new(&[[-1i32]], cpu).unwrap(), &q, &k, &v), &["block_tables", "-1"]);
        refuses(with(&|op| op.block_tables = Tensor::new(&[[4u32]], cpu).unwrap(), &q, &k, &v), &["block_tables", "4"]);
        refuses(with(&|op| op.context_lens = Tensor::new(&[33i32], cpu).unwrap(), &q, &k, &v), &["context_lens", "33"]);
        refuses(with(&|op| op.layer = 1, &q, &k, &v), &["layer: 1"]);
        refuses(with(&|op| op.options.window = Some(0), &q, &k, &v), &["window"]);
        refuses(with(&|op| op.options.sinks = Some(Tensor::zeros(3, DType::F32, cpu).unwrap()), &q, &k, &v), &["sinks"]);
        refuses(with(&|_| {}, &q.narrow(1, 0, 3)?, &k, &v), &["q"]);
        refuses(with(&|_| {}, &q, &k.narrow(0, 0, 1)?, &v), &["k"]);
        refuses(with(&|_| {}, &q, &k, &v.narrow(1, 0, 1)?), &["v"]);
        refuses(with(&|_| {}, &q.to_dtype(DType::F64)?, &k, &v), &["q", "F64"]);
        assert_same!(state()?, before);
        // The caller's options do not say how the cache is scaled.
        let bits_of = |edit| with(edit, &q, &k, &v).map(|out| bits(&out));
        let own = bits_of(&|_| {})?;
        let other = bits_of(&|op| (op.options.k_scale, op.options.layout) = (KvScale::Scalar(f32::NAN), CacheLayout::Hnd))?;
        assert_same!(other, own);
    }
    Ok(())
}

#[test]
fn two_devices_do_not_mix() -> Result<()> {
    if RocmDevice::count()? < 2 {
        println!("skipped: one device (HIP_SIM_DEVICES=2 gives two)");
        return Ok(());
    }
    let other = RocmDevice::new(1)?;
    let case = CaseSpec { lens: vec![600, 40], ..bf16() }.build()?;
    let (here, there) = (OnDevice::new(&case, device())?, OnDevice::new(&case, &other)?);
    assert_same!(bits(&here.decode()?.to_tensor()?), bits(&there.decode()?.to_tensor()?));
    let plan = RocmPlan::new(here.plan_shape(&case), device())?;
    let mut mixed = there.clone();
    mixed.options.plan = PlanChoice::Given(plan.clone());
    refuses(mixed.decode(), &["plan", "different devices"]);
    refuses(plan.refresh(&there.context_lens, None), &["context_lens", "different devices"]);
    mixed = there.clone();
    mixed.options.sinks = Some(RocmTensor::zeros(8, DType::F32, device())?);
    refuses(mixed.decode(), &["sinks"]);
    let graph = other.capture(|| there.decode().map(|_| ()))?;
    graph.replay()?;
    Ok(())
}

#[test]
fn wrong_tensors_are_named() -> Result<()> {
    let case = CaseSpec { lens: vec![300, 40], query_lens: vec![2], ..spec(KvDtype::Fp8, Scales::PerToken) }.build()?;
    let call = OnDevice::new(&case, device())?;
    let with = |edit: &dyn Fn(&mut OnDevice)| {
        let mut call = call.clone();
        edit(&mut call);
        call.decode().and_then(|out| out.to_tensor())
    };
    let zeros = |shape: &[usize], dtype| RocmTensor::zeros(shape, dtype, device()).unwrap();
    refuses(with(&|c| c.context_lens = zeros(&[3], DType::I32)), &["context_lens"]);
    refuses(with(&|c| c.context_lens = zeros(&[2], DType::I64)), &["context_lens", "I64"]);
    refuses(with(&|c| c.context_lens = zeros(&[2, 2], DType::I32).narrow(1, 0, 1).unwrap().squeeze(1).unwrap()), &["context_lens"]);
    refuses(with(&|c| c.block_tables = zeros(&[2, 3, 4], DType::I32)), &["block_tables"]);
    refuses(with(&|c| c.block_tables = zeros(&[2, 3], DType::F32)), &["block_tables"]);
    refuses(with(&|c| c.q = zeros(&[4, 7, 64], DType::BF16)), &["q"]);
    refuses(with(&|c| c.q = zeros(&[4, 8, 128], DType::BF16)), &["q"]);
    refuses(with(&|c| c.q = zeros(&[4, 8, 64], DType::U8)), &["q"]);
    refuses(with(&|c| c.q = zeros(&[256], DType::BF16)), &["q"]);
    refuses(with(&|c| c.q = c.q.transpose(1, 2).unwrap()), &["q"]);
    refuses(with(&|c| c.value = zeros(&[1, 2, 1, 64, 16], DType::F8E4M3)), &["value_cache"]);
    refuses(with(&|c| c.value = zeros(c.value.dims(), DType::U8)), &["value_cache"]);
    refuses(with(&|c| c.options.v_scale = KvScale::None), &["v_scale"]);
    refuses(with(&|c| c.options.v_scale = KvScale::Scalar(1.0)), &["v_scale"]);
    refuses(with(&|c| c.options.k_scale = KvScale::Tensor(zeros(&[1, 2, 16], DType::F32))), &["k_scale"]);
    refuses(with(&|c| c.options.query_start = Some(zeros(&[2], DType::I32))), &["query_start"]);
    refuses(with(&|c| c.options.query_start = Some(zeros(&[3], DType::F32))), &["query_start"]);
    refuses(with(&|c| c.options.sinks = Some(zeros(&[8], DType::BF16))), &["sinks"]);
    refuses(with(&|c| c.options.sinks = Some(zeros(&[8, 2], DType::F32).narrow(1, 0, 1).unwrap().squeeze(1).unwrap())), &["sinks"]);
    refuses(with(&|c| c.options.softcap = Some(f32::NAN)), &["softcap"]);
    refuses(with(&|c| c.options.softcap = Some(0.0)), &["softcap"]);
    refuses(with(&|c| c.options.softmax_scale = Some(f32::INFINITY)), &["softmax_scale"]);
    let out = RocmTensor::zeros((2, 64, 8), DType::BF16, device())?;
    refuses(call.decode_into(&out.transpose(1, 2)?, None), &["out"]);
    // Scales whose tokens are apart, whose start is anywhere.
    let KvScale::Tensor(scale) = &call.options.k_scale else { unreachable!() };
    let (pages, heads) = (scale.dims()[0], scale.dims()[1]);
    let mut apart = call.clone();
    let wide = RocmTensor::from_tensor(
        &Tensor::cat(&[&Tensor::zeros((pages, heads, 3), DType::F32, &Device::Cpu)?, &scale.to_tensor()?], 2)?,
        device(),
    )?;
    apart.options.k_scale = KvScale::Tensor(wide.narrow(2, 3, 16)?);
    assert_same!(bits(&apart.decode()?.to_tensor()?), bits(&call.decode()?.to_tensor()?));
    Ok(())
}
