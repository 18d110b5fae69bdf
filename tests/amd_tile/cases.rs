//! Calls against the float64 answer.

use candle::{DType, Device, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::{Arch, ArchName, Problem, ScaleMode, select};
use cdna_sim::{Class, CodeObject, Counters};
use testkit::assert_same;
use testkit::bits::bits;
use testkit::cases::{CaseSpec, Poison, Scales};
use testkit::quantized::{self, Fp8};
use testkit::reference::floats;

use crate::call::{LAYOUTS, TileCall, archs};
use crate::compile::{KERNEL, code_object, flags_of, module};
use crate::require_clang;

/// A BF16 call with little work.
pub fn base() -> CaseSpec {
    CaseSpec {
        kv_heads: 1,
        group: 8,
        head_dim: 128,
        page_size: 16,
        layout: CacheLayout::Shuffled,
        kv_dtype: KvDtype::Bf16,
        q_dtype: DType::BF16,
        lens: vec![300],
        ..CaseSpec::default()
    }
}

#[track_caller]
pub fn check(spec: CaseSpec, arch: &Arch) -> f64 {
    let context = format!("{} {spec:?}", arch.name);
    let tolerance = match (spec.kv_dtype, spec.q_dtype) {
        (KvDtype::F16, DType::F16 | DType::F32) => 4e-3,
        (KvDtype::Fp8, _) => 0.08,
        _ => 8e-3,
    };
    let case = spec.build().unwrap();
    let expected = case.expected().unwrap();
    let call = TileCall::new(case, arch.clone()).unwrap();
    let outcome = call.run().unwrap_or_else(|e| panic!("{context}: {e}"));
    let lse_tolerance = if spec.kv_dtype == KvDtype::Fp8 { 0.05 } else { 1e-3 };
    expected.compare(&outcome.out, Some(&outcome.lse), tolerance, lse_tolerance).unwrap_or_else(|e| panic!("{context}: {e}"))
}

/// An FP8 call: near the float64 model of its quantization, and at `exact` also near the exact answer.
#[track_caller]
pub fn check_fp8(spec: CaseSpec, arch: &Arch, exact: bool) -> f64 {
    let context = format!("{} {spec:?}", arch.name);
    let case = spec.build().unwrap();
    let call = TileCall::new(case, arch.clone()).unwrap();
    let outcome = call.run().unwrap_or_else(|e| panic!("{context}: {e}"));
    let case = &call.case;
    let groups = if call.selection.flags().dual_group { 2 } else { 1 };
    let how = (&*call.tasks(), Fp8 { fnuz: arch.name == ArchName::Gfx942, groups });
    let caches = (&case.key_cache, &case.value_cache);
    let model = quantized::attention(&case.q, caches, &case.block_tables, &case.context_lens, &case.options, how).unwrap();
    if exact {
        case.expected().unwrap().compare(&outcome.out, None, 0.08, 0.0).unwrap_or_else(|e| panic!("exact: {context}: {e}"));
    }
    model.compare(&outcome.out, Some(&outcome.lse), 1e-2, 1e-3).unwrap_or_else(|e| panic!("{context}: {e}"))
}

#[track_caller]
fn check_all_fp8(specs: Vec<CaseSpec>) {
    for arch in archs() {
        let check = |(i, s): (usize, &CaseSpec)| check_fp8(CaseSpec { seed: i as u64, ..s.clone() }, &arch, s.q_factor == 1.0);
        let worst = specs.iter().enumerate().map(check).fold(0.0, f64::max);
        println!("{}: {} FP8 calls, worst relative L2 {worst:.2e} against the model", arch.name, specs.len());
    }
}

#[track_caller]
fn check_all(specs: Vec<CaseSpec>) {
    for arch in archs() {
        let worst = specs.iter().enumerate().map(|(i, s)| check(CaseSpec { seed: i as u64, ..s.clone() }, &arch)).fold(0.0, f64::max);
        println!("{}: {} calls, worst relative L2 {worst:.2e}", arch.name, specs.len());
    }
}

/// The layouts in turn.
fn layouts(specs: impl IntoIterator<Item = CaseSpec>) -> Vec<CaseSpec> {
    specs.into_iter().zip(LAYOUTS.into_iter().cycle()).map(|(spec, layout)| CaseSpec { layout, ..spec }).collect()
}

#[test]
fn context_lengths() {
    require_clang!();
    let lens = vec![0, 1, 255, 256, 257, 1027, -3];
    check_all(vec![
        CaseSpec { lens: lens.clone(), poison: Poison::Infinity, ..base() },
        CaseSpec { lens: lens.clone(), plan_free: true, ..base() },
        CaseSpec { lens: lens.clone(), max_partitions: Some(1), ..base() },
        CaseSpec { lens: lens.clone(), max_partitions: Some(1), sinks: true, ..base() },
        CaseSpec { lens, query_lens: vec![4], workgroup_budget: Some(1), ..base() },
    ]);
}

#[test]
fn pages_and_layouts() {
    require_clang!();
    let pages = [8, 16, 32, 64, 128, 256, 512, 1024];
    let both = |page_size| LAYOUTS.map(|layout| CaseSpec { page_size, layout, lens: vec![600], kv_heads: 2, ..base() });
    check_all(pages.into_iter().flat_map(both).collect());
}

#[test]
fn head_dims_and_m_tiles() {
    require_clang!();
    let dims =
        [(64, 1), (64, 4), (128, 2), (128, 3), (128, 4), (192, 1), (192, 2), (256, 1), (256, 4), (512, 1), (512, 2), (1024, 1), (1024, 2)];
    // One task of two tiles.
    let tiles = CaseSpec { group: 16, lens: vec![270], workgroup_budget: Some(1), ..base() };
    check_all(layouts(dims.map(|(head_dim, m)| CaseSpec { head_dim, query_lens: vec![m], ..tiles.clone() })));
}

#[test]
fn groups_and_queries() {
    require_clang!();
    let shapes = [(1, 1), (2, 3), (3, 8), (5, 1), (7, 7), (16, 1), (16, 8), (32, 1), (32, 8), (12, 2)];
    check_all(shapes.map(|(group, query)| CaseSpec { group, query_lens: vec![query], lens: vec![258, 5], ..base() }).to_vec());
}

#[test]
fn dtypes() {
    require_clang!();
    let mut specs = vec![];
    for kv_dtype in [KvDtype::Bf16, KvDtype::F16] {
        for q_dtype in [DType::BF16, DType::F16, DType::F32] {
            for (q_factor, max_partitions) in [(1.0, None), (32.0, Some(1))] {
                specs.push(CaseSpec { kv_dtype, q_dtype, q_factor, max_partitions, query_lens: vec![3], lens: vec![530], ..base() });
            }
        }
    }
    check_all(specs);
}

#[test]
fn windows() {
    require_clang!();
    let windows = [1, 2, 17, 256, 300, 1000, usize::MAX >> 1];
    let specs = windows.map(|w| CaseSpec { window: Some(w), query_lens: vec![4], lens: vec![1027, 3, 260], page_size: 32, ..base() });
    let single = windows.map(|w| CaseSpec { window: Some(w), lens: vec![1027, 1, 512], poison: Poison::Infinity, ..base() });
    check_all([specs, single].concat());
}

#[test]
fn scores() {
    require_clang!();
    check_all(vec![
        CaseSpec { softcap: Some(5.0), ..base() },
        CaseSpec { softcap: Some(30.0), q_factor: 32.0, ..base() },
        CaseSpec { softcap: Some(1e6), ..base() },
        CaseSpec { softcap: Some(1e-3), ..base() },
        CaseSpec { softmax_scale: Some(-0.1), ..base() },
        CaseSpec { softmax_scale: Some(0.0), ..base() },
        CaseSpec { softmax_scale: Some(-0.3), softcap: Some(2.0), sinks: true, ..base() },
        CaseSpec { q_factor: 32.0, ..base() },
        CaseSpec { q_factor: 32.0, query_lens: vec![4], group: 16, ..base() },
    ]);
}

#[test]
fn batches() {
    require_clang!();
    check_all(vec![
        CaseSpec { query_lens: vec![1, 4, 0, 9], lens: vec![300, 4, 7, 600], ..base() },
        CaseSpec { query_lens: vec![2, 5, 1], lens: vec![1, 513, 256], group: 16, max_partitions: Some(1), ..base() },
        CaseSpec { per_head: true, kv_heads: 3, lens: vec![300, 700, 0], ..base() },
        CaseSpec { per_head: true, kv_heads: 2, query_lens: vec![2, 1], lens: vec![300, 520], max_partitions: Some(1), ..base() },
        CaseSpec { per_head: true, kv_heads: 2, lens: vec![300, 520], plan_free: true, window: Some(40), ..base() },
        CaseSpec { page_strided: true, q_strided: true, kv_heads: 2, lens: vec![300, 520], signed_tables: false, ..base() },
        CaseSpec { kv_heads: 4, lens: vec![2000], workgroup_budget: Some(12), ..base() },
    ]);
}

pub fn fp8() -> CaseSpec {
    CaseSpec { kv_dtype: KvDtype::Fp8, ..base() }
}

/// Scales up to 3 a token make scores three times as large as real caches do, and with them what Q loses in FP8: the softmax scale makes up
/// for it.
pub fn scaled(scales: Scales, spec: CaseSpec) -> CaseSpec {
    let softmax_scale = (scales == Scales::PerToken).then(|| 0.5 / (spec.head_dim as f32).sqrt());
    CaseSpec { scales, softmax_scale, ..spec }
}

const SCALES: [Scales; 4] = [Scales::None, Scales::Scalar, Scales::ScalarTensor, Scales::PerToken];

#[test]
fn fp8_scales_and_dtypes() {
    require_clang!();
    let mut specs = vec![];
    for scales in SCALES {
        for (q_dtype, q_factor) in [(DType::BF16, 1.0), (DType::BF16, 32.0), (DType::F16, 1.0), (DType::F32, 32.0)] {
            specs.push(scaled(scales, CaseSpec { q_dtype, q_factor, lens: vec![700, 3], ..fp8() }));
            let verify = CaseSpec { query_lens: vec![4], max_partitions: Some(1), lens: vec![700, 2], ..fp8() };
            specs.push(scaled(scales, CaseSpec { q_dtype, q_factor, ..verify }));
        }
    }
    check_all_fp8(specs);
}

#[test]
fn fp8_shapes() {
    require_clang!();
    let tiles = CaseSpec { group: 16, lens: vec![300], workgroup_budget: Some(1), ..fp8() };
    let mut specs = vec![];
    for (i, head_dim) in [64, 128, 192, 256, 512, 1024].into_iter().enumerate() {
        let scales = if i % 2 == 0 { Scales::PerToken } else { Scales::Scalar };
        specs.push(scaled(scales, CaseSpec { head_dim, query_lens: vec![1 + i % 4], ..tiles.clone() }));
    }
    for page_size in [16, 32, 64, 128, 256, 1024] {
        let spec = CaseSpec { page_size, kv_heads: 2, lens: vec![600], poison: Poison::Infinity, ..fp8() };
        specs.push(scaled(Scales::PerToken, spec));
    }
    check_all_fp8(layouts(specs));
}

#[test]
fn fp8_context_lengths() {
    require_clang!();
    let lens = vec![0, 1, 255, 256, 257, 1027, -3];
    let one_slot = CaseSpec { lens, workgroup_budget: Some(1), ..fp8() };
    let with = |scales, query, window| scaled(scales, CaseSpec { query_lens: vec![query], window, ..one_slot.clone() });
    let mut specs = vec![with(Scales::PerToken, 1, None), with(Scales::Scalar, 4, None), with(Scales::PerToken, 3, Some(100))];
    specs.push(CaseSpec { sinks: true, softcap: Some(20.0), ..with(Scales::PerToken, 2, None) });
    specs.push(CaseSpec { plan_free: true, softmax_scale: Some(-0.05), ..with(Scales::Scalar, 1, Some(300)) });
    check_all_fp8(specs);
}

/// The lean verify tile: lengths around its tiles, poison, large scores, what moves its registers, rows split over workgroups.
#[test]
fn lean_fp8_verify() {
    require_clang!();
    let lens = vec![0, 4, 255, 256, 257, 1027, -3];
    let shape = scaled(Scales::PerToken, CaseSpec { group: 16, query_lens: vec![4], page_size: 128, lens, ..fp8() });
    let specs = layouts([
        CaseSpec { poison: Poison::NaN, ..shape.clone() },
        CaseSpec { workgroup_budget: Some(1), group: 12, ..shape.clone() },
        CaseSpec { max_partitions: Some(1), q_dtype: DType::F16, group: 8, kv_heads: 2, ..shape.clone() },
        CaseSpec { plan_free: true, q_dtype: DType::F32, ..shape.clone() },
        CaseSpec { q_factor: 32.0, workgroup_budget: Some(1), sinks: true, ..shape.clone() },
        CaseSpec { lens: vec![259, 514, 258], group: 32, q_strided: true, ..shape.clone() },
        CaseSpec { lens: vec![300, 7, 600, 4], query_lens: vec![4, 1, 3, 0], page_strided: true, ..shape.clone() },
        CaseSpec { lens: vec![300, 520], per_head: true, kv_heads: 2, softmax_scale: Some(1e-3), ..shape.clone() },
    ]);
    for spec in &specs {
        let call = TileCall::new(spec.build().unwrap(), Arch::gfx950()).unwrap();
        assert!(call.selection.flags().fp8_mtp4_lean, "{spec:?}");
    }
    let check = |(i, s): (usize, &CaseSpec)| check_fp8(CaseSpec { seed: i as u64, ..s.clone() }, &Arch::gfx950(), s.q_factor == 1.0);
    println!("worst relative L2 {:.2e} against the model", specs.iter().enumerate().map(check).fold(0.0, f64::max));
}

/// Scores so large that F32 keeps no fractions of them: a row is all one token's, whatever the maximum was rounded by.
#[test]
fn scores_past_the_fractions_of_f32() {
    require_clang!();
    let long = |spec| CaseSpec { group: 16, page_size: 128, lens: vec![600, 256, 4], ..spec };
    for arch in archs() {
        for (seed, scale) in [1e5, 1e6, 1e7, 1e8, 1e9, 1e20].into_iter().enumerate() {
            let with = |query, spec| CaseSpec { seed: seed as u64, softmax_scale: Some(scale), query_lens: vec![query], ..long(spec) };
            for query in [1, 4] {
                check_fp8(CaseSpec { scales: Scales::PerToken, ..with(query, fp8()) }, &arch, false);
                check_fp8(with(query, fp8()), &arch, false);
                check(with(query, base()), &arch);
            }
        }
    }
    // One huge element of Q does the same.
    let mut case = long(CaseSpec { query_lens: vec![4], ..base() }).build().unwrap();
    let huge = Tensor::full(1e30f32, (12, 16, 1), &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
    case.q = Tensor::cat(&[&huge, &case.q.narrow(2, 1, 127).unwrap()], 2).unwrap();
    let expected = case.expected().unwrap();
    let outcome = TileCall::new(case, Arch::gfx950()).unwrap().run().unwrap();
    expected.compare(&outcome.out, Some(&outcome.lse), 8e-3, 1e-3).unwrap();
}

/// Byte offsets past 2^32, page ids past 65,535.
#[test]
fn caches_of_many_gigabytes() {
    require_clang!();
    for spec in [CaseSpec { lens: vec![60, 5], ..base() }, CaseSpec { lens: vec![60, 5], page_size: 32, query_lens: vec![2], ..fp8() }] {
        let case = spec.build().unwrap();
        for arch in archs() {
            let expected = case.expected().unwrap();
            let mut call = TileCall::new(case.clone(), arch).unwrap();
            let near = call.run().unwrap();
            call.spread = Some((70_000, 300_000));
            let far = call.run().unwrap();
            expected.compare(&far.out, Some(&far.lse), 0.08, 0.05).unwrap();
            assert_same!(bits(&near.out), bits(&far.out));
        }
    }
}

/// The tests above can fail: without the mask of V, what the cache holds past the context comes out of the kernel.
#[test]
fn without_the_mask_of_v_poison_gets_through() {
    require_clang!();
    // FP8 has no infinity.
    for (kv_dtype, poison) in [(KvDtype::Bf16, Poison::NaN), (KvDtype::Bf16, Poison::Infinity), (KvDtype::Fp8, Poison::NaN)] {
        let per_token = [(1, None, Scales::PerToken), (4, None, Scales::PerToken)];
        let plain = [(1, None, Scales::None), (4, None, Scales::None), (1, Some(20), Scales::None)];
        let per_token = per_token.into_iter().filter(|_| kv_dtype == KvDtype::Fp8);
        for (query_len, window, scales) in plain.into_iter().chain(per_token) {
            let page_size = if scales == Scales::PerToken { 128 } else { 16 };
            let spec = CaseSpec { kv_dtype, poison, query_lens: vec![query_len], window, lens: vec![300], page_size, ..base() };
            let case = scaled(scales, spec.clone()).build().unwrap();
            let expected = case.expected().unwrap();
            for arch in archs() {
                let call = TileCall::new(case.clone(), arch).unwrap();
                expected.compare(&call.run().unwrap().out, None, 0.08, 0.0).unwrap();
                let unmasked = call.run_with(&["-DPA_TEST_NO_V_MASK"]).unwrap();
                assert!(expected.compare(&unmasked.out, None, 0.08, 0.0).is_err(), "{} {spec:?}", call.arch.name);
            }
        }
    }
}

/// A plan made for a longer context runs no tile past the context.
#[test]
fn plans_of_a_longer_context() {
    require_clang!();
    for arch in archs() {
        let case = CaseSpec { lens: vec![300, 5, 0], max_partitions: Some(1), ..base() }.build().unwrap();
        let expected = case.expected().unwrap();
        let mut call = TileCall::new(case, arch).unwrap();
        let plan = call.plan.as_mut().unwrap();
        plan.work.iter_mut().for_each(|record| record[2] += 3);
        let outcome = call.run().unwrap();
        expected.compare(&outcome.out, Some(&outcome.lse), 8e-3, 1e-3).unwrap();
    }
}

/// 14 dwords of arguments preloaded into scalar registers, for every KV dtype; the entry for firmware that does not preload; and no preload
/// where it is switched off. The LSE only where it is asked for.
#[test]
fn preloaded_arguments() {
    require_clang!();
    let case = CaseSpec { lens: vec![300, 20], max_partitions: Some(1), ..base() }.build().unwrap();
    let mut call = TileCall::new(case, Arch::gfx950()).unwrap();
    assert_eq!(call.selection.key.flags.kernarg_preload, 16);
    let preloaded = call.run().unwrap();
    call.preload = false;
    let loaded = call.run().unwrap();
    assert_same!(bits(&preloaded.out), bits(&loaded.out));
    call.wants_lse = false;
    let alone = call.run().unwrap();
    assert_same!(bits(&preloaded.out), bits(&alone.out));
    assert!(floats(&alone.lse).unwrap().iter().all(|x| x.is_nan()), "the LSE was not asked for");
    call.preload = true;
    for spec in [base(), CaseSpec { query_lens: vec![4], group: 16, page_size: 128, ..base() }, fp8()] {
        let mut call = TileCall::new(CaseSpec { lens: vec![300], ..spec }.build().unwrap(), Arch::gfx950()).unwrap();
        let length = |call: &TileCall| module("gfx950", &flags_of(&call.selection)).kernel(KERNEL).unwrap().preload_length;
        assert_eq!(length(&call), 14);
        let preloaded = call.run().unwrap();
        call.selection.key.flags.kernarg_preload = 0;
        assert_eq!(length(&call), 0);
        assert_same!(bits(&preloaded.out), bits(&call.run().unwrap().out));
    }
}

/// Registers and LDS of generic specializations. No spills up to head_dim 256; LDS as the registry counts it.
#[test]
fn registers_and_lds() {
    require_clang!();
    println!("| arch | KV | scales | head_dim | M-tiles | VGPRs | scratch bytes | LDS bytes | waves a SIMD |");
    println!("|---|---|---|---|---|---|---|---|---|");
    let all = [1, 2, 3, 4].as_slice();
    let modes = [
        (KvDtype::Bf16, ScaleMode::None, all),
        (KvDtype::F16, ScaleMode::None, &[1, 4]),
        (KvDtype::Fp8, ScaleMode::Scalar, &[1, 4]),
        (KvDtype::Fp8, ScaleMode::PerToken, all),
    ];
    for (kv_dtype, scales, shown) in modes {
        for (head_dim, &query_len) in [64, 128, 192, 256, 512, 1024].into_iter().flat_map(|d| shown.iter().map(move |m| (d, m))) {
            for arch in archs() {
                let problem = Problem { head_dim, kv_dtype, scales, query_len, ..Problem::default() };
                let selection = select(&problem, &arch).unwrap();
                let m_tiles = selection.key.m_tiles;
                let repeats = all.len() > shown.len() && ![128, 256].contains(&head_dim);
                if m_tiles < query_len || repeats {
                    continue;
                }
                let object = CodeObject::parse(&code_object(&arch.name.to_string(), &flags_of(&selection))).unwrap();
                let kernel = object.kernel_named(KERNEL).unwrap();
                let (registers, _) = kernel.register_file();
                let (scratch, lds) = (kernel.private_segment_size, kernel.group_segment_size);
                let row = format!("| {} | {} | {scales:?} | {head_dim} | {m_tiles} |", arch.name, kv_dtype.name());
                println!("{row} {registers} | {scratch} | {lds} | {} |", (512 / registers).min(8));
                assert!(lds <= selection.lds_bytes, "{row} {lds} of {} bytes of LDS", selection.lds_bytes);
                assert!(scratch == 0 || head_dim > 256, "{row} spills {scratch} bytes");
            }
        }
    }
}

/// What one more tile costs, per wave: two barriers an M-tile (in all where M-tiles share them), K and V read once for all M-tiles, few LDS
/// bank conflicts, no scratch.
#[test]
fn a_steady_tile() {
    require_clang!();
    println!(
        "| arch | KV | scales | M-tiles | tile | instructions | VALU | MFMA | LDS | bank conflict cycles | barriers | global bytes of the workgroup |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    let modes = [(KvDtype::Bf16, Scales::None), (KvDtype::Fp8, Scales::Scalar), (KvDtype::Fp8, Scales::PerToken)];
    for (kv_dtype, scales) in modes {
        for m_tiles in [1, 4] {
            for (arch, generic) in archs().into_iter().flat_map(|arch| [(arch.clone(), true), (arch, false)]) {
                let tuned = !generic && arch.name == ArchName::Gfx950;
                // BF16_MTP_FUSED, FP8_MTP4_LEAN.
                let fused = tuned && m_tiles > 1 && (kv_dtype == KvDtype::Bf16 || scales == Scales::PerToken);
                let run = |tiles: i64| {
                    let spec = CaseSpec { group: 16, page_size: 128, query_lens: vec![m_tiles], lens: vec![256 * tiles], ..base() };
                    let spec = CaseSpec { kv_dtype, scales, workgroup_budget: Some(1), ..spec };
                    let call = TileCall::new(spec.build().unwrap(), arch.clone()).unwrap();
                    assert_eq!(call.selection.key.m_tiles, m_tiles);
                    let call = if generic { call.generic() } else { call };
                    call.run().unwrap().counters
                };
                let (few, more) = (run(4), run(5));
                let per_wave = |count: fn(&Counters) -> u64| (count(&more) - count(&few)) / 4;
                let bytes = more.global_loaded - few.global_loaded;
                let barriers = per_wave(|c| c.class(Class::Barrier));
                let name = if generic { "generic" } else { "chosen" };
                let row = format!("| {} | {} | {scales:?} | {m_tiles} | {name} |", arch.name, kv_dtype.name());
                println!(
                    "{row} {} | {} | {} | {} | {} | {barriers} | {bytes} |",
                    per_wave(Counters::instructions),
                    per_wave(|c| c.class(Class::Vector) + c.class(Class::Transcendental)),
                    per_wave(|c| c.mfma.values().sum()),
                    per_wave(|c| c.lds_accesses),
                    per_wave(|c| c.lds_bank_conflicts),
                );
                assert_eq!(barriers, if fused { 2 } else { 2 * m_tiles as u64 }, "{row}");
                // Lanes of a row load the same scales, where these are not staged.
                let per_token = if scales == Scales::PerToken { 2 * 256 * 4 } else { 0 };
                let scale_bytes = per_token * if tuned { 1 } else { 16 };
                let cache = 2 * 256 * 128 * if kv_dtype == KvDtype::Fp8 { 1 } else { 2 };
                // All lanes of the lean tile load page ids.
                let ids = if fused && kv_dtype == KvDtype::Fp8 { 256 * 4 } else { 2 * 4 };
                assert_eq!(bytes, cache + scale_bytes + ids, "{row}");
                assert_eq!(more.scratch, 0, "{row}");
            }
        }
    }
}
