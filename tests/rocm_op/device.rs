//! Calls over tensors on the device: what an engine that owns its cache makes.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::plan::{HostPlan, PlanRequest};
use candle_paged_attn::rocm::{PlanShape, RocmPlan, RocmTensor};
use candle_paged_attn::{KvScale, PlanChoice};
use testkit::cases::{Case, CaseSpec, Scales};
use testkit::reference::floats;

use crate::support::{self, *};

fn bf16() -> CaseSpec {
    spec(KvDtype::Bf16, Scales::None)
}

fn compare(case: &Case, out: &RocmTensor, lse: Option<&RocmTensor>) {
    let lse = lse.map(|lse| lse.to_tensor().unwrap());
    let compared = support::compare(case, &out.to_tensor().unwrap(), lse.as_ref());
    compared.unwrap_or_else(|e| panic!("{:?}: {e}", case.spec));
}

#[test]
fn every_form_and_option() -> Result<()> {
    for (kv_dtype, scales) in forms() {
        let base = CaseSpec { query_lens: vec![2], lens: vec![700, 0, 130], ..spec(kv_dtype, scales) };
        let specs = [
            CaseSpec { window: Some(300), page_strided: true, ..base.clone() },
            CaseSpec { per_head: true, sinks: true, q_strided: true, ..base.clone() },
            CaseSpec { query_lens: vec![1, 3, 9], softcap: Some(9.0), ..base.clone() },
            CaseSpec { plan_free: true, sinks: true, ..base.clone() },
            CaseSpec { lens: vec![40, 200, 0], max_partitions: Some(1), signed_tables: false, ..base },
        ];
        for spec in specs {
            let case = spec.build()?;
            let (out, lse) = OnDevice::new(&case, device())?.decode_with_lse()?;
            compare(&case, &out, Some(&lse));
        }
    }
    Ok(())
}

#[test]
fn the_device_s_plan_is_the_host_s_and_so_are_the_bits() -> Result<()> {
    let specs = [
        CaseSpec { lens: vec![3000, 0, 700, 1], query_lens: vec![2], ..bf16() },
        CaseSpec { lens: vec![3000, 40, 900], per_head: true, window: Some(700), ..bf16() },
        CaseSpec { lens: vec![3000, 40, 900], query_lens: vec![1, 2, 4], workgroup_budget: Some(12), max_partitions: Some(4), ..bf16() },
    ];
    for spec in specs {
        let case = spec.build()?;
        let (want, want_lse) = run(&case)?;
        let mut call = OnDevice::new(&case, device())?;
        call.options.max_query_len = spec.query_lens.iter().copied().max().filter(|_| spec.query_lens.len() > 1);
        let plan = RocmPlan::new(call.plan_shape(&case), device())?;
        plan.refresh(&call.context_lens, call.options.query_start.as_ref())?;
        let lens = case.context_lens.flatten_all()?.to_vec1::<i32>()?;
        let heads = if spec.per_head { spec.kv_heads } else { 1 };
        let query_lens: Vec<usize> = match spec.query_lens.as_slice() {
            [one] => vec![*one],
            each => each.iter().flat_map(|&len| std::iter::repeat_n(len, heads)).collect(),
        };
        let request = PlanRequest {
            window: spec.window,
            max_partitions: spec.max_partitions,
            workgroup_budget: spec.workgroup_budget,
            ..PlanRequest::new(&lens, &query_lens, if spec.per_head { 1 } else { spec.kv_heads })
        };
        assert_eq!(plan.host()?, HostPlan::new(&request, device().arch())?);
        call.options.plan = PlanChoice::Given(plan);
        for _ in 0..2 {
            let (out, lse) = call.decode_with_lse()?;
            assert_same!((bits(&out.to_tensor()?), bits(&lse.to_tensor()?)), (bits(&want), bits(&want_lse)), "{spec:?}");
            call.options.plan = PlanChoice::Default;
        }
    }
    Ok(())
}

