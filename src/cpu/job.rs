//! A validated decode call as the CPU kernels see it: slices, strides and numbers.

use float8::F8E4M3;
use half::{bf16, f16};

use crate::cache::{CacheDims, KvStrides};
use crate::plan::HostPlan;
use crate::registry::CpuIsa;

/// One call. All shapes, strides, page ids and lengths have been checked against the slices.
pub(crate) struct Job<'a> {
    pub isa: CpuIsa,
    pub dims: CacheDims,
    pub q_heads: usize,
    pub query: QueryView<'a>,
    pub key: KvView<'a>,
    pub value: KvView<'a>,
    pub table: PageTable<'a>,
    /// Plan rows: one a sequence, or one a (sequence, KV head) with per-head tables (`row = sequence * kv_heads + head`).
    pub rows: &'a [Row],
    pub per_head: bool,
    pub softmax_scale: f32,
    pub window: Option<usize>,
    pub softcap: Option<f32>,
    /// One logit a query head.
    pub sinks: Option<&'a [f32]>,
    pub plan: &'a HostPlan,
}

/// The new tokens and the context of one plan row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// First row of q (and of the output) of this sequence.
    pub query_start: usize,
    pub query_len: usize,
    /// Tokens in the cache, new ones included; 0 where the caller's length was <= 0.
    pub context_len: usize,
}

/// q `[rows, q_heads, head_dim]`, head_dim contiguous.
pub(crate) struct QueryView<'a> {
    pub data: QueryData<'a>,
    pub start: usize,
    pub row_stride: usize,
    pub head_stride: usize,
}

pub(crate) enum QueryData<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

/// One of the K and V caches.
pub(crate) struct KvView<'a> {
    pub data: KvData<'a>,
    pub strides: KvStrides,
    pub scale: Scale<'a>,
}

pub(crate) enum KvData<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
    Fp8(&'a [F8E4M3]),
    /// Two dims a byte, low nibble first.
    Mxfp4(&'a [u8]),
}

/// `value = stored * scale`.
pub(crate) enum Scale<'a> {
    /// One factor (1.0 where there is none).
    Scalar(f32),
    /// F32 per (page, head, token): `data[start + page*page_stride + head*head_stride + token*token_stride]`.
    PerToken { data: &'a [f32], start: usize, page_stride: usize, head_stride: usize, token_stride: usize },
    /// E8M0 per (page, head, token, block of 32 dims), blocks contiguous.
    Block { data: &'a [u8], start: usize, page_stride: usize, head_stride: usize, token_stride: usize },
}

/// Block tables, columns `column_stride` apart.
pub(crate) struct PageTable<'a> {
    pub ids: Ids<'a>,
    pub start: usize,
    pub sequence_stride: usize,
    /// 0 where all heads share a table.
    pub head_stride: usize,
    pub column_stride: usize,
}

pub(crate) enum Ids<'a> {
    U32(&'a [u32]),
    I32(&'a [i32]),
}

impl PageTable<'_> {
    /// The page in `column` of a sequence's (and head's) table.
    pub fn page(&self, sequence: usize, head: usize, column: usize) -> i64 {
        let at = self.start + sequence * self.sequence_stride + head * self.head_stride + column * self.column_stride;
        match self.ids {
            Ids::U32(ids) => i64::from(ids[at]),
            Ids::I32(ids) => i64::from(ids[at]),
        }
    }
}

/// Where results go: `out` like q's shape, `lse` `[rows, q_heads]` contiguous. Every row is written by `run`.
pub(crate) struct Output<'a> {
    pub data: OutputData<'a>,
    pub start: usize,
    pub row_stride: usize,
    pub head_stride: usize,
    pub lse: Option<&'a mut [f32]>,
}

pub(crate) enum OutputData<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
}

impl Scale<'_> {
    /// The factor of the whole cache, 1 where factors are stored with the tokens.
    pub fn scalar(&self) -> f32 {
        match *self {
            Self::Scalar(scale) => scale,
            Self::PerToken { .. } | Self::Block { .. } => 1.0,
        }
    }
}
