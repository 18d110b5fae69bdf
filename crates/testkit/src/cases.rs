//! Random decode calls: every layout, dtype and option, with poison wherever the call must not look.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheDims, CacheLayout, KvDtype, Quantization};
use candle_paged_attn::registry::{Problem, ScaleMode};
use candle_paged_attn::{DecodeOptions, KvScale, PlanChoice, paged_decode_with_lse};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::reference::{Expected, attention};

/// Scales of a quantized cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    None,
    Scalar,
    ScalarTensor,
    PerToken,
}

/// What fills the KV (and scales) that a call must not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Poison {
    NaN,
    Infinity,
}

/// A call in a few numbers; [`CaseSpec::build`] makes its tensors.
#[derive(Clone, Debug)]
pub struct CaseSpec {
    pub seed: u64,
    pub kv_heads: usize,
    pub group: usize,
    pub head_dim: usize,
    pub page_size: usize,
    pub layout: CacheLayout,
    pub kv_dtype: KvDtype,
    pub q_dtype: DType,
    pub scales: Scales,
    /// Context length of each sequence (per-head tables vary it by head); may be <= 0.
    pub lens: Vec<i64>,
    /// One new-token count for all, or one a sequence (a ragged batch).
    pub query_lens: Vec<usize>,
    pub per_head: bool,
    pub window: Option<usize>,
    pub softcap: Option<f32>,
    pub sinks: bool,
    pub softmax_scale: Option<f32>,
    pub q_factor: f32,
    pub plan_free: bool,
    pub max_partitions: Option<usize>,
    pub workgroup_budget: Option<usize>,
    pub poison: Poison,
    /// K and V are views of one `[pages, 2, ...]` tensor.
    pub page_strided: bool,
    /// q has a gap between its rows.
    pub q_strided: bool,
    /// I32 tables with -1 in unread lanes; otherwise U32 with an id past the cache.
    pub signed_tables: bool,
}

impl Default for CaseSpec {
    fn default() -> Self {
        Self {
            seed: 1,
            kv_heads: 2,
            group: 4,
            head_dim: 64,
            page_size: 16,
            layout: CacheLayout::Nhd,
            kv_dtype: KvDtype::F32,
            q_dtype: DType::F32,
            scales: Scales::None,
            lens: vec![37, 300, 1],
            query_lens: vec![1],
            per_head: false,
            window: None,
            softcap: None,
            sinks: false,
            softmax_scale: None,
            q_factor: 1.0,
            plan_free: false,
            max_partitions: None,
            workgroup_budget: None,
            poison: Poison::NaN,
            page_strided: false,
            q_strided: false,
            signed_tables: true,
        }
    }
}

/// A call's tensors.
#[derive(Clone, Debug)]
pub struct Case {
    pub spec: CaseSpec,
    pub q: Tensor,
    pub key_cache: Tensor,
    pub value_cache: Tensor,
    pub block_tables: Tensor,
    pub context_lens: Tensor,
    pub options: DecodeOptions,
}

/// The plan rows of a call: sequences, or (sequence, KV head) pairs where tables are per head.
#[derive(Clone, Debug)]
pub struct PlanRows {
    pub lens: Vec<i32>,
    /// New tokens of each.
    pub query_lens: Vec<usize>,
    /// Of sequences: where each one's query rows start, and the number of them all.
    pub starts: Vec<i32>,
}

impl PlanRows {
    /// Query rows of all sequences.
    pub fn queries(&self) -> usize {
        self.starts[self.starts.len() - 1] as usize
    }
}

/// Which tokens of which pages the call may read: `[page][head][token]`, and the tables.
struct Ownership {
    owned: Vec<bool>,
    tables: Vec<i64>,
    lens: Vec<i64>,
    pages: usize,
    max_pages: usize,
}

impl CaseSpec {
    fn query_len(&self, sequence: usize) -> usize {
        self.query_lens[if self.query_lens.len() == 1 { 0 } else { sequence }]
    }

