//! Calls against the float64 answer.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::Arch;
use testkit::cases::{CaseSpec, Poison};

use crate::call::{TileCall, archs};
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

#[test]
fn bf16_decode() {
    require_clang!();
    check_all(vec![base()]);
}

#[test]
fn context_lengths() {
    require_clang!();
    check_all(vec![CaseSpec { lens: vec![0, 1, 255, 256, 257, 1027, -3], poison: Poison::Infinity, ..base() }]);
}