#[test]
fn views_of_tables_queries_and_outputs() -> Result<()> {
    let case = CaseSpec { lens: vec![300, 40], query_lens: vec![2], ..bf16() }.build()?;
    let mut call = OnDevice::new(&case, device())?;
    let want = bits(&call.decode()?.to_tensor()?);
    // Rows of a wider table.
    let lanes = case.block_tables.dim(1)?;
    let wide = Tensor::cat(&[&case.block_tables, &Tensor::full(-7i32, (2, 9), &Device::Cpu)?], 1)?;
    call.block_tables = RocmTensor::from_tensor(&wide, device())?.narrow(1, 0, lanes)?;
    assert_same!(bits(&call.decode()?.to_tensor()?), want);
    // A 4-D query, and heads of a wider output, whose other elements keep their values.
    call.q = call.q.reshape((2, 2, 8, 64))?;
    let around = RocmTensor::empty((2, 2, 10, 64), DType::BF16, device())?;
    around.fill_bytes(0xff)?;
    call.decode_into(&around.narrow(2, 1, 8)?, None)?;
    let all = around.to_tensor()?;
    assert_same!(bits(&all.narrow(2, 1, 8)?), want);
    for outside in [0, 9] {
        assert!(floats(&all.narrow(2, outside, 1)?)?.iter().all(|v| v.is_nan()));
    }
    Ok(())
}

#[test]
fn a_short_call_with_a_scalar_scale_is_one_launch_and_a_planned_one_two() -> Result<()> {
    for (kv_dtype, scales) in [(KvDtype::Fp8, Scales::Scalar), (KvDtype::Fp8, Scales::None), (KvDtype::Bf16, Scales::None)] {
        let own = fresh_device();
        let launches = |call: &OnDevice, out: &RocmTensor| -> Result<u64> {
            call.decode_into(out, None)?;
            let before = own.counts();
            call.decode_into(out, None)?;
            let after = own.counts();
            assert_eq!(after.synchronizations, before.synchronizations, "nothing waits");
            assert_eq!((after.copies, after.fills), (before.copies, before.fills), "a known scale costs nothing");
            assert_eq!(after.live_bytes, before.live_bytes);
            Ok(after.launches - before.launches)
        };
        let short = CaseSpec { lens: vec![100, 200], ..spec(kv_dtype, scales) };
        let call = OnDevice::new(&short.build()?, &own)?;
        let out = RocmTensor::empty(call.q.dims(), DType::BF16, &own)?;
        assert_eq!(launches(&call, &out)?, 1, "a table of one tile has one partition");
        let case = CaseSpec { lens: vec![2000, 600], ..spec(kv_dtype, scales) }.build()?;
        let mut call = OnDevice::new(&case, &own)?;
        assert_eq!(launches(&call, &out)?, 3, "planner, tile, reducer");
        let plan = RocmPlan::new(call.plan_shape(&case), &own)?;
        plan.refresh(&call.context_lens, None)?;
        call.options.plan = PlanChoice::Given(plan);
        assert_eq!(launches(&call, &out)?, 2, "tile and reducer");
        compare(&case, &out, None);
        call.options.plan = PlanChoice::Default;
        call.options.max_partitions = Some(1);
        assert_eq!(launches(&call, &out)?, 1, "one partition");
        let one = Case { spec: CaseSpec { max_partitions: Some(1), ..case.spec.clone() }, ..case };
        compare(&one, &out, None);
    }
    Ok(())
}

#[test]
fn more_scales_than_are_kept() -> Result<()> {
    let own = fresh_device();
    let mut case = CaseSpec { lens: vec![40], ..spec(KvDtype::Fp8, Scales::Scalar) }.build()?;
    let mut live = vec![];
    for i in 0..70 {
        let scale = 0.25 + i as f32 / 64.0;
        (case.options.k_scale, case.options.v_scale) = (KvScale::Scalar(scale), KvScale::Scalar(scale));
        compare(&case, &OnDevice::new(&case, &own)?.decode()?, None);
        live.push(own.counts().live_bytes);
    }
    // After the first call, which takes what holds 64 values, nothing is left behind.
    assert!(live.iter().all(|bytes| *bytes == live[0]), "{live:?}");
    let fills = own.counts().fills;
    OnDevice::new(&case, &own)?.decode()?;
    assert!(own.counts().fills > fills, "past 64 values each call fills its own");
    Ok(())
}

