//! What the tests share.

use candle::{CpuStorage, DType, Device, Result, Storage, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype, PagedKvCache};
use candle_paged_attn::plan::{HostPlan, PlanRequest, TileRange};
use candle_paged_attn::quant::fp8::{FNUZ_SCALE_FACTOR, ocp_to_fnuz};
use candle_paged_attn::registry::ArchName;
use candle_paged_attn::rocm::{self, PlanShape, RocmDevice, RocmOptions, RocmTensor};
use candle_paged_attn::{AppendAndAttend, DecodeOptions, KvScale, PlanChoice};
use float8::F8E4M3;
use once_cell::sync::Lazy;
pub use testkit::assert_same;
pub use testkit::bits::bits;
use testkit::cases::{Case, CaseSpec, Scales};
pub use testkit::contracts::refuses;
use testkit::quantized::{self, Fp8};

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

/// Relative L2 of a row against the exact answer. FP8 quantizes Q and P: K scales that differ by 30 from token to token sharpen the scores that
/// Q's rounding moves, and V's are a part of P.
pub fn tolerance(spec: &CaseSpec) -> f64 {
    match (spec.kv_dtype, spec.q_dtype) {
        (KvDtype::Fp8, _) if spec.scales == Scales::PerToken => 0.15,
        (KvDtype::Fp8, _) => 0.08,
        (KvDtype::Mxfp4, _) => 1e-2,
        (KvDtype::F16, DType::F16 | DType::F32) => 4e-3,
        _ => 8e-3,
    }
}

/// Runs a case in the staged form and compares it with the float64 answer; gives the worst row's relative L2.
#[track_caller]
pub fn check(spec: &CaseSpec) -> f64 {
    let checked = spec.build().and_then(|case| {
        let (out, lse) = run(&case)?;
        compare(&case, &out, Some(&lse))
    });
    checked.unwrap_or_else(|e| panic!("{spec:?}: {e}"))
}

/// Compares with the float64 answer: an FP8 call with a model of its quantization, and with the exact answer where its scores are not sharp.
pub fn compare(case: &Case, out: &Tensor, lse: Option<&Tensor>) -> Result<f64> {
    let spec = &case.spec;
    if spec.kv_dtype != KvDtype::Fp8 {
        return case.expected()?.compare(out, lse, tolerance(spec), 2e-3);
    }
    if spec.q_factor == 1.0 {
        case.expected()?.compare(out, None, tolerance(spec), 0.)?;
    }
    let (q, caches) = (&case.q, (&case.key_cache, &case.value_cache));
    let options = DecodeOptions { max_partitions: spec.max_partitions, ..case.options.clone() };
    let summary = rocm::explain_call(device(), q, caches.0, caches.1, &case.block_tables, &case.context_lens, &options)?;
    let format = Fp8 { fnuz: !is_gfx950(), groups: if summary.selection.flags().dual_group { 2 } else { 1 } };
    let model = quantized::attention(q, caches, &case.block_tables, &case.context_lens, &case.options, (&tasks(case)?, format))?;
    model.compare(out, lse, 1e-2, 1e-3)
}

/// The tasks of each plan row of a case.
fn tasks(case: &Case) -> Result<Vec<Vec<TileRange>>> {
    let spec = &case.spec;
    let lens = case.context_lens.flatten_all()?.to_vec1::<i32>()?;
    let heads = if spec.per_head { spec.kv_heads } else { 1 };
    let query_lens: Vec<usize> = match spec.query_lens.as_slice() {
        [one] => vec![*one; lens.len()],
        each => each.iter().flat_map(|&len| std::iter::repeat_n(len, heads)).collect(),
    };
    // As the op counts: row blocks of 64 rows are workgroups of their own.
    let blocks: usize = query_lens.iter().map(|len| (len * spec.group).div_ceil(64).max(1)).sum();
    let request = PlanRequest {
        window: spec.window,
        max_partitions: spec.max_partitions,
        workgroup_budget: spec.workgroup_budget,
        ..PlanRequest::new(&lens, &query_lens, spec.kv_heads / heads * blocks.div_ceil(lens.len().max(1)).max(1))
    };
    let plan = if spec.plan_free { HostPlan::free(&request, device().arch()) } else { HostPlan::new(&request, device().arch())? };
    let mut tasks = vec![vec![]; lens.len()];
    for &[row, first, end, _] in plan.work.iter().filter(|record| record[0] >= 0) {
        tasks[row as usize].push(TileRange { first, end });
    }
    Ok(tasks)
}

