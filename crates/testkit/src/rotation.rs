//! A workload as tensors: one call over several caches in turn, so that no cache of the machine holds what a call reads.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheDims, CacheLayout, KvDtype};
use candle_paged_attn::{DecodeOptions, KvScale, PlanChoice, paged_decode, paged_decode_into};
use float8::F8E4M3;
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::workloads::{Fp8Scale, Kv, Workload};

/// KV bytes that a rotation spans unless told otherwise: more than any last-level cache.
pub const ROTATION_BYTES: usize = 1 << 30;

/// Most caches of a rotation: the block tables of a small workload would outgrow its KV.
const MAX_TURNS: usize = 4096;

/// Random elements that caches are tiled from.
const BLOCK: usize = 1 << 20;

/// A call of `workload` over one of several caches, which are pages of one K and one V tensor in random order.
pub struct Rotation {
    pub workload: Workload,
    /// `[batch * query_len, q_heads, head_dim]`.
    pub q: Tensor,
    pub key_cache: Tensor,
    pub value_cache: Tensor,
    /// U32 `[batch, table_width]` of each cache; lanes past the context hold `u32::MAX`.
    pub block_tables: Vec<Tensor>,
    /// U32 `[batch]`.
    pub context_lens: Tensor,
    pub options: DecodeOptions,
    /// The view that a strided-output workload writes.
    strided_out: Option<Tensor>,
}

impl Workload {
    /// The KV dtype that this workload names.
    pub fn kv_dtype(&self) -> KvDtype {
        match self.kv {
            Kv::Bf16 => KvDtype::Bf16,
            Kv::Fp8 => KvDtype::Fp8,
            Kv::Mxfp4 => KvDtype::Mxfp4,
        }
    }
}

impl Rotation {
    /// The workload in an NHD cache of `kv`, over as many caches as `bytes` of KV take (at least two). q is F32 or F16 where the cache
    /// is, BF16 otherwise. The same seed gives the same tensors.
    pub fn new(workload: &Workload, kv: KvDtype, bytes: usize, seed: u64) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(seed);
        let device = &Device::Cpu;
        let need = workload.pages();
        let pages: usize = need.iter().sum();
        let turns = bytes.div_ceil(kv_bytes(workload, kv).max(1)).clamp(2, MAX_TURNS);
        let dims =
            CacheDims { pages: pages * turns, page_size: workload.page_size, kv_heads: workload.num_kv_heads, head_dim: workload.head_dim };
        let mut free: Vec<u32> = (0..dims.pages as u32).collect();
        free.shuffle(&mut rng);
        let block_tables = free.chunks(pages.max(1)).map(|pages| tables(workload, &need, pages)).collect::<Result<_>>()?;
        let q_dtype = match kv {
            KvDtype::F32 => DType::F32,
            KvDtype::F16 => DType::F16,
            _ => DType::BF16,
        };
        let (rows, heads) = (workload.batch * workload.query_len, workload.num_q_heads);
        let q = Tensor::from_vec(normals(&mut rng, rows * heads * workload.head_dim), (rows, heads, workload.head_dim), device)?;
        let lens: Vec<u32> = workload.contexts().iter().map(|&tokens| tokens as u32).collect();
        let strided_out = match workload.strided_output {
            true => Some(Tensor::zeros((rows, 2 * heads, workload.head_dim), q_dtype, device)?.narrow(1, 0, heads)?),
            false => None,
        };
        Ok(Self {
            workload: workload.clone(),
            q: q.to_dtype(q_dtype)?,
            key_cache: cache(&mut rng, &CacheLayout::Nhd.key_shape(dims, kv), kv)?,
            value_cache: cache(&mut rng, &CacheLayout::Nhd.value_shape(dims, kv), kv)?,
            block_tables,
            context_lens: Tensor::from_vec(lens, workload.batch, device)?,
            options: DecodeOptions {
                k_scale: scale(&mut rng, workload, kv, dims)?,
                v_scale: scale(&mut rng, workload, kv, dims)?,
                layout: CacheLayout::Nhd,
                plan: if workload.plan_free { PlanChoice::Free } else { PlanChoice::Default },
                max_partitions: workload.max_partitions,
                ..DecodeOptions::default()
            },
            strided_out,
        })
    }

    /// The same rotation with every tensor on `device`.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        let scale = |scale: &KvScale| match scale {
            KvScale::Tensor(tensor) => tensor.to_device(device).map(KvScale::Tensor),
            other => Ok(other.clone()),
        };
        // A copy of the view alone would be contiguous.
        let strided = |view: &Tensor| {
            let (rows, heads, head_dim) = view.dims3()?;
            Tensor::zeros((rows, 2 * heads, head_dim), view.dtype(), device)?.narrow(1, 0, heads)
        };
        Ok(Self {
            workload: self.workload.clone(),
            q: self.q.to_device(device)?,
            key_cache: self.key_cache.to_device(device)?,
            value_cache: self.value_cache.to_device(device)?,
            block_tables: self.block_tables.iter().map(|table| table.to_device(device)).collect::<Result<_>>()?,
            context_lens: self.context_lens.to_device(device)?,
            options: DecodeOptions {
                k_scale: scale(&self.options.k_scale)?,
                v_scale: scale(&self.options.v_scale)?,
                ..self.options.clone()
            },
            strided_out: self.strided_out.as_ref().map(strided).transpose()?,
        })
    }

    /// Caches in the rotation.
    pub fn turns(&self) -> usize {
        self.block_tables.len()
    }

    /// KV bytes that one call reads, scales left out.
    pub fn kv_bytes(&self) -> usize {
        KvDtype::of(self.key_cache.dtype()).map_or(0, |kv| kv_bytes(&self.workload, kv))
    }

    /// The call on the cache of this turn (any number; turns wrap around).
    pub fn decode(&self, turn: usize) -> Result<Tensor> {
        let tables = &self.block_tables[turn % self.turns()];
        match &self.strided_out {
            None => paged_decode(&self.q, &self.key_cache, &self.value_cache, tables, &self.context_lens, &self.options),
            Some(out) => {
                paged_decode_into(out, &self.q, &self.key_cache, &self.value_cache, tables, &self.context_lens, &self.options)?;
                Ok(out.clone())
            }
        }
    }
}

