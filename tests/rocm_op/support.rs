//! What the tests share.

use candle::{CpuStorage, DType, Device, Result, Storage, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheLayout, KvDtype, PagedKvCache, Quantization};
use candle_paged_attn::quant::fp8::{FNUZ_SCALE_FACTOR, ocp_to_fnuz};
use candle_paged_attn::registry::ArchName;
use candle_paged_attn::rocm::{self, RocmDevice};
use candle_paged_attn::{AppendAndAttend, KvScale};
use float8::F8E4M3;
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

/// Relative L2 of a row against the exact answer. FP8 quantizes Q and P; V scales that differ by 30 from token to token are a part of P.
pub fn tolerance(spec: &CaseSpec) -> f64 {
    match (spec.kv_dtype, spec.q_dtype) {
        (KvDtype::Fp8, _) if spec.scales == Scales::PerToken => 0.1,
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

/// Output of `AppendAndAttend` over a cache on `device` that holds the case's pages; no token is new.
pub fn over_a_cache(case: &Case, device: &RocmDevice) -> Result<Tensor> {
    let (spec, options) = (&case.spec, &case.options);
    let dims = options.layout.dims_of_key(case.key_cache.dims(), spec.kv_dtype)?;
    let value = |scale: &KvScale| match scale {
        KvScale::Scalar(value) => *value,
        KvScale::Tensor(tensor) => tensor.flatten_all().and_then(|t| t.get(0)?.to_scalar()).unwrap(),
        KvScale::None => 1.0,
    };
    let quantization = match spec.scales {
        _ if spec.kv_dtype == KvDtype::Mxfp4 => Quantization::Block,
        Scales::None => Quantization::None,
        Scales::Scalar | Scales::ScalarTensor => Quantization::Scalar { k: value(&options.k_scale), v: value(&options.v_scale) },
        Scales::PerToken => Quantization::PerToken,
    };
    let config = CacheConfig { layers: 1, dims, dtype: spec.kv_dtype, layout: Some(options.layout), quantization };
    let cache = PagedKvCache::new(config, device)?;
    let layer = cache.rocm_layer(0)?;
    let fnuz = !is_gfx950() && spec.kv_dtype == KvDtype::Fp8;
    for (to, from) in [(&layer.key, &case.key_cache), (&layer.value, &case.value_cache)] {
        to.copy_from(&if fnuz { as_fnuz(from)? } else { from.clone() })?;
    }
    for (to, from) in [(&layer.k_scale, &options.k_scale), (&layer.v_scale, &options.v_scale)] {
        if let (KvScale::Tensor(to), KvScale::Tensor(from)) = (to, from) {
            to.copy_from(&if fnuz { (from * f64::from(FNUZ_SCALE_FACTOR))? } else { from.clone() })?;
        }
    }
    let (rows, cpu) = (case.q.dim(0)?, &Device::Cpu);
    let new = Tensor::zeros((rows, dims.kv_heads, dims.head_dim), DType::BF16, cpu)?;
    let op = AppendAndAttend {
        cache: &cache,
        layer: 0,
        slot_mapping: Tensor::full(-1i64, rows, cpu)?,
        block_tables: case.block_tables.clone(),
        context_lens: case.context_lens.clone(),
        options: options.clone(),
    };
    op.apply(&case.q, &new, &new)
}

/// OCP FP8 as FNUZ codes of half the value.
pub fn as_fnuz(codes: &Tensor) -> Result<Tensor> {
    let codes = codes.contiguous()?;
    let (storage, layout) = codes.storage_and_layout();
    let Storage::Cpu(CpuStorage::F8E4M3(values)) = &*storage else { candle::bail!("not FP8") };
    let start = layout.start_offset();
    let values = values[start..start + codes.elem_count()].iter().map(|code| F8E4M3::from_bits(ocp_to_fnuz(code.to_bits())));
    Tensor::from_vec(values.collect::<Vec<_>>(), codes.shape(), &Device::Cpu)
}
