//! The schedules that switches choose, against the generic tile and the float64 answer.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::Arch;
use cdna_sim::{Class, CodeObject, Counters};
use testkit::assert_same;
use testkit::bits::bits;
use testkit::cases::{CaseSpec, Poison, Scales};
use testkit::reference::{floats, relative_l2};

use crate::call::{LAYOUTS, TileCall, archs};
use crate::cases::{base, fp8, scaled};
use crate::compile::{KERNEL, code_object, flags_of};
use crate::require_clang;

/// How a schedule's results are to agree with the generic tile's.
#[derive(Clone, Copy, PartialEq)]
enum Agreement {
    Bits,
    Rounding,
}

/// The call with the schedule that the registry chooses, which must switch on `flag`, and without any.
#[track_caller]
fn compare(spec: &CaseSpec, arch: &Arch, flag: &str, agreement: Agreement) -> [Counters; 2] {
    let context = format!("{} {flag} {spec:?}", arch.name);
    let call = TileCall::new(spec.build().unwrap(), arch.clone()).unwrap();
    assert!(call.selection.flags().names().contains(&flag), "{context}: not chosen");
    // Two groups (dual.rs) round elsewhere.
    let call = call.one_group();
    let ours = call.run().unwrap_or_else(|e| panic!("{context}: {e}"));
    let generic = call.generic().run().unwrap_or_else(|e| panic!("generic: {context}: {e}"));
    let pairs = [(&ours.out, &generic.out), (&ours.lse, &generic.lse)].map(|(a, b)| (floats(a).unwrap(), floats(b).unwrap()));
    for (a, b) in pairs {
        match agreement {
            Agreement::Bits => assert_eq!(
                a.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                b.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                "{context}"
            ),
            Agreement::Rounding => {
                let finite = |x: &[f64]| x.iter().map(|&x| if x.is_finite() { x } else { 0.0 }).collect::<Vec<_>>();
                assert!(a.iter().zip(&b).all(|(a, b)| a.is_finite() == b.is_finite()), "{context}");
                let difference = relative_l2(&finite(&a), &finite(&b), 0.0);
                assert!(difference < 4e-3, "{context}: {difference:.2e} from the generic tile");
            }
        }
    }
    if spec.kv_dtype == KvDtype::Bf16 {
        let expected = call.case.expected().unwrap();
        expected.compare(&ours.out, Some(&ours.lse), 8e-3, 1e-3).unwrap_or_else(|e| panic!("{context}: {e}"));
    }
    [ours.counters, generic.counters]
}

/// Lengths around tiles, odd and even counts of tiles, one task and many, poison past the context, large scores, direct output.
fn situations(shape: &CaseSpec) -> Vec<CaseSpec> {
    let lens = vec![0, 1, 255, 256, 257, 1027, -3];
    let lens = if shape.query_lens[0] > 1 { lens.into_iter().filter(|&l| l <= 0 || l > 3).chain([4]).collect() } else { lens };
    let one_slot = Some(1);
    vec![
        CaseSpec { lens: lens.clone(), poison: Poison::NaN, ..shape.clone() },
        CaseSpec { lens: lens.clone(), poison: Poison::Infinity, workgroup_budget: one_slot, q_factor: 32.0, ..shape.clone() },
        CaseSpec { lens: lens.clone(), max_partitions: Some(1), kv_heads: 2, ..shape.clone() },
        CaseSpec { lens, plan_free: true, ..shape.clone() },
        CaseSpec { lens: vec![768], workgroup_budget: one_slot, q_strided: true, ..shape.clone() },
        CaseSpec { lens: vec![1000], workgroup_budget: one_slot, page_strided: true, ..shape.clone() },
    ]
}

fn check_all(shapes: &[CaseSpec], archs: &[Arch], flag: &str, agreement: Agreement) {
    for arch in archs {
        let mut calls = 0;
        for (shape, layout) in shapes.iter().zip(LAYOUTS.into_iter().cycle()) {
            for spec in situations(shape) {
                calls += 1;
                compare(&CaseSpec { layout, seed: calls, ..spec }, arch, flag, agreement);
            }
        }
        println!("{} {flag}: {calls} calls", arch.name);
    }
}

