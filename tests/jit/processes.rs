//! What depends on the environment, and processes that share a cache: this binary starts itself.

use std::path::Path;
use std::process::{Command, Output};

use candle_paged_attn::jit::{Compiler, JitSettings};

use crate::fake::{Bench, DEBIAN_22, ROCM_20, files, spec};

/// The name that a child is asked to compile under.
const CHILD: &str = "JIT_TEST_CHILD";

/// A cache that keeps nothing.
const NOWHERE: &str = "/proc/none";

/// Not a test of its own: what the children do.
#[test]
fn child() {
    let Ok(kernel) = std::env::var(CHILD) else { return };
    match Compiler::new(JitSettings::default()).code_object(&spec(&kernel)) {
        Ok(code) => println!("code: {}", String::from_utf8_lossy(&code)),
        Err(error) => println!("error: {error}"),
    }
}

/// A process that asks for `kernel` with nothing in its environment but `variables`.
fn child_of(kernel: &str, variables: &[(&str, &Path)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "processes::child", "--nocapture"]).env_clear().env(CHILD, kernel).envs(variables.iter().copied());
    command
}

fn said(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn run(kernel: &str, variables: &[(&str, &Path)]) -> String {
    said(child_of(kernel, variables).output().unwrap())
}

#[test]
fn the_search_goes_from_the_variable_over_rocm_to_the_path() {
    let bench = Bench::new();
    let (named, rocm, path) = (bench.path("named"), bench.path("rocm"), bench.path("bin"));
    let write = |file: &str, version: &str| {
        bench.script(
            file,
            &format!("if [ \"$1\" = --version ]; then echo '{version}'; exit; fi\nfor o; do :; done\necho \"by {file}\" > \"$o\"\n"),
        )
    };
    write("named", DEBIAN_22);
    write("rocm/llvm/bin/clang", ROCM_20);
    write("bin/clang", "clang version 14.0.6");
    write("bin/clang-20", "clang version 20.1.0");
    write("bin/clang-22", DEBIAN_22);
    let nowhere = ("CANDLE_PAGED_ATTN_CACHE", Path::new(NOWHERE));
    let all = [nowhere, ("CANDLE_PAGED_ATTN_CLANG", named.as_path()), ("ROCM_PATH", &rocm), ("PATH", &path)];
    assert!(run("a", &all).contains("by named"));
    assert!(run("a", &[nowhere, all[2], all[3]]).contains("by rocm"));
    // An old clang is passed over; newer versions come first.
    if !Path::new("/opt/rocm/llvm/bin/clang").exists() {
        assert!(run("a", &[nowhere, all[3]]).contains("by bin/clang-22"));
    }
    // One that is named and does not serve is not replaced by another.
    let absent = bench.path("absent");
    let error = run("a", &[nowhere, ("CANDLE_PAGED_ATTN_CLANG", &absent), all[2], all[3]]);
    assert!(error.contains("absent: not found") && !error.contains("clang-22"), "{error}");
}

#[test]
fn where_nothing_is_found_the_error_lists_what_was_looked_at() {
    if Path::new("/opt/rocm/llvm/bin/clang").exists() {
        println!("SKIPPED where_nothing_is_found_the_error_lists_what_was_looked_at: ROCm is installed");
        return;
    }
    let bench = Bench::new();
    bench.script("bin/clang", "echo 'clang version 14.0.6'\n");
    let (path, rocm) = (bench.path("bin"), bench.path("rocm"));
    let error = run("a", &[("PATH", &path), ("ROCM_PATH", &rocm), ("CANDLE_PAGED_ATTN_CACHE", Path::new(NOWHERE))]);
    let looked_at =
        ["rocm/llvm/bin/clang: not found", "/opt/rocm/llvm/bin/clang: not found", "clang: version 14 is older", "clang-20: not found"];
    for part in looked_at.into_iter().chain(["clang-24: not found", "CANDLE_PAGED_ATTN_CLANG", "precompile"]) {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn the_cache_lies_where_the_environment_says() {
    let bench = Bench::new();
    let clang = bench.clang("clang", DEBIAN_22, "0");
    let (clang, path) = (("CANDLE_PAGED_ATTN_CLANG", clang.as_path()), ("PATH", Path::new("/bin:/usr/bin")));
    let (named, xdg, home) = (bench.path("named"), bench.path("xdg"), bench.path("home"));
    let named = [("CANDLE_PAGED_ATTN_CACHE", named.as_path()), ("XDG_CACHE_HOME", xdg.as_path()), ("HOME", home.as_path())];
    let folders = ["named", "xdg/candle-paged-attn", "home/.cache/candle-paged-attn"];
    for (i, folder) in folders.into_iter().enumerate() {
        assert!(run("a", &[&[clang, path], &named[i..]].concat()).contains("code: "));
        assert_eq!(files(&bench.path(folder)).len(), 1, "{folder}");
        assert_eq!(bench.compilations(), i + 1);
    }
    // A relative XDG_CACHE_HOME is none, and an empty variable is not set.
    let other = bench.path("other");
    let relative = [("XDG_CACHE_HOME", Path::new("caches")), ("CANDLE_PAGED_ATTN_CACHE", Path::new("")), ("HOME", other.as_path())];
    assert!(run("a", &[&[clang, path], &relative[..]].concat()).contains("code: "));
    assert_eq!(files(&other.join(".cache/candle-paged-attn")).len(), 1);
}

#[test]
fn processes_share_a_cache() {
    let bench = Bench::new();
    let (clang, cache) = (bench.clang("clang", DEBIAN_22, "0.1"), bench.cache());
    let variables =
        [("CANDLE_PAGED_ATTN_CLANG", clang.as_path()), ("CANDLE_PAGED_ATTN_CACHE", &cache), ("PATH", Path::new("/bin:/usr/bin"))];
    let spawn = |kernel: &str| child_of(kernel, &variables).stdout(std::process::Stdio::piped()).spawn().unwrap();
    for round in 0..2 {
        let children: Vec<_> = (0..8).map(|i| spawn(["a", "b"][i % 2])).collect();
        let texts: Vec<_> = children.into_iter().map(|child| said(child.wait_with_output().unwrap())).collect();
        for (i, text) in texts.iter().enumerate() {
            let code = |text: &str| text.lines().find(|line| line.starts_with("code: ")).map(String::from);
            assert!(code(text).is_some() && code(text) == code(&texts[i % 2]), "round {round}: {text}");
        }
    }
    // Whatever the race, the second round found entries, and nothing half-written is left.
    assert!((2..=8).contains(&bench.compilations()), "{}", bench.compilations());
    assert_eq!(files(&cache).len(), 2, "{:?}", files(&cache));
}
