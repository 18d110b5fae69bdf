//! Failures on demand: every HIP call of decode calls, appends and graphs fails once, in turn. An error names it, nothing leaks, the cache is as it was or
//! holds the step, and the same call made again is right.
#![cfg(feature = "rocm")]

#[allow(dead_code, reason = "the runtime layer's tests use the rest")]
#[path = "rocm_runtime/support.rs"]
mod support;

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheConfig, CacheDims, CacheLayout, KvDtype, PagedKvCache, Quantization};
use candle_paged_attn::jit::JitSettings;
use candle_paged_attn::rocm::{self, DeviceSettings, PlanShape, RocmDevice, RocmOptions, RocmPlan, RocmTensor};
use candle_paged_attn::{AppendAndAttend, DecodeOptions, PlanChoice};
use support::{Simulator, UNTOLD, simulator};
use testkit::cases::{Case, CaseSpec, Scales};
use testkit::reference::floats;

const DIMS: CacheDims = CacheDims { pages: 4, page_size: 16, kv_heads: 1, head_dim: 64 };

fn case(kv_dtype: KvDtype, scales: Scales) -> Case {
    let spec = CaseSpec { kv_heads: 1, kv_dtype, scales, layout: CacheLayout::Shuffled, ..CaseSpec::default() };
    CaseSpec { q_dtype: DType::BF16, lens: vec![300, 20], ..spec }.build().unwrap()
}

/// Makes calls, each once more if it fails.
struct Persistent {
    errors: Vec<String>,
}

impl Persistent {
    fn call<T>(&mut self, mut call: impl FnMut() -> Result<T>) -> T {
        call().unwrap_or_else(|error| {
            self.errors.push(error.to_string());
            call().expect("the next call works")
        })
    }
}

fn staged(device: &RocmDevice, case: &Case) -> Result<Vec<f64>> {
    let (out, lse) =
        rocm::paged_decode(device, &case.q, &case.key_cache, &case.value_cache, &case.block_tables, &case.context_lens, &case.options)?;
    Ok([floats(&out)?, floats(&lse)?].concat())
}

/// A step of one sequence on a cache of its own.
struct Step {
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl Step {
    fn new() -> Result<Self> {
        let random = |heads| Tensor::randn(0f32, 1., (2, heads, 64), &Device::Cpu)?.to_dtype(DType::BF16);
        Ok(Self { q: random(4)?, k: random(1)?, v: random(1)? })
    }

    fn op<'a>(&self, cache: &'a PagedKvCache) -> Result<AppendAndAttend<'a>> {
        Ok(AppendAndAttend {
            cache,
            layer: 0,
            slot_mapping: Tensor::new(&[38i64, 39], &Device::Cpu)?,
            block_tables: Tensor::new(&[[0u32, 1, 2]], &Device::Cpu)?,
            context_lens: Tensor::new(&[40u32], &Device::Cpu)?,
            options: DecodeOptions::default(),
        })
    }
}

/// What the cache holds of the step's sequence.
fn held(cache: &PagedKvCache) -> Result<Vec<f64>> {
    let (k, v) = cache.gather(0, &[0, 1, 2], 40)?;
    Ok([floats(&k)?, floats(&v)?].concat())
}

/// Results to compare with.
#[derive(Clone, Debug, Default, PartialEq)]
struct Results {
    staged: Vec<f64>,
    step: Vec<f64>,
    replayed: Vec<f64>,
}

/// One of every call; the results.
fn everything(caller: &mut Persistent, [scaled, plain]: &[Case; 2], step: &Step) -> Results {
    let device = caller.call(|| RocmDevice::new(0));
    let staged = caller.call(|| staged(&device, scaled));
    let config = CacheConfig { layers: 1, dims: DIMS, dtype: KvDtype::Bf16, layout: None, quantization: Quantization::None };
    let cache = caller.call(|| PagedKvCache::new(config.clone(), &device));
    let prompt = Tensor::ones((38, 1, 64), DType::BF16, &Device::Cpu).unwrap();
    let slots = Tensor::arange(0i64, 38, &Device::Cpu).unwrap();
    caller.call(|| cache.write(0, &prompt, &prompt, &slots));
    let before = caller.call(|| held(&cache));
    let op = step.op(&cache).unwrap();
    let attended = op.apply(&step.q, &step.k, &step.v).or_else(|error| {
        caller.errors.push(error.to_string());
        let now = held(&cache).expect("the next call works");
        let out = op.apply(&step.q, &step.k, &step.v);
        let after = held(&cache).unwrap();
        assert!(now == before || now == after, "{error}: the cache holds a part of the step");
        out
    });
    let step = floats(&attended.expect("the next call works")).unwrap();
    caller.call(|| cache.copy_pages(&[(0, 3)]));
    let replayed = caller.call(|| replay(&device, plain));
    Results { staged, step, replayed }
}

