//! Recorded calls: what is kept of a call, the file, and its errors.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::plan::{DecodePlan, HostPlan};
use candle_paged_attn::{Case, DecodeOptions, KvScale, PlanChoice, paged_decode_with_lse};
use testkit::assert_same;
use testkit::bits::bits;
use testkit::cases::{CaseSpec, Scales};

fn capture(call: &testkit::cases::Case) -> Result<Case> {
    Case::capture(&call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options)
}

/// The call's own output and LSE against those of its case, written and read back.
fn assert_replays(spec: CaseSpec) {
    let call = spec.build().unwrap();
    let case = Case::from_bytes(&capture(&call).unwrap().to_bytes().unwrap()).unwrap();
    let (out, lse) = call.run().unwrap();
    let (replayed, replayed_lse) = case.run().unwrap();
    assert_eq!(out.dims(), replayed.dims());
    assert_same!(bits(&out), bits(&replayed), "{spec:?}");
    assert_same!(bits(&lse), bits(&replayed_lse), "{spec:?}");
}

#[test]
fn a_replayed_call_gives_the_same_bits() {
    let base = CaseSpec { lens: vec![300, 0, 1, 77], head_dim: 64, page_size: 16, q_dtype: DType::BF16, ..CaseSpec::default() };
    let caches = [
        (KvDtype::F32, Scales::None),
        (KvDtype::F16, Scales::None),
        (KvDtype::Bf16, Scales::None),
        (KvDtype::Fp8, Scales::Scalar),
        (KvDtype::Fp8, Scales::ScalarTensor),
        (KvDtype::Fp8, Scales::PerToken),
        (KvDtype::Mxfp4, Scales::None),
    ];
    for layout in CacheLayout::ALL {
        for (kv_dtype, scales) in caches {
            if kv_dtype == KvDtype::Mxfp4 && matches!(layout, CacheLayout::Vllm | CacheLayout::Shuffled) {
                continue;
            }
            assert_replays(CaseSpec { layout, kv_dtype, scales, ..base.clone() });
        }
    }
}

#[test]
fn every_option_survives() {
    let base = CaseSpec { lens: vec![500, 3, 90], kv_dtype: KvDtype::Bf16, ..CaseSpec::default() };
    let specs = [
        CaseSpec { softmax_scale: Some(-0.123_456_79), softcap: Some(7.3), sinks: true, ..base.clone() },
        CaseSpec { window: Some(33), signed_tables: true, ..base.clone() },
        CaseSpec { window: Some(33), signed_tables: false, query_lens: vec![4], ..base.clone() },
        CaseSpec { query_lens: vec![7, 0, 2], ..base.clone() },
        CaseSpec { per_head: true, query_lens: vec![2], ..base.clone() },
        CaseSpec { plan_free: true, ..base.clone() },
        CaseSpec { max_partitions: Some(1), workgroup_budget: Some(9), ..base.clone() },
        CaseSpec { page_strided: true, q_strided: true, ..base.clone() },
        CaseSpec { lens: vec![], ..base },
    ];
    specs.into_iter().for_each(assert_replays);
}

#[test]
fn options_are_read_as_written() {
    let spec = CaseSpec {
        window: Some(40),
        softcap: Some(0.1),
        softmax_scale: Some(1e-7),
        max_partitions: Some(3),
        workgroup_budget: Some(17),
        plan_free: true,
        layout: CacheLayout::Hnd,
        ..CaseSpec::default()
    };
    let written = capture(&spec.build().unwrap()).unwrap().options;
    let read = Case::from_bytes(&capture(&spec.build().unwrap()).unwrap().to_bytes().unwrap()).unwrap().options;
    assert_eq!((read.window, read.softcap, read.softmax_scale), (Some(40), Some(0.1), Some(1e-7)));
    assert_eq!((read.max_partitions, read.workgroup_budget, read.layout), (Some(3), Some(17), CacheLayout::Hnd));
    assert!(matches!((read.plan, written.plan), (PlanChoice::Free, PlanChoice::Free)));
}

