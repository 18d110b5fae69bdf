//! Runs one recorded call again: `replay CASE.safetensors [--backend cpu|rocm|cuda] [--out OUT.safetensors] [--expect OUT.safetensors]`.
//!
//! A case file holds everything that a call depends on, so it is what a bug report needs: `CANDLE_PAGED_ATTN_RECORD=DIR` makes the
//! library write one for each call (see `candle_paged_attn::Case`). `--help` describes the line of JSON that is printed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle::{DType, Device, Tensor};
use candle_paged_attn::cache::KvDtype;
#[cfg(feature = "rocm")]
use candle_paged_attn::rocm::{self, RocmDevice};
use candle_paged_attn::{CallSummary, Case, explain_call, paged_decode_with_lse};
use clap::{Parser, ValueEnum};
use serde_json::{Map, Value, json};

/// Runs one recorded paged-attention call again and prints one line of JSON.
///
/// To record: run any program that uses candle-paged-attn with CANDLE_PAGED_ATTN_RECORD=DIR in its environment. Every call, so every
/// layer of every step, leaves a file call-PROCESS-NUMBER.safetensors in DIR.
///
/// The JSON: variant (the kernel), reason (why it was chosen), backend, tasks (of the plan), shape (of the call: batch, query_len (null
/// where each sequence has its own), q_heads, kv_heads, head_dim, page_size, layout, q_dtype, kv_dtype, context (the shortest and the
/// longest, tokens; null without sequences)), max_error (against the file's expected tensor, where it has one), expect_error (against
/// --expect, where given). Errors are the largest absolute difference; null is NaN or infinity against something else.
///
/// The caches go to the backend as they were recorded. AMD's kernels take F16, BF16 and FP8 in layout shuffled or vllm (MXFP4 on gfx950:
/// hnd or nhd): what a cache on such a GPU records, or one on the CPU whose CacheConfig names that layout; by itself the CPU takes nhd.
#[derive(Parser)]
#[command(name = "replay", verbatim_doc_comment)]
struct Args {
    /// The recorded call
    case: PathBuf,
    /// Where it runs: rocm and cuda take a build with that feature
    #[arg(long, value_enum, default_value = "cpu")]
    backend: Backend,
    /// Where the output and the LSE are written: out and lse, F32 safetensors
    #[arg(long, value_name = "OUT.safetensors")]
    out: Option<PathBuf>,
    /// What --out wrote in another run, to compare this run's output with
    #[arg(long, value_name = "OUT.safetensors")]
    expect: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Backend {
    Cpu,
    Rocm,
    Cuda,
}

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Rocm => "rocm",
            Self::Cuda => "cuda",
        }
    }

    fn open(self) -> Result<Runner> {
        match self {
            Self::Cpu => Ok(Runner::Candle(Device::Cpu)),
            #[cfg(feature = "rocm")]
            Self::Rocm => Ok(Runner::Rocm(RocmDevice::new(0).context("--backend rocm")?)),
            #[cfg(not(feature = "rocm"))]
            Self::Rocm => anyhow::bail!("--backend rocm: this build has no rocm kernels: build with --features rocm"),
            #[cfg(feature = "cuda")]
            Self::Cuda => Ok(Runner::Candle(Device::new_cuda(0).context("--backend cuda")?)),
            #[cfg(not(feature = "cuda"))]
            Self::Cuda => anyhow::bail!("--backend cuda: this build has no cuda kernels: build with --features cuda"),
        }
    }
}

/// What runs a case.
enum Runner {
    /// Candle's device, to which the case's tensors are moved.
    Candle(Device),
    /// An AMD GPU: the case's tensors stay on the CPU and are copied for the call.
    #[cfg(feature = "rocm")]
    Rocm(RocmDevice),
}

