//! One small call of every kernel variant, its tables on the device, where the planner runs too.

use candle::Result;
use candle_paged_attn::cuda::Tables;
use candle_paged_attn::registry::{Arch, ArchName, Selection};
use rayon::prelude::*;
use testkit::cases::CaseSpec;

use crate::cases::{all_right, check, on_archs};
use crate::cuts::{self, Cut};
use crate::require_nvrtc;

/// Checks calls; on an H200 `is` what is chosen for them.
#[track_caller]
fn check_all(specs: &[CaseSpec], is: impl Fn(&Selection) -> bool + Sync) {
    let check = |(arch, spec): &(Arch, &CaseSpec)| -> Result<()> {
        check(arch, spec, Tables::Device, |selection| arch.name != ArchName::Sm90 || is(selection))
    };
    all_right(on_archs(specs).par_iter().map(check).collect());
}

#[track_caller]
fn check_cuts(cuts: &[Cut]) {
    for Cut { name, is, specs } in cuts {
        println!("{name}");
        check_all(specs, |selection| selection.key.cuda.is_some_and(|cut| is(&cut)));
    }
}

#[test]
fn decode_tiles() {
    require_nvrtc!();
    check_cuts(&cuts::decode());
}

#[test]
fn verify_tiles() {
    require_nvrtc!();
    check_cuts(&cuts::verify());
}

#[test]
fn plain_tiles() {
    require_nvrtc!();
    check_all(&cuts::plain(), |selection| selection.key.cuda.is_none());
}

#[test]
fn reducers() {
    require_nvrtc!();
    for (spec, warps) in cuts::reducers() {
        let wanted = format!("a reducer of {warps} warp");
        check_all(&[spec], |selection| selection.reason.to_string().contains(&wanted));
    }
}
