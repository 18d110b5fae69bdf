//! Caches past 2 GiB and 2^31 elements, page ids past 65,535.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::AppendAndAttend;
use candle_paged_attn::cache::{CacheConfig, CacheDims, CacheLayout, KvDtype, PagedKvCache, Quantization};
use testkit::reference::attention;

use crate::support::*;

const PAGE: usize = 128;
const PAGES: usize = 70_000;

/// Pages near the end of the cache, one before 65,536 and one in the middle.
const IDS: [u32; 4] = [69_999, 65_535, 65_536, 33_000];

#[test]
fn the_last_pages_of_a_large_cache() -> Result<()> {
    let Some(device) = gpu("the_last_pages_of_a_large_cache") else { return Ok(()) };
    let cpu = &Device::Cpu;
    let forms = [
        (KvDtype::Bf16, Quantization::None, CacheLayout::Nhd),
        (KvDtype::Bf16, Quantization::None, CacheLayout::Shuffled),
        (KvDtype::Fp8, Quantization::PerToken, CacheLayout::Hnd),
        (KvDtype::Fp8, Quantization::PerToken, CacheLayout::Shuffled),
        (KvDtype::F32, Quantization::None, CacheLayout::Vllm),
    ];
    for (dtype, quantization, layout) in forms {
        // 2.29e9 elements of K: past 2^31, and past 2 GiB in FP8 too.
        let dims = CacheDims { pages: PAGES, page_size: PAGE, kv_heads: 2, head_dim: 128 };
        let cache = PagedKvCache::new(CacheConfig { layers: 1, dims, dtype, layout: Some(layout), quantization }, &*device)?;
        let tokens = 3 * PAGE + 70;
        let slots = (0..tokens).map(|t| i64::from(IDS[t / PAGE]) * PAGE as i64 + (t % PAGE) as i64).collect::<Vec<_>>();
        let random = |rows: usize, heads: usize| Tensor::randn(0f32, 1., (rows, heads, 128), cpu)?.to_dtype(DType::BF16);
        let (q, k, v) = (random(4, 16)?, random(tokens, 2)?, random(tokens, 2)?);
        let there = |t: &Tensor, from: usize, n: usize| t.narrow(0, from, n)?.contiguous()?.to_device(&device);
        let old = tokens - 4;
        cache.write(0, &there(&k, 0, old)?, &there(&v, 0, old)?, &Tensor::new(&slots[..old], cpu)?)?;
        let tables = Tensor::new(&[IDS], cpu)?;
        for place in [cpu, &*device] {
            let op = AppendAndAttend {
                cache: &cache,
                layer: 0,
                slot_mapping: Tensor::new(&slots[old..], cpu)?.to_device(place)?,
                block_tables: tables.to_device(place)?,
                context_lens: Tensor::new(&[tokens as u32], cpu)?.to_device(place)?,
                options: Default::default(),
            };
            let out = op.apply(&q.to_device(&device)?, &there(&k, old, 4)?, &there(&v, old, 4)?)?.to_device(cpu)?;
            let (keys, values) = cache.gather(0, &IDS, 4 * PAGE)?;
            let paged = |t: &Tensor| t.reshape((4, PAGE, 2, 128));
            let (near, lens) = (Tensor::new(&[[0u32, 1, 2, 3]], cpu)?, Tensor::new(&[tokens as u32], cpu)?);
            let want = attention(&q, &paged(&keys)?, &paged(&values)?, &near, &lens, &Default::default())?;
            want.compare(&out, None, 8e-3, 0.).unwrap_or_else(|e| panic!("{dtype:?} {layout:?}: {e}"));
            if matches!(dtype, KvDtype::Bf16 | KvDtype::F32) {
                assert_same!(bits(&keys.narrow(0, 0, tokens)?), bits(&k.to_dtype(DType::F32)?));
            }
        }
        cache.copy_pages(&[(69_999, 0), (0, 69_998)])?;
        let (got, want) = (cache.gather(0, &[69_998], PAGE)?, cache.gather(0, &[69_999], PAGE)?);
        assert_same!((bits(&got.0), bits(&got.1)), (bits(&want.0), bits(&want.1)));
    }
    Ok(())
}
