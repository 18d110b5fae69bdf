//! Calls against the float64 answer on the dequantized cache.

use candle::{DType, Device, Tensor};
use candle_paged_attn::KvScale;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::Arch;
use testkit::assert_same;
use testkit::bits::bits;
use testkit::cases::{Case, CaseSpec, Poison};
use testkit::reference::floats;

use crate::call::{Outcome, TileCall};
use crate::require_clang;

/// A call with little work. The scale makes many tokens matter: cached values are up to 48.
pub fn base() -> CaseSpec {
    CaseSpec {
        kv_heads: 1,
        group: 8,
        head_dim: 128,
        page_size: 16,
        layout: CacheLayout::Hnd,
        kv_dtype: KvDtype::Mxfp4,
        q_dtype: DType::BF16,
        softmax_scale: Some(0.01),
        lens: vec![300],
        ..CaseSpec::default()
    }
}

#[track_caller]
fn run(case: Case, flags: &[&str]) -> Outcome {
    let context = format!("{:?}", case.spec);
    let call = TileCall::new(case, Arch::gfx950()).unwrap();
    call.run_with(flags).unwrap_or_else(|e| panic!("{context}: {e}"))
}

#[track_caller]
fn check_case(case: Case) -> f64 {
    let context = format!("{:?}", case.spec);
    let expected = case.expected().unwrap();
    let outcome = run(case, &[]);
    expected.compare(&outcome.out, Some(&outcome.lse), 1e-2, 1e-3).unwrap_or_else(|e| panic!("{context}: {e}"))
}

#[track_caller]
fn check_all(specs: impl IntoIterator<Item = CaseSpec>) {
    let errors = specs.into_iter().enumerate().map(|(i, spec)| check_case(CaseSpec { seed: i as u64, ..spec }.build().unwrap()));
    let errors: Vec<f64> = errors.collect();
    println!("{} calls, worst relative L2 {:.2e}", errors.len(), errors.iter().fold(0.0, |a: f64, &b| a.max(b)));
}

/// Every spec in both layouts.
fn layouts(specs: impl IntoIterator<Item = CaseSpec>) -> Vec<CaseSpec> {
    specs.into_iter().flat_map(|spec| [CacheLayout::Hnd, CacheLayout::Nhd].map(|layout| CaseSpec { layout, ..spec.clone() })).collect()
}

#[test]
fn context_lengths() {
    require_clang!();
    let lens = vec![0, 1, 64, 255, 256, 257, 449, 1027, -3];
    check_all([
        CaseSpec { lens: lens.clone(), ..base() },
        CaseSpec { lens: lens.clone(), plan_free: true, ..base() },
        CaseSpec { lens: lens.clone(), max_partitions: Some(1), ..base() },
        CaseSpec { lens: lens.clone(), max_partitions: Some(1), sinks: true, ..base() },
        CaseSpec { lens: lens.clone(), softmax_scale: None, workgroup_budget: Some(1), ..base() },
        CaseSpec { lens, query_lens: vec![4], workgroup_budget: Some(1), ..base() },
    ]);
}

/// Page ids from LDS are those of the block table, whatever tiles a task has.
#[test]
fn staged_pages() {
    require_clang!();
    let lens = vec![0, 1, 255, 256, 257, 1027, -3];
    let poisoned = CaseSpec { poison: Poison::NaN, ..base() };
    let specs = [
        CaseSpec { lens: lens.clone(), workgroup_budget: Some(3), q_factor: 32.0, ..poisoned.clone() },
        CaseSpec { lens: lens.clone(), plan_free: true, page_size: 8, window: Some(300), ..poisoned.clone() },
        CaseSpec { lens: lens.clone(), max_partitions: Some(1), page_size: 64, ..poisoned.clone() },
        CaseSpec { lens: vec![5, 1300, 2500], workgroup_budget: Some(4), page_size: 1024, ..poisoned },
    ];
    for spec in specs {
        let call = TileCall::new(spec.build().unwrap(), Arch::gfx950()).unwrap().one_group();
        assert!(call.selection.flags().mxfp4_staged_pages && call.selection.staged_bytes > 0);
        let bits_of = |outcome: Outcome| (bits(&outcome.out), bits(&outcome.lse));
        assert_same!(bits_of(call.run().unwrap()), bits_of(call.generic().run().unwrap()), "{spec:?}");
    }
    // Nothing is read beyond what is staged: the simulator's LDS ends there.
    let mut short = TileCall::new(CaseSpec { lens: vec![1027], ..base() }.build().unwrap(), Arch::gfx950()).unwrap();
    short.selection.staged_bytes = 0;
    assert!(short.run().is_err());
}

