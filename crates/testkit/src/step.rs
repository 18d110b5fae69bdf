//! A decode step of two sequences over any cache of [`DIMS`]: prompts that are written first, then two new tokens each.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheDims, CacheLayout, KvDtype, PagedKvCache, Quantization};
use candle_paged_attn::{AppendAndAttend, DecodeOptions};

use crate::assert_same;
use crate::bits::bits;
use crate::reference::{Expected, attention, floats};

pub const DIMS: CacheDims = CacheDims { pages: 12, page_size: 16, kv_heads: 2, head_dim: 64 };

/// A cache of two layers for the step, which takes the second.
pub fn config(dtype: KvDtype, quantization: Quantization, layout: Option<CacheLayout>) -> CacheConfig {
    CacheConfig { layers: 2, dims: DIMS, dtype, layout, quantization }
}

/// Two sequences: 40 tokens on pages 3, 7, 1 and 5 tokens on page 9; the last 2 of each are new. On the CPU.
pub struct Step {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub block_tables: Tensor,
}

/// The rows of two parts of `t`.
fn rows(t: &Tensor, parts: [(usize, usize); 2]) -> Result<Tensor> {
    Tensor::cat(&[t.narrow(0, parts[0].0, parts[0].1)?, t.narrow(0, parts[1].0, parts[1].1)?], 0)
}

impl Step {
    pub fn new() -> Result<Self> {
        let device = &Device::Cpu;
        let random = |rows, heads| Tensor::randn(0f32, 1., (rows, heads, DIMS.head_dim), device)?.to_dtype(DType::BF16);
        let block_tables = Tensor::new(&[[3i32, 7, 1], [9, -1, -1]], device)?;
        Ok(Self { q: random(4, 8)?, k: random(45, 2)?, v: random(45, 2)?, block_tables })
    }

    fn slots(&self) -> Vec<i64> {
        let place = |pages: &[i64], t: i64| pages[t as usize / 16] * 16 + t % 16;
        (0..40).map(|t| place(&[3, 7, 1], t)).chain((0..5).map(|t| place(&[9], t))).collect()
    }

    /// Writes all but the two newest tokens of each sequence; gives the op for those, tables on the CPU, and their k and v. What is written and k and
    /// v are on `device`.
    pub fn prefill<'a>(&self, cache: &'a PagedKvCache, device: &Device) -> Result<(AppendAndAttend<'a>, Tensor, Tensor)> {
        let (old, new) = ([(0, 38), (40, 3)], [(38, 2), (43, 2)]);
        let slots = Tensor::new(self.slots(), &Device::Cpu)?;
        let there = |t: &Tensor, parts| rows(t, parts)?.to_device(device);
        cache.write(1, &there(&self.k, old)?, &there(&self.v, old)?, &rows(&slots, old)?)?;
        let op = AppendAndAttend {
            cache,
            layer: 1,
            slot_mapping: rows(&slots, new)?,
            block_tables: self.block_tables.clone(),
            context_lens: Tensor::new(&[40u32, 5], &Device::Cpu)?,
            options: DecodeOptions::default(),
        };
        Ok((op, there(&self.k, new)?, there(&self.v, new)?))
    }

    /// The answer over what `cache` holds.
    pub fn expected(&self, cache: &PagedKvCache) -> Result<Expected> {
        let (k3, v3) = cache.gather(1, &[3, 7, 1, 9], 64)?;
        let paged = |t: &Tensor| t.reshape((4, 16, 2, 64));
        let tables = Tensor::new(&[[0i32, 1, 2], [3, -1, -1]], &Device::Cpu)?;
        let lens = Tensor::new(&[40i32, 5], &Device::Cpu)?;
        attention(&self.q, &paged(&k3)?, &paged(&v3)?, &tables, &lens, &DecodeOptions::default())
    }

    /// Panics, naming `what`, unless `out` is the answer over what `cache` holds, to a relative L2 of `tolerance` a row, the other layer is as it was,
    /// and a cache that rounds nothing holds the tokens.
    pub fn check(&self, cache: &PagedKvCache, out: &Tensor, tolerance: f64, what: &str) -> Result<()> {
        self.expected(cache)?.compare(out, None, tolerance, 0.).unwrap_or_else(|e| panic!("{what}: {e}"));
        let (untouched, _) = cache.gather(0, &[3, 7, 1], 40)?;
        assert!(floats(&untouched)?.iter().all(|v| *v == 0.), "{what}: the other layer stays as it was");
        if matches!(cache.config().dtype, KvDtype::F32 | KvDtype::Bf16) {
            self.check_tokens(cache, what)?;
        }
        Ok(())
    }

    /// Panics, naming `what`, unless `cache` holds the first sequence's tokens.
    pub fn check_tokens(&self, cache: &PagedKvCache, what: &str) -> Result<()> {
        let (keys, values) = cache.gather(1, &[3, 7, 1], 40)?;
        assert_same!(bits(&keys), bits(&self.k.narrow(0, 0, 40)?), "{what}");
        assert_same!(bits(&values), bits(&self.v.narrow(0, 0, 40)?), "{what}");
        Ok(())
    }
}

/// Panics unless pages are copied in the order of the pairs, in every layer of `cache`, which has [`DIMS`] and takes k and v from `device`.
pub fn check_page_copies(cache: &PagedKvCache, device: &Device) -> Result<()> {
    let cpu = &Device::Cpu;
    let k = Tensor::randn(0f32, 1., (DIMS.page_size, DIMS.kv_heads, DIMS.head_dim), cpu)?.to_device(device)?;
    for layer in 0..2 {
        cache.write(layer, &k, &k, &Tensor::arange(32i64, 48, cpu)?)?;
    }
    cache.copy_pages(&[(2, 5), (5, 9), (5, 5)])?;
    for layer in 0..2 {
        let want = cache.gather(layer, &[2], 16)?;
        let got = cache.gather(layer, &[9], 16)?;
        assert_same!((bits(&got.0), bits(&got.1)), (bits(&want.0), bits(&want.1)));
        assert!(floats(&want.0)?.iter().any(|v| *v != 0.));
    }
    let message = cache.copy_pages(&[(0, 1), (12, 0)]).expect_err("page 12 of 12").to_string();
    assert!(message.contains("(12, 0) at index 1"), "{message}");
    Ok(())
}
