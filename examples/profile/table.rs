//! What profiles look like in text.

use std::collections::BTreeMap;
use std::fmt::Write;

use cdna_profile::constants::{Constant, TABLE};
use cdna_profile::predict::BoundTimes;
use cdna_profile::{Bound, Counts, Tag};

use crate::measure::{Cost, Profile, Span};
use crate::tiles::Tile;
use crate::variants::{Measured, drains};

/// One line of a table: a name, and a cell for each profile.
struct Row(String, Vec<String>);

/// Profiles side by side.
pub fn side_by_side(profiles: &[Profile]) -> String {
    let mut rows = vec![Row("per wave and steady 256-token tile".into(), profiles.iter().map(|p| p.kernel.clone()).collect())];
    let number = |rows: &mut Vec<Row>, name: &str, of: &dyn Fn(&Profile) -> f64| {
        rows.push(Row(name.into(), profiles.iter().map(|profile| decimal(of(profile))).collect()));
    };
    number(&mut rows, "instructions", &|p| p.tile.instructions);
    number(&mut rows, "VALU", &|p| p.tile.valu);
    number(&mut rows, "  of these at a quarter of the rate", &|p| p.tile.transcendental);
    number(&mut rows, "conversions", &|p| p.tile.conversions);
    for shape in keys(profiles.iter().map(|p| &p.tile.mfma)) {
        number(&mut rows, &format!("MFMA {shape}"), &|p| p.tile.mfma.get(&shape).copied().unwrap_or(0.0));
    }
    number(&mut rows, "LDS accesses", &|p| p.tile.lds);
    number(&mut rows, "LDS bank conflict cycles", &|p| p.tile.lds_conflicts);
    number(&mut rows, "lane exchanges through LDS", &|p| p.tile.lds_exchanges);
    number(&mut rows, "vector memory", &|p| p.tile.vmem);
    number(&mut rows, "SALU and branches", &|p| p.tile.salu + p.tile.branches);
    number(&mut rows, "barriers", &|p| p.tile.barriers);
    number(&mut rows, "s_waitcnt", &|p| p.tile.waits);
    for (name, pick) in [("waits that force", forced as fn(&Profile) -> &BTreeMap<Tag, f64>), ("waits that drain", drained)] {
        // Those of K and V are there where they are 0, too.
        let always = BTreeMap::from([(Tag::Key, 0.0), (Tag::Value, 0.0)]);
        for tag in keys(profiles.iter().map(pick).chain([&always])) {
            number(&mut rows, &format!("{name} {}", tag_name(tag)), &|p| pick(p).get(&tag).copied().unwrap_or(0.0));
        }
    }
    for tag in keys(profiles.iter().map(|p| &p.tile.loaded)) {
        let loaded = |p: &Profile| p.tile.loaded.get(&tag).copied().unwrap_or_default();
        number(&mut rows, &format!("bytes of {} loaded", tag_name(tag)), &|p| loaded(p).total());
        if profiles.iter().any(|p| loaded(p).nontemporal > 0.0) {
            number(&mut rows, "  of these nontemporal", &|p| loaded(p).nontemporal);
        }
    }
    let text = |rows: &mut Vec<Row>, name: &str, of: &dyn Fn(&Profile) -> String| {
        rows.push(Row(name.into(), profiles.iter().map(of).collect()));
    };
    text(&mut rows, "VGPRs and AGPRs (AGPRs, spilled)", &|p| format!("{} ({}, {})", p.binary.registers, p.binary.agprs, p.binary.spilled));
    text(&mut rows, "LDS bytes", &|p| p.lds_bytes.to_string());
    text(&mut rows, "workgroups a CU", &|p| p.resident.to_string());
    text(&mut rows, "whole binary: VALU, conversions", &|p| format!("{}, {}", p.binary.valu, p.binary.conversions));
    text(&mut rows, "  MFMA, LDS, barriers", &|p| {
        format!("{}, {}, {}", p.binary.mfma.values().sum::<usize>(), p.binary.lds, p.binary.barriers)
    });
    text(&mut rows, "predicted us a tile, one workgroup", &|p| format!("{:.3}", p.predicted_tile_us));
    text(&mut rows, "  predicted cycles (issuing)", &|p| format!("{:.0} ({:.0})", p.predicted_timing.cycles, p.predicted_timing.issuing));
    for stall in keys(profiles.iter().map(|p| &p.predicted_timing.stalls)) {
        let name = format!("  predicted stalls: {}", format!("{stall:?}").to_lowercase());
        number(&mut rows, &name, &|p| p.predicted_timing.stalls.get(&stall).copied().unwrap_or(0.0));
    }
    let call = |rows: &mut Vec<Row>, name: &str, of: &dyn Fn(&cdna_profile::Predicted) -> String| {
        rows.push(Row(name.into(), profiles.iter().map(|p| p.predicted_call.as_ref().map_or("-".into(), of)).collect()));
    };
    call(&mut rows, "predicted us of the call", &|c| format!("{:.2}", c.us));
    call(&mut rows, "  predicted bound", &|c| bound_name(c.bound).to_string());
    call(&mut rows, "  predicted us of each bound", &|c| bounds(&c.bounds));
    draw(&rows)
}