    /// Block tables of a sequence.
    pub fn heads_of_tables(&self) -> usize {
        if self.per_head { self.kv_heads } else { 1 }
    }

    fn ownership(&self, rng: &mut StdRng) -> Ownership {
        let (heads, size) = (self.heads_of_tables(), self.page_size);
        let lens: Vec<i64> = (0..self.lens.len() * heads)
            .map(|lane| {
                let len = self.lens[lane / heads];
                if self.per_head && len > 0 { rng.random_range(0..=len) } else { len }
            })
            .collect();
        let needed = |lane: usize| {
            let (len, query) = (lens[lane].max(0) as usize, self.query_len(lane / heads));
            let first = self.window.map_or(0, |w| (len + 1).saturating_sub(query.saturating_add(w))).min(len);
            if query == 0 { 0..0 } else { first..len }
        };
        let lanes_of = |lane: usize| {
            let range = needed(lane);
            if range.is_empty() { 0..0 } else { range.start / size..range.end.div_ceil(size) }
        };
        let used: usize = (0..lens.len()).map(|lane| lanes_of(lane).len()).sum();
        let pages = used + rng.random_range(1..4);
        let mut free: Vec<usize> = (0..pages).collect();
        free.shuffle(rng);
        let max_pages = lens.iter().map(|l| (*l).max(0) as usize).max().unwrap_or(0).div_ceil(size) + rng.random_range(0..3);
        let unread = if self.signed_tables { -1 } else { 1 << 30 };
        let mut tables = vec![unread; lens.len() * max_pages];
        let mut owned = vec![false; pages * self.kv_heads * size];
        for lane in 0..lens.len() {
            let tokens = needed(lane);
            for column in lanes_of(lane) {
                let page = free.pop().expect("one page for each used lane");
                tables[lane * max_pages + column] = page as i64;
                let kv_heads = if self.per_head { lane % heads..lane % heads + 1 } else { 0..self.kv_heads };
                for head in kv_heads {
                    for token in 0..size {
                        owned[(page * self.kv_heads + head) * size + token] = tokens.contains(&(column * size + token));
                    }
                }
            }
        }
        Ownership { owned, tables, lens, pages, max_pages }
    }

    /// The call as a registry sees it, but for its plan and the width of its block table.
    pub fn problem(&self) -> Problem {
        Problem {
            batch: self.lens.len(),
            q_heads: self.group * self.kv_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            page_size: self.page_size,
            query_len: if self.lens.is_empty() { 0 } else { self.query_lens.iter().copied().max().unwrap_or(0) },
            query_dtype: self.q_dtype,
            kv_dtype: self.kv_dtype,
            layout: self.layout,
            scales: match (self.kv_dtype, self.scales) {
                (KvDtype::Mxfp4, _) => ScaleMode::Block,
                (_, Scales::None) => ScaleMode::None,
                (_, Scales::Scalar | Scales::ScalarTensor) => ScaleMode::Scalar,
                (_, Scales::PerToken) => ScaleMode::PerToken,
            },
            per_head_tables: self.per_head,
            ragged: self.query_lens.len() > 1,
            windowed: self.window.is_some(),
            softcap: self.softcap.is_some(),
            sinks: self.sinks,
            positive_scale: self.softmax_scale.is_none_or(|scale| scale > 0.0),
            plan_free: self.plan_free,
            max_partitions: self.max_partitions,
            ..Problem::default()
        }
    }

    /// Relative L2 that a row of an NVIDIA kernel's output may be off by.
    pub fn cuda_tolerance(&self) -> f64 {
        match (self.kv_dtype, self.q_dtype) {
            (_, DType::F32) => 2e-5,
            (_, DType::BF16) | (KvDtype::Bf16, _) => 8e-3,
            _ => 4e-3,
        }
    }

