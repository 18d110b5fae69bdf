//! Two tile groups a workgroup (DUAL_GROUP): against float64, against one group, and what their waves execute.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::{Arch, ArchName};
use cdna_sim::{Class, CodeObject};
use testkit::cases::{CaseSpec, Poison, Scales};
use testkit::reference::{floats, relative_l2};

use crate::call::{LAYOUTS, TileCall, archs};
use crate::cases::{base, check, check_fp8, fp8};
use crate::compile::{KERNEL, code_object, flags_of, module};
use crate::require_clang;

/// Around tiles, odd and even counts of them, none at all.
const LENS: [i64; 9] = [0, 1, 255, 256, 257, 511, 512, 513, 1027];

#[track_caller]
fn dual(spec: &CaseSpec, arch: &Arch) -> TileCall {
    let call = TileCall::new(spec.build().unwrap(), arch.clone()).unwrap();
    assert!(call.selection.flags().dual_group && call.selection.threads == 512, "{} {spec:?}: not chosen", arch.name);
    call
}

/// One task a row: rows stored directly, partial results, no plan; poison past the context; large scores; ragged and strided batches.
fn situations(shape: &CaseSpec) -> Vec<CaseSpec> {
    let one = CaseSpec { lens: LENS.to_vec(), max_partitions: Some(1), ..shape.clone() };
    vec![
        one.clone(),
        CaseSpec { poison: Poison::Infinity, kv_heads: 2, ..one.clone() },
        CaseSpec { sinks: true, ..one.clone() },
        CaseSpec { plan_free: true, lens: vec![1027, -3, 2048, 300], ..shape.clone() },
        CaseSpec { q_factor: 32.0, lens: vec![257, 1027], ..one.clone() },
        CaseSpec { query_lens: vec![1, 0, 1, 0], lens: vec![700, 300, 513, 0], ..one.clone() },
        CaseSpec { page_strided: true, q_strided: true, kv_heads: 2, per_head: true, lens: vec![300, 900], ..one },
    ]
}

/// Checks all against float64 (FP8: a model of its quantization), and against one group; gives the worst distances.
fn check_all(shapes: &[CaseSpec], arch: &Arch) {
    let (mut exact, mut single, mut calls) = (0f64, 0f64, 0);
    for (shape, layout) in shapes.iter().zip(LAYOUTS.into_iter().cycle()) {
        for spec in situations(shape) {
            calls += 1;
            let spec = CaseSpec { layout, seed: calls, ..spec };
            let call = dual(&spec, arch);
            let fp8 = spec.kv_dtype == KvDtype::Fp8;
            exact = exact.max(if fp8 { check_fp8(spec.clone(), arch, spec.q_factor == 1.0) } else { check(spec.clone(), arch) });
            let [ours, one] = [call.run(), call.generic().run()].map(|outcome| floats(&outcome.unwrap().out).unwrap());
            // P of a tile is quantized against the maximum of the group's tiles so far.
            let (difference, tolerance) = (relative_l2(&ours, &one, 0.0), if fp8 { 3e-2 } else { 4e-3 });
            assert!(difference < tolerance, "{} {spec:?}: {difference:.2e} from one group", arch.name);
            single = single.max(difference);
        }
    }
    println!("{}: {calls} calls, worst relative L2 {exact:.2e}, {single:.2e} from one group", arch.name);
}

#[test]
fn bf16() {
    require_clang!();
    let shapes = [CaseSpec { page_size: 128, ..base() }, base(), CaseSpec { page_size: 64, group: 16, q_dtype: DType::F32, ..base() }];
    archs().iter().for_each(|arch| check_all(&shapes, arch));
    let shapes = [
        CaseSpec { head_dim: 64, page_size: 8, group: 3, ..base() },
        CaseSpec { head_dim: 1024, page_size: 1024, q_dtype: DType::F16, ..base() },
        CaseSpec { head_dim: 512, page_size: 32, group: 2, ..base() },
    ];
    check_all(&shapes, &Arch::gfx950());
}

#[test]
fn fp8_without_token_scales() {
    require_clang!();
    let scalar = |page_size| CaseSpec { page_size, scales: Scales::Scalar, ..fp8() };
    let shapes = [scalar(128), CaseSpec { group: 16, q_dtype: DType::F16, ..fp8() }, CaseSpec { q_dtype: DType::F32, ..scalar(256) }];
    archs().iter().for_each(|arch| check_all(&shapes, arch));
    let shapes =
        [CaseSpec { head_dim: 64, ..scalar(64) }, CaseSpec { head_dim: 192, ..scalar(16) }, CaseSpec { head_dim: 1024, ..scalar(32) }];
    check_all(&shapes, &Arch::gfx950());
}

