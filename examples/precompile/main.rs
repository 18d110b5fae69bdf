//! Compiles kernels for AMD and NVIDIA GPUs ahead of time, into a cache that programs then need no compiler for. Needs a clang (feature `rocm`) or
//! NVRTC (feature `nvrtc`), but neither a GPU nor ROCm nor CUDA:
//!
//! ```text
//! cargo run --release --features rocm --example precompile -- --cache image/cache --arch gfx942,gfx950 \
//!     --q-heads 64 --kv-heads 4 --head-dim 128 --page-size 64 --kv bf16,fp8 --query-lens 1,4
//! cargo run --release --features nvrtc --example precompile -- --cache image/cache --arch sm90 \
//!     --q-heads 64 --kv-heads 4 --head-dim 128 --page-size 64 --kv bf16,fp8 --query-lens 1,4
//! ```
//!
//! In the container: `CANDLE_PAGED_ATTN_CACHE=/path/of/the/copy`, read-only is fine. `--help` has more.

#[cfg(feature = "rocm")]
mod amd;
mod build;
#[allow(dead_code, reason = "the kernels' own tests look for more")]
#[path = "../../tests/cuda_compile/cubin.rs"]
mod cubin;
mod kernels;
#[cfg(feature = "nvrtc")]
mod nvidia;
#[path = "../shared/options.rs"]
mod options;
mod shape;
mod table;
#[cfg(all(test, feature = "rocm"))]
mod tests;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use candle_paged_attn::registry::Arch;
use clap::Parser;
use testkit::{errors, workloads};

use crate::build::{Done, Job, Outcome, build};
use crate::kernels::Kernels;
use crate::shape::Shape;

/// Compiles the kernels of a list of shapes for AMD or NVIDIA GPUs into a cache, so that programs on other machines need no compiler, and prints what
/// each takes of a compute unit.
///
/// Shapes come from options, from a JSON file (a list of objects whose fields are those options with underscores:
/// [{"q_heads": 64, "kv_heads": 4, "kv": ["fp8"], "scales": "per-token", "query_lens": [1, 4]}, ...]; what is left out has the option's
/// default), or from benches/workloads.json by name. Options that take several values take them with commas:
///
///   precompile --cache image/cache --arch gfx942,gfx950 --q-heads 64 --kv-heads 4 --page-size 64 --kv bf16,fp8 --query-lens 1,4
///
/// Where layers differ (some with a window, some without), run it for each kind: the folder takes them all.
///
/// In the container, CANDLE_PAGED_ATTN_CACHE names the copy of the folder, which may be read-only. There need be no clang and no NVRTC; one that is
/// there and is not this one compiles anew. A new version of the crate may want new kernels: fill the cache again with it.
///
/// For AMD (a build with the feature rocm) the clang, 20 or newer, is that of CANDLE_PAGED_ATTN_CLANG, ROCM_PATH, /opt/rocm or PATH; for NVIDIA (nvrtc)
/// the library is that of CANDLE_PAGED_ATTN_NVRTC, or the system's. Neither a GPU nor ROCm nor CUDA is needed to run this. NVIDIA's kernels are those
/// that PagedKvCache::warm_up loads: of calls whose tables are on the GPU.
#[derive(Parser)]
#[command(name = "precompile", verbatim_doc_comment)]
struct Args {
    /// GPUs to compile for, with commas: gfx942 is the MI300 series, gfx950 the MI350 series; sm80 the A100, sm86 others of compute capability 8.x,
    /// sm89 Ada, sm90 H100 and H200 (sm90:114: of so many SMs)
    #[arg(long, value_delimiter = ',', default_values = ARCHS)]
    arch: Vec<String>,
    /// The cache's folder [default: CANDLE_PAGED_ATTN_CACHE, or the user's cache folder]
    #[arg(long)]
    cache: Option<PathBuf>,
    /// Compilers that run at a time [default: one a core]
    #[arg(long)]
    jobs: Option<usize>,
    /// A JSON file of shapes
    #[arg(long, value_name = "FILE", conflicts_with = "Shape")]
    shapes: Option<PathBuf>,
    /// Shapes of benches/workloads.json: FAMILY/NAME, or FAMILY for all of it
    #[arg(long, value_name = "FAMILY[/NAME]", value_delimiter = ',', conflicts_with = "Shape")]
    workloads: Vec<String>,
    #[command(flatten)]
    shape: Shape,
}

