//! Why this kernel, and how the batch is split: prints the registry's selection for a shape on an arch, and draws the plan.
//!
//! ```text
//! cargo run --release --example explain -- --shape review/P2 --arch gfx950 --svg plan.svg
//! cargo run --release --example explain -- --batch 8 --context 1024-32768 --q-heads 32 --kv-heads 8 --kv fp8
//! ```

mod draw_svg;
mod draw_text;
mod shape;
mod timeline;

use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_paged_attn::plan::{HostPlan, Split, TILE_TOKENS, capacity};
use candle_paged_attn::registry::{Arch, Problem, Selection, missing_requirements, select};
use clap::Parser;

use shape::{Shape, ShapeArgs};
use timeline::{Panel, Timeline};

#[derive(Parser)]
#[command(about = "Prints the kernel chosen for a shape and why, and draws the plan before (proportional) and after (min-max)")]
struct Args {
    #[command(flatten)]
    shape: ShapeArgs,
    /// cpu (this one), cpu-ISA, gfx942, gfx950, gfx1250, sm80, sm89 or sm90; a colon and a number sets the CUs or SMs (gfx942:80)
    #[arg(long, default_value = "cpu")]
    arch: String,
    /// Writes the plan as an SVG
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let arch = Arch::from_name(&args.arch)?;
    let shape = args.shape.resolve(&arch)?;
    let request = shape.request();
    let slots = if shape.plan_free { request.rows() } else { capacity(&request, &arch)? };
    let problem = shape.problem(slots);
    let selection = select(&problem, &arch)?;

    let panels = panels(&shape, &arch, &selection)?;
    let text = format!(
        "shape      {shape}\narch       {arch}, {} bytes of LDS or shared memory a workgroup\n{}{}\n{}",
        arch.lds_bytes,
        selection_text(&selection),
        missing_text(&problem, &arch)?,
        draw_text::draw(&panels)
    );
    print(&text)?;
    if let Some(path) = &args.svg {
        let title = format!("{shape}\n{arch}: {}", selection.kernel);
        draw_svg::draw(path, &title, &panels).with_context(|| format!("writing {}", path.display()))?;
        print(&format!("\nwrote {}\n", path.display()))?;
    }
    Ok(())
}

/// Prints to stdout; a reader that has left (`| head`) is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn selection_text(selection: &Selection) -> String {
    let mut flags: Vec<String> = selection.flags().names().into_iter().map(String::from).collect();
    if selection.flags().kernarg_preload > 0 {
        flags.push(format!("KERNARG_PRELOAD={}", selection.flags().kernarg_preload));
    }
    let flags = if flags.is_empty() { "none".to_string() } else { flags.join(" ") };
    let reducer = if selection.needs_reducer() { ", then the reducer" } else { "" };
    let Selection { kernel, key, threads, lds_bytes, row_groups, reason, .. } = selection;
    format!(
        "kernel     {kernel}\nreason     {reason}\n\
         launch     {threads} threads and {lds_bytes} bytes of LDS a workgroup, M-tiles {} x {row_groups} workgroups{reducer}\n\
         flags      {flags}\n",
        key.m_tiles
    )
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
        let longest = plan.work.iter().map(|task| task[2].abs_diff(task[1])).max().unwrap_or(0);
        let title = format!("{name}: {} tasks in {} slots, longest {longest} tiles of {TILE_TOKENS}", plan.tasks(), plan.capacity());
        Panel { title, timeline: Timeline::new(plan, shape, arch, selection) }
    };
    if shape.plan_free {
        return Ok(vec![panel("plan-free", &HostPlan::free(&request))]);
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
