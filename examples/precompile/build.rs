//! Compiles a list of kernels, several at a time.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail};
use candle_paged_attn::jit::{Compiler, JitEvent, JitSettings, Specialization};
use candle_paged_attn::registry::ArchName;
use cdna_sim::elf::{Resources, resources};
use indicatif::{ProgressBar, ProgressStyle};
use testkit::errors::chain;

use crate::cubin::{Usage, has_illegal_copy};

/// One kernel and what became of it.
pub struct Job {
    pub spec: Specialization,
    pub outcome: Outcome,
}

pub enum Outcome {
    Open,
    /// It was in the cache.
    Hit(Resources),
    Compiled {
        resources: Resources,
        seconds: f64,
    },
    Failed(String),
    /// It is not in the cache, and there is no compiler: what was looked for.
    NoCompiler(String),
}

impl Outcome {
    pub fn is_failure(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::NoCompiler(_))
    }
}

impl Job {
    pub fn new(spec: Specialization) -> Self {
        Self { spec, outcome: Outcome::Open }
    }
}

/// All jobs, done.
pub struct Done {
    pub jobs: Vec<Job>,
    /// Where the code objects are.
    pub folder: String,
    /// What was compiled, but could not be written.
    pub not_kept: usize,
    /// What there is no kernel for.
    pub notes: Vec<String>,
}

impl Done {
    /// Whether the cache now has every kernel.
    pub fn complete(&self) -> bool {
        self.not_kept == 0 && !self.jobs.iter().any(|job| job.outcome.is_failure())
    }
}

thread_local! {
    /// Seconds that this thread's last code object took to compile; `None` where the cache had it.
    static SECONDS: Cell<Option<f64>> = const { Cell::new(None) };
}

/// Compiles on `threads` threads, into `cache` or the default folder, with a progress bar.
pub fn build(jobs: Vec<Job>, threads: usize, cache: Option<PathBuf>) -> Result<Done> {
    let bar = ProgressBar::new(jobs.len() as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}")?);
    let not_kept = Arc::new(AtomicUsize::new(0));
    let (shown, failures) = (bar.clone(), not_kept.clone());
    let progress = move |event: &JitEvent| match event {
        JitEvent::CacheHit { .. } => SECONDS.set(None),
        JitEvent::Compiling { kernel, arch } => shown.set_message(format!("{kernel} for {arch}")),
        JitEvent::Compiled { seconds, .. } => SECONDS.set(Some(*seconds)),
        JitEvent::CacheCorrupt { path, reason } => warn(&shown, &format!("{}: {reason}; compiled anew", path.display())),
        JitEvent::CacheWriteFailed { path, error } => {
            failures.fetch_add(1, Ordering::Relaxed);
            warn(&shown, &format!("{}: not written: {error}", path.display()));
        }
        _ => {}
    };
    let compiler = Compiler::new(JitSettings { cache_dir: cache, progress: Some(Arc::new(progress)), ..JitSettings::default() });
    let folder = compiler.cache_dir().context("no cache folder: give --cache, or set CANDLE_PAGED_ATTN_CACHE or HOME")?;
    let folder = folder.display().to_string();
    let jobs = run(jobs, threads, |spec| {
        let outcome = match compile(&compiler, spec) {
            Ok((resources, Some(seconds))) => Outcome::Compiled { resources, seconds },
            Ok((resources, None)) => Outcome::Hit(resources),
            Err(error) => match compiler.compiler_of(spec.arch) {
                Ok(_) => Outcome::Failed(chain(&error)),
                Err(missing) => Outcome::NoCompiler(chain(&missing.into())),
            },
        };
        bar.inc(1);
        outcome
    });
    bar.finish_and_clear();
    Ok(Done { jobs, folder, not_kept: not_kept.load(Ordering::Relaxed), notes: vec![] })
}

fn compile(compiler: &Compiler, spec: &Specialization) -> Result<(Resources, Option<f64>)> {
    let code = compiler.code_object(spec)?;
    let seconds = SECONDS.get();
    if spec.arch.is_cuda() {
        return Ok((cubin_resources(spec, &code)?, seconds));
    }
    let kernel = resources(&code)?.into_iter().find(|resources| resources.kernel == spec.kernel);
    Ok((kernel.with_context(|| format!("no kernel {} in its code object", spec.kernel))?, seconds))
}

/// A thread's registers and local memory, and the shared memory that a launch asks for.
fn cubin_resources(spec: &Specialization, code: &[u8]) -> Result<Resources> {
    if spec.arch == ArchName::Sm90 && has_illegal_copy(code) {
        bail!("this NVRTC made an instruction of it that the GPU refuses")
    }
    let Usage { registers, local_bytes } = Usage::of(code);
    let shared = spec.defines.iter().find(|(name, _)| name == "PA_SHARED_BYTES").and_then(|(_, bytes)| bytes.parse().ok());
    Ok(Resources {
        kernel: spec.kernel.clone(),
        vgprs: registers.into(),
        scratch_bytes: local_bytes.into(),
        lds_bytes: shared.unwrap_or(0),
        agprs: 0,
        sgprs: 0,
        vgpr_spills: 0,
        sgpr_spills: 0,
    })
}

/// Fills in each job's outcome; threads take the next open one.
fn run(jobs: Vec<Job>, threads: usize, work: impl Fn(&Specialization) -> Outcome + Sync) -> Vec<Job> {
    let next = AtomicUsize::new(0);
    let jobs: Vec<_> = jobs.into_iter().map(Mutex::new).collect();
    std::thread::scope(|scope| {
        for _ in 0..threads.min(jobs.len()) {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Ok(mut job) = job.lock() {
                        job.outcome = work(&job.spec);
                    }
                }
            });
        }
    });
    jobs.into_iter().filter_map(|job| job.into_inner().ok()).collect()
}

/// A line above the bar, also where there is no terminal to draw one.
fn warn(bar: &ProgressBar, line: &str) {
    bar.suspend(|| eprintln!("{line}"));
}