fn gfx950() -> [Arch; 1] {
    [Arch::gfx950()]
}

/// Streamed K and V, Q ahead of the page ids: nothing else is computed.
#[test]
fn bf16_decode() {
    require_clang!();
    let shapes = [
        CaseSpec { page_size: 128, ..base() },
        CaseSpec { page_size: 128, group: 16, q_dtype: DType::F32, ..base() },
        CaseSpec { page_size: 32, head_dim: 64, group: 3, ..base() },
        CaseSpec { page_size: 64, head_dim: 256, group: 1, q_dtype: DType::F16, ..base() },
    ];
    check_all(&shapes, &gfx950(), "BF16_DECODE_NT_KV", Agreement::Bits);
    check_all(&[base()], &gfx950(), "DECODE_Q_EARLY", Agreement::Bits);
}

#[test]
fn fp8_decode() {
    require_clang!();
    let shapes = [
        CaseSpec { page_size: 128, scales: Scales::Scalar, ..fp8() },
        scaled(Scales::PerToken, CaseSpec { page_size: 128, group: 5, q_dtype: DType::F16, ..fp8() }),
    ];
    check_all(&shapes, &gfx950(), "FP8_DECODE_NT_V", Agreement::Bits);
    let early = [CaseSpec { page_size: 16, q_dtype: DType::F32, ..fp8() }, CaseSpec { head_dim: 256, page_size: 64, ..fp8() }];
    check_all(&early, &gfx950(), "DECODE_Q_EARLY", Agreement::Bits);
}

/// V before S, then page ids before V, then the next K right after S: nothing else is computed.
#[test]
fn page16_pipe() {
    require_clang!();
    let shapes = [
        base(),
        CaseSpec { head_dim: 64, group: 4, query_lens: vec![4], window: Some(300), ..base() },
        CaseSpec { group: 16, ..fp8() },
        CaseSpec { head_dim: 64, q_dtype: DType::F32, softcap: Some(20.0), ..fp8() },
        scaled(Scales::PerToken, CaseSpec { q_dtype: DType::F16, ..fp8() }),
    ]
    .map(|shape| CaseSpec { page_size: 16, ..shape });
    check_all(&shapes, &gfx950(), "PAGE16_VPIPE", Agreement::Bits);
    check_all(&shapes[..4], &gfx950(), "PAGE16_PAGES_FIRST", Agreement::Bits);
    check_all(&shapes[2..4], &gfx950(), "PAGE16_EARLY_K", Agreement::Bits);
    // One switch after the other.
    for shape in &shapes[..4] {
        let spec = CaseSpec { lens: vec![0, 257, 1027, 512], workgroup_budget: Some(4), ..shape.clone() };
        let mut call = TileCall::new(spec.build().unwrap(), Arch::gfx950()).unwrap().generic();
        let plain = call.run().unwrap();
        for flag in ["PAGE16_VPIPE", "PAGE16_PAGES_FIRST"] {
            assert!(call.selection.key.flags.set(flag));
            let ours = call.run().unwrap();
            assert_same!((bits(&ours.out), bits(&ours.lse)), (bits(&plain.out), bits(&plain.lse)), "{flag} {spec:?}");
        }
    }
}

/// V before S and the next K right after it.
#[test]
fn head256_pipe() {
    require_clang!();
    let shapes = [
        CaseSpec { page_size: 64, ..base() },
        CaseSpec { page_size: 16, group: 3, ..fp8() },
        scaled(Scales::PerToken, CaseSpec { page_size: 128, group: 16, ..fp8() }),
        CaseSpec { kv_dtype: KvDtype::F16, q_dtype: DType::F16, page_size: 32, window: Some(300), ..base() },
    ]
    .map(|shape| CaseSpec { head_dim: 256, ..shape });
    check_all(&shapes, &archs(), "HEAD256_PIPE", Agreement::Bits);
}

