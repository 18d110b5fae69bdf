//! `PagedKvCache` on the device: writes, copies and reads of pages, against the same cache on the CPU.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheDims, CacheLayout, KvDtype, PagedKvCache, Quantization};
use candle_paged_attn::registry::preferred_layout;
use testkit::reference::floats;
use testkit::step::{DIMS, check_page_copies, config};

use crate::support::*;

/// Every form of a cache, with how far a value may be from the CPU's: a per-token scale is chosen for the range of the device's FP8.
fn kinds() -> Vec<(KvDtype, Quantization, f64)> {
    let mut kinds = vec![
        (KvDtype::Bf16, Quantization::None, 0.0),
        (KvDtype::F16, Quantization::None, 0.0),
        (KvDtype::Fp8, Quantization::None, 0.0),
        (KvDtype::Fp8, Quantization::Scalar { k: 0.05, v: 0.03 }, 0.0),
        (KvDtype::Fp8, Quantization::PerToken, if is_gfx950() { 0.0 } else { 1.0 / 8.0 }),
    ];
    if is_gfx950() {
        kinds.push((KvDtype::Mxfp4, Quantization::Block, 0.0));
    }
    kinds
}

fn assert_near(got: &Tensor, want: &Tensor, tolerance: f64, what: &str) {
    for (at, (got, want)) in floats(got).unwrap().into_iter().zip(floats(want).unwrap()).enumerate() {
        assert!(got == want || (got - want).abs() <= tolerance * want.abs().max(0.05), "{what}: element {at} is {got}, on the CPU {want}");
    }
}

#[test]
fn what_is_written_is_what_the_cpu_would_hold() -> Result<()> {
    let cpu = &Device::Cpu;
    for (dtype, quantization, tolerance) in kinds() {
        for input in [DType::F32, DType::BF16, DType::F16] {
            let config = config(dtype, quantization, None);
            let here = PagedKvCache::new(config.clone(), device())?;
            assert_eq!(here.layout(), preferred_layout(device().arch(), dtype));
            let there = PagedKvCache::new(CacheConfig { layout: Some(here.layout()), ..config }, cpu)?;
            // A token is skipped, a slot comes twice, and k's rows are apart.
            let slots = Tensor::new(&[7i64, 8, 9, -1, 100, 8, 191, 0], cpu)?;
            let k = (Tensor::randn(0f32, 1., (8, 3, 64), cpu)? * 3.)?.to_dtype(input)?.narrow(1, 0, 2)?;
            let v = Tensor::randn(0f32, 1., (8, 2, 64), cpu)?.to_dtype(input)?;
            for cache in [&here, &there] {
                cache.write(1, &k, &v, &slots)?;
            }
            let pages = [0, 6, 11];
            let ((k, v), (k_there, v_there)) = (here.gather(1, &pages, 48)?, there.gather(1, &pages, 48)?);
            let what = format!("{dtype:?} {quantization:?} {input:?}");
            assert_near(&k, &k_there, tolerance, &what);
            assert_near(&v, &v_there, tolerance, &what);
            assert!(floats(&here.gather(0, &pages, 48)?.0)?.iter().all(|v| *v == 0.), "the other layer stays as it was");
        }
    }
    Ok(())
}

#[test]
fn keys_and_values_of_different_dtypes() -> Result<()> {
    let cpu = &Device::Cpu;
    let cache = PagedKvCache::new(config(KvDtype::Bf16, Quantization::None, None), device())?;
    let (k, v) = (Tensor::randn(0f32, 1., (3, 2, 64), cpu)?.to_dtype(DType::BF16)?, Tensor::randn(0f32, 1., (3, 2, 64), cpu)?);
    cache.write(0, &k, &v, &Tensor::new(&[16i64, 17, 18], cpu)?)?;
    let (got_k, got_v) = cache.gather(0, &[1], 3)?;
    assert_eq!((floats(&got_k)?, floats(&got_v)?), (floats(&k)?, floats(&v.to_dtype(DType::BF16)?)?));
    Ok(())
}

