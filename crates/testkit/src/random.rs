//! Strategies of random calls, for property tests.

use std::ops::{Range, RangeInclusive};

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use proptest::prelude::*;

use crate::cases::{CaseSpec, Poison, Scales};

/// Context lengths: empty, negative, short, past a few tiles, and at `edges` of a tile.
pub fn lengths(edges: Range<i64>) -> impl Strategy<Value = i64> {
    prop_oneof![1 => Just(0i64), 1 => Just(-1), 3 => 1i64..20, 4 => 1i64..400, 2 => edges, 1 => 400i64..1500]
}

/// How large batches are drawn.
#[derive(Clone, Debug)]
pub struct BatchSizes {
    /// Edges of a tile, in tokens.
    pub edges: Range<i64>,
    /// Sequences that have the same number of new tokens, and that number.
    pub even: (Range<usize>, RangeInclusive<usize>),
    /// Sequences of a ragged batch, and the new tokens of its longer ones.
    pub ragged: (Range<usize>, Range<usize>),
}

impl BatchSizes {
    /// Of a GPU whose tile's edge is among `edges`.
    pub fn of_gpu(edges: Range<i64>) -> Self {
        Self { edges, even: (0..5, 1..=8), ragged: (2..4, 20..40) }
    }
}

/// Context lengths and query lengths of a batch: one query length for all, or one a sequence.
pub fn batches(sizes: BatchSizes) -> impl Strategy<Value = (Vec<i64>, Vec<usize>)> {
    let BatchSizes { edges, even, ragged } = sizes;
    prop_oneof![
        3 => (prop::collection::vec(lengths(edges.clone()), even.0), even.1).prop_map(|(lens, q)| (lens, vec![q])),
        2 => prop::collection::vec((lengths(edges), prop_oneof![4 => 0usize..6, 1 => ragged.1]), ragged.0)
            .prop_map(|pairs| pairs.into_iter().unzip()),
    ]
}

/// What a cache stores, with its scales, in one of the `layouts` it comes in.
pub fn stored(
    forms: Vec<(KvDtype, Scales)>,
    layouts: fn(KvDtype) -> Vec<CacheLayout>,
) -> impl Strategy<Value = (KvDtype, Scales, CacheLayout)> {
    prop::sample::select(forms).prop_flat_map(move |(kv, scales)| (Just(kv), Just(scales), prop::sample::select(layouts(kv))))
}

/// What a cache stores and how, and its head_dim and page size.
pub type Stored = BoxedStrategy<(KvDtype, Scales, CacheLayout, usize, usize)>;

/// Of which sizes calls are drawn.
#[derive(Clone, Debug)]
pub struct Sizes {
    pub stored: Stored,
    pub batches: BatchSizes,
    /// Query heads of a KV head.
    pub groups: BoxedStrategy<usize>,
    pub q_dtypes: Vec<DType>,
    pub q_factors: BoxedStrategy<f32>,
}

/// Calls for a GPU over caches of `stored`, of the sizes that every GPU has kernels for.
pub fn gpu_calls(
    stored: BoxedStrategy<(KvDtype, Scales, CacheLayout)>,
    edges: Range<i64>,
    q_factors: BoxedStrategy<f32>,
) -> impl Strategy<Value = CaseSpec> {
    let (head_dims, page_sizes) = (vec![64usize, 128, 128, 192, 256], vec![16usize, 16, 32, 64, 128]);
    let geometry = (stored, prop::sample::select(head_dims), prop::sample::select(page_sizes));
    calls(Sizes {
        stored: geometry.prop_map(|((kv_dtype, scales, layout), head_dim, page)| (kv_dtype, scales, layout, head_dim, page)).boxed(),
        batches: BatchSizes::of_gpu(edges),
        groups: prop::sample::select(vec![1, 3, 4, 8, 16, 32]).boxed(),
        q_dtypes: vec![DType::F32, DType::F16, DType::BF16, DType::BF16],
        q_factors,
    })
}

prop_compose! {
    /// Calls of these sizes, with anything that a call may have.
    pub fn calls(sizes: Sizes)(
        (kv_dtype, scales, layout, head_dim, page_size) in sizes.stored,
        (lens, query_lens) in batches(sizes.batches),
        (kv_heads, group) in (1usize..=3, sizes.groups),
        q_dtype in prop::sample::select(sizes.q_dtypes),
        (per_head, sinks, plan_free, page_strided, q_strided, signed_tables) in any::<(bool, bool, bool, bool, bool, bool)>(),
        (window, softcap) in (prop::option::of(1usize..300), prop::option::of(1f32..30.0)),
        (softmax_scale, q_factor) in (prop::option::of(-1.2f32..1.2), sizes.q_factors),
        (max_partitions, workgroup_budget) in (prop::option::of(1usize..6), prop::option::of(1usize..40)),
        poison in prop_oneof![Just(Poison::NaN), Just(Poison::Infinity)],
        seed in any::<u64>(),
    ) -> CaseSpec {
        CaseSpec {
            seed, kv_heads, group, head_dim, page_size, layout, kv_dtype, q_dtype, scales, lens, query_lens, per_head, window, softcap, sinks,
            softmax_scale: softmax_scale.map(|scale| scale / (head_dim as f32).sqrt()), q_factor, plan_free, max_partitions, workgroup_budget,
            poison, page_strided, q_strided, signed_tables,
        }
    }
}