#[test]
fn a_given_plan_is_replayed() -> Result<()> {
    let mut call = CaseSpec { lens: vec![600, 0, 1], kv_heads: 1, ..CaseSpec::default() }.build()?;
    // The first sequence in three tasks, which no default plan of these lengths makes.
    let work = vec![[0, 0, 1, 0], [0, 1, 2, 1], [0, 2, 3, 2], [2, 0, 1, 0]];
    let plan = HostPlan { work, reduce: vec![[0, 3], [3, 0], [3, 1]] };
    call.options.plan = PlanChoice::Given(DecodePlan::from_host(plan.clone(), &Device::Cpu)?);
    let case = Case::from_bytes(&capture(&call)?.to_bytes()?)?;
    let PlanChoice::Given(read) = &case.options.plan else { panic!("the plan was given") };
    assert_eq!(*read.host()?, plan);
    assert_same!(bits(&case.run()?.0), bits(&call.run()?.0));
    assert_same!(bits(&case.to_device(&Device::Cpu)?.run()?.0), bits(&call.run()?.0));
    Ok(())
}

/// Four sequences over the pages of one large cache, in no order, the second with a window's worth of evicted pages.
fn scattered(window: Option<usize>, unread: i32) -> Result<(Case, Tensor, Tensor)> {
    let device = &Device::Cpu;
    let cache = || Tensor::randn(0f32, 1.0, (1000, 4, 2, 8), device)?.to_dtype(DType::F8E4M3);
    let (q, key, value) = (Tensor::randn(0f32, 1.0, (4, 4, 8), device)?, cache()?, cache()?);
    let tables = Tensor::new(&[[977i32, 13, 500, unread], [unread, unread, 13, 999], [unread; 4], [2, unread, unread, unread]], device)?;
    let lens = Tensor::new(&[12i32, 16, 0, 1], device)?;
    let lens = if window.is_some() { lens } else { Tensor::new(&[12i32, 0, -3, 1], device)? };
    let options = DecodeOptions {
        window,
        k_scale: KvScale::Tensor(Tensor::rand(0.5f32, 1.5, (1000, 2, 4), device)?),
        v_scale: KvScale::Scalar(0.5),
        ..DecodeOptions::default()
    };
    let (out, lse) = paged_decode_with_lse(&q, &key, &value, &tables, &lens, &options)?;
    Ok((Case::capture(&q, &key, &value, &tables, &lens, &options)?, out, lse))
}

#[test]
fn only_the_pages_read_are_kept() -> Result<()> {
    for unread in [-1, 0, 5000] {
        let (case, out, lse) = scattered(Some(8), unread)?;
        assert_eq!(case.key_cache.dims(), [4, 4, 2, 8], "pages 2, 13, 500, 999: 977 is before the window");
        assert_eq!(case.value_cache.dims(), [4, 4, 2, 8]);
        let KvScale::Tensor(scale) = &case.options.k_scale else { panic!("k_scale is per token") };
        assert_eq!(scale.dims(), [4, 2, 4]);
        assert_eq!(case.block_tables.to_vec2::<i32>()?, [[-1, 1, 2, -1], [-1, -1, 1, 3], [-1; 4], [0, -1, -1, -1]]);
        let (replayed, replayed_lse) = case.run()?;
        assert_same!(bits(&out), bits(&replayed));
        assert_same!(bits(&lse), bits(&replayed_lse));

        let (case, out, _) = scattered(None, unread)?;
        assert_eq!(case.block_tables.to_vec2::<i32>()?, [[3, 1, 2, -1], [-1; 4], [-1; 4], [0, -1, -1, -1]]);
        assert_same!(bits(&out), bits(&case.run()?.0));
    }
    Ok(())
}