#[test]
fn what_is_wrong_is_named_and_nothing_is_launched() -> Result<()> {
    let own = fresh_device();
    let case = CaseSpec { lens: vec![300, 40], query_lens: vec![2], ..bf16() }.build()?;
    let call = OnDevice::new(&case, &own)?;
    let out = RocmTensor::empty(call.q.dims(), DType::BF16, &own)?;
    let elsewhere = RocmTensor::from_tensor(&case.q, device())?;
    let table = RocmTensor::from_tensor(&Tensor::zeros((40, 2), DType::I32, &Device::Cpu)?, &own)?;
    let wide = RocmTensor::zeros((4, 8, 65), DType::BF16, &own)?;
    let [shifted, short_lse] = [RocmTensor::zeros(4 * 8 * 64 + 4, DType::BF16, &own)?, RocmTensor::zeros((4, 7), DType::F32, &own)?];
    let plan = RocmPlan::new(PlanShape { batch: 3, ..call.plan_shape(&case) }, &own)?;
    let windowed = RocmPlan::new(PlanShape { window: Some(9), ..call.plan_shape(&case) }, &own)?;
    let before = work(&own);
    let with = |edit: &dyn Fn(&mut OnDevice)| {
        let mut call = call.clone();
        edit(&mut call);
        call.decode_into(&out, None)
    };
    refuses(with(&|c| c.q = elsewhere.clone()), &["different devices"]);
    refuses(with(&|c| c.q = c.q.narrow(0, 0, 3).unwrap()), &["out"]);
    refuses(with(&|c| c.q = wide.narrow(2, 0, 64).unwrap()), &["q", "16 bytes"]);
    refuses(with(&|c| c.q = shifted.narrow(0, 4, 2048).unwrap().reshape((4, 8, 64)).unwrap()), &["q", "16 bytes"]);
    refuses(with(&|c| c.block_tables = table.transpose(0, 1).unwrap()), &["block_tables", "strided"]);
    refuses(with(&|c| c.options.layout = CacheLayout::Nhd), &["key_cache", "nhd"]);
    refuses(with(&|c| c.options.k_scale = KvScale::Scalar(0.5)), &["k_scale"]);
    refuses(with(&|c| c.options.plan = PlanChoice::Given(plan.clone())), &["plan", "3 rows", "2"]);
    refuses(with(&|c| c.options.plan = PlanChoice::Given(windowed.clone())), &["plan", "window"]);
    refuses(call.decode_into(&call.q, None), &["out", "shares its storage with q"]);
    refuses(call.decode_into(&out, Some(&short_lse)), &["lse", "[4, 8]", "[4, 7]"]);
    refuses(call.decode_into(&out.narrow(0, 0, 2)?, None), &["out"]);
    assert_eq!(work(&own), before);
    with(&|_| {})
}

