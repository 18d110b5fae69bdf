//! What the tests share.

use candle::{DType, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::ArchName;
use candle_paged_attn::rocm::{self, RocmDevice};
use once_cell::sync::Lazy;
use testkit::cases::{Case, CaseSpec, Scales};
use testkit::reference::floats;

static DEVICE: Lazy<RocmDevice> = Lazy::new(|| RocmDevice::new(0).unwrap());

/// The one device of the process: its kernels are compiled and loaded once.
pub fn device() -> &'static RocmDevice {
    &DEVICE
}

pub fn is_gfx950() -> bool {
    device().arch().name == ArchName::Gfx950
}

/// A device of its own, for tests that count what it does.
pub fn fresh_device() -> RocmDevice {
    RocmDevice::new(0).unwrap()
}

/// Launches, copies and fills so far.
pub fn work(device: &RocmDevice) -> [u64; 3] {
    let counts = device.counts();
    [counts.launches, counts.copies, counts.fills]
}

/// Every value's bits.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    floats(tensor).unwrap().into_iter().map(f64::to_bits).collect()
}

/// What the device's caches store, with their scales.
pub fn forms() -> Vec<(KvDtype, Scales)> {
    let mut forms = vec![
        (KvDtype::Bf16, Scales::None),
        (KvDtype::F16, Scales::None),
        (KvDtype::Fp8, Scales::None),
        (KvDtype::Fp8, Scales::Scalar),
        (KvDtype::Fp8, Scales::PerToken),
    ];
    if is_gfx950() {
        forms.push((KvDtype::Mxfp4, Scales::None));
    }
    forms
}

/// A case in the kernels' own layout.
pub fn spec(kv_dtype: KvDtype, scales: Scales) -> CaseSpec {
    let layout = if kv_dtype == KvDtype::Mxfp4 { CacheLayout::Hnd } else { CacheLayout::Shuffled };
    CaseSpec { kv_dtype, scales, layout, q_dtype: DType::BF16, ..CaseSpec::default() }
}

/// Output and LSE of the staged form.
pub fn run(case: &Case) -> Result<(Tensor, Tensor)> {
    run_on(device(), case)
}

/// [`run`] on a given device.
pub fn run_on(device: &RocmDevice, case: &Case) -> Result<(Tensor, Tensor)> {
    rocm::paged_decode(device, &case.q, &case.key_cache, &case.value_cache, &case.block_tables, &case.context_lens, &case.options)
}

/// Relative L2 of a row against the exact answer. FP8 quantizes Q and P.
pub fn tolerance(spec: &CaseSpec) -> f64 {
    match (spec.kv_dtype, spec.q_dtype) {
        (KvDtype::Fp8, _) => 0.08,
        (KvDtype::Mxfp4, _) => 1e-2,
        (KvDtype::F16, DType::F16 | DType::F32) => 4e-3,
        _ => 8e-3,
    }
}

/// Runs a case in the staged form and compares it with the float64 answer; gives the worst row's relative L2.
pub fn check(spec: &CaseSpec) -> f64 {
    let checked = spec.build().and_then(|case| {
        let (out, lse) = run(&case)?;
        let lse_tolerance = if spec.kv_dtype == KvDtype::Fp8 { 0.1 } else { 2e-3 };
        case.expected()?.compare(&out, Some(&lse), tolerance(spec), lse_tolerance)
    });
    checked.unwrap_or_else(|e| panic!("{spec:?}: {e}"))
}
