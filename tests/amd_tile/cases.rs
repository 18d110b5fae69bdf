//! Calls against the float64 answer.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::{Arch, ArchName};
use testkit::cases::{CaseSpec, Poison, Scales};
use testkit::quantized::{self, Fp8};

use crate::call::{LAYOUTS, TileCall, archs};
use crate::require_clang;

/// A BF16 call with little work.
fn base() -> CaseSpec {
    CaseSpec {
        kv_heads: 1,
        group: 8,
        head_dim: 128,
        page_size: 16,
        layout: CacheLayout::Shuffled,
        kv_dtype: KvDtype::Bf16,
        q_dtype: DType::BF16,
        lens: vec![300],
        ..CaseSpec::default()
    }
}

#[track_caller]
fn check(spec: CaseSpec, arch: &Arch) -> f64 {
    let context = format!("{} {spec:?}", arch.name);
    let tolerance = match (spec.kv_dtype, spec.q_dtype) {
        (KvDtype::F16, DType::F16 | DType::F32) => 4e-3,
        (KvDtype::Fp8, _) => 0.08,
        _ => 8e-3,
    };
    let case = spec.build().unwrap();
    let expected = case.expected().unwrap();
    let call = TileCall::new(case, arch.clone()).unwrap();
    let outcome = call.run().unwrap_or_else(|e| panic!("{context}: {e}"));
    let lse_tolerance = if spec.kv_dtype == KvDtype::Fp8 { 0.05 } else { 1e-3 };
    expected.compare(&outcome.out, Some(&outcome.lse), tolerance, lse_tolerance).unwrap_or_else(|e| panic!("{context}: {e}"))
}

/// An FP8 call: near the float64 model of its quantization, and at `exact` also near the exact answer.
#[track_caller]
fn check_fp8(spec: CaseSpec, arch: &Arch, exact: bool) -> f64 {
    let context = format!("{} {spec:?}", arch.name);
    let case = spec.build().unwrap();
    let call = TileCall::new(case, arch.clone()).unwrap();
    let outcome = call.run().unwrap_or_else(|e| panic!("{context}: {e}"));
    let case = &call.case;
    let how = (&*call.tasks(), Fp8 { fnuz: arch.name == ArchName::Gfx942 });
    let caches = (&case.key_cache, &case.value_cache);
    let model = quantized::attention(&case.q, caches, &case.block_tables, &case.context_lens, &case.options, how).unwrap();
    if exact {
        case.expected().unwrap().compare(&outcome.out, None, 0.08, 0.0).unwrap_or_else(|e| panic!("exact: {context}: {e}"));
    }
    model.compare(&outcome.out, Some(&outcome.lse), 1e-2, 1e-3).unwrap_or_else(|e| panic!("{context}: {e}"))
}

#[track_caller]
fn check_all_fp8(specs: Vec<CaseSpec>) {
    for arch in archs() {
        let check = |(i, s): (usize, &CaseSpec)| check_fp8(CaseSpec { seed: i as u64, ..s.clone() }, &arch, s.q_factor == 1.0);
        let worst = specs.iter().enumerate().map(check).fold(0.0, f64::max);
        println!("{}: {} FP8 calls, worst relative L2 {worst:.2e} against the model", arch.name, specs.len());
    }
}

#[track_caller]
fn check_all(specs: Vec<CaseSpec>) {
    for arch in archs() {
        let worst = specs.iter().enumerate().map(|(i, s)| check(CaseSpec { seed: i as u64, ..s.clone() }, &arch)).fold(0.0, f64::max);
        println!("{}: {} calls, worst relative L2 {worst:.2e}", arch.name, specs.len());
    }
}

/// Every spec with each of two layouts.
fn layouts(specs: impl IntoIterator<Item = CaseSpec>) -> Vec<CaseSpec> {
    specs.into_iter().flat_map(|spec| LAYOUTS.map(|layout| CaseSpec { layout, ..spec.clone() })).collect()
}

#[test]
fn context_lengths() {
    require_clang!();
    let lens = vec![0, 1, 255, 256, 257, 1027, -3];
    check_all(vec![
        CaseSpec { lens: lens.clone(), poison: Poison::Infinity, ..base() },
        CaseSpec { lens: lens.clone(), plan_free: true, ..base() },
        CaseSpec { lens: lens.clone(), max_partitions: Some(1), ..base() },
        CaseSpec { lens: lens.clone(), max_partitions: Some(1), sinks: true, ..base() },
        CaseSpec { lens, query_lens: vec![4], workgroup_budget: Some(1), ..base() },
    ]);
}

#[test]
fn pages_and_layouts() {
    require_clang!();
    let pages = [8, 16, 32, 64, 128, 256, 512, 1024];
    check_all(layouts(pages.map(|page_size| CaseSpec { page_size, lens: vec![600], kv_heads: 2, ..base() })));
}

#[test]
fn head_dims_and_m_tiles() {
    require_clang!();
    let dims =
        [(64, 1), (64, 4), (128, 2), (128, 3), (128, 4), (192, 1), (192, 2), (256, 1), (256, 4), (512, 1), (512, 2), (1024, 1), (1024, 2)];
    check_all(layouts(dims.map(|(head_dim, m)| CaseSpec { head_dim, group: 16, query_lens: vec![m], lens: vec![270], ..base() })));
}

#[test]
fn groups_and_queries() {
    require_clang!();
    let shapes = [(1, 1), (2, 3), (3, 8), (5, 1), (7, 7), (16, 1), (16, 8), (32, 1), (32, 8), (12, 2)];
    check_all(shapes.map(|(group, query)| CaseSpec { group, query_lens: vec![query], lens: vec![258, 5], ..base() }).to_vec());
}