#[test]
fn packed_absmax() {
    require_clang!();
    let shapes =
        [CaseSpec { query_lens: vec![4], page_size: 64, ..fp8() }, CaseSpec { q_dtype: DType::F16, page_size: 64, head_dim: 192, ..fp8() }];
    check_all(&shapes, &archs(), "PACKED_Q_ABSMAX", Agreement::Bits);
}

#[test]
fn fp8_pack() {
    require_clang!();
    let verify = CaseSpec { query_lens: vec![3], group: 16, page_size: 64, q_dtype: DType::F32, ..fp8() };
    check_all(&[verify], &gfx950(), "FP8_PACK_NO_OLD", Agreement::Bits);
}

#[test]
fn head256_interior() {
    require_clang!();
    let shapes = [CaseSpec { head_dim: 256, page_size: 16, ..base() }, CaseSpec { head_dim: 256, page_size: 128, ..fp8() }];
    check_all(&shapes, &gfx950(), "HEAD256_INTERIOR_UNMASKED", Agreement::Bits);
}

#[test]
fn fused_bf16_verify() {
    require_clang!();
    let shape = |group, query, q_dtype| CaseSpec { group, query_lens: vec![query], q_dtype, page_size: 128, ..base() };
    let shapes = [shape(16, 2, DType::BF16), shape(8, 5, DType::F16), shape(16, 4, DType::BF16), shape(12, 5, DType::BF16)];
    check_all(&shapes, &gfx950(), "BF16_MTP_FUSED", Agreement::Rounding);
    // Queries over two tiles' edge, ragged batches, rows split over workgroups.
    let edges = [
        CaseSpec { lens: vec![258, 514, 259], ..shape(16, 4, DType::BF16) },
        CaseSpec { lens: vec![300, 7, 600, 4], query_lens: vec![4, 1, 3, 0], ..shape(16, 4, DType::BF16) },
        CaseSpec { lens: vec![300], softmax_scale: Some(1e-3), sinks: true, ..shape(16, 8, DType::BF16) },
        CaseSpec { lens: vec![300, 520], softmax_scale: Some(30.0), ..shape(16, 3, DType::BF16) },
        CaseSpec { lens: vec![300, 520], per_head: true, kv_heads: 2, ..shape(16, 4, DType::BF16) },
    ];
    edges.iter().for_each(|spec| drop(compare(spec, &Arch::gfx950(), "BF16_MTP_FUSED", Agreement::Rounding)));
}

#[test]
fn lean_fp8_verify() {
    require_clang!();
    let shape = |group, q_dtype| scaled(Scales::PerToken, CaseSpec { group, query_lens: vec![4], q_dtype, page_size: 128, ..fp8() });
    for flag in ["FP8_MTP4_LEAN", "FP8_MTP4_Q_LDS", "FP8_MTP4_PAGES_AHEAD"] {
        let shapes = [shape(16, DType::BF16), shape(8, DType::F16)];
        check_all(if flag == "FP8_MTP4_LEAN" { &shapes } else { &shapes[1..] }, &gfx950(), flag, Agreement::Rounding);
    }
}

/// Scales that are staged are those that lanes would have loaded.
#[test]
fn staged_scales() {
    require_clang!();
    let shape = |query, spec| scaled(Scales::PerToken, CaseSpec { query_lens: vec![query], page_size: 128, ..spec });
    let shapes = [
        shape(1, CaseSpec { group: 5, ..fp8() }),
        shape(1, CaseSpec { head_dim: 512, group: 16, ..fp8() }),
        shape(3, CaseSpec { group: 16, q_dtype: DType::F16, ..fp8() }),
    ];
    check_all(&shapes, &gfx950(), "FP8_LOOP_SCALES_LATE", Agreement::Bits);
    let window = shape(2, CaseSpec { window: Some(100), lens: vec![1027, 3, 260], softcap: Some(20.0), ..fp8() });
    compare(&window, &Arch::gfx950(), "FP8_SCALES_AFTER_Q", Agreement::Bits);
}