impl Runner {
    /// What was decided of the call, its output and LSE.
    fn run(&self, case: &Case) -> Result<(CallSummary, Tensor, Tensor)> {
        match self {
            Self::Candle(device) => {
                let Case { q, key_cache, value_cache, block_tables, context_lens, options, .. } = &case.to_device(device)?;
                let summary = explain_call(q, key_cache, value_cache, block_tables, context_lens, options)?;
                let (out, lse) = paged_decode_with_lse(q, key_cache, value_cache, block_tables, context_lens, options)?;
                Ok((summary, out, lse))
            }
            #[cfg(feature = "rocm")]
            Self::Rocm(device) => {
                let Case { q, key_cache, value_cache, block_tables, context_lens, options, .. } = case;
                let summary = rocm::explain_call(device, q, key_cache, value_cache, block_tables, context_lens, options)?;
                let (out, lse) = rocm::paged_decode(device, q, key_cache, value_cache, block_tables, context_lens, options)?;
                Ok((summary, out, lse))
            }
        }
    }
}

fn main() -> ExitCode {
    match replay(&Args::parse()) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("replay: {}", testkit::errors::chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// Runs the case; the line for stdout. Errors name the file that they are about.
fn replay(args: &Args) -> Result<Value> {
    let runner = args.backend.open()?;
    let case = Case::read(&args.case)?;
    let expect = args.expect.as_deref().map(read_out).transpose()?;
    let (line, out, lse) = run(&case, args.backend, &runner, expect).with_context(|| args.case.display().to_string())?;
    if let Some(path) = &args.out {
        write(path, &out, &lse).with_context(|| path.display().to_string())?;
    }
    Ok(line)
}

fn run(case: &Case, backend: Backend, runner: &Runner, expect: Option<Tensor>) -> Result<(Value, Tensor, Tensor)> {
    let (summary, out, lse) = runner.run(case)?;
    let mut line = Map::new();
    line.insert("variant".into(), json!(summary.selection.kernel()));
    line.insert("reason".into(), json!(summary.selection.reason.to_string()));
    line.insert("backend".into(), json!(backend.name()));
    line.insert("tasks".into(), json!(summary.tasks));
    line.insert("shape".into(), shape(case)?);
    let expected = Case { expected: expect, ..case.clone() };
    for (name, error) in [("max_error", case.max_error(&out)?), ("expect_error", expected.max_error(&out).context("--expect")?)] {
        if let Some(error) = error {
            line.insert(name.into(), json!(error.is_finite().then_some(error)));
        }
    }
    Ok((Value::Object(line), out, lse))
}

/// The sizes of a call that ran.
fn shape(case: &Case) -> Result<Value> {
    let kv = KvDtype::of(case.key_cache.dtype())?;
    let layout = case.options.layout;
    let dims = layout.dims_of_key(case.key_cache.dims(), kv)?;
    let lens = case.context_lens.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let batch = case.context_lens.dim(0)?;
    let (rows, q_heads) = match *case.q.dims() {
        [batch, query_len, q_heads, _] => (batch * query_len, q_heads),
        _ => (case.q.dim(0)?, case.q.dim(1)?),
    };
    let query_len = if case.options.query_start.is_some() { None } else { rows.checked_div(batch) };
    Ok(json!({
        "batch": batch,
        "query_len": query_len,
        "q_heads": q_heads,
        "kv_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "page_size": dims.page_size,
        "layout": layout.name(),
        "q_dtype": case.q.dtype().as_str(),
        "kv_dtype": kv.name(),
        "context": lens.iter().min().zip(lens.iter().max()),
    }))
}

/// The output that another run wrote.
fn read_out(path: &Path) -> Result<Tensor> {
    let name = || path.display().to_string();
    let bytes = std::fs::read(path).with_context(name)?;
    let mut tensors = candle::safetensors::load_buffer(&bytes, &Device::Cpu).context("not a safetensors file").with_context(name)?;
    tensors.remove("out").with_context(|| format!("{}: no tensor \"out\": --expect takes what --out wrote", path.display()))
}

fn write(path: &Path, out: &Tensor, lse: &Tensor) -> Result<()> {
    let f32 = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32);
    let tensors = HashMap::from([("out", f32(out)?), ("lse", f32(lse)?)]);
    Ok(std::fs::write(path, safetensors::serialize(&tensors, None)?)?)
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "rocm")]
    use candle_paged_attn::cache::CacheLayout;
    use testkit::cases::CaseSpec;

    use super::*;

    struct Files(PathBuf);

    impl Files {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("candle-paged-attn-replay-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        fn args(&self, backend: Backend) -> Args {
            Args { case: self.0.join("case.safetensors"), backend, out: Some(self.0.join("out.safetensors")), expect: None }
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn case(dtype: DType) -> Case {
        let call = CaseSpec { q_dtype: dtype, lens: vec![40, 3], ..CaseSpec::default() }.build().unwrap();
        Case::capture(&call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options).unwrap()
    }

    #[test]
    fn the_output_file_holds_the_call_s_results() {
        let files = Files::new("out");
        let args = files.args(Backend::Cpu);
        let mut case = case(DType::BF16);
        let (out, lse) = case.run().unwrap();
        case.expected = Some((out.to_dtype(DType::F32).unwrap() + 0.5).unwrap());
        case.write(&args.case).unwrap();
        let line = replay(&args).unwrap();
        assert_eq!(line["backend"], "cpu");
        assert!(line["tasks"].as_u64().unwrap() >= 2);
        assert!(!line["variant"].as_str().unwrap().is_empty() && !line["reason"].as_str().unwrap().is_empty());
        assert!((line["max_error"].as_f64().unwrap() - 0.5).abs() < 1e-6);
        assert!(!line.to_string().contains('\n'));
        let written = candle::safetensors::load(args.out.unwrap(), &Device::Cpu).unwrap();
        let values = |t: &Tensor| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(written["out"].dtype(), DType::F32);
        assert_eq!(values(&written["out"]), values(&out));
        assert_eq!(values(&written["lse"]), values(&lse));
    }

    #[test]
    fn without_an_expectation_there_is_no_error_to_print() {
        let files = Files::new("plain");
        let args = files.args(Backend::Cpu);
        case(DType::F32).write(&args.case).unwrap();
        assert!(replay(&args).unwrap().get("max_error").is_none());
    }

    #[test]
    fn failures_name_what_is_wrong() {
        let files = Files::new("failures");
        let missing = replay(&files.args(Backend::Cpu)).unwrap_err().to_string();
        assert!(missing.contains("case.safetensors"), "{missing}");
        let missing = [(Backend::Rocm, cfg!(feature = "rocm")), (Backend::Cuda, cfg!(feature = "cuda"))];
        for (backend, _) in missing.into_iter().filter(|(_, is_built)| !is_built) {
            let message = replay(&files.args(backend)).unwrap_err().to_string();
            assert!(message.contains("--backend") && message.contains(backend.name()), "{message}");
        }
    }

    #[test]
    fn another_run_s_output_is_compared_with() {
        let files = Files::new("expect");
        let args = files.args(Backend::Cpu);
        case(DType::F32).write(&args.case).unwrap();
        replay(&args).unwrap();
        let expecting = Args { expect: args.out.clone(), out: None, case: args.case.clone(), ..args };
        assert_eq!(replay(&expecting).unwrap()["expect_error"], 0.0);
        let (case, path) = (Case::read(&expecting.case).unwrap(), expecting.expect.as_ref().unwrap());
        let (out, lse) = case.run().unwrap();
        write(path, &(&out + 0.25).unwrap(), &lse).unwrap();
        assert!((replay(&expecting).unwrap()["expect_error"].as_f64().unwrap() - 0.25).abs() < 1e-6);
        write(path, &out.narrow(0, 0, 1).unwrap(), &lse).unwrap();
        let message = testkit::errors::chain(&replay(&expecting).unwrap_err());
        assert!(message.contains("--expect") && message.contains("case.safetensors") && message.contains("shape"), "{message}");
        std::fs::write(path, "text").unwrap();
        let message = testkit::errors::chain(&replay(&expecting).unwrap_err());
        assert!(message.contains("out.safetensors: not a safetensors file"), "{message}");
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn an_nvidia_gpu_gives_what_the_cpu_gives() {
        if let Err(error) = Device::new_cuda(0) {
            eprintln!("skipped: {}", error.to_string().lines().next().unwrap_or_default());
            return;
        }
        let files = Files::new("cuda");
        let mut args = files.args(Backend::Cpu);
        case(DType::BF16).write(&args.case).unwrap();
        replay(&args).unwrap();
        (args.backend, args.expect) = (Backend::Cuda, args.out.take());
        args.out = Some(files.0.join("cuda.safetensors"));
        let line = replay(&args).unwrap();
        assert_eq!(line["backend"], "cuda");
        assert!(line["expect_error"].as_f64().unwrap() < 2e-2, "{line}");
        args.expect = args.out.take();
        assert_eq!(replay(&args).unwrap()["expect_error"], 0.0, "the same bits again");
    }

    #[cfg(feature = "rocm")]
    #[test]
    fn an_amd_gpu_gives_what_the_cpu_gives() {
        let files = Files::new("rocm");
        let mut args = files.args(Backend::Cpu);
        let spec = CaseSpec { q_dtype: DType::BF16, kv_dtype: KvDtype::Bf16, lens: vec![40, 3], ..CaseSpec::default() };
        let call = CaseSpec { layout: CacheLayout::Shuffled, ..spec }.build().unwrap();
        let case = Case::capture(&call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options);
        case.unwrap().write(&args.case).unwrap();
        replay(&args).unwrap();
        (args.backend, args.expect, args.out) = (Backend::Rocm, args.out.take(), None);
        let line = replay(&args).unwrap();
        assert_eq!(line["backend"], "rocm");
        assert!(line["variant"].as_str().unwrap().starts_with("pa_bf16_d64_p16"), "{line}");
        assert!(line["expect_error"].as_f64().unwrap() < 2e-2, "{line}");
    }

    #[test]
    fn the_shape_is_the_call_s() {
        let files = Files::new("shape");
        let args = files.args(Backend::Cpu);
        case(DType::BF16).write(&args.case).unwrap();
        let spec = CaseSpec::default();
        let shape = replay(&args).unwrap()["shape"].take();
        assert_eq!((shape["batch"].clone(), shape["query_len"].clone()), (json!(2), json!(1)));
        assert_eq!((shape["kv_heads"].clone(), shape["head_dim"].clone()), (json!(spec.kv_heads), json!(spec.head_dim)));
        assert_eq!((shape["page_size"].clone(), shape["context"].clone()), (json!(spec.page_size), json!([3, 40])));
        assert_eq!((shape["layout"].clone(), shape["q_dtype"].clone()), (json!("nhd"), json!("bf16")));
    }

    #[test]
    fn every_failure_names_its_file_once() {
        let files = Files::new("names");
        let mut args = files.args(Backend::Cpu);
        let message = |args: &Args| testkit::errors::chain(&replay(args).unwrap_err());
        std::fs::write(&args.case, "no safetensors at all").unwrap();
        assert!(message(&args).contains("case.safetensors: not a safetensors file"));
        // A call that contradicts itself is refused when it runs.
        let mut broken = case(DType::F32);
        broken.block_tables = Tensor::full(9000u32, broken.block_tables.dims(), &Device::Cpu).unwrap();
        broken.write(&args.case).unwrap();
        let text = message(&args);
        assert!(text.contains("case.safetensors") && text.contains("9000"), "{text}");
        case(DType::F32).write(&args.case).unwrap();
        args.out = Some(files.0.join("no/such/out.safetensors"));
        let text = message(&args);
        assert!(text.ends_with("No such file or directory (os error 2)") && text.matches("os error").count() == 1, "{text}");
        assert!(text.starts_with(&*files.0.join("no/such/out.safetensors").to_string_lossy()), "{text}");
    }
}
