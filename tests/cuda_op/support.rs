//! What the tests share.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::KvDtype;
use candle_paged_attn::{DecodeOptions, KvScale, paged_decode_with_lse};
use testkit::cases::{Case, CaseSpec, Scales};
use testkit::reference::floats;

/// The GPU; `None`, and a line that says so, where there is none.
pub fn gpu(test: &str) -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(error) => {
            eprintln!("skipped: {test}: {}", error.to_string().lines().next().unwrap_or_default());
            None
        }
    }
}

/// Where a call's tables are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    Host,
    Device,
}

/// A view of `tensor`'s whole storage on `device`: candle copies the storage, and nothing is computed there.
pub fn upload(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    tensor.to_device(device)
}

/// The case with its tensors on `device`.
pub fn on(case: &Case, device: &Device, tables: Tables) -> Result<Case> {
    let place = match tables {
        Tables::Host => &Device::Cpu,
        Tables::Device => device,
    };
    let scale = |scale: &KvScale| match scale {
        KvScale::Tensor(tensor) => upload(tensor, device).map(KvScale::Tensor),
        other => Ok(other.clone()),
    };
    let options = &case.options;
    Ok(Case {
        spec: case.spec.clone(),
        q: upload(&case.q, device)?,
        key_cache: upload(&case.key_cache, device)?,
        value_cache: upload(&case.value_cache, device)?,
        block_tables: upload(&case.block_tables, place)?,
        context_lens: upload(&case.context_lens, place)?,
        options: DecodeOptions {
            sinks: options.sinks.as_ref().map(|t| upload(t, device)).transpose()?,
            query_start: options.query_start.as_ref().map(|t| upload(t, place)).transpose()?,
            k_scale: scale(&options.k_scale)?,
            v_scale: scale(&options.v_scale)?,
            ..options.clone()
        },
    })
}

/// Output and LSE of a case that is on the GPU, on the CPU.
pub fn run(case: &Case) -> Result<(Tensor, Tensor)> {
    let (out, lse) =
        paged_decode_with_lse(&case.q, &case.key_cache, &case.value_cache, &case.block_tables, &case.context_lens, &case.options)?;
    Ok((out.to_device(&Device::Cpu)?, lse.to_device(&Device::Cpu)?))
}

/// Relative L2 that a row of the output may be off by.
pub fn tolerance(spec: &CaseSpec) -> f64 {
    match (spec.kv_dtype, spec.q_dtype) {
        (_, DType::F32) => 2e-5,
        (_, DType::BF16) | (KvDtype::Bf16, _) => 8e-3,
        _ => 4e-3,
    }
}

/// Runs a case with its tables on the host and on the device and compares both with the float64 answer. Gives the worst row's relative L2.
#[track_caller]
pub fn check(device: &Device, spec: &CaseSpec) -> f64 {
    let mut worst = 0.0f64;
    for tables in [Tables::Host, Tables::Device] {
        let checked = spec.build().and_then(|case| {
            let (out, lse) = run(&on(&case, device, tables)?)?;
            case.expected()?.compare(&out, Some(&lse), tolerance(spec), 2e-3)
        });
        worst = worst.max(checked.unwrap_or_else(|e| panic!("tables on the {tables:?}: {spec:?}: {e}")));
    }
    worst
}

/// Every value's bits.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    floats(tensor).unwrap().into_iter().map(f64::to_bits).collect()
}

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
