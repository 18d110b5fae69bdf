//! Runs one recorded call again: `replay CASE.safetensors [--backend cpu|rocm|cuda] [--out OUT.safetensors]`.
//!
//! A case file holds everything that a call depends on, so it is what a bug report needs: `CANDLE_PAGED_ATTN_RECORD=DIR` makes the
//! library write one for each call (see `candle_paged_attn::Case`). Prints one line of JSON: the kernel variant, why it was chosen, the
//! backend, the tasks of the plan, and the largest error where the file has an `expected` tensor (null: NaN or infinity against something
//! else). OUT gets `out` and `lse`, both F32.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use candle::{DType, Device, Tensor};
use candle_paged_attn::{Case, explain_call};
use clap::{Parser, ValueEnum};
use serde_json::{Map, Value, json};

#[derive(Parser)]
#[command(name = "replay", about = "Run one recorded paged-attention call again")]
struct Args {
    /// The recorded call.
    case: PathBuf,
    /// Where it runs.
    #[arg(long, value_enum, default_value = "cpu")]
    backend: Backend,
    /// Where the output and the LSE are written, as F32 safetensors.
    #[arg(long)]
    out: Option<PathBuf>,
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

    fn device(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Rocm | Self::Cuda => bail!("--backend {}: this build has no {0} kernels", self.name()),
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
            eprintln!("replay: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the case; the line for stdout.
fn replay(args: &Args) -> Result<Value> {
    let device = args.backend.device()?;
    let case = Case::read(&args.case)?.to_device(&device)?;
    let summary = explain_call(&case.q, &case.key_cache, &case.value_cache, &case.block_tables, &case.context_lens, &case.options)?;
    let (out, lse) = case.run()?;
    if let Some(path) = &args.out {
        write(path, &out, &lse).with_context(|| path.display().to_string())?;
    }
    let mut line = Map::new();
    line.insert("variant".into(), json!(summary.selection.kernel));
    line.insert("reason".into(), json!(summary.selection.reason));
    line.insert("backend".into(), json!(args.backend.name()));
    line.insert("tasks".into(), json!(summary.tasks));
    if let Some(error) = case.max_error(&out)? {
        line.insert("max_error".into(), json!(error.is_finite().then_some(error)));
    }
    Ok(Value::Object(line))
}

fn write(path: &PathBuf, out: &Tensor, lse: &Tensor) -> Result<()> {
    let f32 = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32);
    let tensors = HashMap::from([("out", f32(out)?), ("lse", f32(lse)?)]);
    Ok(candle::safetensors::save(&tensors, path)?)
}

#[cfg(test)]
mod tests {
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
            Args { case: self.0.join("case.safetensors"), backend, out: Some(self.0.join("out.safetensors")) }
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
        for backend in [Backend::Rocm, Backend::Cuda] {
            let message = replay(&files.args(backend)).unwrap_err().to_string();
            assert!(message.contains("--backend") && message.contains(backend.name()), "{message}");
        }
    }
}