fn bounds(times: &BoundTimes) -> String {
    let BoundTimes { memory, valu, mfma, lds, chain } = times;
    format!("memory {memory:.2} VALU {valu:.2} MFMA {mfma:.2} LDS {lds:.2} chain {chain:.2}")
}

/// A workload's line: its name, predictions of the selected and the generic tile, the published times before and after.
pub struct Line {
    pub name: String,
    pub generic: Profile,
    /// `None`: the generic tile is what is selected.
    pub selected: Option<Profile>,
    pub published: Option<(f64, f64)>,
}

/// Predictions beside published times.
pub fn workloads(lines: &[Line]) -> String {
    let head = ["generic", "selected", "bound", "before", "after"].map(String::from);
    let mut rows = vec![
        Row(String::new(), ["predicted us", "predicted us", "predicted", "MI355X us", "MI355X us"].map(String::from).into()),
        Row("workload".into(), head.into()),
    ];
    for line in lines {
        let us = |profile: &Profile| profile.predicted_call.as_ref().map_or("-".into(), |call| format!("{:.2}", call.us));
        let published = |pick: fn((f64, f64)) -> f64| line.published.map_or("-".into(), |pair| format!("{:.2}", pick(pair)));
        let selected = line.selected.as_ref().unwrap_or(&line.generic);
        let bound = selected.predicted_call.as_ref().map_or("-", |call| bound_name(call.bound));
        rows.push(Row(
            line.name.clone(),
            vec![us(&line.generic), us(selected), bound.into(), published(|pair| pair.0), published(|pair| pair.1)],
        ));
    }
    let mut text = draw(&rows);
    text.push_str("\nPredicted: from simulated executions and the constants of `--constants`; no AMD GPU ran this.\n");
    text.push_str("MI355X before and after: published times of another implementation of these shapes.\n");
    text
}