/// A plan made for a shorter context: a tile past the task, though not past the context, adds nothing.
#[test]
fn plans_of_a_shorter_context() {
    require_clang!();
    for (arch, tiles) in archs().into_iter().flat_map(|arch| [0, 1, 2, 3].map(|tiles| (arch.clone(), tiles))) {
        let mut call = dual(&CaseSpec { lens: vec![1500], max_partitions: Some(1), ..base() }, &arch);
        call.plan.as_mut().unwrap().work[0][2] = tiles;
        let [ours, one] = [call.run(), call.generic().run()].map(|outcome| outcome.unwrap());
        assert!(relative_l2(&floats(&ours.out).unwrap(), &floats(&one.out).unwrap(), 0.0) < 4e-3, "{} {tiles} tiles", arch.name);
        let difference = floats(&ours.lse).unwrap().iter().zip(floats(&one.lse).unwrap()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(difference < 1e-4 || tiles == 0, "{} {tiles} tiles: {difference}", arch.name);
    }
}

/// All eight waves pass as many barriers and multiply as often, whether the tiles are odd or even in number.
#[test]
fn groups_are_in_step() {
    require_clang!();
    for (arch, shape) in archs().into_iter().flat_map(|arch| [base(), fp8()].map(|shape| (arch.clone(), shape))) {
        for tiles in 0..=5 {
            let mut call = dual(&CaseSpec { lens: vec![tiles * 256 - tiles.min(1) * 9], plan_free: true, ..shape.clone() }, &arch);
            call.traced = true;
            let trace = call.run().unwrap().trace.unwrap();
            let program = module(&arch.name.to_string(), &flags_of(&call.selection)).program.clone();
            let count =
                |wave: usize, class: Class| trace.waves[wave].iter().filter(|e| program.insts[e.inst as usize].class == class).count();
            let counts = (0..8).map(|wave| [Class::Barrier, Class::Matrix].map(|class| count(wave, class))).collect::<Vec<_>>();
            assert!(counts.iter().all(|of| *of == counts[0]), "{} {tiles} tiles: {counts:?}", arch.name);
            let rounds = (tiles as usize).div_ceil(2);
            assert!(counts[0][0] <= 5 + 2 * rounds && (counts[0][1] > 0) == (tiles > 0), "{} {tiles} tiles: {counts:?}", arch.name);
        }
    }
}

/// Groups that run as many tiles as there are for each do not meet at their barriers, and the simulator says so.
#[test]
fn uneven_groups_are_found_out() {
    require_clang!();
    for (arch, shape) in archs().into_iter().flat_map(|arch| [base(), fp8()].map(|shape| (arch.clone(), shape))) {
        for tiles in 1..=4 {
            let call = dual(&CaseSpec { lens: vec![tiles * 256], plan_free: true, ..shape.clone() }, &arch);
            let uneven = call.run_with(&["-DPA_TEST_UNEVEN_GROUPS"]);
            match uneven {
                Ok(_) => assert!(tiles % 2 == 0, "{} {tiles} tiles: groups of a different number of tiles pass", arch.name),
                Err(e) => assert!(tiles % 2 == 1 && e.to_string().contains("barrier"), "{} {tiles} tiles: {e}", arch.name),
            }
        }
    }
}

/// Eight waves: at most 256 registers each, nothing spilled, LDS as the registry counts it.
#[test]
fn registers_and_lds() {
    require_clang!();
    println!("| arch | KV | head_dim | page | q | layout | VGPRs | LDS bytes |");
    println!("|---|---|---|---|---|---|---|---|");
    for (arch, kv_dtype) in archs().into_iter().flat_map(|arch| [KvDtype::Bf16, KvDtype::Fp8].map(|kv| (arch.clone(), kv))) {
        let dims: &[usize] = match (arch.name, kv_dtype) {
            (ArchName::Gfx942, _) => &[128],
            (_, KvDtype::Fp8) => &[64, 128, 192, 1024],
            _ => &[64, 128, 512, 1024],
        };
        for (&head_dim, page_size) in dims.iter().flat_map(|d| [16, 128].map(|p| (d, p))) {
            for (q_dtype, layout) in [(DType::BF16, CacheLayout::Shuffled), (DType::F32, CacheLayout::Vllm)] {
                let spec = CaseSpec { kv_dtype, head_dim, page_size, q_dtype, layout, lens: vec![300], plan_free: true, ..base() };
                let call = TileCall::new(spec.build().unwrap(), arch.clone()).unwrap();
                // Two copies of an F32 query's LDS do not fit at head_dim 1024.
                if !call.selection.flags().dual_group {
                    assert!((head_dim, q_dtype) == (1024, DType::F32), "{} {spec:?}", arch.name);
                    continue;
                }
                let object = CodeObject::parse(&code_object(&arch.name.to_string(), &flags_of(&call.selection))).unwrap();
                let kernel = object.kernel_named(KERNEL).unwrap();
                let (registers, _) = kernel.register_file();
                let (lds, said) = (kernel.group_segment_size, call.selection.lds_bytes);
                let row = format!("| {} | {} | {head_dim} | {page_size} | {q_dtype:?} | {} |", arch.name, kv_dtype.name(), layout.name());
                println!("{row} {registers} | {lds} |");
                assert!(registers <= 256 && kernel.private_segment_size == 0, "{row} {registers} VGPRs");
                assert!(lds <= said && said <= arch.lds_bytes, "{row} {lds} of {said} bytes of LDS");
            }
        }
    }
}