    /// Makes the call's tensors.
    pub fn build(&self) -> Result<Case> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let ownership = self.ownership(&mut rng);
        let dims = CacheDims { pages: ownership.pages, page_size: self.page_size, kv_heads: self.kv_heads, head_dim: self.head_dim };
        let (key_cache, k_scale) = self.cache(&mut rng, dims, &ownership, true)?;
        let (value_cache, v_scale) = self.cache(&mut rng, dims, &ownership, false)?;
        let (key_cache, value_cache) = if self.page_strided && key_cache.dims() == value_cache.dims() {
            interleave(&key_cache, &value_cache)?
        } else {
            (key_cache, value_cache)
        };
        let device = &Device::Cpu;
        let batch = self.lens.len();
        let q_heads = self.group * self.kv_heads;
        let sinks = self.sinks.then(|| (0..q_heads).map(|_| rng.random_range(-2f32..2.0)).collect::<Vec<_>>());
        let options = DecodeOptions {
            softmax_scale: self.softmax_scale,
            window: self.window,
            softcap: self.softcap,
            sinks: sinks.map(|s| Tensor::new(s, device)).transpose()?,
            k_scale,
            v_scale,
            layout: self.layout,
            query_start: (self.query_lens.len() > 1).then(|| self.query_start()).transpose()?,
            max_query_len: None,
            plan: if self.plan_free { PlanChoice::Free } else { PlanChoice::Default },
            max_partitions: self.max_partitions,
            workgroup_budget: self.workgroup_budget,
            validate: true,
            tables_settled: false,
        };
        let mut table_shape = vec![batch, ownership.max_pages];
        let mut lens_shape = vec![batch];
        if self.per_head {
            table_shape.insert(1, self.kv_heads);
            lens_shape.push(self.kv_heads);
        }
        Ok(Case {
            spec: self.clone(),
            q: self.query(&mut rng)?,
            key_cache,
            value_cache,
            block_tables: self.integers(&ownership.tables, table_shape)?,
            context_lens: Tensor::from_vec(ownership.lens.iter().map(|&l| l as i32).collect(), lens_shape, device)?,
            options,
        })
    }

    /// Where each sequence's query rows start, and the number of them all.
    fn starts(&self) -> Vec<i32> {
        let ends = (0..self.lens.len()).scan(0, |sum, s| {
            *sum += self.query_len(s) as i32;
            Some(*sum)
        });
        std::iter::once(0).chain(ends).collect()
    }

    fn query_start(&self) -> Result<Tensor> {
        Tensor::from_iter(self.starts().into_iter().map(|start| start as u32), &Device::Cpu)
    }

    fn integers(&self, values: &[i64], shape: Vec<usize>) -> Result<Tensor> {
        match self.signed_tables {
            true => Tensor::from_vec(values.iter().map(|&v| v as i32).collect::<Vec<_>>(), shape, &Device::Cpu),
            false => Tensor::from_vec(values.iter().map(|&v| v as u32).collect::<Vec<_>>(), shape, &Device::Cpu),
        }
    }

    fn query(&self, rng: &mut StdRng) -> Result<Tensor> {
        let rows: usize = (0..self.lens.len()).map(|s| self.query_len(s)).sum();
        let heads = self.group * self.kv_heads;
        let gap = usize::from(self.q_strided);
        let values: Vec<f32> = (0..rows * (heads + gap) * self.head_dim).map(|_| normal(rng) * self.q_factor).collect();
        Tensor::from_vec(values, (rows, heads + gap, self.head_dim), &Device::Cpu)?.to_dtype(self.q_dtype)?.narrow(1, 0, heads)
    }

    /// One cache tensor and its scale; `[pages, kv_heads, page_size]` tokens that are not owned are poisoned.
    fn cache(&self, rng: &mut StdRng, dims: CacheDims, ownership: &Ownership, key: bool) -> Result<(Tensor, KvScale)> {
        let shape = (dims.pages, dims.kv_heads, dims.page_size);
        if self.kv_dtype == KvDtype::Mxfp4 {
            return self.mxfp4_cache(rng, dims, ownership);
        }
        let poison = match self.poison {
            Poison::NaN => f32::NAN,
            Poison::Infinity => f32::INFINITY,
        };
        let values: Vec<f32> = ownership
            .owned
            .iter()
            .flat_map(|&owned| (0..dims.head_dim).map(move |_| owned).collect::<Vec<_>>())
            .map(|owned| if owned { normal(rng) } else { poison })
            .collect();
        let scale = match self.scales {
            Scales::None => KvScale::None,
            Scales::Scalar => KvScale::Scalar(rng.random_range(0.25..2.0)),
            Scales::ScalarTensor => KvScale::Tensor(Tensor::new(&[rng.random_range(0.25f32..2.0)], &Device::Cpu)?),
            Scales::PerToken => {
                let scales: Vec<f32> =
                    ownership.owned.iter().map(|&owned| if owned { rng.random_range(0.1..3.0) } else { poison }).collect();
                KvScale::Tensor(Tensor::from_vec(scales, shape, &Device::Cpu)?)
            }
        };
        let canonical = (dims.pages, dims.kv_heads, dims.page_size, dims.head_dim);
        let device = &Device::Cpu;
        let tensor = match self.kv_dtype {
            KvDtype::F32 => Tensor::from_vec(values, canonical, device)?,
            KvDtype::F16 => Tensor::from_vec(values.iter().map(|&v| f16::from_f32(v)).collect(), canonical, device)?,
            KvDtype::Bf16 => Tensor::from_vec(values.iter().map(|&v| bf16::from_f32(v)).collect(), canonical, device)?,
            KvDtype::Fp8 | KvDtype::Mxfp4 => Tensor::from_vec(values, canonical, device)?.to_dtype(DType::F8E4M3)?,
        };
        Ok((to_layout(&tensor, self.layout, key, self.kv_dtype)?, scale))
    }

    fn mxfp4_cache(&self, rng: &mut StdRng, dims: CacheDims, ownership: &Ownership) -> Result<(Tensor, KvScale)> {
        let (bytes, blocks) = (dims.head_dim / 2, dims.head_dim / 32);
        let codes: Vec<u8> = (0..ownership.owned.len() * bytes).map(|_| rng.random()).collect();
        let scales: Vec<u8> = (0..ownership.owned.len() * blocks)
            .map(|i| if ownership.owned[i / blocks] { rng.random_range(122..131) } else { 255 })
            .collect();
        let device = &Device::Cpu;
        let tensor = Tensor::from_vec(codes, (dims.pages, dims.kv_heads, dims.page_size, bytes), device)?;
        let scales = Tensor::from_vec(scales, (dims.pages, dims.kv_heads, dims.page_size, blocks), device)?;
        Ok((to_layout(&tensor, self.layout, true, self.kv_dtype)?, KvScale::Tensor(scales)))
    }
}