/// Schedules before and after, in Markdown: docs/kernels.md shows this table.
pub fn variants(measured: &[Measured]) -> String {
    let mut text =
        "| | flags | shape | over | is for less | instructions | VALU | conversions | LDS | barriers | waits that drain K, V | registers | predicted us |\n"
            .to_string();
    text.push_str("|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
    for of in measured {
        let Measured { variant, costs } = of;
        let [before, after] = of.claimed().map(decimal);
        let pair = |of: &dyn Fn(&Cost) -> String| {
            let [before, after] = costs.each_ref().map(of);
            if before == after { before } else { format!("{before} → {after}") }
        };
        let number = |of: fn(&Counts) -> f64| pair(&|cost| decimal(of(&cost.counts)));
        let span = if variant.span == Span::Tile { "tile" } else { "one-tile task" };
        let shape = variant.shape.split(" --batch").next().unwrap_or_default().replace("--", "");
        let cells = [
            variant.row.to_string(),
            variant.flags.join(", "),
            shape,
            span.to_string(),
            format!("{}: {before} → {after}", variant.removes.name()),
            number(|c| c.instructions),
            number(|c| c.valu),
            number(|c| c.conversions),
            number(|c| c.lds),
            number(|c| c.barriers),
            number(drains),
            pair(&|cost| cost.registers.to_string()),
            pair(&|cost| format!("{:.2}", cost.us)),
        ];
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
    text
}

/// Tiles of common shapes, in Markdown: docs/kernels.md shows these tables. Steady tiles, generic and selected, then whole binaries.
pub fn tiles(tiles: &[Tile]) -> String {
    let steady = |pick: fn(&Tile) -> &Profile| {
        let mut text = "| | VALU | conversions | MFMA | LDS (conflict cycles) | barriers | SALU | drains of K, V | registers | LDS bytes | workgroups a CU | predicted us, one workgroup |\n".to_string();
        text.push_str("|---|---|---|---|---|---|---|---|---|---|---|---|\n");
        tiles.iter().for_each(|tile| text.push_str(&steady_line(tile.name, pick(tile))));
        text
    };
    let mut whole = "| | VALU | conversions | MFMA | LDS | barriers | registers | LDS bytes | selected: the same |\n".to_string();
    whole.push_str("|---|---|---|---|---|---|---|---|---|\n");
    for tile in tiles {
        let [generic, selected] = [&tile.generic, &tile.selected].map(whole_binary);
        let _ = writeln!(whole, "| {} | {} | {} |", tile.name, generic.join(" | "), selected.join(", "));
    }
    format!("Generic, a steady tile:\n\n{}\nSelected:\n\n{}\nWhole binaries:\n\n{whole}", steady(|t| &t.generic), steady(|t| &t.selected))
}

fn steady_line(name: &str, profile: &Profile) -> String {
    let Profile { tile, binary, .. } = profile;
    let mfma: Vec<String> = tile.mfma.iter().map(|(shape, &n)| format!("{} x {shape}", decimal(n))).collect();
    let drained = [Tag::Key, Tag::Value].map(|tag| decimal(tile.drained.get(&tag).copied().unwrap_or(0.0)));
    let cells = [
        name.to_string(),
        decimal(tile.valu),
        decimal(tile.conversions),
        mfma.join(", "),
        format!("{} ({})", decimal(tile.lds), decimal(tile.lds_conflicts)),
        decimal(tile.barriers),
        decimal(tile.salu + tile.branches),
        drained.join(", "),
        format!("{} ({})", binary.registers, binary.agprs),
        profile.lds_bytes.to_string(),
        profile.resident.to_string(),
        format!("{:.2}", profile.predicted_tile_us),
    ];
    format!("| {} |\n", cells.join(" | "))
}

fn whole_binary(profile: &Profile) -> [String; 7] {
    let binary = &profile.binary;
    let mfma = binary.mfma.values().sum();
    [binary.valu, binary.conversions, mfma, binary.lds, binary.barriers, binary.registers, profile.lds_bytes].map(|n| n.to_string())
}

/// The model's constants, in Markdown: docs/kernels.md holds this text.
pub fn constants() -> String {
    let mut text = "| constant | unit | gfx942 | gfx950 | source |\n|---|---|---|---|---|\n".to_string();
    for Constant { name, unit, gfx942, gfx950, fitted, source } in TABLE {
        let fit = if *fitted { "**fit**: " } else { "" };
        let _ = writeln!(text, "| {name} | {unit} | {gfx942} | {gfx950} | {fit}{source} |");
    }
    text
}

fn forced(profile: &Profile) -> &BTreeMap<Tag, f64> {
    &profile.tile.forced
}

fn drained(profile: &Profile) -> &BTreeMap<Tag, f64> {
    &profile.tile.drained
}

fn keys<'a, K: Ord + Clone + 'a, V: 'a>(maps: impl Iterator<Item = &'a BTreeMap<K, V>>) -> Vec<K> {
    let mut keys: Vec<K> = maps.flat_map(|map| map.keys().cloned()).collect();
    keys.sort();
    keys.dedup();
    keys
}

fn tag_name(tag: Tag) -> &'static str {
    match tag {
        Tag::Key => "K",
        Tag::Value => "V",
        Tag::PageIds => "page ids",
        Tag::KeyScales => "K scales",
        Tag::ValueScales => "V scales",
        Tag::Query => "Q",
        Tag::Records => "records",
        Tag::Output => "output",
        Tag::Other => "other",
    }
}

fn bound_name(bound: Bound) -> &'static str {
    match bound {
        Bound::Memory => "memory",
        Bound::Valu => "VALU",
        Bound::Mfma => "MFMA",
        Bound::Lds => "LDS",
        Bound::Chain => "chain",
    }
}

/// At most two decimals, and none where there are none.
fn decimal(x: f64) -> String {
    // No negative zero.
    let text = format!("{:.2}", x + 0.0);
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

fn draw(rows: &[Row]) -> String {
    let columns = rows.iter().map(|row| row.1.len()).max().unwrap_or(0);
    let name = rows.iter().map(|row| row.0.len()).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.1.get(column)).map(String::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for Row(label, cells) in rows {
        let _ = write!(text, "{label:<name$}");
        for (cell, width) in cells.iter().zip(&widths) {
            let _ = write!(text, "  {cell:>width$}");
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}
