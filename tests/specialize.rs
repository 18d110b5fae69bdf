//! From a selection or a shape to macros: what is passed, under which name, and what stays off because no kernel has it.
#![cfg(feature = "rocm")]

use std::collections::{HashMap, HashSet};

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::jit::{Source, Specialization};
use candle_paged_attn::registry::{Arch, ArchName, KernelKey, Problem, ScaleMode, select};
use candle_paged_attn::rocm::specialize::{self, WriteKey};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

fn define<'a>(spec: &'a Specialization, name: &str) -> &'a str {
    let mut values = spec.defines.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let value = values.next().unwrap_or_else(|| panic!("{name} is not given: {:?}", spec.defines));
    assert_eq!(values.next(), None, "{name} is given twice");
    value
}

fn tile(problem: &Problem, arch: &Arch) -> Specialization {
    specialize::tile(&specialize::select(problem, arch).unwrap()).unwrap()
}

/// A problem unlike the default in everything a tile is specialized on.
fn other() -> Problem {
    Problem {
        batch: 2,
        q_heads: 12,
        kv_heads: 2,
        head_dim: 192,
        page_size: 32,
        query_len: 3,
        query_dtype: DType::F16,
        kv_dtype: KvDtype::Fp8,
        layout: CacheLayout::Vllm,
        scales: ScaleMode::PerToken,
        per_head_tables: true,
        ragged: true,
        windowed: true,
        softcap: true,
        positive_scale: false,
        max_partitions: Some(1),
        ..Problem::default()
    }
}

#[test]
fn every_macro_of_the_tile_follows_the_problem() {
    let plain = [
        ("PA_HEAD_DIM", "128", "192"),
        ("PA_PAGE", "128", "32"),
        ("PA_GROUP", "16", "6"),
        ("PA_SINGLE_QUERY", "1", "0"),
        ("PA_M_TILES", "1", "2"),
        ("PA_QUERY", "0", "1"),
        ("PA_KV", "0", "2"),
        ("PA_SCALES", "0", "2"),
        ("PA_LAYOUT", "0", "1"),
        ("PA_PER_HEAD", "0", "1"),
        ("PA_RAGGED", "0", "1"),
        ("PA_WINDOW", "0", "1"),
        ("PA_SOFTCAP", "0", "1"),
        ("PA_POSITIVE_SCALE", "1", "0"),
        ("PA_DIRECT_OUTPUT", "0", "1"),
        ("PA_MXFP4_TILE", "0", "0"),
        ("PA_WAVES_PER_EU", "0", "0"),
    ];
    let (default, other) = (tile(&Problem::default(), &Arch::gfx950()), tile(&other(), &Arch::gfx950()));
    for (name, of_default, of_other) in plain {
        assert_eq!((define(&default, name), define(&other, name)), (of_default, of_other), "{name}");
    }
    for spec in [&default, &other] {
        assert_eq!((spec.arch, spec.source), (ArchName::Gfx950, Source::Tile));
        // Each macro once, whatever the problem.
        assert_eq!(spec.defines.iter().map(|(name, _)| name).collect::<HashSet<_>>().len(), spec.defines.len());
        assert_eq!(spec.defines.len(), default.defines.len());
    }
    assert_eq!(
        (default.kernel.as_str(), other.kernel.as_str()),
        ("pa_bf16_d128_p128_m1_nt", "pa_fp8_d192_p32_m2_token_vllm_window_softcap_direct")
    );
}

/// A kernel that was loaded is found again by its key alone.
#[test]
fn problems_of_one_key_are_one_specialization() {
    let mut known: HashMap<KernelKey, (Problem, Specialization)> = HashMap::new();
    let mut shared = 0;
    for p in random_problems(20_000) {
        for arch in [Arch::gfx950(), Arch::gfx942(304)] {
            let Ok(selection) = specialize::select(&p, &arch) else { continue };
            let spec = specialize::tile(&selection).unwrap();
            let (first, known) = known.entry(selection.key).or_insert_with(|| (p.clone(), spec.clone()));
            assert_eq!(*known, spec, "{first:?} and {p:?} on {arch}");
            shared += usize::from(*first != p);
        }
    }
    assert!(known.len() > 1000 && shared > 1000, "{} keys, {shared} problems of keys that others have", known.len());
}

