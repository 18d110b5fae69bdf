//! What the AMD tile kernels execute and how long they are predicted to take, from runs on the simulator: no GPU is needed.
//!
//! ```text
//! cargo run --release --features rocm --example profile -- --shape minimax20/decode-b4-q1-ctx8192-bf16 --arch gfx950
//! cargo run --release --features rocm --example profile -- --kv fp8 --page-size 16 --max-partitions 1 --context 30000
//! cargo run --release --features rocm --example profile -- --table minimax20
//! cargo run --release --features rocm --example profile -- --variants
//! cargo run --release --features rocm --example profile -- --tiles
//! cargo run --release --features rocm --example profile -- --constants
//! ```
//!
//! Times are predictions (`cdna-profile`); every table says so. Counts are of one workgroup: a run with two tiles more, less a run without.

mod call;
#[cfg(test)]
mod fp8_tests;
mod measure;
#[path = "../shared/options.rs"]
mod options;
#[path = "../explain/shape.rs"]
mod shape;
mod table;
#[cfg(test)]
mod tests;
#[path = "../shared/text.rs"]
mod text;
mod tiles;
mod variants;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use candle_paged_attn::plan::{HostPlan, capacity};
use candle_paged_attn::registry::{Arch, Flags, Problem, Selection};
use candle_paged_attn::rocm::specialize;
use clap::Parser;
use testkit::workloads;

use measure::{Profile, Tasks, generic, kv_bytes, profile, with_flags};
use shape::{Shape, ShapeArgs};
use table::Line;
use text::{count, print};
use variants::VARIANTS;

#[derive(Parser)]
#[command(about = "Counts what a shape's tile kernel and the generic tile execute on the simulator, and predicts their times")]
struct Args {
    #[command(flatten)]
    shape: ShapeArgs,
    /// gfx942 or gfx950; a colon and a number sets the CUs (gfx942:80)
    #[arg(long, default_value = "gfx950")]
    arch: String,
    /// Schedules of the tile beside the generic one, by name (DUAL_GROUP,PAGE16_VPIPE), in place of the registry's choice
    #[arg(long, value_delimiter = ',')]
    flags: Option<Vec<String>>,
    /// A line for each workload of a family of benches/workloads.json, beside the published times where there are any
    #[arg(long, value_name = "FAMILY")]
    table: Option<String>,
    /// A line for each schedule of the tile: what it executes without it and with it
    #[arg(long)]
    variants: bool,
    /// Tables of what a steady tile of common shapes executes: generic, selected, whole binaries
    #[arg(long)]
    tiles: bool,
    /// Prints the constants of the prediction with their sources
    #[arg(long)]
    constants: bool,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    testkit::errors::exit(run(&Args::parse()).map(|()| true))
}

fn run(args: &Args) -> Result<()> {
    if args.constants {
        return print(&if args.json { serde_json::to_string(cdna_profile::constants::TABLE)? + "\n" } else { table::constants() });
    }
    let arch = Arch::from_name(&args.arch).context("--arch")?;
    if args.variants {
        let measured = VARIANTS.iter().map(|variant| variant.measure(&arch)).collect::<Result<Vec<_>>>()?;
        return print(&table::variants(&measured));
    }
    if args.tiles {
        return print(&table::tiles(&tiles::measure(&arch)?));
    }
    if let Some(family) = &args.table {
        let (lines, notes) = lines(family, &arch)?;
        return print(&(table::workloads(&lines) + &notes.concat()));
    }
    let shape = args.shape.resolve(&arch)?;
    let profiles = profiles(&shape, &arch, args.flags.as_deref())?;
    if args.json {
        return print(&(serde_json::to_string_pretty(&profiles)? + "\n"));
    }
    let note = shape.note().map(|note| format!("{note}\n")).unwrap_or_default();
    print(&format!("{shape}, {arch}\n{note}\n{}", table::side_by_side(&profiles)))
}

/// The generic tile's profile, then that of the selection where it is another.
fn profiles(shape: &Shape, arch: &Arch, flags: Option<&[String]>) -> Result<Vec<Profile>> {
    let request = shape.request();
    let slots = if shape.plan_free { request.rows() } else { capacity(&request, arch)? };
    let problem = shape.problem(slots);
    let chosen = specialize::select(&problem, arch)?;
    let generic = generic(&chosen);
    let selected = match flags {
        Some(names) => with_flags(&chosen, named(names)?, arch),
        None => chosen,
    };
    let plan = if shape.plan_free { HostPlan::free(&request, arch) } else { HostPlan::new(&request, arch)? };
    let tokens = shape.context_lens().iter().map(|&n| n.max(0) as usize).sum();
    let tasks = |s: &Selection| Tasks::new(&plan, shape.kv_heads, s.row_groups, kv_bytes(s, shape.kv_heads, tokens), problem.query_len);
    let mut profiles = vec![profile(generic.clone(), arch, &tasks(&generic))?];
    if selected.key.flags != generic.key.flags {
        profiles.push(profile(selected.clone(), arch, &tasks(&selected))?);
    }
    Ok(profiles)
}

/// Options as if from the command line.
fn parse(options: &str) -> Args {
    Args::parse_from(["profile"].into_iter().chain(options.split_whitespace()))
}

/// Flags by name; KERNARG_PRELOAD is as many dwords as the registry preloads.
fn named(names: &[String]) -> Result<Flags> {
    let mut flags = Flags::default();
    for name in names {
        if name == "KERNARG_PRELOAD" {
            flags.kernarg_preload = Problem::default().kernarg_preload;
        } else if !flags.set(name) {
            let known: Vec<&str> = flags.all().into_iter().map(|(name, _)| name).collect();
            bail!("--flags {name:?}: not one of {}", known.join(", "))
        }
    }
    Ok(flags)
}

/// A line for each workload, and a note for each that has no kernel.
fn lines(family: &str, arch: &Arch) -> Result<(Vec<Line>, Vec<String>)> {
    let families = workloads::families()?;
    let Some(found) = families.iter().find(|f| f.name == family) else {
        bail!("--table {family:?}: not one of {}", families.each_ref().map(|f| f.name).join(", "))
    };
    let (mut lines, mut notes) = (vec![], vec![]);
    for workload in &found.workloads {
        let name = format!("{family}/{}", workload.name);
        let shape = parse(&format!("--shape {name}")).shape.resolve(arch)?;
        match profiles(&shape, arch, None) {
            Ok(profiles) => {
                let mut profiles = profiles.into_iter();
                let Some(generic) = profiles.next() else { continue };
                let published = workload.mi355x_us.map(|us| (us.before, us.after));
                lines.push(Line { name: workload.name.clone(), generic, selected: profiles.next(), published });
            }
            Err(error) => notes.push(format!("{}: {}\n", workload.name, testkit::errors::chain(&error))),
        }
    }
    Ok((lines, notes))
}