/// The case in a graph with the plan's refresh.
fn replay(device: &RocmDevice, case: &Case) -> Result<Vec<f64>> {
    let up = |tensor: &Tensor| RocmTensor::from_tensor(tensor, device);
    let (q, key, value) = (up(&case.q)?, up(&case.key_cache)?, up(&case.value_cache)?);
    let (tables, lens) = (up(&case.block_tables)?, up(&case.context_lens)?);
    let shape = PlanShape {
        batch: 2,
        q_heads: 4,
        kv_heads: 1,
        per_head_tables: false,
        query_len: 1,
        ragged: false,
        window: None,
        max_partitions: None,
        workgroup_budget: None,
    };
    let plan = RocmPlan::new(shape, device)?;
    let options =
        RocmOptions { layout: CacheLayout::Shuffled, plan: PlanChoice::Given(plan.clone()), validate: false, ..RocmOptions::default() };
    let out = RocmTensor::zeros(q.dims(), DType::BF16, device)?;
    let work = || {
        plan.refresh(&lens, None)?;
        rocm::decode_into(&out, None, &q, &key, &value, &tables, &lens, &options)
    };
    work()?;
    let graph = device.capture(work)?;
    out.fill_bytes(0xff)?;
    graph.replay()?;
    floats(&out.to_tensor()?)
}

fn each_call(simulator: &Simulator) -> u64 {
    let step = Step::new().unwrap();
    let cases = [case(KvDtype::Fp8, Scales::Scalar), case(KvDtype::Bf16, Scales::None)];
    let want = everything(&mut Persistent { errors: vec![] }, &cases, &step);
    assert!(want.staged.iter().chain(&want.step).chain(&want.replayed).all(|value| value.is_finite()));
    let before = simulator.alive();
    for nth in 1.. {
        let mut caller = Persistent { errors: vec![] };
        simulator.clear();
        simulator.fail_any(nth, 0);
        let got = everything(&mut caller, &cases, &step);
        let failed = simulator.failed();
        simulator.clear();
        let Some(failed) = failed else { return nth - 1 };
        match caller.errors.as_slice() {
            [error] => assert!(error.contains(&format!("{failed}: ")), "{failed}: {error}"),
            [] => assert!(UNTOLD.contains(&failed.as_str()), "call {nth}: {failed} failed, and nobody was told"),
            errors => panic!("{failed}: more than one error: {errors:?}"),
        }
        assert_eq!(got, want, "call {nth}, {failed}");
        assert_eq!(simulator.alive(), before, "call {nth}, {failed}: leaked");
    }
    0
}

#[test]
fn every_call_may_fail_once() {
    let Some(simulator) = simulator() else { return };
    let calls = each_call(simulator);
    println!("{calls} calls failed in turn");
    assert!(calls > 100, "{calls}");
    without_a_compiler(simulator);
}

/// A kernel that cannot be compiled: an error that names the compiler, and nothing is left behind.
fn without_a_compiler(simulator: &Simulator) {
    let case = case(KvDtype::Bf16, Scales::None);
    let before = simulator.alive();
    let folder = tempfile::tempdir().unwrap();
    let jit = JitSettings { clang: Some("/nowhere/clang".into()), cache_dir: Some(folder.path().into()), ..JitSettings::default() };
    let device = RocmDevice::with_settings(0, DeviceSettings { jit, ..DeviceSettings::default() }).unwrap();
    let error = staged(&device, &case).unwrap_err().to_string();
    assert!(error.contains("/nowhere/clang"), "{error}");
    assert_eq!((device.counts().launches, device.counts().live_allocations), (0, 0));
    drop(device);
    assert_eq!(simulator.alive(), before);
}