fn main() -> ExitCode {
    errors::exit(run(&Args::parse()).map(|done| {
        print!("{}{}", table::draw(&done.jobs), summary(&done));
        done.complete()
    }))
}

/// Compiles what the arguments ask for.
fn run(args: &Args) -> Result<Done> {
    let archs = args.arch.iter().map(|name| arch(name)).collect::<Result<Vec<_>>>()?;
    let mut kernels = Kernels::default();
    for shape in args.shapes()? {
        kernels.add(&shape, &archs)?;
    }
    let jobs = kernels.specializations.into_iter().map(Job::new).collect();
    let threads = args.jobs.or(std::thread::available_parallelism().ok().map(usize::from)).unwrap_or(1).max(1);
    let mut done = build(jobs, threads, args.cache.clone())?;
    done.notes = kernels.notes;
    Ok(done)
}

impl Args {
    fn shapes(&self) -> Result<Vec<Shape>> {
        let mut shapes = vec![];
        if let Some(path) = &self.shapes {
            let text = std::fs::read_to_string(path).with_context(|| format!("--shapes {}", path.display()))?;
            let listed: Vec<Shape> = serde_json::from_str(&text).with_context(|| format!("--shapes {}", path.display()))?;
            shapes.extend(listed);
        }
        for name in &self.workloads {
            if name.contains('/') {
                shapes.push(Shape::from(&workloads::find(name).context("--workloads")?));
                continue;
            }
            let families = workloads::families()?;
            let names = families.each_ref().map(|family| family.name).join(", ");
            let family = families.iter().find(|family| family.name == name);
            let family = family.with_context(|| format!("--workloads {name:?}: not one of {names}, and no FAMILY/NAME"))?;
            shapes.extend(family.workloads.iter().map(Shape::from));
        }
        if self.shapes.is_none() && self.workloads.is_empty() {
            shapes.push(self.shape.clone());
        }
        Ok(shapes)
    }
}

/// What is compiled for where nothing is said.
const ARCHS: &[&str] = if cfg!(feature = "rocm") { &["gfx942", "gfx950"] } else { &["sm90"] };

fn arch(name: &str) -> Result<Arch> {
    let arch = match name.strip_prefix("sm86") {
        // The A100's kernels in what shared memory the others of its kind have, which is Ada's.
        Some(rest) => Arch::from_name(&format!("sm80{rest}")).map(|arch| Arch { lds_bytes: Arch::sm89().lds_bytes, ..arch }),
        None => Arch::from_name(name),
    };
    let arch = arch.map_err(|error| errors::of_option("--arch", error))?;
    let feature = match arch.name {
        name if name.is_amd() => ("rocm", cfg!(feature = "rocm")),
        name if name.is_cuda() => ("nvrtc", cfg!(feature = "nvrtc")),
        _ => bail!("--arch {name}: kernels are compiled ahead for gfx942, gfx950, gfx1250, sm80, sm86, sm89 and sm90"),
    };
    match feature {
        (_, true) => Ok(arch),
        (feature, false) => bail!("--arch {name}: this was built without the feature {feature}"),
    }
}

fn summary(done: &Done) -> String {
    let count = |wanted: fn(&Outcome) -> bool| done.jobs.iter().filter(|job| wanted(&job.outcome)).count();
    let wrong = |n: usize, what: &str| if n == 0 { String::new() } else { format!(", {n} {what}") };
    let (failed, not_kept) = (wrong(count(Outcome::is_failure), "FAILED"), wrong(done.not_kept, "NOT KEPT"));
    let (compiled, there) = (count(|o| matches!(o, Outcome::Compiled { .. })), count(|o| matches!(o, Outcome::Hit(_))));
    let notes: String = done.notes.iter().map(|note| format!("{note}\n")).collect();
    format!("{} kernels in {}: {compiled} compiled, {there} there already{failed}{not_kept}\n{notes}", done.jobs.len(), done.folder)
}