/// All K and V bytes of BF16 decode, and V's of FP8, pass the caches by.
#[test]
fn streamed_bytes() {
    require_clang!();
    for (spec, streamed) in [(base(), 2 * 2), (fp8(), 1)] {
        let spec = CaseSpec { page_size: 128, lens: vec![1024], workgroup_budget: Some(1), ..spec };
        let flag = if spec.kv_dtype == KvDtype::Fp8 { "FP8_DECODE_NT_V" } else { "BF16_DECODE_NT_KV" };
        let [ours, generic] = compare(&spec, &Arch::gfx950(), flag, Agreement::Bits);
        assert_eq!([ours.global_loaded_nontemporal, generic.global_loaded_nontemporal], [1024 * 128 * streamed, 0]);
        // Early Q: the eight rows that pad the M-tile load the last row again.
        assert_eq!(ours.global_loaded - generic.global_loaded, 8 * 128 * 2);
    }
}

/// What a task of one tile costs, per wave: Q's maxima and FP8 packing take fewer instructions.
#[test]
fn one_tile_tasks() {
    require_clang!();
    let verify = CaseSpec { query_lens: vec![4], group: 16, page_size: 128, ..base() };
    let shapes = [
        ("BF16_DECODE_NT_KV", CaseSpec { page_size: 128, ..base() }),
        ("DECODE_Q_EARLY", base()),
        ("BF16_MTP_FUSED", verify.clone()),
        ("FP8_DECODE_NT_V", CaseSpec { page_size: 128, ..fp8() }),
        ("DECODE_Q_EARLY", fp8()),
        ("PACKED_Q_ABSMAX", CaseSpec { kv_dtype: KvDtype::Fp8, ..verify }),
    ];
    println!("| flag | KV | page | instructions | VALU | barriers | before: instructions | VALU | barriers |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for (flag, spec) in shapes {
        let agreement = if flag == "BF16_MTP_FUSED" { Agreement::Rounding } else { Agreement::Bits };
        let counts = compare(&CaseSpec { lens: vec![256], workgroup_budget: Some(1), ..spec.clone() }, &Arch::gfx950(), flag, agreement)
            .map(|counters| {
                let vector = counters.class(Class::Vector) + counters.class(Class::Transcendental);
                [counters.instructions(), vector, counters.class(Class::Barrier)].map(|count| count / 4)
            });
        let [ours, generic] = counts.map(|c| c.map(|n| n.to_string()).join(" | "));
        println!("| {flag} | {} | {} | {ours} | {generic} |", spec.kv_dtype.name(), spec.page_size);
        assert!(spec.kv_dtype != KvDtype::Fp8 || counts[0][1] < counts[1][1], "{flag}");
    }
}

/// Two workgroups of the fused tile fit a CU.
#[test]
fn fused_bf16_verify_fits_a_cu_twice() {
    require_clang!();
    for (query, q_dtype) in [2, 3, 4].into_iter().flat_map(|m| [DType::BF16, DType::F16].map(|q| (m, q))) {
        for (layout, ragged) in [(CacheLayout::Shuffled, false), (CacheLayout::Vllm, true)] {
            let query_lens = if ragged { vec![query, 1] } else { vec![query] };
            let spec = CaseSpec { group: 16, query_lens, q_dtype, layout, page_size: 128, lens: vec![300, 300], ..base() };
            let call = TileCall::new(spec.build().unwrap(), Arch::gfx950()).unwrap();
            assert!(call.selection.flags().bf16_mtp_fused);
            let object = CodeObject::parse(&code_object("gfx950", &flags_of(&call.selection))).unwrap();
            let kernel = object.kernel_named(KERNEL).unwrap();
            let (registers, _) = kernel.register_file();
            println!("{query} M-tiles, q {q_dtype:?}, {layout:?}: {registers} VGPRs, {} bytes of LDS", kernel.group_segment_size);
            assert!(registers <= 256 && kernel.private_segment_size == 0 && kernel.group_segment_size <= 80 * 1024);
        }
    }
}
