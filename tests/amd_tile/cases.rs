//! Calls against the float64 answer.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::Arch;
use testkit::cases::{CaseSpec, Poison};

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
    let dims = [(64, 1), (64, 4), (128, 2), (128, 3), (128, 4), (192, 1), (192, 2), (256, 1), (256, 4), (512, 1), (512, 2), (1024, 1), (1024, 2)];
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
