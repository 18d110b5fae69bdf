//! A decode step of two sequences over any cache of [`DIMS`]: prompts that are written first, then two new tokens each.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheDims, CacheLayout, KvDtype, PagedKvCache, Quantization};
use candle_paged_attn::{AppendAndAttend, DecodeOptions};

use crate::reference::{Expected, attention};

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
}
