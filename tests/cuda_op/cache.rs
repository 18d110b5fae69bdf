//! `PagedKvCache` on the GPU: writes, copies and reads of pages, against the same cache on the CPU.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{
    CacheConfig, CacheDims, CacheLayout, KvDtype, LayerCache, PagedKvCache, copy_pages, gather, reshape_and_cache,
};
use candle_paged_attn::cuda;
use candle_paged_attn::registry::preferred_layout;
use candle_paged_attn::{KvScale, cache::Quantization};
use testkit::step::{DIMS, check_page_copies, config};

use crate::support::*;

/// Bits of every element that two layers hold.
fn held(cache: &PagedKvCache, layer: usize) -> Result<Vec<Bits>> {
    let LayerCache { key, value, k_scale, v_scale } = cache.layer(layer)?;
    let scales = [k_scale, v_scale].into_iter().filter_map(|scale| if let KvScale::Tensor(t) = scale { Some(t) } else { None });
    [key, value].into_iter().chain(scales).map(|t| Ok(bits(&t.to_device(&Device::Cpu)?))).collect()
}

/// New tokens of every magnitude, with a NaN, infinities and a row of zeros among them.
fn tokens(rows: usize, heads: usize, dtype: DType) -> Result<Tensor> {
    let values = Tensor::randn(0f32, 3., (rows, heads, DIMS.head_dim), &Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
    let mut values: Vec<f32> = values.iter().enumerate().map(|(i, v)| v * 10f32.powi(i as i32 % 7 - 3)).collect();
    (values[5], values[200], values[333]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
    let row = heads * DIMS.head_dim;
    values[2 * row..3 * row].fill(0.0);
    Tensor::from_vec(values, (rows, heads, DIMS.head_dim), &Device::Cpu)?.to_dtype(dtype)
}

#[test]
fn what_is_written_is_what_the_cpu_would_hold() -> Result<()> {
    let Some(device) = gpu("what_is_written_is_what_the_cpu_would_hold") else { return Ok(()) };
    let cpu = &Device::Cpu;
    for (i, (dtype, quantization, layout)) in caches().into_iter().enumerate() {
        let input = [DType::F32, DType::BF16, DType::F16][i % 3];
        let config = config(dtype, quantization, Some(layout));
        let (here, there) = (PagedKvCache::new(config.clone(), &*device)?, PagedKvCache::new(config, cpu)?);
        // A token is skipped, a slot comes twice, and k's rows are apart.
        let slots = Tensor::new(&[7i64, 8, 9, -1, 100, 8, 191, 0], cpu)?;
        let (k, v) = (tokens(8, 3, input)?, tokens(8, 2, input)?);
        there.write(1, &k.narrow(1, 0, 2)?, &v, &slots)?;
        here.write(1, &k.to_device(&device)?.narrow(1, 0, 2)?, &v.to_device(&device)?, &slots)?;
        let what = format!("{dtype:?} {quantization:?} {layout:?} {input:?}");
        assert_same!(held(&here, 1)?, held(&there, 1)?, "{what}");
        assert_same!(held(&here, 0)?, held(&there, 0)?, "{what}: the other layer");
        let pages = [0, 6, 11];
        let (got, want) = (here.gather(1, &pages, 45)?, there.gather(1, &pages, 45)?);
        assert_same!((bits(&got.0), bits(&got.1)), (bits(&want.0), bits(&want.1)), "{what}: gathered");
    }
    Ok(())
}

/// Slots on the device: the last of equal ones stays there too, and one past the cache is skipped where it is not validated.
#[test]
fn slots_on_the_device() -> Result<()> {
    let Some(device) = gpu("slots_on_the_device") else { return Ok(()) };
    let cpu = &Device::Cpu;
    let config = config(KvDtype::Fp8, Quantization::PerToken, Some(CacheLayout::Hnd));
    let (here, there) = (PagedKvCache::new(config.clone(), &*device)?, PagedKvCache::new(config, cpu)?);
    let slots: Vec<i64> = (0..100).map(|token| [token % 64, 64 + token, -1, 5][token as usize % 4]).collect();
    let (k, v) = (tokens(100, 2, DType::BF16)?, tokens(100, 2, DType::BF16)?);
    let slots = Tensor::new(slots, cpu)?;
    there.write(0, &k, &v, &slots)?;
    here.write(0, &k.to_device(&device)?, &v.to_device(&device)?, &slots.to_device(&device)?)?;
    assert_same!(held(&here, 0)?, held(&there, 0)?);
    if cfg!(debug_assertions) {
        let past = Tensor::full(12 * 16i64, 100, cpu)?.to_device(&device)?;
        refuses(here.write(0, &k.to_device(&device)?, &v.to_device(&device)?, &past), &["slot_mapping", "192", "token 0"]);
        assert_same!(held(&here, 0)?, held(&there, 0)?);
    }
    Ok(())
}

#[test]
fn keys_and_values_of_different_dtypes() -> Result<()> {
    let Some(device) = gpu("keys_and_values_of_different_dtypes") else { return Ok(()) };
    let cpu = &Device::Cpu;
    let config = config(KvDtype::Bf16, Quantization::None, None);
    let (here, there) = (PagedKvCache::new(config.clone(), &*device)?, PagedKvCache::new(config, cpu)?);
    let (k, v) = (tokens(4, 2, DType::BF16)?, tokens(4, 2, DType::F32)?);
    let slots = Tensor::new(&[16i64, 17, 18, 40], cpu)?;
    there.write(0, &k, &v, &slots)?;
    here.write(0, &k.to_device(&device)?, &v.to_device(&device)?, &slots)?;
    let (got, want) = (here.gather(0, &[1, 2], 32)?, there.gather(0, &[1, 2], 32)?);
    assert_same!((bits(&got.0), bits(&got.1)), (bits(&want.0), bits(&want.1)));
    Ok(())
}

/// K and V as views of one tensor: written, copied and gathered; what is between them stays.
#[test]
fn views_of_one_tensor() -> Result<()> {
    let Some(device) = gpu("views_of_one_tensor") else { return Ok(()) };
    let cpu = &Device::Cpu;
    for layout in [CacheLayout::Nhd, CacheLayout::Hnd] {
        let dims = [vec![12, 3], layout.key_shape(DIMS, KvDtype::Bf16)[1..].to_vec()].concat();
        let whole = Tensor::full(half::bf16::from_f32(7.0), dims, cpu)?.contiguous()?;
        let layer = |whole: &Tensor| -> Result<LayerCache> {
            let part = |at| whole.narrow(1, at, 1)?.squeeze(1);
            Ok(LayerCache { key: part(0)?, value: part(2)?, k_scale: KvScale::None, v_scale: KvScale::None })
        };
        let there = whole.to_device(&device)?;
        let (here, other) = (layer(&there)?, layer(&whole)?);
        let (k, v) = (tokens(5, 2, DType::F16)?, tokens(5, 2, DType::F16)?);
        let slots = Tensor::new(&[0i64, 17, 34, 35, 191], cpu)?;
        reshape_and_cache(&k.to_device(&device)?, &v.to_device(&device)?, &slots, &here, layout)?;
        copy_pages(&here, layout, &[(2, 5), (5, 0)])?;
        reshape_and_cache(&k, &v, &slots, &other, layout)?;
        copy_pages(&other, layout, &[(2, 5), (5, 0)])?;
        assert_same!(bits(&there.to_device(cpu)?), bits(&whole), "{layout:?}");
        let (got, want) = (gather(&here, layout, &[5, 11], 32)?, gather(&other, layout, &[5, 11], 32)?);
        assert_same!((bits(&got.0), bits(&got.1)), (bits(&want.0), bits(&want.1)), "{layout:?}");
    }
    Ok(())
}

#[test]
fn pages_are_copied_in_order_in_every_layer() -> Result<()> {
    let Some(device) = gpu("pages_are_copied_in_order_in_every_layer") else { return Ok(()) };
    for (dtype, quantization, layout) in caches() {
        let cache = PagedKvCache::new(config(dtype, quantization, Some(layout)), &*device)?;
        check_page_copies(&cache, &device)?;
    }
    Ok(())
}

#[test]
fn a_cache_takes_the_layout_that_the_registry_prefers() -> Result<()> {
    let Some(device) = gpu("a_cache_takes_the_layout_that_the_registry_prefers") else { return Ok(()) };
    for (dtype, quantization) in [(KvDtype::Bf16, Quantization::None), (KvDtype::Fp8, Quantization::PerToken)] {
        let cache = PagedKvCache::new(config(dtype, quantization, None), &*device)?;
        assert_eq!(cache.layout(), preferred_layout(&cuda::arch_of(&device)?, dtype));
    }
    Ok(())
}

#[test]
fn what_a_device_cannot_hold_is_refused() -> Result<()> {
    let Some(device) = gpu("what_a_device_cannot_hold_is_refused") else { return Ok(()) };
    let refused = |config: CacheConfig, fragments: &[&str]| refuses(PagedKvCache::new(config, &*device), fragments);
    refused(config(KvDtype::Bf16, Quantization::PerToken, None), &["quantization"]);
    refused(config(KvDtype::Mxfp4, Quantization::Block, Some(CacheLayout::Vllm)), &["layout"]);
    // More than any GPU has.
    let dims = CacheDims { pages: i32::MAX as usize, page_size: 1024, ..DIMS };
    refused(CacheConfig { dims, ..config(KvDtype::Bf16, Quantization::None, None) }, &[]);
    Ok(())
}

#[test]
fn wrong_tokens_are_named_and_change_nothing() -> Result<()> {
    let Some(device) = gpu("wrong_tokens_are_named_and_change_nothing") else { return Ok(()) };
    let cpu = &Device::Cpu;
    let cache = PagedKvCache::new(config(KvDtype::Bf16, Quantization::None, None), &*device)?;
    let k = Tensor::zeros((2, 2, 64), DType::F32, &device)?;
    let slots = Tensor::new(&[0i64, 1], cpu)?;
    cache.write(0, &k, &k, &slots)?;
    let before = held(&cache, 0)?;
    refuses(cache.write(2, &k, &k, &slots), &["layer: 2"]);
    refuses(cache.write(0, &k.narrow(1, 0, 1)?, &k, &slots), &["k:", "2, 64"]);
    refuses(cache.write(0, &k, &k.narrow(0, 0, 1)?, &slots), &["v:", "1 tokens"]);
    refuses(cache.write(0, &k, &Tensor::zeros((2, 2, 64), DType::F64, &device)?, &slots), &["v:", "F64"]);
    refuses(cache.write(0, &k, &k, &Tensor::new(&[0i64, 192], cpu)?), &["slot_mapping", "192", "token 1"]);
    refuses(cache.write(0, &k, &k, &Tensor::new(&[0u32, 1], cpu)?), &["slot_mapping", "U32"]);
    refuses(cache.write(0, &k, &k, &Tensor::new(&[0i64, 1, 2], cpu)?.to_device(&device)?), &["slot_mapping", "[3]"]);
    refuses(cache.write(0, &k.to_device(cpu)?, &k, &slots), &["k is on Cpu"]);
    refuses(cache.write(0, &k.to_device(cpu)?, &k.to_device(cpu)?, &slots), &["k: on the CPU", "key_cache"]);
    let layer = cache.layer(0)?;
    refuses(
        cache.write(
            0,
            &layer.key.narrow(1, 0, 1)?.squeeze(1)?.narrow(0, 0, 2)?,
            &layer.value.narrow(1, 0, 1)?.squeeze(1)?.narrow(0, 0, 2)?,
            &slots,
        ),
        &["k:", "shares its storage"],
    );
    refuses(cache.gather(0, &[0, 12], 20), &["pages", "12", "index 1"]);
    refuses(cache.gather(0, &[0], 20), &["pages", "20 tokens"]);
    assert_same!(held(&cache, 0)?, before);
    cache.write(0, &k.narrow(0, 0, 0)?, &k.narrow(0, 0, 0)?, &slots.narrow(0, 0, 0)?)?;
    assert_same!(held(&cache, 0)?, before);
    Ok(())
}