/// KV bytes that one call of the workload reads when the cache is of `kv`.
fn kv_bytes(workload: &Workload, kv: KvDtype) -> usize {
    workload.contexts().iter().sum::<usize>() * workload.num_kv_heads * workload.head_dim * 2 * kv.bits() / 8
}

fn tables(workload: &Workload, need: &[usize], pages: &[u32]) -> Result<Tensor> {
    let width = workload.table_width();
    let mut ids = vec![u32::MAX; workload.batch * width];
    let mut pages = pages.iter();
    for (row, &need) in ids.chunks_mut(width.max(1)).zip(need) {
        for (lane, &page) in row.iter_mut().zip(pages.by_ref().take(need)) {
            *lane = page;
        }
    }
    Tensor::from_vec(ids, (workload.batch, width), &Device::Cpu)
}

fn normals(rng: &mut StdRng, n: usize) -> Vec<f32> {
    let pair = |rng: &mut StdRng| {
        // Box and Muller's transform.
        let (u, v): (f32, f32) = (rng.random_range(1e-7..1.0), rng.random());
        let (sin, cos) = (std::f32::consts::TAU * v).sin_cos();
        let radius = (-2.0 * u.ln()).sqrt();
        [radius * sin, radius * cos]
    };
    (0..n.div_ceil(2)).flat_map(|_| pair(rng)).take(n).collect()
}

/// A cache of normal values (random codes in MXFP4), tiled from one block.
fn cache(rng: &mut StdRng, shape: &[usize], kv: KvDtype) -> Result<Tensor> {
    let elements = shape.iter().product();
    let block = normals(rng, BLOCK.min(elements));
    match kv {
        KvDtype::F32 => tiled(&block, elements, shape),
        KvDtype::F16 => tiled(&block.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>(), elements, shape),
        KvDtype::Bf16 => tiled(&block.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>(), elements, shape),
        KvDtype::Fp8 => tiled(&block.iter().map(|&x| F8E4M3::from_f32(x)).collect::<Vec<_>>(), elements, shape),
        KvDtype::Mxfp4 => tiled(&(0..block.len()).map(|_| rng.random::<u8>()).collect::<Vec<_>>(), elements, shape),
    }
}

fn tiled<T: candle::WithDType>(block: &[T], elements: usize, shape: &[usize]) -> Result<Tensor> {
    let mut data = Vec::with_capacity(elements);
    while data.len() < elements {
        data.extend_from_slice(&block[..block.len().min(elements - data.len())]);
    }
    Tensor::from_vec(data, shape, &Device::Cpu)
}

fn scale(rng: &mut StdRng, workload: &Workload, kv: KvDtype, dims: CacheDims) -> Result<KvScale> {
    let tokens = (dims.pages, dims.kv_heads, dims.page_size);
    Ok(match (kv, workload.fp8_scale) {
        (KvDtype::Mxfp4, _) => {
            let shape = [tokens.0, tokens.1, tokens.2, dims.head_dim / 32];
            let block: Vec<u8> = (0..4096).map(|_| rng.random_range(126..129)).collect();
            KvScale::Tensor(tiled(&block, shape.iter().product(), &shape)?)
        }
        (KvDtype::Fp8, Some(Fp8Scale::PerToken)) => {
            let block: Vec<f32> = (0..4096).map(|_| rng.random_range(0.8..1.25)).collect();
            KvScale::Tensor(tiled(&block, tokens.0 * tokens.1 * tokens.2, &[tokens.0, tokens.1, tokens.2])?)
        }
        (KvDtype::Fp8, _) => KvScale::Scalar(1.0),
        _ => KvScale::None,
    })
}
