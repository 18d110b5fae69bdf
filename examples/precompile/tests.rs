//! From options to a cache that serves without a compiler.

use std::path::Path;
use std::process::Command;

use candle::DType;
use candle_paged_attn::cache::{CacheConfig, CacheDims, CacheLayout, KvDtype, PagePool, PagedKvCache, Quantization};
use candle_paged_attn::jit::JitSettings;
use candle_paged_attn::rocm::{self, DeviceSettings, PlanShape, RocmDevice, RocmPlan, RocmTensor};
use candle_paged_attn::{AppendAndAttend, DecodeOptions};
use clap::Parser;
use testkit::cases::CaseSpec;

use super::*;

/// Whether there is a clang; says that the test is skipped where not.
fn clang(test: &str) -> bool {
    let there = |clang: String| Command::new(clang).arg("--version").output().is_ok();
    let named = std::env::var("CANDLE_PAGED_ATTN_CLANG").ok();
    let found = named.into_iter().chain((20..=24).map(|version| format!("clang-{version}"))).any(there);
    if !found {
        println!("SKIPPED {test}: no clang of version 20 or newer (scripts/install-llvm installs one)");
    }
    found
}

fn precompile(cache: &Path, options: &str) -> Result<Done> {
    let cache = ["precompile", "--cache", cache.to_str().unwrap()];
    run(&Args::try_parse_from(cache.into_iter().chain(options.split_whitespace()))?)
}

#[test]
fn a_second_run_finds_everything() {
    if !clang("a_second_run_finds_everything") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let shapes = folder.path().join("shapes.json");
    let text = r#"[{"q_heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16, "kv": ["fp8"], "scales": "per-token", "even": true, "max_batch": 2}]"#;
    std::fs::write(&shapes, text).unwrap();
    let options = format!("--arch gfx942,gfx1250 --jobs 2 --shapes {}", shapes.display());
    let cache = folder.path().join("cache");
    let first = precompile(&cache, &options).unwrap();
    let table = table::draw(&first.jobs);
    assert!(first.complete(), "{table}");
    for line in ["pa_fp8_d64_p16_m1_token ", "pa_fp8_d64_p16_m1_token_direct ", "pa_plan_r2_proportional ", "pa_reduce_d64_bf16_t256 "] {
        assert!(table.contains(line), "{line}: {table}");
    }
    let all = first.jobs.len();
    assert!(
        summary(&first).contains(&format!("{all} compiled, 0 there already")) && summary(&first).contains("gfx1250"),
        "{}",
        summary(&first)
    );
    let second = precompile(&cache, &options).unwrap();
    assert!(summary(&second).contains(&format!("0 compiled, {all} there already")), "{}", summary(&second));
    assert!(second.jobs.iter().zip(&first.jobs).all(|(second, first)| second.spec == first.spec));
}

#[test]
fn what_cannot_be_kept_is_a_failure() {
    if clang("what_cannot_be_kept_is_a_failure") {
        let done = precompile(Path::new("/proc/none"), "--arch gfx1250 --even --max-batch 1").unwrap();
        assert!(!done.complete() && !done.jobs.is_empty());
    }
}

#[test]
fn wrong_options_are_named() {
    let error = |options: &str| format!("{:#}", precompile(Path::new("/proc/none"), options).err().expect(options));
    #[cfg(not(feature = "nvrtc"))]
    assert!(error("--arch sm90").contains("--arch sm90"));
    assert!(error("--arch gfx90").contains("gfx90"));
    assert!(error("--workloads minimax21").contains("minimax20"));
    assert!(error("--shapes /nonexistent.json").contains("/nonexistent.json"));
    assert!(error("--workloads minimax20 --q-heads 8").contains("cannot be used with"));
    assert!(error("--q-heads 7 --kv-heads 2").contains("q_heads"));
    assert!(error("--kv f64").contains("f64"));
}

