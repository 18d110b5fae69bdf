//! MiniMax-M3's text model decoded with `candle-paged-attn`: continuous batching, chunked prefill, block-sparse layers and multi-token
//! verify over one paged cache. `cargo run --release --example minimax_decode -- --help` lists what it can do.

pub mod args;
pub mod attention;
pub mod attention_only;
pub mod batch;
pub mod check;
pub mod checkpoint;
pub mod config;
pub mod decode;
pub mod indexer;
pub mod kv;
pub mod limits;
pub mod meter;
pub mod mlp;
pub mod model;
pub mod moe;
pub mod mtp;
pub mod norm;
pub mod progress;
pub mod prompts;
pub mod report;
pub mod rope;
pub mod sampling;
pub mod scheduler;
pub mod synthetic;
pub mod tensors;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::json;

use args::{Args, Backend, Devices};
use checkpoint::Checkpoint;
use config::Config;
use model::Model;
use progress::Progress;
use scheduler::ServeOptions;

/// For a check that fails with a config that names no dtype: see [`Args::rope`].
const ROPE_HINT: &str = "the config names no bfloat16 torch_dtype, so RoPE's frequencies were kept in F32; if the recorded model was cast to bfloat16, try --rope bf16";

fn main() -> ExitCode {
    testkit::errors::exit(run(&Args::parse()))
}

/// Runs what `args` ask for; `false` where a check failed.
pub fn run(args: &Args) -> Result<bool> {
    args.check_sizes()?;
    let devices = args.backend.devices()?;
    if args.attention_only {
        return run_attention(args, &devices);
    }
    let Some(dir) = &args.model else {
        let config = if args.real_heads { synthetic::real_heads() } else { synthetic::config() };
        limits::check(args, &config)?;
        let dir = tempfile::tempdir()?;
        synthetic::write(dir.path(), &config, args.seed)?;
        return decode::run(args, &load(dir.path(), config, args, &devices)?);
    };
    let config = Config::from_dir(dir)?;
    match &args.check {
        Some(file) => run_check(args, &load(dir, config, args, &devices)?, file),
        None => {
            limits::check(args, &config)?;
            decode::run(args, &load(dir, config, args, &devices)?)
        }
    }
}

/// Opens, checks and loads the checkpoint of `config` in `dir`.
fn load(dir: &Path, config: Config, args: &Args, devices: &Devices) -> Result<Model> {
    let checkpoint = Checkpoint::open(dir, &config)?;
    if checkpoint.unused > 0 {
        eprintln!("left unread: {} tensors of the multimodal parts", checkpoint.unused);
    }
    let rope = args.rope_dtype(config.bf16);
    let progress = Progress::new("loading layers", config.layers.len());
    let model = Model::load(&checkpoint, config, args.dtype(), rope, devices.clone(), || progress.add(1))?;
    progress.finish();
    Ok(model)
}

/// How to serve requests as `args` say, `mtp_rows` a verify step.
fn serve_options(args: &Args, model: &Model, mtp_rows: usize) -> ServeOptions {
    ServeOptions {
        kv: args.kv(),
        max_batch: args.batch,
        max_rows: args.chunk,
        mtp_rows,
        page_size: args.page_size.unwrap_or(model.config.indexer.block_size),
        pages: None,
        sampling: args.sampling(),
        keep_logits: false,
        compare_attention: args.compare_attention,
    }
}

fn run_check(args: &Args, model: &Model, file: &Path) -> Result<bool> {
    let recorded = check::read(file, model.config.vocab_size)?;
    let tokens = recorded.iter().map(|recorded| recorded.prompt.len() + recorded.greedy.len()).sum();
    let progress = Progress::new("checking", tokens);
    let comparisons = check::check(model, &recorded, serve_options(args, model, args.mtp.unwrap_or(1)), |n| progress.add(n))?;
    progress.finish();
    let passes = comparisons.iter().all(check::Comparison::passes);
    let rope = format!("{:?}", args.rope_dtype(model.config.bf16));
    let hint = if passes { None } else { failed_check_hint(args, &model.config) };
    let device = model.devices.name()?;
    if args.json {
        let prompts: Vec<_> = comparisons.iter().map(report::comparison_json).collect();
        println!(
            "{}",
            json!({ "device": device, "kv": args.kv().name(), "rope": rope, "passes": passes, "hint": hint, "prompts": prompts })
        );
    } else {
        println!("on {device}; RoPE frequencies in {rope}; KV in {}", args.kv().name());
        comparisons.iter().enumerate().for_each(|(index, comparison)| println!("{}", report::comparison_text(index, comparison)));
        hint.iter().for_each(|hint| println!("hint: {hint}"));
    }
    Ok(passes)
}

/// What may be behind a failed check.
pub fn failed_check_hint(args: &Args, config: &Config) -> Option<&'static str> {
    (args.rope.is_none() && !config.bf16).then_some(ROPE_HINT)
}

fn run_attention(args: &Args, devices: &Devices) -> Result<bool> {
    ensure!(args.backend != Backend::Rocm, "--attention-only: its caches are candle's tensors, which there are none of on an AMD GPU");
    let shape = args.shape.as_deref().unwrap_or_default();
    let workload = testkit::workloads::find(shape).context(if args.shape.is_some() { "--shape" } else { "--shape is missing" })?;
    let kind = args.kv.unwrap_or(attention_only::kv_kind(&workload));
    let times = attention_only::run(&workload, kind, args.seed, &devices.model)?;
    match args.json {
        true => println!("{}", report::attention_json(shape, &kind.name(), &times)),
        false => println!("{}", report::attention_text(shape, &kind.name(), &times)),
    }
    Ok(true)
}