/// Problems that differ in what keys hold and in what they leave out.
fn random_problems(count: usize) -> Vec<Problem> {
    let mut rng = StdRng::seed_from_u64(rand::random());
    let mut problem = || {
        let (kv_dtype, scales, layout) = *[
            (KvDtype::Bf16, ScaleMode::None, CacheLayout::Shuffled),
            (KvDtype::F16, ScaleMode::None, CacheLayout::Vllm),
            (KvDtype::Fp8, ScaleMode::None, CacheLayout::Shuffled),
            (KvDtype::Fp8, ScaleMode::PerToken, CacheLayout::Shuffled),
            (KvDtype::Mxfp4, ScaleMode::Block, CacheLayout::Hnd),
        ]
        .choose(&mut rng)
        .unwrap();
        let mut of = |sizes: &[usize]| *sizes.choose(&mut rng).unwrap();
        let kv_heads = of(&[1, 2, 8]);
        Problem {
            batch: of(&[1, 7, 300]),
            q_heads: kv_heads * of(&[1, 8, 24]),
            kv_heads,
            head_dim: of(&[64, 128, 192, 256, 512]),
            page_size: of(&[16, 64, 128, 512]),
            query_len: of(&[1, 1, 2, 4]),
            query_dtype: [DType::BF16, DType::F32][of(&[0, 1])],
            kv_dtype,
            layout,
            scales,
            max_pages: of(&[1, 40, 700, 30_000]),
            per_head_tables: of(&[0, 1]) == 1,
            ragged: of(&[0, 1]) == 1,
            windowed: of(&[0, 0, 1]) == 1,
            softcap: of(&[0, 0, 1]) == 1,
            sinks: of(&[0, 0, 1]) == 1,
            positive_scale: of(&[0, 1, 1]) == 1,
            output_like_query: of(&[0, 1]) == 1,
            plan_free: of(&[0, 1]) == 1,
            max_partitions: None,
            capacity: of(&[1, 256, 512]),
            task_tiles: of(&[1, usize::MAX]),
            kernarg_preload: of(&[0, 14]),
        }
    };
    (0..count).map(|_| problem()).collect()
}

#[test]
fn every_flag_of_the_registry_is_a_macro() {
    let selection = specialize::select(&Problem::default(), &Arch::gfx950()).unwrap();
    let spec = specialize::tile(&selection).unwrap();
    for (name, set) in selection.flags().all() {
        assert_eq!(define(&spec, &format!("PA_{name}")), if set { "1" } else { "0" }, "{name}");
    }
}

#[test]
fn what_is_not_written_is_neither_switched_on_nor_named() {
    let verify = Problem { query_len: 4, batch: 8, ..Problem::default() };
    let arch = Arch::gfx950();
    let fused = specialize::select(&verify, &arch).unwrap();
    assert_eq!((fused.kernel().as_str(), fused.waves_per_eu), ("pa_bf16_d128_p128_m4_mtp_fused", 2));
    let verify = Problem { kv_dtype: KvDtype::Fp8, scales: ScaleMode::PerToken, ..verify };
    let lean = specialize::select(&verify, &arch).unwrap();
    assert_eq!((lean.kernel().as_str(), lean.waves_per_eu), ("pa_fp8_d128_p128_m4_token_mtp4_lean", 2));
    // Two groups are eight waves and two copies of LDS; the generic tile is four and one.
    let alone = Problem { max_partitions: Some(1), ..Problem::default() };
    let (wanted, built) = (select(&alone, &arch).unwrap(), specialize::select(&alone, &arch).unwrap());
    let generic = specialize::select(&Problem { max_partitions: Some(2), ..Problem::default() }, &arch).unwrap();
    assert_eq!((wanted.threads, built.threads, generic.threads), (512, 512, 256));
    assert_eq!(built.lds_bytes, 2 * generic.lds_bytes);
    assert!(wanted.flags().dual_group && built.flags().dual_group && !generic.flags().dual_group);
    assert!(built.kernel().ends_with("_direct_dual") && !built.needs_reducer());
    // Over many problems: names and reasons promise nothing that flags do not hold.
    for (kv_dtype, scales) in [(KvDtype::Bf16, ScaleMode::None), (KvDtype::Fp8, ScaleMode::PerToken), (KvDtype::Mxfp4, ScaleMode::Block)] {
        for (head_dim, page_size) in [64, 128, 256].into_iter().flat_map(|d| [16, 64, 128].map(|p| (d, p))) {
            for (query_len, plan_free) in [1, 4].into_iter().flat_map(|q| [true, false].map(|free| (q, free))) {
                let layout = if kv_dtype == KvDtype::Mxfp4 { CacheLayout::Hnd } else { CacheLayout::Shuffled };
                let problem = Problem { kv_dtype, scales, head_dim, page_size, query_len, plan_free, layout, ..Problem::default() };
                let built = specialize::select(&problem, &arch).unwrap();
                let flags = built.flags();
                let pipes = [("_vpipe", flags.page16_vpipe), ("_pipe", flags.head256_pipe)];
                let marks =
                    [("_fused", flags.bf16_mtp_fused), ("_lean", flags.fp8_mtp4_lean), pipes[0], pipes[1], ("_dual", flags.dual_group)];
                assert!(marks.iter().all(|&(mark, written)| built.kernel().contains(mark) == written), "{built:?}");
                let reasons =
                    [("lean FP8 MTP4 tile: ", flags.fp8_mtp4_lean), ("page-16", flags.page16_vpipe), ("head-256", flags.head256_pipe)];
                assert!(reasons.iter().all(|&(reason, written)| built.reason.to_string().starts_with(reason) == written), "{built:?}");
                assert_eq!(built.threads, if flags.dual_group { 512 } else { 256 });
            }
        }
    }
}

