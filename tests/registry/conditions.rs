//! Each schedule flag: problems that have it, and single changes that lose it.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::{Arch, Flags, Problem, ScaleMode, Selection, missing_requirements, select};

type Change = (&'static str, fn(&mut Problem));

fn selection(problem: &Problem, arch: &Arch) -> Selection {
    select(problem, arch).unwrap_or_else(|e| panic!("{problem:?} on {arch}: {e}"))
}

/// `base` has the flag on `arch`; each of `loses` alone takes it away, each of `keeps` does not.
fn check(flag: fn(&Flags) -> bool, arch: &Arch, base: &Problem, loses: &[Change], keeps: &[Change]) {
    assert!(flag(selection(base, arch).flags()), "base lacks the flag: {base:?} on {arch}");
    for (changes, expected) in [(loses, false), (keeps, true)] {
        for (what, change) in changes {
            let mut changed = base.clone();
            change(&mut changed);
            assert_eq!(flag(selection(&changed, arch).flags()), expected, "{what} on {arch}");
        }
    }
}

fn absent(flag: fn(&Flags) -> bool, base: &Problem, archs: &[Arch]) {
    for arch in archs {
        assert!(!flag(selection(base, arch).flags()), "{arch} has the flag for {base:?}");
    }
}

fn bf16() -> Problem {
    Problem { batch: 4, capacity: 512, ..Problem::default() }
}

fn fp8() -> Problem {
    Problem { kv_dtype: KvDtype::Fp8, scales: ScaleMode::Scalar, ..bf16() }
}

fn per_token() -> Problem {
    Problem { scales: ScaleMode::PerToken, ..fp8() }
}

fn mxfp4() -> Problem {
    Problem { kv_dtype: KvDtype::Mxfp4, scales: ScaleMode::Block, layout: CacheLayout::Hnd, ..bf16() }
}

fn page(problem: Problem, page_size: usize) -> Problem {
    Problem { page_size, ..problem }
}

fn others() -> [Arch; 2] {
    [Arch::gfx942(304), Arch::gfx1250()]
}

const F16: Change = ("F16 cache", |p| (p.kv_dtype, p.scales) = (KvDtype::F16, ScaleMode::None));
const BF16: Change = ("BF16 cache", |p| (p.kv_dtype, p.scales) = (KvDtype::Bf16, ScaleMode::None));
const FP8: Change = ("FP8 cache", |p| (p.kv_dtype, p.scales) = (KvDtype::Fp8, ScaleMode::Scalar));
const PER_TOKEN: Change = ("per-token scales", |p| p.scales = ScaleMode::PerToken);
const SCALAR: Change = ("one scale", |p| p.scales = ScaleMode::Scalar);
const NO_SCALE: Change = ("no scale", |p| p.scales = ScaleMode::None);
const HEAD_64: Change = ("head_dim 64", |p| p.head_dim = 64);
const HEAD_128: Change = ("head_dim 128", |p| p.head_dim = 128);
const HEAD_192: Change = ("head_dim 192", |p| p.head_dim = 192);
const HEAD_256: Change = ("head_dim 256", |p| p.head_dim = 256);
const HEAD_512: Change = ("head_dim 512", |p| p.head_dim = 512);
const PAGE_16: Change = ("page 16", |p| p.page_size = 16);
const PAGE_64: Change = ("page 64", |p| p.page_size = 64);
const PAGE_128: Change = ("page 128", |p| p.page_size = 128);
const PAGE_256: Change = ("page 256", |p| p.page_size = 256);
const QUERY_2: Change = ("query_len 2", |p| p.query_len = 2);
const QUERY_4_GROUP_4: Change = ("query_len 4, group 4", |p| (p.query_len, p.q_heads) = (4, 4 * p.kv_heads));
const GROUP_1: Change = ("group 1", |p| p.q_heads = p.kv_heads);
const GROUP_32: Change = ("group 32", |p| p.q_heads = 32 * p.kv_heads);
const WINDOW: Change = ("window", |p| p.windowed = true);
const SOFTCAP: Change = ("softcap", |p| p.softcap = true);
const SINKS: Change = ("sinks", |p| p.sinks = true);
const NEGATIVE_SCALE: Change = ("negative scale", |p| p.positive_scale = false);
const STRIDED: Change = ("strided output", |p| p.output_like_query = false);
const ONE_PARTITION: Change = ("one partition", |p| p.max_partitions = Some(1));
const TWO_PARTITIONS: Change = ("two partitions", |p| p.max_partitions = Some(2));
const ANY_PARTITIONS: Change = ("no limit of partitions", |p| p.max_partitions = None);
const PLAN_FREE: Change = ("plan-free", |p| (p.max_partitions, p.plan_free) = (None, true));
const VLLM: Change = ("vllm layout", |p| p.layout = CacheLayout::Vllm);
const F16_QUERY: Change = ("F16 query", |p| p.query_dtype = DType::F16);
const F32_QUERY: Change = ("F32 query", |p| p.query_dtype = DType::F32);
const RAGGED: Change = ("ragged", |p| p.ragged = true);

#[test]
fn k0_the_generic_tile_has_four_waves_and_no_flag_off_amd() {
    let plain = Problem { layout: CacheLayout::Nhd, ..bf16() };
    for arch in [Arch::sm80(), Arch::sm89(), Arch::sm90()] {
        let chosen = selection(&plain, &arch);
        assert_eq!(chosen.flags(), &Flags::default());
        assert_eq!(chosen.threads, 128);
        assert!(chosen.needs_reducer());
    }
    let f16 = Problem { kv_dtype: KvDtype::F16, ..bf16() };
    for arch in [Arch::gfx942(304), Arch::gfx950()] {
        assert_eq!(selection(&f16, &arch).threads, 256);
        assert!(selection(&f16, &arch).flags().names().is_empty());
    }
}

#[test]
fn k1_bf16_mtp_fused() {
    let base = Problem { query_len: 4, ..bf16() };
    let single_m: Change = ("one M-tile", |p| p.q_heads = 4);
    let group_8: Change = ("two M-tiles", |p| p.q_heads = 8);
    let query_16: Change = ("16 M-tiles, four a workgroup", |p| p.query_len = 16);
    check(
        |f| f.bf16_mtp_fused,
        &Arch::gfx950(),
        &base,
        &[F16, FP8, HEAD_64, HEAD_256, PAGE_16, PAGE_64, PAGE_256, single_m, WINDOW, NEGATIVE_SCALE, SOFTCAP, F32_QUERY],
        &[QUERY_2, group_8, query_16, SINKS, ONE_PARTITION, VLLM, F16_QUERY, RAGGED, STRIDED],
    );
    absent(|f| f.bf16_mtp_fused, &base, &others());
    let chosen = selection(&base, &Arch::gfx950());
    assert_eq!(chosen.kernel(), "pa_bf16_d128_p128_m4_mtp_fused");
    assert_eq!((chosen.key.m_tiles, chosen.row_groups, chosen.waves_per_eu), (4, 1, 2));
    // Two workgroups a CU share its LDS.
    assert!(2 * chosen.lds_bytes <= Arch::gfx950().lds_bytes, "{} bytes", chosen.lds_bytes);
}

#[test]
fn k2_bf16_decode_streams() {
    let loses = [F16, FP8, PAGE_16, QUERY_2, QUERY_4_GROUP_4, GROUP_32];
    let keeps = [GROUP_1, HEAD_64, HEAD_192, HEAD_256, PAGE_64, PAGE_256, WINDOW, SINKS, SOFTCAP, NEGATIVE_SCALE, ONE_PARTITION, VLLM];
    check(|f| f.bf16_decode_nt_kv, &Arch::gfx950(), &bf16(), &loses, &keeps);
    check(|f| f.decode_last_v_after_qk, &Arch::gfx950(), &bf16(), &loses, &keeps);
    absent(|f| f.bf16_decode_nt_kv || f.decode_last_v_after_qk, &bf16(), &others());
}

#[test]
fn k2_decode_q_early() {
    let flag = |f: &Flags| f.decode_q_early;
    let arch = Arch::gfx950();
    check(flag, &arch, &bf16(), &[F16, QUERY_2, QUERY_4_GROUP_4, GROUP_32], &[PAGE_16, PAGE_64, HEAD_256, WINDOW]);
    check(flag, &arch, &page(fp8(), 16), &[PER_TOKEN, PAGE_64, QUERY_2, GROUP_32], &[NO_SCALE, HEAD_64, HEAD_256, PAGE_128]);
    let head_256 = Problem { head_dim: 256, ..page(fp8(), 64) };
    check(flag, &arch, &head_256, &[PER_TOKEN, HEAD_128, HEAD_512, QUERY_4_GROUP_4], &[NO_SCALE, PAGE_16, PAGE_128]);
    // Per-token head-128 page-128 has it; per-token head-256 does not, at any page.
    check(flag, &arch, &per_token(), &[PAGE_16, PAGE_64, HEAD_64, HEAD_256, QUERY_2], &[SCALAR, NO_SCALE]);
    absent(flag, &bf16(), &others());
    absent(flag, &page(fp8(), 16), &others());
    absent(flag, &mxfp4(), &[arch]);
}

#[test]
fn k3_fp8_scales_late() {
    for flag in [|f: &Flags| f.fp8_scales_after_q, |f: &Flags| f.fp8_loop_scales_late] {
        let loses = [SCALAR, NO_SCALE, PAGE_16, PAGE_64, PAGE_256, HEAD_256];
        check(flag, &Arch::gfx950(), &per_token(), &loses, &[QUERY_2, HEAD_64, HEAD_512, WINDOW, ONE_PARTITION]);
        absent(flag, &per_token(), &others());
    }
}

#[test]
fn k4_fp8_mtp4() {
    let base = Problem { query_len: 4, ..per_token() };
    let query_1: Change = ("decode", |p| p.query_len = 1);
    let query_3: Change = ("MTP3", |p| p.query_len = 3);
    let query_5: Change = ("five query tokens", |p| p.query_len = 5);
    let group_8: Change = ("two M-tiles", |p| p.q_heads = 8);
    for flag in [|f: &Flags| f.fp8_mtp4_lean, |f: &Flags| f.fp8_mtp4_q_lds, |f: &Flags| f.fp8_mtp4_pages_ahead] {
        let loses = [SCALAR, NO_SCALE, query_1, query_3, query_5, QUERY_4_GROUP_4, HEAD_64, HEAD_256, PAGE_64, PAGE_16];
        check(flag, &Arch::gfx950(), &base, &loses, &[group_8, SINKS, ONE_PARTITION, VLLM, RAGGED]);
        check(flag, &Arch::gfx950(), &base, &[WINDOW, NEGATIVE_SCALE, SOFTCAP, BF16], &[]);
        absent(flag, &base, &others());
    }
    let chosen = selection(&base, &Arch::gfx950());
    assert_eq!((chosen.kernel().as_str(), chosen.waves_per_eu), ("pa_fp8_d128_p128_m4_token_mtp4_lean", 2));
}

#[test]
fn k5_page16() {
    let arch = Arch::gfx950();
    let vpipe = |f: &Flags| f.page16_vpipe;
    let pages_first = |f: &Flags| f.page16_pages_first;
    let early_k = |f: &Flags| f.page16_early_k;
    // Any single-M tile, multi-query ones too.
    let loses = [F16, PAGE_64, PAGE_128, QUERY_2, GROUP_32, HEAD_256, HEAD_192];
    let keeps = [HEAD_64, QUERY_4_GROUP_4, GROUP_1, WINDOW, SINKS, ONE_PARTITION];
    for base in [page(bf16(), 16), page(fp8(), 16), page(per_token(), 16)] {
        check(vpipe, &arch, &base, &loses, &keeps);
        absent(|f| f.page16_vpipe || f.page16_pages_first || f.page16_early_k, &base, &others());
    }
    check(pages_first, &arch, &page(bf16(), 16), &loses, &keeps);
    check(pages_first, &arch, &page(fp8(), 16), &[PER_TOKEN, PAGE_64, QUERY_2], &[NO_SCALE, BF16]);
    check(early_k, &arch, &page(fp8(), 16), &[PER_TOKEN, BF16, PAGE_64, QUERY_2, HEAD_256], &[NO_SCALE, QUERY_4_GROUP_4]);
}

#[test]
fn k6_fp8_decode_nt_v() {
    let flag = |f: &Flags| f.fp8_decode_nt_v;
    check(flag, &Arch::gfx950(), &fp8(), &[BF16, PAGE_16, PAGE_64, PAGE_256, QUERY_2, QUERY_4_GROUP_4], &[PER_TOKEN, NO_SCALE, WINDOW]);
    absent(flag, &fp8(), &others());
}

#[test]
fn k7_direct_output() {
    let flag = |f: &Flags| f.direct_output;
    for arch in [Arch::gfx942(80), Arch::gfx950(), Arch::gfx1250()] {
        for base in [bf16(), fp8(), per_token()] {
            let base = Problem { max_partitions: Some(1), ..base };
            let loses = [TWO_PARTITIONS, ANY_PARTITIONS, SINKS, STRIDED];
            check(flag, &arch, &base, &loses, &[PLAN_FREE, QUERY_2, QUERY_4_GROUP_4, F16, WINDOW, HEAD_512, PAGE_16]);
            assert!(!selection(&base, &arch).needs_reducer());
        }
    }
    check(flag, &Arch::gfx950(), &Problem { plan_free: true, ..mxfp4() }, &[SINKS, STRIDED], &[ONE_PARTITION, QUERY_2]);
}

#[test]
fn k8_dual_group() {
    let flag = |f: &Flags| f.dual_group;
    let free: Change = ("a plan of many partitions", |p| p.max_partitions = Some(64));
    for arch in [Arch::gfx950(), Arch::gfx942(304), Arch::gfx942(80)] {
        for base in [bf16(), fp8(), page(fp8(), 16), page(bf16(), 16)] {
            let base = Problem { max_partitions: Some(1), ..base };
            let loses = [free, ANY_PARTITIONS, QUERY_2, QUERY_4_GROUP_4, GROUP_32, WINDOW, HEAD_256];
            check(flag, &arch, &base, &loses, &[PLAN_FREE, GROUP_1, SINKS, STRIDED, SOFTCAP, NEGATIVE_SCALE]);
        }
        let scalar = Problem { max_partitions: Some(1), ..fp8() };
        check(flag, &arch, &scalar, &[PER_TOKEN, F16], &[NO_SCALE]);
        let chosen = selection(&scalar, &arch);
        assert_eq!(chosen.threads, 512);
        assert!(chosen.kernel().ends_with("_dual"), "{}", chosen.kernel());
        assert!(chosen.lds_bytes <= arch.lds_bytes);
    }
    let base = Problem { max_partitions: Some(1), ..bf16() };
    check(flag, &Arch::gfx950(), &base, &[HEAD_192], &[HEAD_64, HEAD_512]);
    check(flag, &Arch::gfx950(), &Problem { max_partitions: Some(1), ..fp8() }, &[HEAD_512], &[HEAD_64, HEAD_192]);
    check(flag, &Arch::gfx942(304), &base, &[HEAD_64, HEAD_192, HEAD_512], &[]);
    absent(flag, &base, &[Arch::gfx1250()]);
}

#[test]
fn k8_dual_group_only_where_workgroups_leave_cus_idle() {
    let has = |p: &Problem, arch: &Arch| selection(p, arch).flags().dual_group;
    let base = |batch, kv_heads| Problem { batch, kv_heads, q_heads: 8 * kv_heads, max_partitions: Some(1), ..fp8() };
    for arch in [Arch::gfx950(), Arch::gfx942(304), Arch::gfx942(80)] {
        let cus = arch.compute_units;
        assert!(has(&base(cus, 1), &arch) && !has(&base(cus + 1, 1), &arch));
        assert!(has(&base(cus / 8, 8), &arch) && !has(&base(cus / 8 + 1, 8), &arch));
        let per_head = |batch| Problem { per_head_tables: true, ..base(batch, 8) };
        assert!(has(&per_head(cus / 8), &arch) && !has(&per_head(cus / 8 + 1), &arch));
    }
}

#[test]
fn k8_mxfp4_dual_needs_two_lds_copies() {
    let base = Problem { plan_free: true, batch: 1, ..mxfp4() };
    let dual = |max_pages| selection(&Problem { max_pages, ..base.clone() }, &Arch::gfx950());
    // A 512K-token table of 128-token pages: each group stages 2048 of its 4096 ids.
    assert!(dual(4096).flags().dual_group);
    assert_eq!(dual(4096).lds_bytes, 2 * (16 * 272 + 8 * 32 * 136 + 2048 * 4));
    let fits: Vec<usize> = (1..=256).map(|i| i * 128).filter(|&pages| dual(pages).flags().dual_group).collect();
    assert_eq!(fits.last(), Some(&21376), "two copies of 80 KiB leave 41.75 KiB for ids each");
    assert_eq!(dual(32768).threads, 256);
    check(|flags| flags.dual_group, &Arch::gfx950(), &base, &[HEAD_512], &[HEAD_64, HEAD_192, HEAD_256]);
}

#[test]
fn k9_packed_q_absmax() {
    let flag = |f: &Flags| f.packed_q_absmax;
    let keeps = [PER_TOKEN, QUERY_2, QUERY_4_GROUP_4, HEAD_256, PAGE_16, F16_QUERY, WINDOW];
    check(flag, &Arch::gfx950(), &fp8(), &[BF16, F16, F32_QUERY], &keeps);
    check(flag, &Arch::gfx950(), &fp8(), &[], &[HEAD_512, ("head_dim 1024", |p| p.head_dim = 1024)]);
    check(flag, &Arch::gfx942(304), &fp8(), &[BF16, F32_QUERY, HEAD_512, ("head_dim 1024", |p| p.head_dim = 1024)], &keeps);
    absent(flag, &fp8(), &[Arch::gfx1250()]);
}

#[test]
fn k10_head256_interior_unmasked() {
    let flag = |f: &Flags| f.head256_interior_unmasked;
    for base in [bf16(), fp8(), per_token()] {
        let base = Problem { head_dim: 256, page_size: 64, ..base };
        check(flag, &Arch::gfx950(), &base, &[HEAD_128, HEAD_512, QUERY_2, QUERY_4_GROUP_4, WINDOW], &[PAGE_16, PAGE_128, SINKS, F16]);
        absent(flag, &base, &others());
        assert!(selection(&base, &Arch::gfx942(304)).flags().head256_pipe);
        // Never on the page-16 V pipe.
        assert!(!selection(&page(base, 16), &Arch::gfx950()).flags().page16_vpipe);
    }
}

#[test]
fn k11_kernarg_preload() {
    let preload = |p: &Problem, arch: &Arch| selection(p, arch).flags().kernarg_preload;
    for arch in [Arch::gfx950(), Arch::gfx1250()] {
        for configured in [0, 7, 14, 16, 17, 64] {
            assert_eq!(preload(&Problem { kernarg_preload: configured, ..per_token() }, &arch), configured.min(16));
        }
    }
    for base in [bf16(), fp8(), per_token(), mxfp4()] {
        assert_eq!(preload(&base, &Arch::gfx950()), 16);
    }
    assert_eq!(preload(&bf16(), &Arch::gfx942(304)), 0);
}

#[test]
fn k12_fp8_pack_without_the_old_word() {
    let flag = |f: &Flags| f.fp8_pack_no_old;
    check(flag, &Arch::gfx950(), &fp8(), &[BF16, F16], &[PER_TOKEN, NO_SCALE, QUERY_2, HEAD_512, PAGE_16, F32_QUERY]);
    absent(flag, &fp8(), &others());
    absent(flag, &mxfp4(), &[Arch::gfx950()]);
}

#[test]
fn k13_mxfp4_tile() {
    let nhd: Change = ("nhd", |p| p.layout = CacheLayout::Nhd);
    check(|f| f.mxfp4_tile, &Arch::gfx950(), &mxfp4(), &[], &[nhd, QUERY_2, HEAD_256, PAGE_16, WINDOW, PLAN_FREE]);
    absent(|f| f.mxfp4_tile, &bf16(), &[Arch::gfx950()]);
    // A table too long to stage is read tile by tile.
    let longest = (160 * 1024 - 16 * 272 - 8 * 32 * 136) / 4;
    let staged = |max_pages| selection(&Problem { max_pages, ..mxfp4() }, &Arch::gfx950()).flags().mxfp4_staged_pages;
    assert!(staged(longest) && !staged(longest + 1));
}

#[test]
fn k14_gfx1250_has_direct_output_and_preload_only() {
    let arch = Arch::gfx1250();
    for base in [bf16(), fp8(), per_token(), page(fp8(), 16), Problem { head_dim: 256, ..fp8() }, Problem { query_len: 4, ..per_token() }] {
        assert!(selection(&base, &arch).flags().names().is_empty());
        let one = Problem { max_partitions: Some(1), ..base };
        assert_eq!(selection(&one, &arch).flags().names(), ["DIRECT_OUTPUT"]);
        assert_eq!(selection(&one, &arch).threads, 128);
    }
}

#[test]
fn missing_requirements_mirror_the_flags() {
    let arch = Arch::gfx950();
    for problem in [bf16(), fp8(), per_token(), mxfp4(), page(bf16(), 16), Problem { query_len: 4, ..bf16() }] {
        let missing = missing_requirements(&problem, &arch).unwrap().unwrap();
        let set: Vec<_> = missing.all().into_iter().filter(|(_, lacks)| lacks.is_none()).map(|(name, _)| name).collect();
        assert_eq!(set, selection(&problem, &arch).flags().names());
    }
    let small_page = Problem { query_len: 4, page_size: 64, ..bf16() };
    assert_eq!(missing_requirements(&small_page, &arch).unwrap().unwrap().bf16_mtp_fused, Some("page 128"));
    assert_eq!(selection(&small_page, &arch).reason.to_string(), "generic tile: the fused BF16 tile needs page 128");
    assert!(missing_requirements(&Problem { layout: CacheLayout::Nhd, ..bf16() }, &Arch::sm90()).unwrap().is_none());
}
