//! The op's contracts, one at a time.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::KvDtype;
use candle_paged_attn::plan::{DecodePlan, PlanRequest};
use candle_paged_attn::{PlanChoice, cuda, explain_call, paged_decode_into};
use testkit::cases::{CaseSpec, Scales};

use crate::cuts;
use crate::specs;
use crate::support::*;

#[test]
fn the_tensor_core_tile_in_every_form() {
    let Some(device) = gpu("the_tensor_core_tile_in_every_form") else { return };
    for spec in specs::tensor_cores() {
        let error = check(&device, &spec);
        println!("{:?} {:?} q{:?}: {error:.2e}", spec.kv_dtype, spec.scales, spec.query_lens);
    }
}

#[test]
fn the_plain_tile_in_every_layout_and_dtype() {
    let Some(device) = gpu("the_plain_tile_in_every_layout_and_dtype") else { return };
    check_all(&device, &specs::plain());
}

#[test]
fn every_head_dim_page_size_and_group() {
    let Some(device) = gpu("every_head_dim_page_size_and_group") else { return };
    check_all(&device, &specs::sizes());
}

#[test]
fn every_option_in_every_form() {
    let Some(device) = gpu("every_option_in_every_form") else { return };
    check_all(&device, &specs::options());
}

#[test]
fn many_sequences() {
    let Some(device) = gpu("many_sequences") else { return };
    check_all(&device, &specs::many_sequences());
}

#[track_caller]
fn check_all(device: &Device, specs: &[CaseSpec]) {
    for spec in specs {
        check(device, spec);
    }
}

#[test]
fn the_same_call_gives_the_same_bits_wherever_its_tables_are() -> Result<()> {
    let Some(device) = gpu("the_same_call_gives_the_same_bits_wherever_its_tables_are") else { return Ok(()) };
    let case = CaseSpec { lens: vec![9000, 300, 0, 77], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let (host, table) = (on(&case, &device, Tables::Host)?, on(&case, &device, Tables::Device)?);
    let first = bits(&run(&host)?.0);
    for case in [&host, &table, &table] {
        assert_same!(bits(&run(case)?.0), first);
    }
    Ok(())
}

#[test]
fn given_plans_on_the_host_and_on_the_device() -> Result<()> {
    let Some(device) = gpu("given_plans_on_the_host_and_on_the_device") else { return Ok(()) };
    let case = CaseSpec { lens: vec![3000, 300], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let request = PlanRequest::new(&[3000, 300], &[1], 2);
    for place in [Device::Cpu, device.clone()] {
        let mut case = on(&case, &device, Tables::Device)?;
        case.options.plan = PlanChoice::Given(DecodePlan::new(&request, &cuda::arch_of(&device)?, &place)?);
        let (out, lse) = run(&case)?;
        CaseSpec { lens: vec![3000, 300], ..spec(KvDtype::Bf16, Scales::None) }.build()?.expected()?.compare(
            &out,
            Some(&lse),
            8e-3,
            2e-3,
        )?;
    }
    Ok(())
}

#[test]
fn writes_into_a_view_alone() -> Result<()> {
    let Some(device) = gpu("writes_into_a_view_alone") else { return Ok(()) };
    let case = CaseSpec { lens: vec![900, 30], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let call = on(&case, &device, Tables::Device)?;
    let (rows, heads, head_dim) = call.q.dims3()?;
    let whole = Tensor::full(half::bf16::from_f32(7.0), (rows, heads + 1, head_dim), &Device::Cpu)?.to_device(&device)?;
    let out = whole.narrow(1, 0, heads)?;
    paged_decode_into(&out, &call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options)?;
    let whole = whole.to_device(&Device::Cpu)?;
    case.expected()?.compare(&whole.narrow(1, 0, heads)?.contiguous()?, None, 8e-3, 0.)?;
    assert!(whole.narrow(1, heads, 1)?.flatten_all()?.to_vec1::<half::bf16>()?.iter().all(|x| x.to_f32() == 7.0));
    Ok(())
}

#[test]
fn wrong_tables_are_refused_where_they_are_checked() -> Result<()> {
    let Some(device) = gpu("wrong_tables_are_refused_where_they_are_checked") else { return Ok(()) };
    let mut case = CaseSpec { lens: vec![40], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    case.block_tables = Tensor::new(&[[9000u32, 9000, 9000]], &Device::Cpu)?;
    for tables in [Tables::Host, Tables::Device] {
        let message = run(&on(&case, &device, tables)?).unwrap_err().to_string();
        assert!(message.contains("block_tables") && message.contains("9000"), "{message}");
    }
    // Without validation the ids are clamped to the cache.
    let mut call = on(&case, &device, Tables::Device)?;
    call.options.validate = false;
    run(&call)?;
    let mixed =
        candle_paged_attn::paged_decode(&call.q, &call.key_cache, &call.value_cache, &call.block_tables, &case.context_lens, &call.options);
    assert!(mixed.unwrap_err().to_string().contains("context_lens"));
    Ok(())
}

#[test]
fn empty_batches_and_caches() -> Result<()> {
    let Some(device) = gpu("empty_batches_and_caches") else { return Ok(()) };
    check(&device, &CaseSpec { lens: vec![0, -3], ..spec(KvDtype::Bf16, Scales::None) });
    Ok(())
}

#[test]
fn unaligned_tensors_take_the_plain_tile() -> Result<()> {
    let Some(device) = gpu("unaligned_tensors_take_the_plain_tile") else { return Ok(()) };
    let case = CaseSpec { lens: vec![300, 5], ..spec(KvDtype::Bf16, Scales::None) }.build()?;
    let mut call = on(&case, &device, Tables::Host)?;
    let (rows, heads, head_dim) = case.q.dims3()?;
    let shifted = Tensor::cat(&[&Tensor::zeros((rows, heads, 1), DType::BF16, &Device::Cpu)?, &case.q], 2)?;
    call.q = shifted.to_device(&device)?.narrow(2, 1, head_dim)?;
    let summary = explain_call(&call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options)?;
    assert!(summary.selection.kernel().ends_with("plain"), "{}", summary.selection.kernel());
    let (out, lse) = run(&call)?;
    case.expected()?.compare(&out, Some(&lse), 8e-3, 2e-3)?;
    Ok(())
}

#[test]
fn an_infinite_query_is_its_own_heads_alone() -> Result<()> {
    let Some(device) = gpu("an_infinite_query_is_its_own_heads_alone") else { return Ok(()) };
    for pair in cuts::one_infinite_head()? {
        cuts::check_infinite_head(&pair, |case| run(&on(case, &device, Tables::Host)?))
            .map_err(|e| e.context(format!("{:?}", pair[0].spec)))?;
    }
    Ok(())
}

#[test]
fn queries_and_token_scales_between_sixteen_bytes() -> Result<()> {
    let Some(device) = gpu("queries_and_token_scales_between_sixteen_bytes") else { return Ok(()) };
    for case in cuts::between_sixteen_bytes()? {
        check_call(&device, &case);
    }
    Ok(())
}