/// `[pages, kv_heads, page_size, head_dim]` into a cache layout.
pub fn to_layout(tensor: &Tensor, layout: CacheLayout, key: bool, dtype: KvDtype) -> Result<Tensor> {
    let (pages, heads, size, d) = tensor.dims4()?;
    let x = dtype.elements_per_16_bytes();
    match (layout, key) {
        (CacheLayout::Nhd, _) => tensor.permute((0, 2, 1, 3))?.contiguous(),
        (CacheLayout::Hnd, _) => Ok(tensor.clone()),
        (CacheLayout::Vllm | CacheLayout::Shuffled, true) => {
            tensor.reshape((pages, heads, size, d / x, x))?.permute((0, 1, 3, 2, 4))?.contiguous()
        }
        (CacheLayout::Vllm, false) => tensor.permute((0, 1, 3, 2))?.contiguous(),
        (CacheLayout::Shuffled, false) => tensor.reshape((pages, heads, size / x, x, d))?.permute((0, 1, 2, 4, 3))?.contiguous(),
    }
}

/// Two caches as views of one `[pages, 2, ...]` tensor.
fn interleave(key: &Tensor, value: &Tensor) -> Result<(Tensor, Tensor)> {
    let both = Tensor::stack(&[key, value], 1)?;
    Ok((both.narrow(1, 0, 1)?.squeeze(1)?, both.narrow(1, 1, 1)?.squeeze(1)?))
}