#[test]
fn pages_and_layouts() {
    require_clang!();
    let pages = [8, 16, 32, 64, 128, 256, 1024];
    check_all(layouts(pages.map(|page_size| CaseSpec { page_size, lens: vec![600, 1300], kv_heads: 2, ..base() })));
}

#[test]
fn head_dims_and_m_tiles() {
    require_clang!();
    let dims = [(64, 1), (64, 4), (128, 2), (128, 3), (128, 4), (192, 1), (192, 2), (256, 1), (256, 4), (512, 1), (512, 2), (1024, 1)];
    check_all(dims.map(|(head_dim, m)| CaseSpec { head_dim, group: 16, query_lens: vec![m], lens: vec![330], page_size: 32, ..base() }));
}

#[test]
fn groups_and_queries() {
    require_clang!();
    let shapes = [(1, 1), (2, 3), (3, 8), (5, 1), (7, 7), (16, 1), (16, 8), (32, 1), (32, 8), (12, 2)];
    check_all(shapes.map(|(group, query)| CaseSpec { group, query_lens: vec![query], lens: vec![258, 5], ..base() }));
}

#[test]
fn queries_of_every_dtype_and_size() {
    require_clang!();
    let mut specs = vec![];
    for q_dtype in [DType::BF16, DType::F16, DType::F32] {
        for (q_factor, max_partitions) in [(1.0, None), (32.0, Some(1))] {
            specs.push(CaseSpec { q_dtype, q_factor, max_partitions, query_lens: vec![3], lens: vec![530], ..base() });
            specs.push(CaseSpec { q_dtype, q_factor, max_partitions, softmax_scale: None, lens: vec![530, 70], ..base() });
        }
    }
    check_all(specs);
}

#[test]
fn windows() {
    require_clang!();
    let windows = [1, 2, 17, 64, 256, 300, 1000, usize::MAX >> 1];
    let verify = windows.map(|w| CaseSpec { window: Some(w), query_lens: vec![4], lens: vec![1027, 3, 260], page_size: 32, ..base() });
    let single = windows.map(|w| CaseSpec { window: Some(w), lens: vec![1027, 1, 512], plan_free: true, ..base() });
    check_all([verify, single].concat());
}

#[test]
fn scores() {
    require_clang!();
    check_all([
        CaseSpec { softcap: Some(5.0), ..base() },
        CaseSpec { softcap: Some(30.0), q_factor: 32.0, softmax_scale: None, ..base() },
        CaseSpec { softmax_scale: Some(-0.01), ..base() },
        CaseSpec { softmax_scale: Some(0.0), ..base() },
        CaseSpec { softmax_scale: Some(-0.3), softcap: Some(2.0), sinks: true, ..base() },
        CaseSpec { q_factor: 32.0, query_lens: vec![4], group: 16, ..base() },
    ]);
}

