//! One small call of every kernel variant, small enough for `scripts/sanitize-cuda`, which watches each memory access.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, PagedKvCache};
use candle_paged_attn::explain_call;
use candle_paged_attn::registry::Selection;
use testkit::cases::CaseSpec;
use testkit::step::{DIMS, check_page_copies, config};

use crate::cuts::{self, Cut};
use crate::support::*;

/// Checks a case with its tables on the device, where the planner runs too; gives what was chosen for it.
fn check_on_device(device: &Device, spec: &CaseSpec) -> Result<Selection> {
    let case = spec.build()?;
    let call = on(&case, device, Tables::Device)?;
    let selection =
        explain_call(&call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options)?.selection;
    let (out, lse) = run(&call)?;
    case.expected()?.compare(&out, Some(&lse), spec.cuda_tolerance(), 2e-3)?;
    Ok(selection)
}

/// Panics unless every case is right and has a tensor-core cut that is as wanted.
fn check_cuts(device: &Device, cuts: &[Cut]) {
    for Cut { name, is, specs } in cuts {
        for spec in specs {
            let selection = check_on_device(device, spec).unwrap_or_else(|e| panic!("{name}: {spec:?}: {e}"));
            let cut = selection.key.cuda.unwrap_or_else(|| panic!("{name}: {}: {spec:?}", selection.reason));
            assert!(is(&cut), "{name}, not {}: {spec:?}", selection.reason);
            println!("{name}: {}", selection.kernel());
        }
    }
}

#[test]
fn decode_tiles() {
    let Some(device) = gpu("decode_tiles") else { return };
    check_cuts(&device, &cuts::decode());
}

#[test]
fn verify_tiles() {
    let Some(device) = gpu("verify_tiles") else { return };
    check_cuts(&device, &cuts::verify());
}

#[test]
fn plain_tiles() {
    let Some(device) = gpu("plain_tiles") else { return };
    for spec in cuts::plain() {
        let selection = check_on_device(&device, &spec).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
        assert!(selection.key.cuda.is_none(), "{}", selection.reason);
    }
}

#[test]
fn reducers() {
    let Some(device) = gpu("reducers") else { return };
    for (spec, warps) in cuts::reducers() {
        let selection = check_on_device(&device, &spec).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
        let wanted = format!("a reducer of {warps} warp");
        assert!(selection.reason.to_string().contains(&wanted), "{wanted}, not {}: {spec:?}", selection.reason);
    }
}

/// Every form of a cache is written, its slots on the host and on the device, and its pages copied and read.
#[test]
fn writes_and_copies() -> Result<()> {
    let Some(device) = gpu("writes_and_copies") else { return Ok(()) };
    for (i, (dtype, quantization, layout)) in caches().into_iter().enumerate() {
        let input = [DType::F32, DType::BF16, DType::F16][i % 3];
        let cache = PagedKvCache::new(config(dtype, quantization, Some(layout)), &*device)?;
        let rows =
            |seed: f32| Tensor::randn(seed, 1., (5, DIMS.kv_heads, DIMS.head_dim), &Device::Cpu)?.to_dtype(input)?.to_device(&device);
        let slots = Tensor::new(&[7i64, 8, -1, 8, 191], &Device::Cpu)?;
        cache.write(0, &rows(0.0)?, &rows(1.0)?, &slots)?;
        cache.write(1, &rows(0.0)?, &rows(1.0)?, &slots.to_device(&device)?)?;
        check_page_copies(&cache, &device)?;
        if layout == CacheLayout::Nhd {
            cache.gather(0, &[0, 11], 20)?;
        }
    }
    Ok(())
}
