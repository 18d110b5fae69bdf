//! `--attention-only`: one workload's attention call, without a model.

use std::time::{Duration, Instant};

use anyhow::Result;
use candle::{DType, Device, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheDims, KvDtype, PagedKvCache};
use candle_paged_attn::{DecodeOptions, PlanChoice, paged_decode};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use testkit::workloads::{Fp8Scale, Kv, Workload};

use super::kv::KvKind;
use super::synthetic::normal;

/// Calls are timed until they have taken this long together.
const MEASURE_FOR: Duration = Duration::from_secs(2);
const FEWEST_CALLS: usize = 5;

/// Tokens written to the cache at a time.
const FILL_ROWS: usize = 4096;

/// Times of a workload's calls.
pub struct AttentionTimes {
    pub calls: usize,
    pub median: Duration,
    pub best: Duration,
    /// K and V bytes of a call, scales included.
    pub kv_bytes: u64,
}

impl AttentionTimes {
    /// KV bytes a second, by the median.
    pub fn read_rate(&self) -> f64 {
        self.kv_bytes as f64 / self.median.as_secs_f64()
    }
}

/// How a workload stores K and V.
pub fn kv_kind(workload: &Workload) -> KvKind {
    match (workload.kv, workload.fp8_scale) {
        (Kv::Bf16, _) => KvKind::Bf16,
        (Kv::Fp8, Some(Fp8Scale::PerToken)) => KvKind::Fp8PerToken,
        (Kv::Fp8, _) => KvKind::Fp8,
        (Kv::Mxfp4, _) => KvKind::Mxfp4,
    }
}

/// Fills a cache with random tokens on scattered pages and times the call on it. q is BF16, or F32 over an F32 cache.
pub fn run(workload: &Workload, kind: KvKind, seed: u64, device: &Device) -> Result<AttentionTimes> {
    let mut rng = StdRng::seed_from_u64(seed);
    let call = Call::new(workload, kind, &mut rng, device)?;
    call.run()?;
    let mut times = vec![];
    let start = Instant::now();
    while times.len() < FEWEST_CALLS || start.elapsed() < MEASURE_FOR {
        let start = Instant::now();
        call.run()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let tokens: usize = workload.contexts().iter().sum();
    let kv_bytes = (tokens * workload.num_kv_heads * kind.token_bytes(workload.head_dim)) as u64;
    Ok(AttentionTimes { calls: times.len(), median: times[times.len() / 2], best: times[0], kv_bytes })
}

struct Call {
    q: Tensor,
    cache: PagedKvCache,
    block_tables: Tensor,
    context_lens: Tensor,
    options: DecodeOptions,
}

impl Call {
    fn new(workload: &Workload, kind: KvKind, rng: &mut StdRng, device: &Device) -> Result<Self> {
        let Workload { num_q_heads, num_kv_heads, head_dim, page_size, batch, query_len, .. } = *workload;
        let contexts = workload.contexts();
        let pages = workload.pages().iter().sum();
        let dims = CacheDims { pages, page_size, kv_heads: num_kv_heads, head_dim };
        let config = CacheConfig { layers: 1, dims, dtype: kind.dtype(), layout: None, quantization: kind.quantization() };
        let cache = PagedKvCache::new(config, device)?;
        fill(&cache, rng, device)?;
        let mut free: Vec<u32> = (0..pages as u32).collect();
        free.shuffle(rng);
        let columns = workload.table_width();
        let mut tables = vec![];
        for context in &contexts {
            let own = free.split_off(free.len() - context.div_ceil(page_size));
            let padding = columns - own.len();
            tables.extend(own);
            tables.extend(std::iter::repeat_n(0, padding));
        }
        let lens: Vec<u32> = contexts.iter().map(|&context| context as u32).collect();
        let dtype = if kind.dtype() == KvDtype::F32 { DType::F32 } else { DType::BF16 };
        let layer = cache.layer(0)?;
        let options = DecodeOptions {
            k_scale: layer.k_scale.clone(),
            v_scale: layer.v_scale.clone(),
            layout: cache.layout(),
            max_partitions: workload.max_partitions,
            plan: if workload.plan_free { PlanChoice::Free } else { PlanChoice::Default },
            validate: false,
            ..Default::default()
        };
        Ok(Self {
            q: random(rng, (batch * query_len, num_q_heads, head_dim), device)?.to_dtype(dtype)?,
            block_tables: Tensor::from_vec(tables, (batch, columns), device)?,
            context_lens: Tensor::new(lens, device)?,
            cache,
            options,
        })
    }

    fn run(&self) -> candle::Result<Tensor> {
        let layer = self.cache.layer(0)?;
        paged_decode(&self.q, &layer.key, &layer.value, &self.block_tables, &self.context_lens, &self.options)
    }
}

/// Writes every slot of the cache; one draw of K and V serves all runs of slots.
fn fill(cache: &PagedKvCache, rng: &mut StdRng, device: &Device) -> Result<()> {
    let CacheDims { pages, page_size, kv_heads, head_dim } = cache.config().dims;
    let slots = pages * page_size;
    let rows = FILL_ROWS.min(slots);
    let [k, v] = [0, 1].map(|_| random(rng, (rows, kv_heads, head_dim), device));
    let (k, v) = (k?, v?);
    for start in (0..slots).step_by(rows) {
        let rows = rows.min(slots - start);
        let mapping = Tensor::arange(start as i64, (start + rows) as i64, device)?;
        cache.write(0, &k.narrow(0, 0, rows)?, &v.narrow(0, 0, rows)?, &mapping)?;
    }
    Ok(())
}

fn random(rng: &mut impl Rng, shape: (usize, usize, usize), device: &Device) -> candle::Result<Tensor> {
    let values: Vec<f32> = (0..shape.0 * shape.1 * shape.2).map(|_| normal(rng)).collect();
    Tensor::from_vec(values, shape, device)
}