#[test]
fn dtypes() {
    require_clang!();
    let mut specs = vec![];
    for kv_dtype in [KvDtype::Bf16, KvDtype::F16] {
        for q_dtype in [DType::BF16, DType::F16, DType::F32] {
            for (q_factor, max_partitions) in [(1.0, None), (32.0, Some(1))] {
                specs.push(CaseSpec { kv_dtype, q_dtype, q_factor, max_partitions, query_lens: vec![3], lens: vec![530], ..base() });
            }
        }
    }
    check_all(specs);
}

#[test]
fn windows() {
    require_clang!();
    let windows = [1, 2, 17, 256, 300, 1000, usize::MAX >> 1];
    let specs = windows.map(|w| CaseSpec { window: Some(w), query_lens: vec![4], lens: vec![1027, 3, 260], page_size: 32, ..base() });
    let single = windows.map(|w| CaseSpec { window: Some(w), lens: vec![1027, 1, 512], poison: Poison::Infinity, ..base() });
    check_all([specs, single].concat());
}

#[test]
fn scores() {
    require_clang!();
    check_all(vec![
        CaseSpec { softcap: Some(5.0), ..base() },
        CaseSpec { softcap: Some(30.0), q_factor: 32.0, ..base() },
        CaseSpec { softcap: Some(1e6), ..base() },
        CaseSpec { softcap: Some(1e-3), ..base() },
        CaseSpec { softmax_scale: Some(-0.1), ..base() },
        CaseSpec { softmax_scale: Some(0.0), ..base() },
        CaseSpec { softmax_scale: Some(-0.3), softcap: Some(2.0), sinks: true, ..base() },
        CaseSpec { q_factor: 32.0, ..base() },
        CaseSpec { q_factor: 32.0, query_lens: vec![4], group: 16, ..base() },
    ]);
}

#[test]
fn batches() {
    require_clang!();
    check_all(vec![
        CaseSpec { query_lens: vec![1, 4, 0, 9], lens: vec![300, 4, 7, 600], ..base() },
        CaseSpec { query_lens: vec![2, 5, 1], lens: vec![1, 513, 256], group: 16, max_partitions: Some(1), ..base() },
        CaseSpec { per_head: true, kv_heads: 3, lens: vec![300, 700, 0], ..base() },
        CaseSpec { per_head: true, kv_heads: 2, query_lens: vec![2, 1], lens: vec![300, 520], max_partitions: Some(1), ..base() },
        CaseSpec { per_head: true, kv_heads: 2, lens: vec![300, 520], plan_free: true, window: Some(40), ..base() },
        CaseSpec { page_strided: true, q_strided: true, kv_heads: 2, lens: vec![300, 520], signed_tables: false, ..base() },
        CaseSpec { kv_heads: 4, lens: vec![2000], workgroup_budget: Some(12), ..base() },
    ]);
}

fn fp8() -> CaseSpec {
    CaseSpec { kv_dtype: KvDtype::Fp8, ..base() }
}

/// Scales up to 3 a token make scores three times as large as real caches do, and with them what Q loses in FP8: the softmax scale makes up
/// for it.
fn scaled(scales: Scales, spec: CaseSpec) -> CaseSpec {
    let softmax_scale = (scales == Scales::PerToken).then(|| 0.5 / (spec.head_dim as f32).sqrt());
    CaseSpec { scales, softmax_scale, ..spec }
}

const SCALES: [Scales; 4] = [Scales::None, Scales::Scalar, Scales::ScalarTensor, Scales::PerToken];

#[test]
fn fp8_scales_and_dtypes() {
    require_clang!();
    let mut specs = vec![];
    for scales in SCALES {
        for (q_dtype, q_factor) in [(DType::BF16, 1.0), (DType::BF16, 32.0), (DType::F16, 1.0), (DType::F32, 32.0)] {
            specs.push(scaled(scales, CaseSpec { q_dtype, q_factor, lens: vec![700, 3], ..fp8() }));
            let verify = CaseSpec { query_lens: vec![4], max_partitions: Some(1), lens: vec![700, 2], ..fp8() };
            specs.push(scaled(scales, CaseSpec { q_dtype, q_factor, ..verify }));
        }
    }
    check_all_fp8(specs);
}

#[test]
fn fp8_shapes() {
    require_clang!();
    let mut specs = vec![];
    for (i, head_dim) in [64, 128, 192, 256, 512, 1024].into_iter().enumerate() {
        let scales = if i % 2 == 0 { Scales::PerToken } else { Scales::Scalar };
        specs.push(scaled(scales, CaseSpec { head_dim, group: 16, query_lens: vec![1 + i % 4], lens: vec![300], ..fp8() }));
    }
    for page_size in [16, 32, 64, 128, 256, 1024] {
        let spec = CaseSpec { page_size, kv_heads: 2, lens: vec![600], poison: Poison::Infinity, ..fp8() };
        specs.push(scaled(Scales::PerToken, spec));
    }
    check_all_fp8(layouts(specs));
}

#[test]
fn fp8_context_lengths() {
    require_clang!();
    let lens = vec![0, 1, 255, 256, 257, 1027, -3];
    let one_slot = CaseSpec { lens, workgroup_budget: Some(1), ..fp8() };
    let with = |scales, query, window| scaled(scales, CaseSpec { query_lens: vec![query], window, ..one_slot.clone() });
    let mut specs = vec![with(Scales::PerToken, 1, None), with(Scales::Scalar, 4, None), with(Scales::PerToken, 3, Some(100))];
    specs.push(CaseSpec { sinks: true, softcap: Some(20.0), ..with(Scales::PerToken, 2, None) });
    specs.push(CaseSpec { plan_free: true, softmax_scale: Some(-0.05), ..with(Scales::Scalar, 1, Some(300)) });
    check_all_fp8(specs);
}
