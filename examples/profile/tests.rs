//! Profiles of real kernels. Skipped by name where there is no clang.

use std::process::Command;

use candle_paged_attn::plan::capacity;
use candle_paged_attn::registry::{Arch, Selection};
use candle_paged_attn::rocm::specialize;
use cdna_profile::constants::TABLE;
use cdna_profile::{Machine, Tag, time};
use cdna_sim::Trace;
use clap::Parser;

use crate::call::Kernel;
use crate::measure::generic;
use crate::{Args, profiles, table};

fn clang() -> bool {
    let named = std::env::var("CANDLE_PAGED_ATTN_CLANG").ok();
    let candidates = named.into_iter().chain((20..=24).rev().map(|version| format!("clang-{version}")));
    let mut works = candidates.map(|clang| Command::new(clang).arg("--version").output().is_ok_and(|output| output.status.success()));
    works.any(|works| works)
}

fn parse(options: &str) -> Args {
    Args::parse_from(["profile"].into_iter().chain(options.split_whitespace()))
}

#[test]
fn a_steady_tile_is_counted() {
    if !clang() {
        println!("SKIPPED: no clang of version 20 or newer");
        return;
    }
    for (arch, mfma, count) in [("gfx950", "16x16x32_bf16", 32.0), ("gfx942", "16x16x16_bf16", 64.0)] {
        let args = parse("--shape minimax20/decode-b4-q1-ctx8192-bf16 --flags DIRECT_OUTPUT");
        let arch = Arch::from_name(arch).unwrap();
        let profiles = profiles(&args.shape.resolve(&arch).unwrap(), &arch, args.flags.as_deref()).unwrap();
        assert_eq!(profiles.len(), 2);
        for profile in &profiles {
            let tile = &profile.tile;
            assert_eq!(tile.mfma.iter().map(|(shape, &n)| (shape.trim_end_matches("_1k"), n)).collect::<Vec<_>>(), [(mfma, count)]);
            assert_eq!(tile.barriers, 2.0);
            // 256 tokens of 128 BF16 dims, each of the four waves a quarter.
            assert_eq!([Tag::Key, Tag::Value].map(|tag| tile.loaded[&tag].total()), [16384.0; 2]);
            assert!(tile.valu > 50.0 && tile.valu < 250.0 && tile.lds >= 10.0, "{tile:?}");
            assert_eq!(profile.binary.spilled, 0);
            assert!(profile.resident >= 1 && profile.binary.lds_bytes > 0);
            assert!(profile.predicted_tile_us > 0.5 && profile.predicted_tile_us < 5.0, "{}", profile.predicted_tile_us);
        }
        let text = table::side_by_side(&profiles);
        let unlabelled = text.lines().filter(|line| line.contains(" us")).find(|line| !line.contains("predicted"));
        assert_eq!(unlabelled, None);
        let json = serde_json::to_value(&profiles).unwrap();
        assert!(json[0]["predicted_call"]["us"].as_f64().unwrap() > 1.0, "{json}");
    }
}

#[test]
fn every_constant_has_a_source() {
    assert!(TABLE.iter().all(|constant| constant.source.len() > 3 && constant.gfx950 > 0.0));
    let text = table::constants();
    assert_eq!(text.matches("**fit**").count(), TABLE.iter().filter(|constant| constant.fitted).count());
    assert!(include_str!("../../docs/kernels.md").contains(&text), "docs/kernels.md: its table of constants against `profile --constants`");
}

/// The macros of the tile that the constants were fitted with: matrix instructions of 32 FP8 products.
const FITTED: &[&str] = &["PA_TEST_NARROW_MFMA"];
/// And those that put its loads where the published schedules have them: the next K after P's barrier, page ids behind V.
const LATE_K: &[&str] = &["PA_TEST_NARROW_MFMA", "PA_TEST_LATE_K"];
const LATE_K_AND_IDS: &[&str] = &["PA_TEST_NARROW_MFMA", "PA_TEST_LATE_K", "PA_TEST_LATE_IDS"];

/// Microseconds of a 256-token tile of one workgroup on an MI355X, published for another implementation: KV, page, order of the loads, two tile
/// groups, time.
const PUBLISHED: [(&str, usize, &[&str], bool, f64); 6] = [
    ("fp8", 16, FITTED, false, 1.412),
    ("bf16", 16, LATE_K, false, 2.152),
    ("fp8", 128, LATE_K_AND_IDS, false, 1.69),
    ("fp8", 16, FITTED, true, 1.15),
    ("bf16", 16, LATE_K, true, 1.54),
    ("fp8", 128, LATE_K_AND_IDS, true, 1.41),
];

/// Two groups that run in step: a copy of the waves with lines of its own.
fn paired(trace: &Trace) -> Trace {
    let mut other = trace.waves.clone();
    for touched in other.iter_mut().flatten().filter_map(|event| event.touched.as_mut()) {
        touched.lines.iter_mut().for_each(|line| *line += 1 << 57);
    }
    Trace { waves: trace.waves.iter().cloned().chain(other).collect() }
}

/// Predicted microseconds of a tile.
fn predicted(selection: &Selection, macros: &[&str], dual: bool) -> f64 {
    let kernel = Kernel::compile(selection.clone(), macros).unwrap();
    let machine = Machine::of(kernel.module.object.arch);
    let cycles = |tiles| {
        let run = kernel.run(tiles, 1).unwrap();
        let trace = if dual { paired(&run.trace) } else { run.trace };
        time(&kernel.module.program, &trace, &run.tags, 1, machine, machine.fill).cycles
    };
    machine.us((cycles(8) - cycles(6)) / if dual { 4.0 } else { 2.0 })
}

#[test]
fn predictions_reproduce_published_tile_times() {
    if !clang() {
        println!("SKIPPED: no clang of version 20 or newer");
        return;
    }
    let arch = Arch::from_name("gfx950").unwrap();
    let mut off = vec![];
    for (kv, page, macros, dual, published) in PUBLISHED {
        let args = parse(&format!("--kv {kv} --page-size {page} --batch 1 --context 30720 --max-partitions 1"));
        let shape = args.shape.resolve(&arch).unwrap();
        let problem = shape.problem(capacity(&shape.request(), &arch).unwrap());
        let us = predicted(&generic(&specialize::select(&problem, &arch).unwrap()), macros, dual);
        println!("{kv} page {page}{}: predicted {us:.3}, published {published}", if dual { ", two groups" } else { "" });
        if (us / published - 1.0).abs() > 0.15 {
            off.push((kv, page, dual, us, published));
        }
    }
    assert!(off.is_empty(), "more than 15% off: {off:?}");
}
