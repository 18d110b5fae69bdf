//! Decode calls in graphs: captured once, replayed with other inputs over an output of NaNs.

use candle::{DType, Result, Tensor};
use candle_paged_attn::cache::KvDtype;
use candle_paged_attn::rocm::{RocmPlan, RocmTensor};
use candle_paged_attn::{KvScale, PlanChoice};
use testkit::cases::{Case, CaseSpec, Scales};

use crate::support::{self, *};

/// Cases of the same shapes and other contents; tables have room for the longest.
fn rounds(base: &CaseSpec, lens: &[Vec<i64>]) -> Result<Vec<Case>> {
    let mut cases = lens
        .iter()
        .enumerate()
        .map(|(seed, lens)| CaseSpec { seed: seed as u64 + 1, lens: lens.clone(), ..base.clone() }.build())
        .collect::<Result<Vec<_>>>()?;
    let pages = cases.iter().map(|case| case.key_cache.dim(0)).collect::<Result<Vec<_>>>()?.into_iter().max().unwrap();
    let lanes = cases.iter().map(|case| case.block_tables.dim(1)).collect::<Result<Vec<_>>>()?.into_iter().max().unwrap();
    for case in &mut cases {
        let padded = |t: &Tensor, dim: usize, size: usize| t.pad_with_zeros(dim, 0, size - t.dim(dim)?);
        (case.key_cache, case.value_cache) = (padded_pages(&case.key_cache, pages)?, padded_pages(&case.value_cache, pages)?);
        case.block_tables = padded(&case.block_tables, 1, lanes)?;
        for scale in [&mut case.options.k_scale, &mut case.options.v_scale] {
            if let KvScale::Tensor(tensor) = scale {
                *tensor = padded(tensor, 0, pages)?;
            }
        }
    }
    Ok(cases)
}

/// FP8 has no zeros to pad with: the first page again.
fn padded_pages(cache: &Tensor, pages: usize) -> Result<Tensor> {
    let missing = pages - cache.dim(0)?;
    let mut parts = vec![cache.clone()];
    parts.extend((0..missing).map(|_| cache.narrow(0, 0, 1).unwrap()));
    Tensor::cat(&parts, 0)
}

/// Overwrites the call's inputs with those of `case`.
fn set(call: &OnDevice, case: &Case) -> Result<()> {
    let other = OnDevice::new(case, call.q.device())?;
    for (to, from) in [(&call.q, &other.q), (&call.key, &other.key), (&call.value, &other.value), (&call.block_tables, &other.block_tables)]
    {
        to.copy_from_device(from)?;
    }
    call.context_lens.copy_from_device(&other.context_lens)?;
    for (to, from) in [(&call.options.k_scale, &other.options.k_scale), (&call.options.v_scale, &other.options.v_scale)] {
        if let (KvScale::Tensor(to), KvScale::Tensor(from)) = (to, from) {
            to.copy_from_device(from)?;
        }
    }
    Ok(())
}

fn compare(case: &Case, out: &RocmTensor, lse: &RocmTensor) -> Result<()> {
    support::compare(case, &out.to_tensor()?, Some(&lse.to_tensor()?)).map(|_| ())
}

#[test]
fn a_captured_plan_refresh_and_decode_follow_their_inputs() -> Result<()> {
    // A capture has its device for itself.
    let own = &fresh_device();
    for (kv_dtype, scales) in forms() {
        // A scale of its own for each case would be another graph.
        let scales = if scales == Scales::Scalar { Scales::None } else { scales };
        let base = CaseSpec { query_lens: vec![2], ..spec(kv_dtype, scales) };
        let cases = rounds(&base, &[vec![1500, 40, 3], vec![10, 900, 0], vec![300, 300, 300], vec![0, 0, 0]])?;
        let mut call = OnDevice::new(&cases[0], own)?;
        let plan = RocmPlan::new(call.plan_shape(&cases[0]), own)?;
        call.options.plan = PlanChoice::Given(plan.clone());
        let out = RocmTensor::zeros(call.q.dims(), DType::BF16, own)?;
        let lse = RocmTensor::zeros((6, 8), DType::F32, own)?;
        let step = || {
            plan.refresh(&call.context_lens, None)?;
            call.decode_into(&out, Some(&lse))
        };
        step()?;
        let graph = own.capture(step)?;
        for case in cases.iter().rev() {
            set(&call, case)?;
            out.fill_bytes(0xff)?;
            lse.fill_bytes(0xff)?;
            graph.replay()?;
            compare(case, &out, &lse).unwrap_or_else(|e| panic!("{:?}: {e}", case.spec));
        }
    }
    Ok(())
}

