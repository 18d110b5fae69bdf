//! Profiles of real kernels. Skipped by name where there is no clang.

use std::process::Command;

use candle_paged_attn::plan::capacity;
use candle_paged_attn::registry::{Arch, Flags, Selection};
use candle_paged_attn::rocm::specialize;
use cdna_profile::constants::TABLE;
use cdna_profile::waits::{Wait, waits};
use cdna_profile::{Machine, Tag, time};
use cdna_sim::Trace;

use crate::call::Kernel;
use crate::measure::{Profile, with_flags};
use crate::variants::VARIANTS;
use crate::{lines, named, parse, profiles, table, tiles};

pub fn clang() -> bool {
    let named = std::env::var("CANDLE_PAGED_ATTN_CLANG").ok();
    let candidates = named.into_iter().chain((20..=24).rev().map(|version| format!("clang-{version}")));
    let mut works = candidates.map(|clang| Command::new(clang).arg("--version").output().is_ok_and(|output| output.status.success()));
    works.any(|works| works)
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

/// The page's tables of tiles are those that `profile --tiles` prints, but for what a release of clang may change.
#[test]
fn the_page_shows_the_tiles_that_are_measured() {
    if !clang() {
        println!("SKIPPED: no clang of version 20 or newer");
        return;
    }
    let page = include_str!("../../docs/kernels.md");
    let mut stale = vec![];
    for tile in tiles::measure(&Arch::gfx950()).unwrap() {
        let start = format!("| {} | ", tile.name);
        let rows: Vec<Vec<&str>> =
            page.lines().filter(|line| line.starts_with(&start)).map(|line| line.split('|').map(str::trim).collect()).collect();
        let [generic, selected, whole] = rows.as_slice() else { panic!("docs/kernels.md: {} rows of {}", rows.len(), tile.name) };
        let number = |row: &[&str], cell: usize| row[cell].split([' ', ',']).next().unwrap().parse::<f64>().unwrap();
        let mut check = |what: &str, shown: f64, measured: f64, most: f64| {
            if (shown - measured).abs() > most {
                stale.push(format!("{}, {what}: {shown}, measured {measured}", tile.name));
            }
        };
        for (row, profile, what) in [(generic, &tile.generic, "generic"), (selected, &tile.selected, "selected")] {
            check(&format!("VALU, {what}"), number(row, 2), profile.tile.valu, 0.01 * profile.tile.valu);
            check(&format!("barriers, {what}"), number(row, 6), profile.tile.barriers, 0.0);
            check(&format!("registers, {what}"), number(row, 9), profile.binary.registers as f64, 4.0);
            check(&format!("us, {what}"), number(row, 12), profile.predicted_tile_us, 0.02 * profile.predicted_tile_us);
        }
        check("VALU, binary", number(whole, 2), tile.generic.binary.valu as f64, 0.01 * tile.generic.binary.valu as f64);
        check("VALU, selected binary", number(whole, 9), tile.selected.binary.valu as f64, 0.01 * tile.selected.binary.valu as f64);
    }
    assert!(stale.is_empty(), "docs/kernels.md against `profile --tiles`: {stale:#?}");
}

/// Each schedule has less of what it is for, and what the registry selects for the shape is predicted faster than the generic tile.
#[test]
fn variants_are_predicted_faster_where_they_are_selected() {
    if !clang() {
        println!("SKIPPED: no clang of version 20 or newer");
        return;
    }
    let arch = Arch::gfx950();
    let mut wrong = vec![];
    for variant in VARIANTS {
        let measured = variant.measure(&arch).unwrap();
        let [before, after] = measured.claimed();
        let what = format!("{} {:?} {}", variant.row, variant.flags, variant.shape);
        println!("{what}: {:?} {before} -> {after}", variant.removes);
        if after >= before {
            wrong.push(format!("{what}: {:?} {before} -> {after}", variant.removes));
        }
        let [generic, selected] = <[_; 2]>::try_from(profiles(&parse(variant.shape).shape.resolve(&arch).unwrap(), &arch, None).unwrap())
            .unwrap_or_else(|_| panic!("{what}: the generic tile is selected"));
        let chosen = |flag: &&str| *flag == "KERNARG_PRELOAD" || selected.flags.contains(flag);
        assert!(variant.flags.iter().all(chosen), "{what}: {:?} are selected", selected.flags);
        let us = [generic, selected].map(|profile| profile.predicted_call.unwrap().us);
        println!("  predicted call {us:.2?}");
        if us[1] >= us[0] {
            wrong.push(format!("{what}: predicted {us:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Each workload of minimax20 is predicted faster with the tile that the registry selects.
#[test]
fn selected_tiles_are_predicted_faster_on_minimax20() {
    if !clang() {
        println!("SKIPPED: no clang of version 20 or newer");
        return;
    }
    let (lines, notes) = lines("minimax20", &Arch::gfx950()).unwrap();
    assert_eq!((lines.len(), notes), (20, vec![]));
    let us = |profile: &Profile| profile.predicted_call.as_ref().unwrap().us;
    let slower: Vec<String> = lines
        .iter()
        .map(|line| (&line.name, us(&line.generic), us(line.selected.as_ref().unwrap_or(&line.generic))))
        .filter(|(_, generic, selected)| selected >= generic)
        .map(|(name, generic, selected)| format!("{name}: {generic:.2} -> {selected:.2}"))
        .collect();
    assert!(slower.is_empty(), "{slower:#?}");
}

type Names = &'static [&'static str];

/// The constants were fitted with matrix instructions of 32 FP8 products.
const NARROW: Names = &["PA_TEST_WIDE_MFMA"];
/// The switch that is off where the published schedule has the next K after P's barrier.
const K_LATE: Names = &["PA_TEST_KEYS_EARLY", "PA_TEST_WIDE_MFMA"];
/// Orders of page 16's loads; the tile that the registry selects has its own.
const PIPE: Names = &["PAGE16_VPIPE"];
const NO_PIPE: Names = &[];

/// Microseconds of a 256-token tile of one workgroup on an MI355X, published for another implementation, that the constants were fitted to: KV, page,
/// switches off, two tile groups, time. The tile is the one that the registry selects.
const FITTED: [(&str, usize, Names, bool, f64); 6] = [
    ("fp8", 16, NARROW, false, 1.412),
    ("bf16", 16, K_LATE, false, 2.152),
    ("fp8", 128, K_LATE, false, 1.69),
    ("fp8", 16, NARROW, true, 1.15),
    ("bf16", 16, K_LATE, true, 1.54),
    ("fp8", 128, K_LATE, true, 1.41),
];

/// Published times that they were not fitted to: KV of page 16, flags that are on, switches off, time, and how far off the prediction may be.
const NOT_FITTED: [(&str, Names, Names, f64, f64); 4] = [
    ("fp8", PIPE, NARROW, 1.693, 0.15),
    ("bf16", PIPE, K_LATE, 2.227, 0.15),
    ("fp8", NO_PIPE, NARROW, 2.7, 0.3),
    ("bf16", NO_PIPE, &[], 3.7, 0.3),
];

/// Two groups that run in step: a copy of the waves with lines of its own. There was no tile of two groups when the constants were fitted.
fn paired(trace: &Trace) -> Trace {
    let mut other = trace.waves.clone();
    for touched in other.iter_mut().flatten().filter_map(|event| event.touched.as_mut()) {
        touched.lines.iter_mut().for_each(|line| *line += 1 << 57);
    }
    Trace { waves: trace.waves.iter().cloned().chain(other).collect() }
}

/// Predicted microseconds of a tile. `pair`: of two copies of the workgroup that take tiles in turn.
fn predicted(selection: &Selection, off: &[&str], pair: bool) -> f64 {
    let kernel = Kernel::compile(selection.clone(), off).unwrap();
    let machine = Machine::of(kernel.module.object.arch);
    let cycles = |tiles| {
        let run = kernel.run(tiles, 1).unwrap();
        let trace = if pair { paired(&run.trace) } else { run.trace };
        time(&kernel.module.program, &trace, &run.tags, 1, machine, machine.fill).cycles
    };
    machine.us((cycles(8) - cycles(6)) / if pair { 4.0 } else { 2.0 })
}

/// The tile that the registry selects for one long sequence: of two groups, or as it is with one.
fn selected(kv: &str, page: usize, dual: bool) -> Selection {
    let arch = Arch::gfx950();
    let shape = parse(&format!("--kv {kv} --page-size {page} --batch 1 --context 30720 --max-partitions 1")).shape.resolve(&arch).unwrap();
    let selection = specialize::select(&shape.problem(capacity(&shape.request(), &arch).unwrap()), &arch).unwrap();
    assert!(selection.flags().dual_group);
    if dual { selection } else { with_flags(&selection, Flags { dual_group: false, ..*selection.flags() }, &arch) }
}

/// Its loads in the order of `flags` alone.
fn ordered(kv: &str, page: usize, flags: &[&str]) -> Selection {
    let names: Vec<String> = flags.iter().map(|name| name.to_string()).collect();
    with_flags(&selected(kv, page, false), named(&names).unwrap(), &Arch::gfx950())
}

#[test]
fn predictions_reproduce_published_tile_times() {
    if !clang() {
        println!("SKIPPED: no clang of version 20 or newer");
        return;
    }
    let mut off = vec![];
    let mut check = |what: String, us: f64, published: f64, most: f64| {
        println!("{what}: predicted {us:.3}, published {published}");
        if (us / published - 1.0).abs() > most {
            off.push(what);
        }
    };
    for (kv, page, switches, dual, published) in FITTED {
        let what = format!("{kv} page {page}{}", if dual { ", two groups" } else { "" });
        check(what.clone(), predicted(&selected(kv, page, false), switches, dual), published, 0.15);
        if dual {
            check(format!("{what}, DUAL_GROUP"), predicted(&selected(kv, page, true), switches, false), published, 0.2);
        }
    }
    for (kv, flags, switches, published, most) in NOT_FITTED {
        check(format!("{kv} page 16, {flags:?}"), predicted(&ordered(kv, 16, flags), switches, false), published, most);
    }
    assert!(off.is_empty(), "too far off: {off:?}");
}

/// What is in flight at the waits of page 16's interior tiles: all of V when page ids are waited for, all of the next K when V is.
#[test]
fn page_16_waits_leave_v_and_k_in_flight() {
    if !clang() {
        println!("SKIPPED: no clang of version 20 or newer");
        return;
    }
    const TILES: usize = 8;
    let orders = [PIPE, &["PAGE16_VPIPE", "PAGE16_PAGES_FIRST"], &["PAGE16_VPIPE", "PAGE16_PAGES_FIRST", "PAGE16_EARLY_K"]];
    for (kv, loads, flags) in [("fp8", 8), ("bf16", 16)].into_iter().flat_map(|(kv, loads)| orders.map(|flags| (kv, loads, flags))) {
        let kernel = Kernel::compile(ordered(kv, 16, flags), &[]).unwrap();
        let run = kernel.run(TILES, 1).unwrap();
        let waves = waits(&kernel.module.program, &run.trace, &run.tags);
        // What of `tag` is left at each wait for `awaited` before the last tile's V is there.
        let left = |wave: &[Wait], awaited, tag| -> Vec<usize> {
            let waits = wave.iter().filter(|wait| wait.forced.contains_key(&awaited));
            waits.map(|wait| wait.left.get(&tag).copied().unwrap_or(0)).collect()
        };
        // Wave 0 stages ids: in the prologue, then those of the third tile to the last.
        let v_left = left(&waves[0], Tag::PageIds, Tag::Value);
        let (prologue, steady) = v_left.split_at(v_left.len() - (TILES - 2));
        assert!(prologue.iter().all(|&left| left == 0), "{v_left:?}");
        let ids_first = flags.len() > 1;
        assert!(steady.iter().all(|&left| left == if ids_first { loads } else { 0 }), "{kv} {flags:?}: V left {v_left:?}");
        for (number, wave) in waves.iter().enumerate() {
            // A peeled last tile (BF16) has no next K.
            let k_left = left(wave, Tag::Value, Tag::Key);
            let steady = k_left.iter().filter(|&&left| left == loads).count();
            let in_order = k_left.iter().position(|&left| left < loads).unwrap_or(k_left.len()) == steady && steady >= TILES - 1;
            assert!(if ids_first { in_order } else { number > 0 || !in_order }, "{kv} {flags:?}: K left {k_left:?}");
        }
    }
}