#[test]
fn pages_are_copied_in_order_in_every_layer() -> Result<()> {
    for (dtype, quantization, _) in kinds() {
        let cache = PagedKvCache::new(config(dtype, quantization, None), device())?;
        check_page_copies(&cache, &Device::Cpu)?;
    }
    Ok(())
}

#[test]
fn what_a_device_cannot_hold_is_refused() -> Result<()> {
    let refused = |config: CacheConfig, fragments: &[&str]| {
        let message = PagedKvCache::new(config, device()).unwrap_err().to_string();
        fragments.iter().for_each(|fragment| assert!(message.contains(fragment), "{message:?} does not name {fragment:?}"));
    };
    refused(config(KvDtype::F32, Quantization::None, None), &["key_cache", "F32", "BF16"]);
    refused(config(KvDtype::Bf16, Quantization::None, Some(CacheLayout::Nhd)), &["layout", "nhd"]);
    refused(config(KvDtype::Bf16, Quantization::PerToken, None), &["quantization"]);
    let dims = CacheDims { head_dim: 80, ..DIMS };
    refused(CacheConfig { dims, ..config(KvDtype::Bf16, Quantization::None, None) }, &["head_dim", "80"]);
    let dims = CacheDims { page_size: 24, ..DIMS };
    refused(CacheConfig { dims, ..config(KvDtype::Bf16, Quantization::None, None) }, &["page_size", "24"]);
    if !is_gfx950() {
        refused(config(KvDtype::Mxfp4, Quantization::Block, None), &["MXFP4", "gfx950"]);
    }
    Ok(())
}

#[test]
fn candle_has_no_tensors_of_it() -> Result<()> {
    let cache = PagedKvCache::new(config(KvDtype::Fp8, Quantization::Scalar { k: 0.5, v: 2.0 }, None), device())?;
    for error in [cache.layer(0).map(|_| ()), cache.decode_options(0).map(|_| ())] {
        let message = error.unwrap_err().to_string();
        assert!(message.contains("device 0") && message.contains("rocm_layer"), "{message}");
    }
    assert!(cache.rocm_layer(2).unwrap_err().to_string().contains("layer: 2 of a cache of 2"));
    let layer = cache.rocm_layer(1)?;
    assert_eq!(layer.key.dims(), cache.layout().key_shape(DIMS, KvDtype::Fp8));
    assert_eq!(cache.rocm_decode_options(1)?.layout, cache.layout());
    let on_cpu = PagedKvCache::new(config(KvDtype::Bf16, Quantization::None, None), &Device::Cpu)?;
    assert!(on_cpu.rocm_layer(0).is_err());
    Ok(())
}

#[test]
fn wrong_tokens_are_named_and_change_nothing() -> Result<()> {
    let cpu = &Device::Cpu;
    let own = fresh_device();
    let cache = PagedKvCache::new(config(KvDtype::Bf16, Quantization::None, None), &own)?;
    let k = Tensor::zeros((2, 2, 64), DType::F32, cpu)?;
    let slots = Tensor::new(&[0i64, 1], cpu)?;
    let before = work(&own);
    let refused = |result: Result<()>, fragments: &[&str]| {
        let message = result.unwrap_err().to_string();
        fragments.iter().for_each(|fragment| assert!(message.contains(fragment), "{message:?} does not name {fragment:?}"));
    };
    refused(cache.write(2, &k, &k, &slots), &["layer: 2"]);
    refused(cache.write(0, &k.narrow(1, 0, 1)?, &k, &slots), &["k:", "2, 64"]);
    refused(cache.write(0, &k, &k.narrow(0, 0, 1)?, &slots), &["v:", "1 tokens"]);
    refused(cache.write(0, &k, &k.to_dtype(DType::F64)?, &slots), &["v:", "F64"]);
    refused(cache.write(0, &k, &k, &Tensor::new(&[0i64, 192], cpu)?), &["slot_mapping", "192", "token 1"]);
    refused(cache.gather(0, &[0, 12], 20).map(|_| ()), &["pages", "12", "index 1"]);
    refused(cache.gather(0, &[0], 20).map(|_| ()), &["pages", "20 tokens"]);
    assert_eq!(work(&own), before);
    Ok(())
}