fn normal(rng: &mut StdRng) -> f32 {
    // Box and Muller's transform.
    let (u, v): (f32, f32) = (rng.random_range(1e-7..1.0), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

impl Case {
    /// What is planned of the call.
    pub fn plan_rows(&self) -> Result<PlanRows> {
        let (spec, heads) = (&self.spec, self.spec.heads_of_tables());
        let query_lens: Vec<usize> = (0..spec.lens.len() * heads).map(|row| spec.query_len(row / heads)).collect();
        Ok(PlanRows { lens: self.context_lens.flatten_all()?.to_vec1()?, query_lens, starts: spec.starts() })
    }

    /// The page of the first row's first tokens.
    pub fn first_page(&self) -> Result<usize> {
        Ok(self.block_tables.flatten_all()?.get(0)?.to_scalar::<i32>()? as usize)
    }

    /// A cache of one layer that can hold the case's pages.
    pub fn cache_config(&self) -> Result<CacheConfig> {
        let (spec, options) = (&self.spec, &self.options);
        let factor = |scale: &KvScale| match scale {
            KvScale::Scalar(value) => Ok(*value),
            KvScale::Tensor(tensor) => tensor.flatten_all()?.get(0)?.to_scalar(),
            KvScale::None => Ok(1.0),
        };
        let quantization = match spec.scales {
            _ if spec.kv_dtype == KvDtype::Mxfp4 => Quantization::Block,
            Scales::None => Quantization::None,
            Scales::Scalar | Scales::ScalarTensor => Quantization::Scalar { k: factor(&options.k_scale)?, v: factor(&options.v_scale)? },
            Scales::PerToken => Quantization::PerToken,
        };
        let dims = options.layout.dims_of_key(self.key_cache.dims(), spec.kv_dtype)?;
        Ok(CacheConfig { layers: 1, dims, dtype: spec.kv_dtype, layout: Some(options.layout), quantization })
    }

    /// Output and LSE of the crate.
    pub fn run(&self) -> Result<(Tensor, Tensor)> {
        paged_decode_with_lse(&self.q, &self.key_cache, &self.value_cache, &self.block_tables, &self.context_lens, &self.options)
    }

    /// Output and LSE of the float64 reference.
    pub fn expected(&self) -> Result<Expected> {
        attention(&self.q, &self.key_cache, &self.value_cache, &self.block_tables, &self.context_lens, &self.options)
    }

    /// Relative L2 a vector of the output may be off by: that of the coarser of q's and the cache's dtype.
    pub fn tolerance(&self) -> f64 {
        let q = match self.spec.q_dtype {
            DType::F32 => 1e-5,
            DType::F16 => 2e-3,
            _ => 8e-3,
        };
        let kv = match self.spec.kv_dtype {
            KvDtype::F32 => 1e-5,
            KvDtype::F16 => 2e-3,
            KvDtype::Bf16 | KvDtype::Fp8 | KvDtype::Mxfp4 => 8e-3,
        };
        f64::max(q, kv)
    }

    /// Runs the call and compares it with the reference; gives the worst relative L2.
    pub fn check(&self) -> Result<f64> {
        let (out, lse) = self.run()?;
        let tolerance = self.tolerance();
        self.expected()?.compare(&out, Some(&lse), tolerance, if tolerance <= 1e-5 { 1e-5 } else { 1e-3 })
    }
}
