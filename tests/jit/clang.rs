//! The compiler's own part: versions, errors, and the real one.

use std::process::Command;

use candle_paged_attn::jit::{Compiler, JitSettings, Specialization};
use candle_paged_attn::registry::{ArchName, CpuIsa};
use cdna_sim::elf::resources;

use crate::fake::{Bench, DEBIAN_22, ROCM_20, spec};

#[test]
fn versions_are_read_from_every_vendors_line() {
    let good = [
        DEBIAN_22,
        ROCM_20,
        "clang version 20.1.0",
        "Ubuntu clang version 21.1.0 (++20250811)",
        "clang version 100.0.0git (https://github.com/llvm/llvm-project 0000)",
        "AMD clang version 22.0.0git (https://github.com/ROCm/llvm-project roc-7.2.0)",
    ];
    for version in good {
        let bench = Bench::new();
        let clang = bench.clang("clang", version, "0");
        assert!(bench.compiler(clang).code_object(&spec("a")).is_ok(), "{version}");
    }
    let bad = [
        ("Debian clang version 19.1.7 (3)", "version 19 is older than 20"),
        ("AMD clang version 2.0.0", "version 2 is older"),
        ("Apple clang version 21.0.0 (clang-2100.1.1)", "Apple"),
        ("gcc (Debian 12.2.0-14) 12.2.0", "not a clang (gcc (Debian 12.2.0-14) 12.2.0)"),
        ("clang version unknown", "without a version number"),
        ("", "not a clang"),
    ];
    for (version, why) in bad {
        let bench = Bench::new();
        let clang = bench.clang("clang", version, "0");
        let error = bench.compiler(&clang).code_object(&spec("a")).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains(clang.to_str().unwrap()), "{version}: {error}");
    }
}

#[test]
fn a_compiler_that_does_not_run_is_named() {
    let bench = Bench::new();
    let broken = bench.script("broken", "exit 3\n");
    let plain = bench.path("plain");
    std::fs::write(&plain, "").unwrap();
    for (clang, why) in [(broken, "exit status: 3"), (plain, "ermission denied"), (bench.path("absent"), "not found")] {
        let error = bench.compiler(&clang).code_object(&spec("a")).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains(clang.to_str().unwrap()), "{error}");
    }
}

#[test]
fn the_compilers_messages_are_in_the_error_within_reason() {
    let bench = Bench::new();
    let version = format!("if [ \"$1\" = --version ]; then echo '{DEBIAN_22}'; exit; fi\n");
    let error = |body: &str| {
        let clang = bench.script("clang", &format!("{version}{body}"));
        bench.compiler(clang).code_object(&spec("a_kernel")).unwrap_err().to_string()
    };
    let long = error("for i in $(seq 1000); do echo \"error $i\" >&2; done\nexit 1\n");
    for part in ["a_kernel", "gfx950", DEBIAN_22, "exit status: 1", "error 1\n", "error 40\n", "960 more lines"] {
        assert!(long.contains(part), "{part}: {long}");
    }
    assert!(!long.contains("error 41"), "{long}");
    assert!(error("kill -9 $$\n").contains("signal: 9"));
    assert!(error("exit 0\n").contains("without a result"));
    assert!(error("echo 'unable to execute command: Executable \"ld.lld\" does not exist!' >&2; exit 1\n").contains("lld-22"));
}

#[test]
fn what_is_not_a_kernel_for_an_amd_gpu_is_refused() {
    let bench = Bench::new();
    let compiler = bench.compiler(bench.clang("clang", DEBIAN_22, "0"));
    let error = |spec: Specialization| compiler.code_object(&spec).unwrap_err().to_string();
    assert!(error(Specialization { arch: ArchName::Sm90, ..spec("a") }).contains("sm90"));
    assert!(error(Specialization { arch: ArchName::Cpu(CpuIsa::Avx2), ..spec("a") }).contains("cpu-avx2"));
    for name in ["", "../a", "a b", "1a", "a-b", &"a".repeat(129)] {
        assert!(error(spec(name)).contains("is not an identifier"), "{name}");
    }
    assert!(error(Specialization { defines: vec![("A B".into(), String::new())], ..spec("a") }).contains("A B"));
    assert_eq!(bench.compilations(), 0);
}

/// The real compiler, or the reason to skip the test called `name`, printed.
fn real(name: &str) -> Option<Compiler> {
    let there = |clang: &String| Command::new(clang).arg("--version").output().is_ok();
    let named = std::env::var("CANDLE_PAGED_ATTN_CLANG").ok();
    let found = named.into_iter().chain((20..=24).map(|version| format!("clang-{version}"))).any(|clang| there(&clang));
    if !found {
        println!("SKIPPED {name}: no clang of version 20 or newer (scripts/install-llvm installs one)");
    }
    found.then(|| Compiler::new(JitSettings { cache_dir: Some("/proc/none".into()), ..JitSettings::default() }))
}

#[test]
fn clang_compiles_a_kernel_for_each_gpu() {
    let Some(compiler) = real("clang_compiles_a_kernel_for_each_gpu") else { return };
    for arch in [ArchName::Gfx942, ArchName::Gfx950, ArchName::Gfx1250] {
        let spec = Specialization { arch, ..spec("planner") };
        let code = compiler.code_object(&spec).unwrap();
        assert_eq!(resources(&code).unwrap().into_iter().map(|r| r.kernel).collect::<Vec<_>>(), ["planner"], "{arch}");
        assert!(compiler.code_object(&spec).unwrap() == code, "{arch}: not the same code twice");
    }
}

#[test]
fn an_error_in_the_source_is_shown_where_it_is() {
    let Some(compiler) = real("an_error_in_the_source_is_shown_where_it_is") else { return };
    let error = |bucket: &str| {
        let bucket = [("PA_BUCKET".to_string(), bucket.to_string())];
        let defines = spec("a").defines.into_iter().filter(|(name, _)| name != "PA_BUCKET").chain(bucket).collect();
        compiler.code_object(&Specialization { defines, ..spec("a") }).unwrap_err().to_string()
    };
    let wrong = error("100");
    for part in ["cannot compile a for gfx950", "kernels/amd/../common/planner.h:", "error: static assertion failed", "rows of a planner"] {
        assert!(wrong.contains(part), "{part}: {wrong}");
    }
    assert!(error("nothing").contains("kernels/amd/plan.hip:"));
}