/// Calls of every kind on a device that has the cache and no compiler.
#[test]
fn programs_need_no_compiler() {
    if !clang("programs_need_no_compiler") {
        return;
    }
    let Ok(arch) = RocmDevice::new(0).map(|device| device.arch().name) else {
        println!("SKIPPED programs_need_no_compiler: no AMD GPU, and no simulated one (scripts/hip-sim-prefix)");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let options = "--q-heads 8 --kv-heads 2 --head-dim 64 --page-size 16 --kv bf16 --query-lens 1,4 --max-batch 4";
    let done = precompile(folder.path(), &format!("--arch {arch} {options}")).unwrap();
    assert!(done.complete(), "{}", table::draw(&done.jobs));
    let jit = JitSettings { clang: Some("/nonexistent/clang".into()), cache_dir: Some(folder.path().into()), ..JitSettings::default() };
    let device = RocmDevice::with_settings(0, DeviceSettings { jit, ..DeviceSettings::default() }).unwrap();
    let base = CaseSpec {
        kv_dtype: KvDtype::Bf16,
        q_dtype: DType::BF16,
        layout: CacheLayout::Shuffled,
        lens: vec![900, 70, 3],
        ..CaseSpec::default()
    };
    let specs = [
        base.clone(),
        CaseSpec { query_lens: vec![4], ..base.clone() },
        CaseSpec { query_lens: vec![1, 4, 20], ..base.clone() },
        CaseSpec { plan_free: true, ..base.clone() },
        CaseSpec { max_partitions: Some(1), sinks: true, ..base.clone() },
        CaseSpec { lens: vec![9000], ..base.clone() },
    ];
    for spec in specs {
        let case = spec.build().unwrap();
        let (q, key, value) = (&case.q, &case.key_cache, &case.value_cache);
        let called = rocm::paged_decode(&device, q, key, value, &case.block_tables, &case.context_lens, &case.options);
        let (out, _) = called.unwrap_or_else(|error| panic!("{spec:?}: {error}"));
        case.expected().unwrap().compare(&out, None, 8e-3, 0.0).unwrap();
    }
    plan_on(&device);
    append_on(&device);
}

fn plan_on(device: &RocmDevice) {
    for (batch, ragged) in [(1, false), (3, true), (4, false)] {
        let shape = PlanShape {
            batch,
            q_heads: 8,
            kv_heads: 2,
            per_head_tables: false,
            query_len: 1,
            ragged,
            window: None,
            max_partitions: None,
            workgroup_budget: None,
        };
        let up = |values: Vec<i32>| RocmTensor::from_tensor(&candle::Tensor::new(values, &candle::Device::Cpu).unwrap(), device).unwrap();
        let query_start = ragged.then(|| up((0..=batch as i32).collect()));
        RocmPlan::new(shape, device).unwrap().refresh(&up(vec![700; batch]), query_start.as_ref()).unwrap();
    }
}

fn append_on(device: &RocmDevice) {
    let dims = CacheDims { pages: 8, page_size: 16, kv_heads: 2, head_dim: 64 };
    let config = CacheConfig { layers: 1, dims, dtype: KvDtype::Bf16, layout: None, quantization: Quantization::None };
    let cache = PagedKvCache::new(config, device).unwrap();
    let cpu = &candle::Device::Cpu;
    let mut pool = PagePool::new(dims.pages, dims.page_size).unwrap();
    let sequence = pool.allocate();
    let append = pool.append(sequence, &[1, 2, 3]).unwrap();
    let batch = pool.batch(&[(sequence, &append)], cpu).unwrap();
    let [q, k, v] = [8, 2, 2].map(|heads| candle::Tensor::ones((3, heads, 64), DType::BF16, cpu).unwrap());
    AppendAndAttend {
        options: DecodeOptions { layout: CacheLayout::Shuffled, ..DecodeOptions::default() },
        ..AppendAndAttend::new(&cache, 0, &batch).unwrap()
    }
    .apply(&q, &k, &v)
    .unwrap();
}

#[test]
fn a_missing_compiler_is_said_once() {
    let mut kernels = Kernels::default();
    kernels.add(&Shape::default(), &[Arch::gfx950()]).unwrap();
    let mut jobs: Vec<_> = kernels.specializations.into_iter().map(Job::new).collect();
    assert!(jobs.len() > 1);
    jobs.iter_mut().for_each(|job| job.outcome = Outcome::NoCompiler("there is no clang".into()));
    let text = table::draw(&jobs);
    assert_eq!(text.matches("there is no clang").count(), 1, "{text}");
    assert!(text.contains(&format!("{0} of {0} kernels", jobs.len())), "{text}");
}