#[test]
fn a_call_that_contradicts_itself_is_kept_whole() -> Result<()> {
    let call = CaseSpec { lens: vec![20], signed_tables: true, ..CaseSpec::default() }.build()?;
    let tables = Tensor::full(9000i32, call.block_tables.dims(), &Device::Cpu)?;
    let case = Case::capture(&call.q, &call.key_cache, &call.value_cache, &tables, &call.context_lens, &call.options)?;
    assert_eq!(case.key_cache.dims(), call.key_cache.dims());
    assert_eq!(case.block_tables.to_vec2::<i32>()?, tables.to_vec2::<i32>()?);
    let message = case.run().unwrap_err().to_string();
    assert!(message.contains("9000"), "{message}");
    Ok(())
}

/// A fresh folder, gone when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("candle-paged-attn-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<_> = std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// This test binary again, for one ignored test, with recording on.
fn record(directory: &Path, test: &str) -> std::process::Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env("CANDLE_PAGED_ATTN_RECORD", directory)
        .output()
        .unwrap()
}

fn recorded_spec() -> CaseSpec {
    CaseSpec { lens: vec![100, 7], kv_dtype: KvDtype::Bf16, page_strided: true, sinks: true, ..CaseSpec::default() }
}

#[test]
#[ignore = "run by `calls_are_recorded` in a process of its own"]
fn make_calls() {
    let call = recorded_spec().build().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..5).for_each(|_| drop(call.run().unwrap())));
        }
    });
    let out = call.q.contiguous().unwrap().zeros_like().unwrap();
    let (q, key, value) = (&call.q, &call.key_cache, &call.value_cache);
    candle_paged_attn::paged_decode_into(&out, q, key, value, &call.block_tables, &call.context_lens, &call.options).unwrap();
    candle_paged_attn::paged_decode(q, key, value, &call.block_tables, &call.context_lens, &call.options).unwrap();
}

#[test]
fn calls_are_recorded() {
    let folder = Folder::new("recorded");
    let child = record(&folder.0, "make_calls");
    assert!(child.status.success(), "{child:?}");
    let files = folder.files();
    assert_eq!(files.len(), 4 * 5 + 2);
    let expected = bits(&recorded_spec().build().unwrap().run().unwrap().0);
    for file in files {
        assert_same!(bits(&Case::read(&file).unwrap().run().unwrap().0), expected, "{}", file.display());
    }
}

#[test]
#[ignore = "run by `a_failure_to_record_is_an_error` in a process of its own"]
fn make_a_call() {
    println!("{}", recorded_spec().build().unwrap().run().unwrap_err());
}

#[test]
fn a_failure_to_record_is_an_error() {
    let folder = Folder::new("unwritable");
    std::fs::write(&folder.0, "a file, not a folder").unwrap();
    let child = record(&folder.0, "make_a_call");
    let _ = std::fs::remove_file(&folder.0);
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{child:?}");
    assert!(output.contains("CANDLE_PAGED_ATTN_RECORD=") && output.contains(&*folder.0.to_string_lossy()), "{output}");
}

/// A case file with one thing changed.
struct Edit {
    tensors: HashMap<String, Tensor>,
    metadata: HashMap<String, String>,
}

impl Edit {
    fn of(spec: CaseSpec) -> Self {
        let bytes = capture(&spec.build().unwrap()).unwrap().to_bytes().unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = candle::safetensors::load_buffer(&bytes, &Device::Cpu).unwrap();
        Self { tensors, metadata: header.metadata().clone().unwrap() }
    }

    fn new() -> Self {
        Self::of(CaseSpec { lens: vec![20, 5], ..CaseSpec::default() })
    }

    fn without(mut self, name: &str) -> Self {
        self.tensors.remove(name);
        self
    }

    fn tensor(mut self, name: &str, tensor: Result<Tensor>) -> Self {
        self.tensors.insert(name.to_string(), tensor.unwrap());
        self
    }

    fn cast(self, name: &str, dtype: DType) -> Self {
        let tensor = self.tensors[name].to_dtype(dtype);
        self.tensor(name, tensor)
    }

    fn meta(mut self, key: &str, value: &str) -> Self {
        self.metadata.insert(key.to_string(), value.to_string());
        self
    }

    fn error(self) -> String {
        let bytes = safetensors::serialize(&self.tensors, Some(self.metadata)).unwrap();
        Case::from_bytes(&bytes).expect_err("a bad file was accepted").to_string()
    }

