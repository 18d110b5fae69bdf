//! Why this kernel, and how the batch is split: prints the registry's selection for a shape on an arch, and draws the plan.
//!
//! ```text
//! cargo run --release --example explain -- --shape review/P2 --arch gfx950 --svg plan.svg
//! cargo run --release --example explain -- --batch 8 --context 1024-32768 --q-heads 32 --kv-heads 8 --kv fp8
//! ```

mod draw_svg;
mod draw_text;
#[path = "../shared/options.rs"]
mod options;
mod shape;
#[path = "../shared/text.rs"]
mod text;
mod timeline;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_paged_attn::plan::{HostPlan, Split};
use candle_paged_attn::registry::{Arch, ArchName, Problem, Selection, missing_requirements, select, walks_whole_rows};
use clap::Parser;
use testkit::errors::of_option;

use shape::{Shape, ShapeArgs};
use text::{count, print};
use timeline::{Panel, Timeline};

#[derive(Parser)]
#[command(about = "Prints the kernel chosen for a shape and why, and draws the plan before (proportional) and after (min-max)")]
struct Args {
    #[command(flatten)]
    shape: ShapeArgs,
    /// cpu (this one), cpu-ISA, gfx942, gfx950, gfx1250, sm80, sm86, sm89, sm90 or cuda (the GPU that is there); a colon and a number sets the CUs or SMs
    /// (gfx942:80)
    #[arg(long, default_value = "cpu")]
    arch: String,
    /// Writes the plan as an SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

fn main() -> ExitCode {
    testkit::errors::exit(explain(&Args::parse()).map(|()| true))
}

fn explain(args: &Args) -> Result<()> {
    let arch = arch(&args.arch).map_err(|error| of_option("--arch", error))?;
    let mut shape = args.shape.resolve(&arch)?;
    shape.plan_free |= is_walked_whole(&shape, &arch);
    let request = shape.request();
    let plan = if shape.plan_free { HostPlan::free(&request, &arch) } else { HostPlan::new(&request, &arch)? };
    let problem = shape.problem(plan.capacity());
    // What a call whose tables are on the host finds in its plan.
    let problem = if arch.name.is_cuda() { problem.with_plan(&plan) } else { problem };
    let selection = select(&problem, &arch)?;

    let panels = panels(&shape, &arch, &selection)?;
    let text = format!(
        "shape      {shape}\n{}arch       {arch}{}\n{}{}\n{}",
        shape.note().map(|note| format!("note       {note}\n")).unwrap_or_default(),
        arch_text(&arch),
        selection_text(&selection, &arch),
        missing_text(&problem, &arch)?,
        draw_text::draw(&panels)
    );
    print(&text)?;
    if let Some(path) = &args.svg {
        let title = format!("{shape}\n{arch}: {}", selection.kernel());
        draw_svg::draw(path, &title, shape.context_lens(), &panels).with_context(|| format!("writing {}", path.display()))?;
        print(&format!("\nwrote {}\n", path.display()))?;
    }
    Ok(())
}

/// Whether a call of this shape that leaves its plan open has none on `arch`.
fn is_walked_whole(shape: &Shape, arch: &Arch) -> bool {
    let request = shape.request();
    let free = Problem { plan_free: true, max_partitions: None, ..shape.problem(request.rows()) };
    let is_open = request.max_partitions.is_none() && request.workgroup_budget.is_none();
    let most_tokens = free.max_pages.saturating_mul(free.page_size).min(request.max_context_len.unwrap_or(usize::MAX));
    is_open && walks_whole_rows(&free, most_tokens, arch)
}

/// The arch of that name; `cuda`: of the GPU that is there.
fn arch(name: &str) -> Result<Arch> {
    match name {
        #[cfg(feature = "cuda")]
        "cuda" => Ok(candle_paged_attn::cuda::arch_of(&candle::Device::new_cuda(0)?)?),
        #[cfg(not(feature = "cuda"))]
        "cuda" => anyhow::bail!("cuda: this build opens no GPU: build with --features cuda"),
        _ => Ok(Arch::from_name(name)?),
    }
}

/// What a workgroup has, in the words of the arch's vendor.
fn arch_text(arch: &Arch) -> String {
    let bytes = count(arch.lds_bytes, "byte");
    match arch.name {
        ArchName::Cpu(_) => String::new(),
        name if name.is_cuda() => format!(", {bytes} of shared memory a block"),
        ArchName::Gfx1250 => format!(", {bytes} of LDS a workgroup; compiled for only: no backend runs it"),
        _ => format!(", {bytes} of LDS a workgroup"),
    }
}

fn selection_text(selection: &Selection, arch: &Arch) -> String {
    let mut flags: Vec<String> = selection.flags().names().into_iter().map(String::from).collect();
    if selection.flags().kernarg_preload > 0 {
        flags.push(format!("KERNARG_PRELOAD={}", selection.flags().kernarg_preload));
    }
    let flags = if flags.is_empty() { "none".to_string() } else { flags.join(" ") };
    let reducer = if selection.needs_reducer() { ", then the reducer" } else { "" };
    let kernel = selection.kernel();
    let Selection { key, threads, lds_bytes, row_groups, reason, .. } = selection;
    let (threads, bytes) = (count(*threads, "thread"), count(*lds_bytes, "byte"));
    let launch = match arch.name {
        ArchName::Cpu(_) => "a task is one core's work".to_string(),
        name if name.is_cuda() => {
            let blocks = row_groups * key.cuda.map_or(1, |cut| cut.cluster);
            format!("{threads} and {bytes} of shared memory a block, {} a task", count(blocks, "block"))
        }
        _ => {
            let (tiles, groups) = (count(key.m_tiles, "M-tile"), count(*row_groups, "workgroup"));
            format!("{threads} and {bytes} of LDS a workgroup, {tiles} in each of {groups} a task")
        }
    };
    format!("kernel     {kernel}\nreason     {reason}\nlaunch     {launch}{reducer}\nflags      {flags}\n")
}

/// What each flag that is off would need.
fn missing_text(problem: &Problem, arch: &Arch) -> Result<String> {
    let Some(missing) = missing_requirements(problem, arch)? else { return Ok(String::new()) };
    let mut needs: Vec<(&str, Vec<&str>)> = vec![];
    for (flag, requirement) in missing.all() {
        let Some(requirement) = requirement else { continue };
        match needs.iter_mut().find(|(known, _)| *known == requirement) {
            Some((_, flags)) => flags.push(flag),
            None => needs.push((requirement, vec![flag])),
        }
    }
    Ok(needs.iter().map(|(requirement, flags)| format!("  off      {} (needs {requirement})\n", flags.join(" "))).collect())
}

/// The plan before and after min-max, or once where both splits are the same or there is no plan.
fn panels(shape: &Shape, arch: &Arch, selection: &Selection) -> Result<Vec<Panel>> {
    let request = shape.request();
    let panel = |name: &str, plan: &HostPlan| {
        let longest = count(plan.longest_task(), "tile");
        let (tasks, slots) = (count(plan.tasks(), "task"), count(plan.capacity(), "slot"));
        let title = format!("{name}: {tasks} in {slots}, longest {longest} of {} tokens", arch.name.tile_tokens());
        Panel { title, timeline: Timeline::new(plan, shape, arch, selection) }
    };
    if shape.plan_free {
        return Ok(vec![panel("plan-free", &HostPlan::free(&request, arch))]);
    }
    let before = HostPlan::with_split(&request, arch, Split::Proportional)?;
    let after = HostPlan::with_split(&request, arch, Split::MinMax)?;
    if before == after {
        return Ok(vec![panel("proportional and min-max alike", &after)]);
    }
    let used = |split| if Split::of(request.rows(), arch) == split { format!(" (as on {})", arch.name) } else { String::new() };
    Ok(vec![
        panel(&format!("before: proportional{}", used(Split::Proportional)), &before),
        panel(&format!("after: min-max{}", used(Split::MinMax)), &after),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_rows_of_wide_tables_are_walked_whole() {
        let arch = Arch::sm90();
        let walked = |context: &str| {
            let line = format!("explain --layout nhd --kv fp8 --page-size 16 --batch 1 --table-tokens 131072 --context {context}");
            is_walked_whole(&Args::parse_from(line.split_whitespace()).shape.resolve(&arch).unwrap(), &arch)
        };
        assert!(walked("1024") && !walked("131072"));
    }
}