#[test]
fn validation_reads_tables_and_lengths_back() -> Result<()> {
    let case = CaseSpec { lens: vec![300, 40], query_lens: vec![1, 2], ..bf16() }.build()?;
    let mut call = OnDevice::new(&case, device())?;
    call.options.validate = true;
    compare(&case, &call.decode()?, None);
    let pages = case.key_cache.dim(0)?;
    let with = |edit: &dyn Fn(&mut OnDevice)| {
        let mut call = call.clone();
        edit(&mut call);
        call.decode()
    };
    let up = |values: &[i32]| RocmTensor::from_tensor(&Tensor::new(values, &Device::Cpu).unwrap(), device()).unwrap();
    let table = RocmTensor::from_tensor(&Tensor::full(pages as i32, case.block_tables.dims(), &Device::Cpu)?, device())?;
    refuses(with(&|c| c.block_tables = table.clone()), &["block_tables", &format!("page id {pages} of sequence 0 (column 0)")]);
    refuses(with(&|c| c.context_lens = up(&[300, 9000])), &["context_lens", "sequence 1", "9000"]);
    refuses(with(&|c| c.options.query_start = Some(up(&[0, 2, 1]))), &["query_start", "sequence 1"]);
    refuses(with(&|c| c.options.max_query_len = Some(1)), &["max_query_len", "1", "2 new tokens"]);
    let stale = RocmPlan::new(call.plan_shape(&case), device())?;
    refuses(with(&|c| c.options.plan = PlanChoice::Given(stale.clone())), &["plan row 0"]);
    Ok(())
}

#[test]
fn without_validation_no_id_or_length_reaches_past_the_cache() -> Result<()> {
    // The simulator stops a launch that touches memory that is not there; a GPU may let it pass.
    for (kv_dtype, scales) in forms() {
        let case = CaseSpec { lens: vec![300, 40], ..spec(kv_dtype, scales) }.build()?;
        let mut call = OnDevice::new(&case, device())?;
        for id in [-1, i32::MIN, i32::MAX, case.key_cache.dim(0)? as i32] {
            call.block_tables = RocmTensor::from_tensor(&Tensor::full(id, case.block_tables.dims(), &Device::Cpu)?, device())?;
            call.decode()?.to_tensor()?;
        }
        // A cache without a page, whatever the lengths say.
        if kv_dtype == KvDtype::Bf16 {
            let mut none = call.clone();
            (none.key, none.value) = (none.key.narrow(0, 0, 0)?, none.value.narrow(0, 0, 0)?);
            assert!(floats(&none.decode()?.to_tensor()?)?.iter().all(|v| *v == 0.0));
        }
        // Query starts that are none.
        for starts in [[0, 7, 2], [-5, i32::MIN, i32::MAX], [1 << 30, 1 << 30, 3]] {
            call.options.query_start = Some(RocmTensor::from_tensor(&Tensor::new(&starts, &Device::Cpu)?, device())?);
            call.decode()?.to_tensor()?;
        }
        call.options.query_start = None;
        let capacity = (case.block_tables.dim(1)? * 16) as i32;
        for lens in [[capacity + 1, i32::MIN], [capacity + 5000, -1]] {
            call.context_lens = RocmTensor::from_tensor(&Tensor::new(&lens, &Device::Cpu)?, device())?;
            for plan in [PlanChoice::Default, PlanChoice::Free] {
                call.options.plan = plan;
                call.decode()?.to_tensor()?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_fresh_plan_holds_nothing() -> Result<()> {
    let case = CaseSpec { lens: vec![300, 40], ..bf16() }.build()?;
    let mut call = OnDevice::new(&case, device())?;
    call.options.plan = PlanChoice::Given(RocmPlan::new(call.plan_shape(&case), device())?);
    assert!(floats(&call.decode()?.to_tensor()?)?.iter().all(|v| *v == 0.0));
    let host = RocmPlan::from_host(&HostPlan { work: vec![], reduce: vec![] }, device())?;
    refuses(host.refresh(&call.context_lens, None), &["plan", "host"]);
    for (work, reduce) in [([2, 0, 1, 0], [0, 1]), ([0, -1, 1, 0], [0, 1]), ([0, 0, 1, 0], [1, 1]), ([0, 0, 1, 0], [0, -1])] {
        let wrong = HostPlan { work: vec![work], reduce: vec![reduce] };
        refuses(RocmPlan::from_host(&wrong, device()), &["plan", "0"]);
    }
    let huge = PlanShape { batch: 1 << 20, ..call.plan_shape(&case) };
    refuses(RocmPlan::new(huge, device()), &["LDS", "plan on the host"]);
    Ok(())
}