    fn refused_with(self, fragments: &[&str]) {
        let message = self.error();
        for fragment in fragments {
            assert!(message.contains(fragment), "{message:?} does not name {fragment:?}");
        }
    }
}

#[test]
fn bad_files_are_named_errors() {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    for name in ["q", "key_cache", "value_cache", "block_tables", "context_lens"] {
        Edit::new().without(name).refused_with(&[name, "missing"]);
        Edit::new().cast(name, DType::F64).refused_with(&[name, "F64"]);
    }
    Edit::new().tensor("qq", zeros(&[1], DType::F32)).refused_with(&["qq", "not one that a case file holds"]);
    Edit::new().tensor("k_scale", zeros(&[1], DType::BF16)).refused_with(&["k_scale", "BF16"]);
    Edit::new().tensor("key_block_scale", zeros(&[1], DType::U8)).refused_with(&["key_block_scale", "key_cache"]);
    Edit::new().tensor("expected", zeros(&[1, 2, 3], DType::F32)).refused_with(&["expected", "[1, 2, 3]"]);
    Edit::new().tensor("work_info", zeros(&[1, 4], DType::I32)).refused_with(&["work_info", "given"]);
    Edit::new().meta("plan", "given").refused_with(&["work_info", "missing"]);
    Edit::new()
        .meta("plan", "given")
        .tensor("work_info", zeros(&[1, 3], DType::I32))
        .tensor("reduce_info", zeros(&[1, 2], DType::I32))
        .refused_with(&["work_info", "[1, 3]"]);
    Edit::new().meta("plan", "fre").refused_with(&["plan", "fre"]);
    Edit::new().meta("layout", "NHD").refused_with(&["layout", "NHD"]);
    Edit::new().meta("colour", "red").refused_with(&["colour"]);
    Edit::new().meta("window", "-3").refused_with(&["window", "-3"]);
    Edit::new().meta("softcap", "high").refused_with(&["softcap", "high"]);
    Edit::new().meta("query_len", "3").refused_with(&["query_len: 3", "2 sequences", "2 rows"]);
    Edit::new().meta("query_len", &usize::MAX.to_string()).refused_with(&["query_len"]);
    let mxfp4 = || Edit::of(CaseSpec { kv_dtype: KvDtype::Mxfp4, head_dim: 32, lens: vec![3], ..CaseSpec::default() });
    mxfp4().without("value_block_scale").refused_with(&["value_block_scale", "missing"]);
    mxfp4().tensor("v_scale", zeros(&[1], DType::F32)).refused_with(&["v_scale", "MXFP4"]);
}

#[test]
fn bytes_that_are_no_case_file() {
    let refuse = |bytes: &[u8], fragment: &str| {
        let message = Case::from_bytes(bytes).unwrap_err().to_string();
        assert!(message.contains(fragment), "{message:?} does not name {fragment:?}");
    };
    refuse(b"", "0 bytes");
    refuse(&[0xff; 20], "header");
    refuse(&[8, 0, 0, 0, 0, 0, 0, 0, b'{'], "header of 8 bytes");
    let huge = r#"{"q":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}"#;
    refuse(&[&(huge.len() as u64).to_le_bytes(), huge.as_bytes()].concat(), "too large");
    let beyond = r#"{"q":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,16]}}"#;
    refuse(&[&(beyond.len() as u64).to_le_bytes(), beyond.as_bytes()].concat(), "header");
}

#[test]
fn a_missing_file_is_named() {
    let message = Case::read("no/such/case.safetensors").unwrap_err().to_string();
    assert!(message.contains("no/such/case.safetensors"), "{message}");
    let case = capture(&CaseSpec::default().build().unwrap()).unwrap();
    let message = case.write("no/such/case.safetensors").unwrap_err().to_string();
    assert!(message.starts_with("no/such/case.safetensors: "), "{message}");
    assert!(!message.lines().next().unwrap_or_default().contains(".tmp"), "{message}");
}
