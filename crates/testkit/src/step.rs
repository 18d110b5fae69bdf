//! A decode step of two sequences over any cache of [`DIMS`]: prompts that are written first, then two new tokens each.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{Append, CacheConfig, CacheDims, CacheLayout, KvDtype, PagePool, PagedKvCache, Quantization, SeqId};
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

/// Makes an argument of an op wrong.
pub type Edit = fn(&mut AppendAndAttend<'_>);

/// Edits after which [`Step`]'s op is refused, and what each error names.
pub fn wrong_arguments() -> [(&'static str, Edit); 5] {
    fn tensor<T: candle::WithDType>(rows: &[T], columns: usize) -> Tensor {
        Tensor::from_slice(rows, (rows.len() / columns, columns), &Device::Cpu).unwrap()
    }
    [
        ("layer", |op| op.layer = 2),
        ("block_tables", |op| op.block_tables = tensor(&[3i32, 7, 99, 9, -1, -1], 3)),
        ("context_lens", |op| op.context_lens = tensor(&[4000u32, 5], 2).squeeze(0).unwrap()),
        ("slot_mapping", |op| op.slot_mapping = tensor(&[1i64, 2, 3, 12 * 16], 4).squeeze(0).unwrap()),
        ("softcap", |op| op.options.softcap = Some(-1.)),
    ]
}

/// Panics unless a pool's steps over a cache on a device are those over one on the CPU: prompts of mixed lengths, a fork that writes into a shared page,
/// decodes. `make` makes the cache, `device` has the tensors of its steps.
pub fn check_pools_steps(layout: Option<CacheLayout>, make: impl Fn(CacheConfig) -> Result<PagedKvCache>, device: &Device) -> Result<()> {
    let cpu = &Device::Cpu;
    let config = CacheConfig { dims: CacheDims { pages: 40, ..DIMS }, ..config(KvDtype::Bf16, Quantization::None, layout) };
    let (here, there) = (make(config.clone())?, PagedKvCache::new(config.clone(), cpu)?);
    let mut pool = PagePool::new(config.dims.pages, config.dims.page_size)?;
    let (a, b) = (pool.allocate(), pool.allocate());
    let attend = |pool: &PagePool, step: &[(SeqId, &Append)]| -> Result<()> {
        let rows = pool.batch(step, cpu)?.slot_mapping.dim(0)?;
        let random = |heads| Tensor::randn(0f32, 1., (rows, heads, DIMS.head_dim), cpu)?.to_dtype(DType::BF16);
        let new = [random(8)?, random(2)?, random(2)?];
        let over = |cache, place| -> Result<Tensor> {
            let [q, k, v] = [0, 1, 2].map(|i| new[i].to_device(place));
            AppendAndAttend::new(cache, 1, &pool.batch(step, place)?)?.apply(&q?, &k?, &v?)?.to_device(cpu)
        };
        let (got, want) = (floats(&over(&here, device)?)?, floats(&over(&there, cpu)?)?);
        let error: f64 = got.iter().zip(&want).map(|(g, w)| (g - w) * (g - w)).sum::<f64>().sqrt();
        assert!(error <= 8e-3 * want.iter().map(|w| w * w).sum::<f64>().sqrt(), "{error}");
        Ok(())
    };
    let prompts = [pool.append(a, &(0..37).collect::<Vec<_>>())?, pool.append(b, &(100..103).collect::<Vec<_>>())?];
    attend(&pool, &[(a, &prompts[0]), (b, &prompts[1])])?;
    pool.commit(a)?;
    pool.commit(b)?;
    let fork = pool.fork(a)?;
    for step in 0..3 {
        let appends = [a, b, fork].map(|sequence| pool.append(sequence, &[step]).unwrap());
        for append in &appends {
            here.copy_pages(&append.copies)?;
            there.copy_pages(&append.copies)?;
        }
        attend(&pool, &[(fork, &appends[2]), (a, &appends[0]), (b, &appends[1])])?;
        [a, b, fork].into_iter().try_for_each(|sequence| pool.commit(sequence))?;
    }
    Ok(())
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
