//! The calls that the tests make by the list. `tests/cuda_compile` compiles their kernels where there is no GPU.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use testkit::cases::{CaseSpec, Poison, Scales};
use testkit::contracts;

/// What the tensor-core tile reads.
pub fn forms() -> [(KvDtype, Scales); 5] {
    [
        (KvDtype::Bf16, Scales::None),
        (KvDtype::F16, Scales::None),
        (KvDtype::Fp8, Scales::None),
        (KvDtype::Fp8, Scales::Scalar),
        (KvDtype::Fp8, Scales::PerToken),
    ]
}

/// A case that the tensor-core tile takes.
pub fn spec(kv_dtype: KvDtype, scales: Scales) -> CaseSpec {
    CaseSpec { kv_dtype, scales, head_dim: 128, q_dtype: DType::BF16, ..CaseSpec::default() }
}

pub fn tensor_cores() -> Vec<CaseSpec> {
    let mut specs = vec![];
    for (kv_dtype, scales) in forms() {
        for (query_len, layout) in [(1, CacheLayout::Nhd), (4, CacheLayout::Nhd), (16, CacheLayout::Hnd)] {
            let lens = vec![0, 1, 255, 256, 257, 5027];
            specs.push(CaseSpec { layout, query_lens: vec![query_len], lens, ..spec(kv_dtype, scales) });
        }
        specs.push(CaseSpec { group: 16, kv_heads: 1, page_size: 128, lens: vec![9000, 40, 0], ..spec(kv_dtype, scales) });
    }
    specs
}

pub fn plain() -> Vec<CaseSpec> {
    let mut specs = vec![];
    for layout in CacheLayout::ALL {
        for (kv_dtype, scales, q_dtype) in [
            (KvDtype::F32, Scales::None, DType::F32),
            (KvDtype::F16, Scales::None, DType::F16),
            (KvDtype::Bf16, Scales::None, DType::F32),
            (KvDtype::Fp8, Scales::PerToken, DType::F32),
            (KvDtype::Mxfp4, Scales::None, DType::BF16),
        ] {
            if kv_dtype == KvDtype::Mxfp4 && matches!(layout, CacheLayout::Vllm | CacheLayout::Shuffled) {
                continue;
            }
            let lens = vec![700, 0, 1, 33];
            specs.push(CaseSpec { layout, kv_dtype, scales, q_dtype, query_lens: vec![3], lens, ..CaseSpec::default() });
        }
    }
    specs
}

pub fn sizes() -> Vec<CaseSpec> {
    let sizes = [
        (64, 8, 1, 4),
        (64, 128, 3, 1),
        (128, 24, 32, 1),
        (128, 1, 32, 1),
        (192, 32, 5, 2),
        (256, 16, 16, 1),
        (512, 128, 8, 1),
        (80, 16, 2, 2),
    ];
    let of = |(head_dim, page_size, group, kv_heads)| {
        [KvDtype::Bf16, KvDtype::Fp8].map(|kv_dtype| CaseSpec {
            head_dim,
            page_size,
            group,
            kv_heads,
            lens: vec![270, 3],
            ..spec(kv_dtype, Scales::None)
        })
    };
    sizes.into_iter().flat_map(of).collect()
}

pub fn options() -> Vec<CaseSpec> {
    let of = |(kv_dtype, scales)| {
        let base = CaseSpec { query_lens: vec![2], lens: vec![2700, 0, 130], ..spec(kv_dtype, scales) };
        let more = [
            CaseSpec { q_strided: true, page_strided: true, poison: Poison::Infinity, ..base.clone() },
            CaseSpec { q_factor: 32.0, ..base.clone() },
        ];
        contracts::options(&base).into_iter().chain(more)
    };
    [(KvDtype::Bf16, Scales::None), (KvDtype::Fp8, Scales::PerToken)]
        .into_iter()
        .flat_map(of)
        .chain(long_tasks())
        .chain(extremes())
        .collect()
}

/// Softcaps far above the scores, F16 queries whose last bits count, and scores that are nothing times nothing.
fn extremes() -> impl Iterator<Item = CaseSpec> {
    decode_and_verify().flat_map(|base| {
        let base = CaseSpec { lens: vec![300, 5], ..base };
        [
            CaseSpec { softcap: Some(1e5), ..base.clone() },
            CaseSpec { softcap: Some(1e9), ..base.clone() },
            CaseSpec { q_dtype: DType::F16, q_factor: 16.0, ..base.clone() },
            CaseSpec { softmax_scale: Some(0.0), q_factor: 0.0, ..base },
        ]
    })
}

/// A case by the decode tile and one by the verify tile, of one KV head, in every form.
pub fn decode_and_verify() -> impl Iterator<Item = CaseSpec> {
    forms().into_iter().flat_map(|(kv_dtype, scales)| {
        [(4, 1), (16, 4)].map(|(group, query_len)| CaseSpec { kv_heads: 1, group, query_lens: vec![query_len], ..spec(kv_dtype, scales) })
    })
}

/// Tasks of several chunks a group: scores of the other sign; large ones, whose largest goes on rising; a window whose last token that the newest query
/// leaves out is the first of a chunk.
fn long_tasks() -> impl Iterator<Item = CaseSpec> {
    decode_and_verify().flat_map(|base| {
        let base = CaseSpec { lens: vec![1500, 70], workgroup_budget: Some(3), ..base };
        [
            CaseSpec { softmax_scale: Some(-0.2), ..base.clone() },
            CaseSpec { q_factor: 32.0, ..base.clone() },
            CaseSpec { window: Some(128), lens: vec![385, 70], ..base },
        ]
    })
}

pub fn many_sequences() -> Vec<CaseSpec> {
    let lens: Vec<i64> = (0..300).map(|i| i * 7 % 513).collect();
    let few = CaseSpec { lens: lens[..100].to_vec(), query_lens: vec![4], ..spec(KvDtype::Fp8, Scales::Scalar) };
    let decode = CaseSpec { lens, ..spec(KvDtype::Bf16, Scales::None) };
    // Whole rows, an SM each where a plan on the host has them in order.
    let alone = CaseSpec { kv_heads: 1, lens: (0..200).map(|i| if i == 77 { 1200 } else { 1 + i * 7 % 200 }).collect(), ..decode.clone() };
    [decode, few, alone].into_iter().chain(verify_in_turns()).collect()
}

/// Verify calls of more blocks than run at once.
pub fn verify_in_turns() -> Vec<CaseSpec> {
    let lens: Vec<i64> = (0..140).map(|i| 5 + i * 7 % 300).collect();
    let of = |(kv_dtype, scales)| CaseSpec { group: 16, query_lens: vec![4], lens: lens.clone(), ..spec(kv_dtype, scales) };
    forms().map(of).into()
}
