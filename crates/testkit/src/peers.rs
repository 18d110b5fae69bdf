//! What a candle user has without this crate: candle-nn's CPU attention, and matmul + softmax, over contiguous KV.

use candle::{D, DType, Device, Result, Tensor, bail};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_paged_attn::cache::KvDtype;
use half::{bf16, f16};

use crate::rotation::Rotation;

/// One sequence of a call, gathered.
struct Sequence {
    /// `[1, query_len, q_heads, head_dim]`, as candle-nn takes it.
    q: Tensor,
    /// `[kv_heads, group * query_len, head_dim]`, as matmul takes it.
    grouped_q: Tensor,
    /// `[1, context, kv_heads, head_dim]`.
    k: Tensor,
    v: Tensor,
    /// `[kv_heads, context, head_dim]`.
    head_k: Tensor,
    head_v: Tensor,
    /// F32, 0 or -inf, `[group * query_len, context]`; `None` where every row attends everything.
    mask: Option<Tensor>,
}

/// The KV of one or more turns of a [`Rotation`], contiguous for each sequence: gathering it is not part of what is timed.
/// FP8 caches become BF16, their scales dropped: candle has no attention that reads FP8.
pub struct Peers {
    turns: Vec<Vec<Sequence>>,
    dtype: DType,
    query_len: usize,
    softmax_scale: f32,
}

impl Peers {
    /// Gathers the first `turns` caches. Errors: MXFP4, which candle cannot read at all.
    pub fn new(rotation: &Rotation, turns: usize) -> Result<Self> {
        let w = &rotation.workload;
        let dtype = match KvDtype::of(rotation.key_cache.dtype())? {
            KvDtype::Mxfp4 => bail!("candle reads no MXFP4"),
            KvDtype::Fp8 => DType::BF16,
            other => other.dtype(),
        };
        let turns = rotation.block_tables.iter().take(turns).map(|tables| {
            let contexts = w.contexts().into_iter().enumerate();
            contexts.map(|(sequence, context)| Sequence::gather(rotation, tables, sequence, context, dtype)).collect()
        });
        Ok(Self {
            turns: turns.collect::<Result<_>>()?,
            dtype,
            query_len: w.query_len,
            softmax_scale: rotation.options.softmax_scale.unwrap_or(1.0 / (w.head_dim as f32).sqrt()),
        })
    }

    /// KV bytes that a call reads here.
    pub fn kv_bytes(&self) -> usize {
        let bytes = |s: &Sequence| 2 * s.k.elem_count() * self.dtype.size_in_bytes();
        self.turns.first().map_or(0, |sequences| sequences.iter().map(bytes).sum())
    }

    /// candle-nn's CPU attention, a sequence at a time (its batched form takes no BF16 and one length): F32 `[1, q_heads, query_len, head_dim]` each.
    pub fn candle_nn(&self, turn: usize) -> Result<Vec<Tensor>> {
        self.sequences(turn).iter().map(|sequence| self.candle_nn_one(sequence)).collect()
    }

    /// Matmul, softmax, matmul, a sequence at a time, the softmax in F32 (candle's own of BF16 adds in BF16 and loses count past a few
    /// hundred tokens): `[kv_heads, group * query_len, head_dim]` each.
    pub fn matmul_softmax(&self, turn: usize) -> Result<Vec<Tensor>> {
        self.sequences(turn).iter().map(|sequence| self.matmul_softmax_one(sequence)).collect()
    }

    fn sequences(&self, turn: usize) -> &[Sequence] {
        &self.turns[turn % self.turns.len()]
    }

    fn candle_nn_one(&self, Sequence { q, k, v, .. }: &Sequence) -> Result<Tensor> {
        // Its causal path has a kernel of its own for one row of F32, and none for one row of the 16-bit types.
        let mask = match (self.query_len, self.dtype) {
            (1, DType::F16 | DType::BF16) => AttnMask::None,
            _ => AttnMask::causal_with_offset(k.dim(1)? - self.query_len),
        };
        match self.dtype {
            DType::BF16 => flash_attn::<bf16>(q, k, v, self.softmax_scale, mask, None, None),
            DType::F16 => flash_attn::<f16>(q, k, v, self.softmax_scale, mask, None, None),
            _ => flash_attn::<f32>(q, k, v, self.softmax_scale, mask, None, None),
        }
    }

    fn matmul_softmax_one(&self, s: &Sequence) -> Result<Tensor> {
        let scores = (s.grouped_q.matmul(&s.head_k.t()?)?.to_dtype(DType::F32)? * f64::from(self.softmax_scale))?;
        let scores = match &s.mask {
            Some(mask) => scores.broadcast_add(mask)?,
            None => scores,
        };
        candle_nn::ops::softmax_last_dim(&scores)?.to_dtype(self.dtype)?.matmul(&s.head_v)
    }
}

impl Sequence {
    fn gather(rotation: &Rotation, tables: &Tensor, sequence: usize, context: usize, dtype: DType) -> Result<Self> {
        let w = &rotation.workload;
        let ids = tables.narrow(0, sequence, 1)?.squeeze(0)?.narrow(0, 0, context.div_ceil(w.page_size))?;
        let tokens = |cache: &Tensor| {
            let pages = cache.index_select(&ids, 0)?.to_dtype(dtype)?;
            pages.flatten_to(1)?.narrow(0, 0, context)?.unsqueeze(0)?.contiguous()
        };
        let heads = |kv: &Tensor| kv.squeeze(0)?.transpose(0, 1)?.contiguous();
        let (k, v) = (tokens(&rotation.key_cache)?, tokens(&rotation.value_cache)?);
        let q = rotation.q.to_dtype(dtype)?.narrow(0, sequence * w.query_len, w.query_len)?;
        let (head_k, head_v) = (heads(&k)?, heads(&v)?);
        let grouped_q = q.reshape((w.query_len, w.num_kv_heads, w.group(), w.head_dim))?.permute((1, 2, 0, 3))?.reshape((
            w.num_kv_heads,
            w.group() * w.query_len,
            w.head_dim,
        ))?;
        let mask = causal_mask(w.group(), w.query_len, context)?;
        Ok(Self { q: q.unsqueeze(0)?.contiguous()?, grouped_q, k, v, head_k, head_v, mask })
    }

    /// `candle_nn`'s or `matmul_softmax`'s output of this sequence as `[query_len, q_heads, head_dim]`.
    fn rows(&self, out: &Tensor) -> Result<Tensor> {
        let (_, query_len, q_heads, head_dim) = self.q.dims4()?;
        out.reshape((q_heads, query_len, head_dim))?.transpose(0, 1)
    }
}

fn causal_mask(group: usize, query_len: usize, context: usize) -> Result<Option<Tensor>> {
    if query_len == 1 {
        return Ok(None);
    }
    let row = |i: usize| (0..context).map(move |j| if j + query_len <= context + i { 0f32 } else { f32::NEG_INFINITY });
    let mask: Vec<f32> = (0..group * query_len).flat_map(|r| row(r % query_len)).collect();
    Tensor::from_vec(mask, (group * query_len, context), &Device::Cpu).map(Some)
}

impl Peers {
    /// Largest difference between a peer's outputs and the rows of [`Rotation::decode`].
    pub fn difference(&self, turn: usize, outs: &[Tensor], decoded: &Tensor) -> Result<f32> {
        let rows = self.sequences(turn).iter().zip(outs).map(|(sequence, out)| sequence.rows(out)?.to_dtype(DType::F32));
        let rows = Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?;
        (rows - decoded.to_dtype(DType::F32)?)?.abs()?.flatten_all()?.max(D::Minus1)?.to_scalar()
    }
}
