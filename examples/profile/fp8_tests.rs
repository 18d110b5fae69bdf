//! What an FP8 tile's binary holds, and what its schedules do to a steady tile. Skipped by name where there is no clang.

use candle_paged_attn::plan::capacity;
use candle_paged_attn::registry::{Arch, Selection};
use candle_paged_attn::rocm::specialize;
use cdna_profile::Tag;
use cdna_profile::waits::waits;

use crate::call::Kernel;
use crate::measure::with_flags;
use crate::parse;
use crate::profiles;
use crate::tests::clang;

/// The tile that the registry selects.
fn selected(options: &str) -> Selection {
    let arch = Arch::gfx950();
    let shape = parse(&format!("--kv fp8 {options}")).shape.resolve(&arch).unwrap();
    specialize::select(&shape.problem(capacity(&shape.request(), &arch).unwrap()), &arch).unwrap()
}

/// Static counts of the whole binary, against those of AMD's FlyDSL tile of the same shape (for the lean tile a fifth fewer): shape, most VALU
/// instructions and conversions together.
#[test]
fn fp8_binaries_are_small() {
    if !clang() {
        println!("SKIPPED: no clang of version 20 or newer");
        return;
    }
    let shapes = [
        ("--query-len 4", 1180 + 97),
        ("--query-len 4 --scales per-token", (1343 + 97) * 4 / 5),
        ("--page-size 64", 489 + 25),
        ("--page-size 16", 501 + 25),
        ("--head-dim 256 --q-heads 8", 672 + 41),
    ];
    for (options, most) in shapes {
        let binary = Kernel::compile(selected(options), &[]).unwrap().static_counts().unwrap();
        println!("{options}: {binary:?}");
        assert!(binary.valu + binary.conversions <= most, "{options}: more than {most}: {binary:?}");
        assert!(binary.registers <= 256 && (binary.spilled, binary.scratch_bytes) == (0, 0), "{options}: {binary:?}");
    }
}

/// What the lean FP8 verify tile and staged scales do to a steady tile.
#[test]
fn per_token_tiles_are_lean() {
    if !clang() {
        println!("SKIPPED: no clang of version 20 or newer");
        return;
    }
    let arch = Arch::gfx950();
    for (query_len, barriers) in [(4, [8.0, 2.0]), (1, [2.0, 2.0])] {
        let args = parse(&format!("--kv fp8 --scales per-token --query-len {query_len} --context 8192"));
        let profiles = profiles(&args.shape.resolve(&arch).unwrap(), &arch, None).unwrap();
        let [generic, selected] = profiles.as_slice() else { panic!("{query_len}: the generic tile is selected") };
        let ([before, after], [generic, selected]) = ([&generic.tile, &selected.tile], [&generic.binary, &selected.binary]);
        assert_eq!([before.barriers, after.barriers], barriers);
        assert!(after.valu < before.valu && after.vmem < before.vmem && after.instructions < before.instructions, "{before:?} {after:?}");
        assert!(selected.registers < generic.registers && selected.registers <= 256, "{selected:?}");
        // A thread loads its token's two scales; without, lanes of a row load them all.
        let scales = |tag| [before, after].map(|tile| tile.loaded[&tag].total());
        assert_eq!([Tag::KeyScales, Tag::ValueScales].map(scales), [[4096.0, 256.0]; 2]);
        assert_eq!([Tag::Key, Tag::Value].map(|tag| after.drained.get(&tag)), [None; 2]);
    }
}

/// Waits for scales leave all of V and of the next K in flight, and in the prologue K of the first tile; there, without the flag, they do not.
#[test]
fn waits_for_scales_leave_k_and_v_in_flight() {
    if !clang() {
        println!("SKIPPED: no clang of version 20 or newer");
        return;
    }
    const TILES: usize = 8;
    const LOADS: usize = 8;
    let arch = Arch::gfx950();
    for query_len in [1, 4] {
        let selection = selected(&format!("--scales per-token --query-len {query_len}"));
        for after_q in [true, false] {
            let mut flags = *selection.flags();
            flags.fp8_scales_after_q = after_q;
            let kernel = Kernel::compile(with_flags(&selection, flags, &arch), &[]).unwrap();
            let run = kernel.run(TILES, query_len).unwrap();
            for wave in waits(&kernel.module.program, &run.trace, &run.tags) {
                let for_scales =
                    wave.iter().filter(|wait| [Tag::KeyScales, Tag::ValueScales].iter().any(|tag| wait.forced.contains_key(tag)));
                let left: Vec<_> =
                    for_scales.map(|wait| [Tag::Key, Tag::Value].map(|tag| wait.left.get(&tag).copied().unwrap_or(0))).collect();
                let steady = left.iter().filter(|&&left| left == [LOADS, LOADS]).count();
                let first = left.len() - steady;
                assert!(steady >= TILES && first > 0, "{query_len} {after_q}: {left:?}");
                let expected = if after_q { LOADS } else { 0 };
                assert!(left[..first].iter().all(|left| left[0] == expected || !after_q), "{query_len} {after_q}: {left:?}");
                assert!(after_q || left[first - 1] == [0, 0], "{query_len}: {left:?}");
            }
        }
    }
}