/// Output of `AppendAndAttend` over a cache on `device` that holds the case's pages; no token is new.
pub fn over_a_cache(case: &Case, device: &RocmDevice) -> Result<Tensor> {
    let (spec, options) = (&case.spec, &case.options);
    let config = case.cache_config()?;
    let dims = config.dims;
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

/// A case's tensors on a device.
#[derive(Clone)]
pub struct OnDevice {
    pub q: RocmTensor,
    pub key: RocmTensor,
    pub value: RocmTensor,
    pub block_tables: RocmTensor,
    pub context_lens: RocmTensor,
    pub options: RocmOptions,
}

impl OnDevice {
    /// K and V in the device's FP8; where the case has them as views of one tensor, they are so there too. Nothing is validated.
    pub fn new(case: &Case, device: &RocmDevice) -> Result<Self> {
        let fnuz = !is_gfx950() && case.spec.kv_dtype == KvDtype::Fp8;
        let up = |tensor: &Tensor| RocmTensor::from_tensor(tensor, device);
        let stored = |tensor: &Tensor| if fnuz { as_fnuz(tensor) } else { Ok(tensor.clone()) };
        let factor = if fnuz { FNUZ_SCALE_FACTOR } else { 1.0 };
        let scale = |scale: &KvScale| -> Result<KvScale<RocmTensor>> {
            Ok(match scale {
                KvScale::None if fnuz => KvScale::Scalar(factor),
                KvScale::None => KvScale::None,
                KvScale::Scalar(value) => KvScale::Scalar(value * factor),
                KvScale::Tensor(tensor) if tensor.dtype() == DType::F32 => KvScale::Tensor(up(&(tensor * f64::from(factor))?)?),
                KvScale::Tensor(tensor) => KvScale::Tensor(up(tensor)?),
            })
        };
        let (key, value) = match case.spec.page_strided && case.key_cache.dims() == case.value_cache.dims() {
            true => {
                let both = up(&Tensor::stack(&[stored(&case.key_cache)?, stored(&case.value_cache)?], 1)?)?;
                (both.narrow(1, 0, 1)?.squeeze(1)?, both.narrow(1, 1, 1)?.squeeze(1)?)
            }
            false => (up(&stored(&case.key_cache)?)?, up(&stored(&case.value_cache)?)?),
        };
        let options = &case.options;
        Ok(Self {
            q: up(&case.q)?,
            key,
            value,
            block_tables: up(&case.block_tables)?,
            context_lens: up(&case.context_lens)?,
            options: RocmOptions {
                softmax_scale: options.softmax_scale,
                window: options.window,
                softcap: options.softcap,
                sinks: options.sinks.as_ref().map(up).transpose()?,
                k_scale: scale(&options.k_scale)?,
                v_scale: scale(&options.v_scale)?,
                layout: options.layout,
                query_start: options.query_start.as_ref().map(up).transpose()?,
                max_query_len: None,
                plan: if case.spec.plan_free { PlanChoice::Free } else { PlanChoice::Default },
                max_partitions: options.max_partitions,
                workgroup_budget: options.workgroup_budget,
                validate: false,
                tables_settled: false,
            },
        })
    }

    pub fn decode(&self) -> Result<RocmTensor> {
        rocm::decode(&self.q, &self.key, &self.value, &self.block_tables, &self.context_lens, &self.options)
    }

    pub fn decode_with_lse(&self) -> Result<(RocmTensor, RocmTensor)> {
        rocm::decode_with_lse(&self.q, &self.key, &self.value, &self.block_tables, &self.context_lens, &self.options)
    }

    pub fn decode_into(&self, out: &RocmTensor, lse: Option<&RocmTensor>) -> Result<()> {
        rocm::decode_into(out, lse, &self.q, &self.key, &self.value, &self.block_tables, &self.context_lens, &self.options)
    }

    /// What a plan for it is made for.
    pub fn plan_shape(&self, case: &Case) -> PlanShape {
        let spec = &case.spec;
        PlanShape {
            batch: spec.lens.len(),
            q_heads: spec.group * spec.kv_heads,
            kv_heads: spec.kv_heads,
            per_head_tables: spec.per_head,
            query_len: if spec.query_lens.len() > 1 { self.options.max_query_len.unwrap_or(self.q.dims()[0]) } else { spec.query_lens[0] },
            ragged: spec.query_lens.len() > 1,
            window: spec.window,
            max_partitions: spec.max_partitions,
            workgroup_budget: spec.workgroup_budget,
        }
    }
}
