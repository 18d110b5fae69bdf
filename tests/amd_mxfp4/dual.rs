//! Two tile groups a workgroup (DUAL_GROUP): against float64, against one group, and what their waves execute.

use candle::DType;
use candle_paged_attn::cache::CacheLayout;
use candle_paged_attn::registry::Arch;
use cdna_sim::Class;
use testkit::cases::{CaseSpec, Poison};
use testkit::reference::{floats, relative_l2};

use crate::call::TileCall;
use crate::cases::base;
use crate::compile::{KERNEL, flags_of, module};
use crate::require_clang;

#[track_caller]
fn dual(spec: &CaseSpec) -> TileCall {
    let call = TileCall::new(spec.build().unwrap(), Arch::gfx950()).unwrap();
    assert!(call.selection.flags().dual_group && call.selection.threads == 512, "{spec:?}: not chosen");
    call
}

/// One task a row: stored directly, partial results, no plan; tiles odd and even in number, waves and groups without any token; ragged and
/// strided batches.
fn situations(shape: &CaseSpec) -> Vec<CaseSpec> {
    let one = CaseSpec { max_partitions: Some(1), ..shape.clone() };
    vec![
        CaseSpec { lens: vec![0, 1, 64, 255, 256, 257, 449, 511, 512, 513, 1027], ..one.clone() },
        CaseSpec { lens: vec![257, 700, 0], sinks: true, kv_heads: 2, poison: Poison::Infinity, ..one.clone() },
        CaseSpec { lens: vec![1027, -3, 2048, 300], plan_free: true, ..shape.clone() },
        CaseSpec { lens: vec![257, 1027], q_factor: 32.0, ..one.clone() },
        CaseSpec { query_lens: vec![1, 0, 1, 0], lens: vec![700, 300, 513, 0], ..one.clone() },
        CaseSpec { page_strided: true, q_strided: true, kv_heads: 2, per_head: true, lens: vec![300, 900], ..one },
    ]
}

#[test]
fn calls() {
    require_clang!();
    let page = |page_size| CaseSpec { page_size, ..base() };
    let shapes = [
        page(8),
        CaseSpec { group: 16, ..page(16) },
        CaseSpec { q_dtype: DType::F32, ..page(128) },
        CaseSpec { group: 1, ..page(256) },
        CaseSpec { q_dtype: DType::F16, ..page(1024) },
        CaseSpec { head_dim: 64, ..page(32) },
        CaseSpec { head_dim: 192, ..page(64) },
        CaseSpec { head_dim: 256, ..page(128) },
    ];
    let (mut exact, mut single, mut calls) = (0f64, 0f64, 0);
    for (shape, layout) in shapes.iter().zip([CacheLayout::Hnd, CacheLayout::Nhd].into_iter().cycle()) {
        for spec in situations(shape) {
            calls += 1;
            let call = dual(&CaseSpec { layout, seed: calls, ..spec.clone() });
            let expected = call.case.expected().unwrap();
            let [ours, one] =
                [call.run(), call.clone().one_group().run()].map(|outcome| outcome.unwrap_or_else(|e| panic!("{spec:?}: {e}")));
            let off = expected.compare(&ours.out, Some(&ours.lse), 1e-2, 1e-3).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
            let difference = relative_l2(&floats(&ours.out).unwrap(), &floats(&one.out).unwrap(), 0.0);
            assert!(difference < 4e-3, "{spec:?}: {difference:.2e} from one group");
            (exact, single) = (exact.max(off), single.max(difference));
        }
    }
    println!("{calls} calls, worst relative L2 {exact:.2e}, {single:.2e} from one group");
}

/// A plan made for a shorter context: a tile past the task, though not past the context, adds nothing.
#[test]
fn plans_of_a_shorter_context() {
    require_clang!();
    for tiles in 0..=3 {
        let mut call = dual(&CaseSpec { lens: vec![1500], max_partitions: Some(1), ..base() });
        call.plan.as_mut().unwrap().work[0][2] = tiles;
        let [ours, one] = [call.run(), call.clone().one_group().run()].map(|outcome| floats(&outcome.unwrap().out).unwrap());
        assert!(relative_l2(&ours, &one, 0.0) < 4e-3, "{tiles} tiles");
    }
}

/// Barriers are around the loop alone: as many for all eight waves, however many tiles there are. Registers are half a SIMD's, LDS is what the
/// registry says.
#[test]
fn groups_meet_after_the_loop() {
    require_clang!();
    for (head_dim, page_size) in [(64, 128), (128, 16), (128, 128), (192, 16), (256, 128)] {
        let mut barriers = vec![];
        for tiles in 0..=4 {
            let lens = vec![tiles * 256 - tiles.min(1) * 100];
            let mut call = dual(&CaseSpec { head_dim, page_size, lens, plan_free: true, ..base() });
            call.traced = true;
            let trace = call.run().unwrap().trace.unwrap();
            let module = module("gfx950", &flags_of(&call.selection));
            let of_wave = |wave: &Vec<_>| {
                wave.iter().filter(|e: &&cdna_sim::Event| module.program.insts[e.inst as usize].class == Class::Barrier).count()
            };
            barriers.extend(trace.waves.iter().map(of_wave));
            let kernel = module.kernel(KERNEL).unwrap();
            let (registers, _) = kernel.register_file();
            assert!(registers <= 256 && kernel.private_segment_size == 0, "head_dim {head_dim}: {registers} VGPRs");
            assert_eq!(kernel.group_segment_size + call.selection.staged_bytes, call.selection.lds_bytes);
        }
        assert!(barriers.len() == 5 * 8 && barriers.iter().all(|&n| n == barriers[0]), "head_dim {head_dim}: {barriers:?}");
    }
}