#[test]
fn the_preload_counts_arguments_where_the_flag_counts_dwords() {
    let options = |kernarg_preload, arch: &Arch| tile(&Problem { kernarg_preload, ..Problem::default() }, arch).options;
    let count = |n: usize| vec!["-mllvm".to_string(), format!("-amdgpu-kernarg-preload-count={n}")];
    // work, block tables, q: 2 dwords each; max_pages, plan_rows, q_row, q_head: 1; statistics, key: 2.
    for (dwords, arguments) in [(2, 1), (3, 1), (4, 2), (6, 3), (7, 4), (10, 7), (11, 7), (12, 8), (13, 8), (14, 9), (16, 9), (100, 9)] {
        assert_eq!(options(dwords, &Arch::gfx950()), count(arguments), "{dwords}");
    }
    assert!(options(0, &Arch::gfx950()).is_empty() && options(1, &Arch::gfx950()).is_empty());
    assert!(options(16, &Arch::gfx942(304)).is_empty());
}

#[test]
fn mxfp4_has_a_tile_of_its_own() {
    let problem = Problem { kv_dtype: KvDtype::Mxfp4, scales: ScaleMode::Block, layout: CacheLayout::Nhd, ..Problem::default() };
    let spec = tile(&problem, &Arch::gfx950());
    assert_eq!(spec.source, Source::TileMxfp4);
    assert_eq!(
        ["PA_KV", "PA_SCALES", "PA_LAYOUT", "PA_MXFP4_TILE", "PA_MXFP4_STAGED_PAGES"].map(|name| define(&spec, name)),
        ["3", "3", "2", "1", "1"]
    );
    // Page ids are in LDS that the launch adds: longer tables take the same kernel, until they are too long.
    let with_table = |max_pages| tile(&Problem { max_pages, ..problem.clone() }, &Arch::gfx950());
    assert_eq!((with_table(100), with_table(10_000)), (spec.clone(), spec));
    assert_eq!(define(&with_table(100_000), "PA_MXFP4_STAGED_PAGES"), "0");
}

#[test]
fn gfx1250_has_everything_but_the_tile() {
    let error = specialize::select(&Problem::default(), &Arch::gfx1250()).unwrap_err().to_string();
    assert!(error.contains("gfx1250") && error.contains("not written"), "{error}");
    let tables = select(&Problem::default(), &Arch::gfx1250()).unwrap();
    assert!(specialize::tile(&tables).unwrap_err().to_string().contains("gfx1250"));
    let plan = specialize::plan(&Arch::gfx1250(), 100, false).unwrap();
    assert_eq!((plan.kernel.as_str(), define(&plan, "PA_MIN_MAX")), ("pa_plan_r128_proportional", "0"));
    assert!(specialize::reduce(ArchName::Gfx1250, 128, DType::BF16, false, 64).is_ok());
}

#[test]
fn planners_are_compiled_for_buckets_of_rows() {
    let arch = Arch::gfx942(304);
    let kernels =
        [(1, false), (100, true), (256, false), (257, false)].map(|(rows, ragged)| specialize::plan(&arch, rows, ragged).unwrap().kernel);
    assert_eq!(kernels, ["pa_plan_r1_minmax", "pa_plan_r128_minmax_ragged", "pa_plan_r256_minmax", "pa_plan_r512_proportional"]);
    assert!(specialize::plan(&arch, 5000, false).unwrap_err().to_string().contains("plan on the host"));
}

#[test]
fn writes_and_reducers_have_names_and_macros() {
    let key = WriteKey {
        arch: ArchName::Gfx942,
        head_dim: 64,
        page_size: 16,
        dtype: DType::F32,
        kv_dtype: KvDtype::Fp8,
        scales: ScaleMode::PerToken,
        layout: CacheLayout::Vllm,
    };
    let write = specialize::write(&key).unwrap();
    assert_eq!((write.source, write.kernel.as_str()), (Source::Write, "pa_write_fp8_d64_p16_f32_token_vllm"));
    assert_eq!(
        ["PA_HEAD_DIM", "PA_PAGE", "PA_QUERY", "PA_KV", "PA_SCALES", "PA_LAYOUT"].map(|name| define(&write, name)),
        ["64", "16", "2", "2", "2", "1"]
    );
    let unscaled = [ScaleMode::None, ScaleMode::Scalar].map(|scales| specialize::write(&WriteKey { scales, ..key }).unwrap());
    assert_eq!(unscaled[0], unscaled[1]);
    let error = specialize::write(&WriteKey { kv_dtype: KvDtype::F32, ..key }).unwrap_err().to_string();
    assert!(error.contains("gfx942") && error.contains("F32"), "{error}");
    assert!(specialize::write(&WriteKey { dtype: DType::U8, ..key }).is_err());

    let reduce = specialize::reduce(ArchName::Gfx950, 256, DType::F16, true, 256).unwrap();
    assert_eq!((reduce.source, reduce.kernel.as_str()), (Source::Reduce, "pa_reduce_d256_f16_t256_ragged"));
    assert_eq!(["PA_HEAD_DIM", "PA_QUERY", "PA_RAGGED", "PA_THREADS"].map(|name| define(&reduce, name)), ["256", "1", "1", "256"]);
}
