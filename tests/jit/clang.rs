//! The compiler's own part: versions, errors, and the real one.

use std::process::Command;

use candle_paged_attn::jit::{Compiler, JitSettings, Source, Specialization};
use candle_paged_attn::registry::{ArchName, CpuIsa};

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

/// The real compiler, or the reason to skip the test called `name`.
fn real(name: &str) -> Option<Compiler> {
    let cache = std::env::temp_dir().join("candle-paged-attn-no-cache/\0");
    let there = (20..=24).any(|version| Command::new(format!("clang-{version}")).arg("--version").output().is_ok())
        || std::env::var_os("CANDLE_PAGED_ATTN_CLANG").is_some();
    if !there {
        println!("SKIPPED {name}: no clang of version 20 or newer (scripts/install-llvm installs one)");
        return None;
    }
    Some(Compiler::new(JitSettings { cache_dir: Some(cache), ..JitSettings::default() }))
}