#[test]
fn a_call_with_memory_of_its_own_can_be_captured() -> Result<()> {
    // No plan is given: the call plans by itself, in memory that the graph keeps; others use the pool between its replays.
    let own = &fresh_device();
    let cases = rounds(&spec(KvDtype::Bf16, Scales::None), &[vec![1500, 40], vec![10, 900]])?;
    let call = OnDevice::new(&cases[0], own)?;
    let out = RocmTensor::zeros(call.q.dims(), DType::BF16, own)?;
    let lse = RocmTensor::zeros((2, 8), DType::F32, own)?;
    let step = || call.decode_into(&out, Some(&lse));
    step()?;
    let graph = own.capture(step)?;
    for case in cases.iter().chain(&cases) {
        set(&call, case)?;
        out.fill_bytes(0xff)?;
        let noise: Vec<_> = (0..20).map(|i| RocmTensor::empty(100 << i.min(12), DType::F32, own)).collect::<Result<_>>()?;
        noise.iter().try_for_each(|t| t.fill_bytes(0xff))?;
        graph.replay()?;
        noise.iter().try_for_each(|t| t.fill_bytes(0xff))?;
        compare(case, &out, &lse)?;
    }
    Ok(())
}

#[test]
fn a_scale_that_a_capture_asks_for_first_stays_right() -> Result<()> {
    let own = fresh_device();
    let spec = CaseSpec { lens: vec![100, 40], ..spec(KvDtype::Fp8, Scales::Scalar) };
    let mut case = spec.build()?;
    let warm = OnDevice::new(&case, &own)?;
    warm.decode()?.to_tensor()?;
    (case.options.k_scale, case.options.v_scale) = (KvScale::Scalar(0.375), KvScale::Scalar(1.75));
    let call = OnDevice::new(&case, &own)?;
    let out = RocmTensor::zeros(call.q.dims(), DType::BF16, &own)?;
    // Memory for them has to be in the pool.
    drop([0, 1].map(|_| RocmTensor::empty(1, DType::F32, &own).unwrap()));
    let graph = own.capture(|| call.decode_into(&out, None))?;
    let check = |out: &RocmTensor| support::compare(&case, &out.to_tensor()?, None);
    // A fill that is a part of the graph has not run yet: this call has its own.
    check(&call.decode()?)?;
    for _ in 0..2 {
        out.fill_bytes(0xff)?;
        graph.replay()?;
        check(&out)?;
        // The same scales outside of the graph, now kept, and other values in the memory that was theirs.
        check(&call.decode()?)?;
        let noise: Vec<_> = (0..4).map(|_| RocmTensor::empty(1, DType::F32, &own)).collect::<Result<_>>()?;
        noise.iter().try_for_each(|t| t.fill_bytes(0x7f))?;
    }
    Ok(())
}

#[test]
fn nothing_is_read_back_while_capturing() -> Result<()> {
    let own = &fresh_device();
    let case = CaseSpec { lens: vec![100, 40], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let mut call = OnDevice::new(&case, own)?;
    call.options.validate = true;
    let out = RocmTensor::zeros(call.q.dims(), DType::BF16, own)?;
    call.decode_into(&out, None)?;
    let before = own.counts().synchronizations;
    let graph = own.capture(|| call.decode_into(&out, None))?;
    assert_eq!(own.counts().synchronizations, before);
    out.fill_bytes(0xff)?;
    graph.replay()?;
    case.expected()?.compare(&out.to_tensor()?, None, 8e-3, 0.)?;
    // A kernel that was never loaded cannot be captured, and the error says what to do.
    let other = OnDevice::new(&CaseSpec { head_dim: 192, softcap: Some(3.5), ..case.spec.clone() }.build()?, own)?;
    let message = own.capture(|| other.decode().map(|_| ())).unwrap_err().to_string();
    assert!(message.contains("while a graph is being captured"), "{message}");
    assert!(!own.is_capturing());
    Ok(())
}