#[test]
fn batches() {
    require_clang!();
    check_all([
        CaseSpec { query_lens: vec![1, 4, 0, 9], lens: vec![300, 4, 7, 600], ..base() },
        CaseSpec { query_lens: vec![2, 5, 1], lens: vec![1, 513, 256], group: 16, max_partitions: Some(1), ..base() },
        CaseSpec { per_head: true, kv_heads: 3, lens: vec![300, 700, 0], ..base() },
        CaseSpec { per_head: true, kv_heads: 2, query_lens: vec![2, 1], lens: vec![300, 520], max_partitions: Some(1), ..base() },
        CaseSpec { per_head: true, kv_heads: 2, lens: vec![300, 520], plan_free: true, window: Some(40), ..base() },
        CaseSpec { page_strided: true, q_strided: true, kv_heads: 2, lens: vec![300, 520], signed_tables: false, ..base() },
        CaseSpec { page_strided: true, kv_heads: 2, lens: vec![300, 520], layout: CacheLayout::Nhd, ..base() },
        CaseSpec { kv_heads: 4, lens: vec![2000], workgroup_budget: Some(12), ..base() },
    ]);
}

/// A case whose owned scales of K or V (those that are not NaN) went through `change`, by number.
fn rescaled(spec: CaseSpec, key: bool, change: impl Fn(usize, u8) -> u8) -> Case {
    let mut case = spec.build().unwrap();
    let scale = if key { &mut case.options.k_scale } else { &mut case.options.v_scale };
    let KvScale::Tensor(scales) = scale else { panic!("block scales") };
    let codes = scales.flatten_all().unwrap().to_vec1::<u8>().unwrap().into_iter().enumerate();
    let codes: Vec<u8> = codes.map(|(i, code)| if code == 255 { 255 } else { change(i, code) }).collect();
    *scale = KvScale::Tensor(Tensor::from_vec(codes, scales.shape(), &Device::Cpu).unwrap());
    case
}

#[test]
fn the_smallest_and_largest_scales() {
    require_clang!();
    // All of K is next to nothing: every token weighs the same.
    check_case(rescaled(base(), true, |_, _| 0));
    // Some blocks of V are next to nothing, some far larger than others.
    check_case(rescaled(base(), false, |i, code| if i % 3 == 0 { 0 } else { code }));
    check_case(rescaled(base(), false, |i, code| if i % 5 == 0 { 235 } else { code }));
    // Huge K for tiny Q.
    check_case(rescaled(CaseSpec { q_factor: 1e-30, ..base() }, true, |_, code| code + 100));
}

/// A block of V whose scale is NaN gives NaN in its own dims, in rows that attend its token, and nowhere else.
#[test]
fn a_nan_scale_reads_as_nan() {
    require_clang!();
    let spec = CaseSpec { group: 16, lens: vec![1, 300], ..base() };
    let (pages, blocks) = (spec.clone().build().unwrap().block_tables.to_vec2::<i32>().unwrap(), spec.head_dim / 32);
    let token = pages[1][7] as usize * spec.page_size + 5;
    let out = run(rescaled(spec, false, |i, code| if i == token * blocks + 2 { 255 } else { code }), &[]).out;
    for (at, x) in floats(&out).unwrap().into_iter().enumerate() {
        let (row, dim) = (at / (16 * 128), at % 128);
        assert_eq!(x.is_nan(), row == 1 && dim / 32 == 2, "row {row} dim {dim}");
    }
    let spec = CaseSpec { group: 16, lens: vec![1, 300], ..base() };
    let out = run(rescaled(spec, true, |i, code| if i == token * blocks + 2 { 255 } else { code }), &[]).out;
    assert!(floats(&out).unwrap().into_iter().enumerate().all(|(at, x)| x.is_nan() == (at >= 16 * 128)));
}

/// The poison tests see a V that is not masked.
#[test]
fn without_the_v_mask_poison_comes_through() {
    require_clang!();
    let spec = CaseSpec { lens: vec![300], ..base() };
    let outcome = run(spec.build().unwrap(), &["-DPA_TEST_NO_V_MASK"]);
    assert!(floats(&outcome.out).unwrap().iter().any(|x| x.is_nan()));
}

/// The same call twice gives the same bits.
#[test]
fn runs_repeat() {
    require_clang!();
    let spec = CaseSpec { query_lens: vec![3], lens: vec![700, 257], ..base() };
    let [first, second] = [0, 1].map(|_| floats(&run(spec.build().unwrap(), &[]).out).unwrap());
    assert_eq!(first, second);
}
