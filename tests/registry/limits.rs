//! Archs by name, what each refuses, how rows are split, what the CPU picks.

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::{Arch, ArchName, CpuIsa, Problem, ScaleMode, preferred_layout, select};

fn gpus() -> [Arch; 6] {
    [Arch::gfx942(304), Arch::gfx950(), Arch::gfx1250(), Arch::sm80(), Arch::sm89(), Arch::sm90()]
}

fn with_layout(arch: &Arch, problem: Problem) -> Problem {
    Problem { layout: preferred_layout(arch, problem.kv_dtype), ..problem }
}

/// Expects an error that holds every word.
fn refused(problem: &Problem, arch: &Arch, words: &[&str]) {
    let error = match select(problem, arch) {
        Ok(chosen) => panic!("{arch} took {problem:?} as {}", chosen.kernel()),
        Err(error) => error.to_string(),
    };
    for word in words {
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
}

#[test]
fn archs_by_name() {
    for (name, arch) in [
        ("gfx942", Arch::gfx942(304)),
        ("gfx942:80", Arch::gfx942(80)),
        ("gfx950", Arch::gfx950()),
        ("gfx950:sramecc+:xnack-", Arch::gfx950()),
        ("gfx1250", Arch::gfx1250()),
        ("sm80", Arch::sm80()),
        ("sm89", Arch::sm89()),
        ("sm90", Arch::sm90()),
        ("cpu-avx2", Arch::cpu(CpuIsa::Avx2)),
    ] {
        assert_eq!(Arch::from_name(name).unwrap(), arch, "{name}");
        assert_eq!(Arch::from_name(&arch.to_string()).unwrap(), arch, "{arch} does not read back");
    }
    for isa in CpuIsa::ALL {
        assert_eq!(Arch::from_name(&format!("cpu-{}", isa.name())).unwrap().name, ArchName::Cpu(isa));
        assert_eq!(Arch::cpu(isa).compute_units, 32);
    }
    assert!(matches!(Arch::from_name("cpu").unwrap().name, ArchName::Cpu(_)));
    assert_eq!(Arch::gfx950().compute_units, 256);
    assert_eq!((Arch::gfx942(304).lds_bytes, Arch::gfx950().lds_bytes), (65536, 163840));
    assert_eq!([Arch::sm80(), Arch::sm89(), Arch::sm90()].map(|a| a.compute_units), [108, 142, 132]);
}

#[test]
fn bad_arch_names_are_refused() {
    for (name, word) in [
        ("gfx906", "gfx906"),
        ("sm87", "8.x: sm80; 8.6: sm86"),
        ("h100", "H100, H200: sm90"),
        ("", "gfx950"),
        ("gfx950:0", "at least 1"),
        ("gfx950:many", "many"),
        ("sm90:xnack-", "xnack-"),
        ("cpu:8", "32"),
        ("cpu-sse2", "cpu-sse2"),
    ] {
        let error = Arch::from_name(name).unwrap_err().to_string();
        assert!(error.starts_with("arch: ") && error.contains(word), "{name:?}: {error}");
    }
    // Of sm80's kernels those that fit its shared memory.
    let sm86 = Arch::from_name("sm86:82").unwrap();
    assert_eq!((sm86.name, sm86.compute_units, sm86.lds_bytes), (ArchName::Sm80, 82, 99 << 10));
}

#[test]
fn problems_no_kernel_can_have_are_refused_everywhere() {
    for arch in gpus().into_iter().chain([Arch::cpu(CpuIsa::Portable)]) {
        let base = with_layout(&arch, Problem::default());
        assert!(select(&base, &arch).is_ok());
        refused(&Problem { kv_heads: 0, ..base.clone() }, &arch, &["q_heads", "16", "0"]);
        refused(&Problem { kv_heads: 5, ..base.clone() }, &arch, &["q_heads", "16", "5"]);
        refused(&Problem { q_heads: 0, ..base.clone() }, &arch, &["q_heads"]);
        refused(&Problem { head_dim: 0, ..base.clone() }, &arch, &["head_dim"]);
        refused(&Problem { page_size: 0, ..base.clone() }, &arch, &["page_size"]);
        refused(&Problem { max_partitions: Some(0), ..base.clone() }, &arch, &["max_partitions"]);
        refused(&Problem { query_len: usize::MAX, ..base.clone() }, &arch, &["query_len"]);
        refused(&Problem { query_dtype: DType::I64, ..base.clone() }, &arch, &["q:", "I64"]);
        refused(&Problem { scales: ScaleMode::Block, ..base.clone() }, &arch, &["scales", "Bf16"]);
        let mxfp4 = Problem { kv_dtype: KvDtype::Mxfp4, layout: CacheLayout::Hnd, ..base.clone() };
        refused(&mxfp4, &arch, &["scales", "MXFP4"]);
        refused(&Problem { layout: CacheLayout::Vllm, page_size: 4, ..base.clone() }, &arch, &["layout", "page_size", "4"]);
        // Nothing overflows, however large.
        let huge = Problem { batch: usize::MAX, capacity: usize::MAX, max_pages: usize::MAX, q_heads: 256, kv_heads: 16, ..base };
        assert!(select(&huge, &arch).is_ok());
    }
}

#[test]
fn each_arch_names_what_it_lacks() {
    for arch in [Arch::gfx942(304), Arch::gfx950(), Arch::gfx1250()] {
        let name = arch.name.to_string();
        let base = Problem::default();
        refused(&Problem { kv_dtype: KvDtype::F32, ..base.clone() }, &arch, &["key_cache", &name, "F32"]);
        refused(&Problem { head_dim: 96, ..base.clone() }, &arch, &["head_dim", &name, "96"]);
        refused(&Problem { page_size: 48, ..base.clone() }, &arch, &["page_size", &name, "48"]);
        refused(&Problem { page_size: 2048, ..base.clone() }, &arch, &["page_size", "2048"]);
        refused(&Problem { layout: CacheLayout::Nhd, ..base.clone() }, &arch, &["layout", "nhd", "shuffled"]);
        refused(&Problem { scales: ScaleMode::Scalar, ..base.clone() }, &arch, &["scales", "Bf16"]);
        let mxfp4 = Problem { kv_dtype: KvDtype::Mxfp4, scales: ScaleMode::Block, layout: CacheLayout::Nhd, ..base };
        match arch.name {
            ArchName::Gfx950 => assert!(select(&mxfp4, &arch).is_ok()),
            _ => refused(&mxfp4, &arch, &["key_cache", &name, "MXFP4"]),
        }
    }
    for arch in [Arch::sm80(), Arch::sm89(), Arch::sm90()] {
        let base = with_layout(&arch, Problem::default());
        refused(&Problem { head_dim: 36, layout: CacheLayout::Nhd, ..base.clone() }, &arch, &["head_dim", "36"]);
        refused(&Problem { head_dim: 2048, ..base.clone() }, &arch, &["head_dim", "2048"]);
        refused(&Problem { page_size: 2000, ..base.clone() }, &arch, &["page_size", "2000"]);
        refused(&Problem { scales: ScaleMode::PerToken, ..base }, &arch, &["scales", "Bf16"]);
    }
    let wide = Problem { head_dim: 1024, layout: CacheLayout::Nhd, ..Problem::default() };
    assert!(select(&wide, &Arch::sm89()).is_ok());
    let cpu = Arch::cpu(CpuIsa::Avx512);
    refused(&Problem { head_dim: 12, layout: CacheLayout::Nhd, ..Problem::default() }, &cpu, &["head_dim", "12"]);
    refused(&Problem { head_dim: 1032, ..Problem::default() }, &cpu, &["head_dim", "1032"]);
    refused(&Problem { page_size: 1025, layout: CacheLayout::Nhd, ..Problem::default() }, &cpu, &["page_size", "1025"]);
}

#[test]
fn rows_are_split_evenly_over_workgroups_that_fit() {
    let arch = Arch::gfx950();
    for (query_len, q_heads, expected) in
        [(1, 1, (1, 1)), (1, 17, (2, 1)), (4, 16, (4, 1)), (5, 16, (3, 2)), (8, 16, (4, 2)), (9, 16, (3, 3)), (512, 16, (4, 128))]
    {
        let chosen = select(&Problem { query_len, q_heads, ..Problem::default() }, &arch).unwrap();
        assert_eq!((chosen.key.m_tiles, chosen.row_groups), expected, "{query_len} x {q_heads}");
    }
    // 64 rows of head_dim 1024: two M-tiles of O fit the registers of gfx950, and one of Q the LDS of gfx942.
    let wide = Problem { head_dim: 1024, query_len: 4, ..Problem::default() };
    let rows = |arch: &Arch| select(&wide, arch).map(|s| (s.key.m_tiles, s.row_groups)).unwrap();
    assert_eq!(rows(&Arch::gfx950()), (2, 2));
    assert_eq!(rows(&Arch::gfx942(304)), (1, 4));
    // On the CPU, passes of 64 rows.
    let cpu = select(&Problem { query_len: 512, ..Problem::default() }, &Arch::cpu(CpuIsa::AmxBf16)).unwrap();
    assert_eq!((cpu.key.m_tiles, cpu.row_groups), (4, 128));
}

#[test]
fn the_cpu_uses_bf16_products_only_where_they_are_exact() {
    use CpuIsa::{AmxBf16, Avx2, Avx512, Avx512Bf16, Neon, Portable};
    for isa in CpuIsa::ALL {
        for kv_dtype in [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8, KvDtype::Mxfp4] {
            let scales = if kv_dtype == KvDtype::Mxfp4 { ScaleMode::Block } else { ScaleMode::None };
            let problem = Problem { kv_dtype, scales, layout: CacheLayout::Nhd, ..Problem::default() };
            let chosen = select(&problem, &Arch::cpu(isa)).unwrap();
            let wide = matches!(kv_dtype, KvDtype::F32 | KvDtype::F16);
            let expected = match isa {
                AmxBf16 | Avx512Bf16 if wide => Avx512,
                AmxBf16 | Avx512Bf16 | Avx512 | Avx2 | Neon | Portable => isa,
            };
            assert_eq!(chosen.cpu_isa, Some(expected), "{kv_dtype:?} on {isa:?}");
            assert_eq!(chosen.key.arch, ArchName::Cpu(expected));
            assert_eq!(chosen.kernel(), format!("cpu_{}_{}_d128", expected.name(), kv_dtype.name()));
            assert!(!chosen.needs_reducer() && !chosen.reason.to_string().is_empty());
        }
    }
    for head_dim in (8..=1024).step_by(8) {
        assert!(select(&Problem { head_dim, layout: CacheLayout::Hnd, ..Problem::default() }, &Arch::cpu(Avx2)).is_ok());
    }
}

#[test]
fn preferred_layouts_are_ones_the_arch_takes() {
    for arch in gpus().into_iter().chain([Arch::cpu(CpuIsa::Neon)]) {
        for kv in [KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8] {
            let problem = with_layout(&arch, Problem { kv_dtype: kv, ..Problem::default() });
            assert!(select(&problem, &arch).is_ok(), "{kv:?} on {arch}");
        }
    }
    assert_eq!(preferred_layout(&Arch::gfx942(304), KvDtype::Bf16), CacheLayout::Shuffled);
    assert_eq!(preferred_layout(&Arch::gfx950(), KvDtype::Mxfp4), CacheLayout::Hnd);
    // What the tensor cores read.
    for kv_dtype in [KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8] {
        let problem = with_layout(&Arch::sm90(), Problem { kv_dtype, ..Problem::default() });
        assert!(problem.layout == CacheLayout::Nhd && select(&problem, &Arch::sm90()).unwrap().key.cuda.is_some(), "{kv_dtype:?}");
    }
    assert_eq!(preferred_layout(&Arch::cpu(CpuIsa::Avx2), KvDtype::Fp8), CacheLayout::Nhd);
}
