//! The cache: hits, what makes another key, damaged entries, folders that cannot be written.

use std::fs;
use std::path::Path;
use std::sync::Barrier;

use candle_paged_attn::jit::{Compiler, JitEvent, Source, Specialization};
use candle_paged_attn::registry::ArchName;

use crate::fake::{Bench, DEBIAN_22, ROCM_20, files, spec};

const NONE: &str = "/nonexistent/clang";

#[test]
fn a_kernel_is_compiled_once_and_then_found() {
    let bench = Bench::new();
    let clang = bench.clang("clang", DEBIAN_22, "0");
    let code = bench.compiler(&clang).code_object(&spec("a")).unwrap();
    assert_eq!(bench.events(), ["compiling", "compiled"]);
    assert_eq!(bench.compiler(&clang).code_object(&spec("a")).unwrap(), code);
    assert_eq!(bench.events(), ["hit"]);
    assert_eq!(bench.compilations(), 1);
}

#[test]
fn events_say_what_and_how_long() {
    let bench = Bench::new();
    let clang = bench.clang("clang", DEBIAN_22, "0.05");
    bench.compiler(&clang).code_object(&spec("a")).unwrap();
    let events = bench.events.lock().unwrap();
    assert_eq!(events[0], JitEvent::Compiling { kernel: "a".into(), arch: ArchName::Gfx950 });
    let JitEvent::Compiled { kernel, arch: ArchName::Gfx950, seconds } = &events[1] else { panic!("{events:?}") };
    assert!(kernel == "a" && (0.05..30.0).contains(seconds), "{events:?}");
}

#[test]
fn everything_that_changes_the_code_changes_the_key() {
    let bench = Bench::new();
    let clang = bench.clang("clang", DEBIAN_22, "0");
    let base = spec("a");
    let define = |name: &str, value: &str| vec![(name.to_string(), value.to_string())];
    let variants = [
        base.clone(),
        Specialization { arch: ArchName::Gfx942, ..base.clone() },
        Specialization { kernel: "b".into(), ..base.clone() },
        Specialization { source: Source::Write, ..base.clone() },
        Specialization { defines: define("PA_BUCKET", "64"), ..base.clone() },
        Specialization { defines: define("PA_BUCKET", "6"), ..base.clone() },
        Specialization { options: vec!["-mllvm".into(), "-amdgpu-kernarg-preload-count=14".into()], ..base.clone() },
    ];
    for _ in 0..2 {
        variants.iter().for_each(|variant| drop(bench.compiler(&clang).code_object(variant).unwrap()));
    }
    assert_eq!(bench.compilations(), variants.len());
    // Another version of the compiler compiles anew, the same one elsewhere does not.
    let (moved, newer) = (bench.clang("moved", DEBIAN_22, "0"), bench.clang("newer", ROCM_20, "0"));
    bench.compiler(moved).code_object(&base).unwrap();
    assert_eq!(bench.compilations(), variants.len());
    bench.compiler(newer).code_object(&base).unwrap();
    assert_eq!(bench.compilations(), variants.len() + 1);
    assert_eq!(files(&bench.cache()).len(), variants.len() + 1);
}

#[test]
fn without_a_compiler_the_newest_entry_of_any_is_found() {
    let bench = Bench::new();
    for (name, version) in [("old", DEBIAN_22), ("new", ROCM_20)] {
        let marked = Specialization { defines: vec![], ..spec("a") };
        let clang = bench.script(
            name,
            &format!("if [ \"$1\" = --version ]; then echo '{version}'; exit; fi\nfor o; do :; done\nprintf {name} > \"$o\"\n"),
        );
        bench.compiler(&clang).code_object(&marked).unwrap();
        // File times must differ, whatever the file system's resolution.
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    bench.events();
    let wanted = Specialization { defines: vec![], ..spec("a") };
    assert_eq!(bench.compiler(NONE).code_object(&wanted).unwrap(), b"new");
    assert_eq!(bench.events(), ["hit"]);
    // A damaged one is passed over, and told of.
    let newest = files(&bench.cache()).into_iter().max_by_key(|path| fs::metadata(path).unwrap().modified().unwrap()).unwrap();
    let mut bytes = fs::read(&newest).unwrap();
    bytes[0] ^= 1;
    fs::write(&newest, bytes).unwrap();
    assert_eq!(bench.compiler(NONE).code_object(&wanted).unwrap(), b"old");
    assert_eq!(bench.events(), ["corrupt", "hit"]);
    // A kernel that no one compiled.
    let error = bench.compiler(NONE).code_object(&spec("b")).unwrap_err().to_string();
    assert!(error.contains("no clang of version 20") && error.contains(NONE) && error.contains("precompile"), "{error}");
}

#[test]
fn a_damaged_entry_is_told_of_and_replaced() {
    let bench = Bench::new();
    let clang = bench.clang("clang", DEBIAN_22, "0");
    let compiler = bench.compiler(&clang);
    let get = || compiler.code_object(&spec("a")).unwrap();
    let code = get();
    let entry = bench.entry();
    let whole = fs::read(&entry).unwrap();
    bench.compiler(&clang).code_object(&spec("other")).unwrap();
    let other = files(&bench.cache()).into_iter().find(|path| *path != entry).unwrap();
    let mut damaged: Vec<Vec<u8>> = [0, 1, 50, whole.len() / 2, whole.len() - 1].map(|length| whole[..length].to_vec()).into();
    damaged.push(fs::read(other).unwrap());
    damaged.push([&whole[..], b"more"].concat());
    damaged.push([b"more", &whole[..]].concat());
    for at in (0..whole.len()).step_by(5) {
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << (at % 8);
        damaged.push(flipped);
    }
    bench.events();
    for (i, bytes) in damaged.iter().enumerate() {
        fs::write(&entry, bytes).unwrap();
        assert_eq!(get(), code, "damage {i}");
        assert_eq!(bench.events(), ["corrupt", "compiling", "compiled"], "damage {i}");
        assert_eq!(fs::read(&entry).unwrap(), whole, "damage {i}");
    }
    get();
    assert_eq!(bench.events(), ["hit"]);
}

#[test]
fn a_folder_in_an_entrys_place_is_no_entry() {
    let bench = Bench::new();
    let clang = bench.clang("clang", DEBIAN_22, "0");
    let code = bench.compiler(&clang).code_object(&spec("a")).unwrap();
    let entry = bench.entry();
    fs::remove_file(&entry).unwrap();
    fs::create_dir(&entry).unwrap();
    bench.events();
    assert_eq!(bench.compiler(&clang).code_object(&spec("a")).unwrap(), code);
    assert_eq!(bench.events(), ["corrupt", "compiling", "compiled", "not kept"]);
}

#[test]
fn a_cache_that_cannot_be_written_is_no_error() {
    let bench = Bench::new();
    let clang = bench.clang("clang", DEBIAN_22, "0");
    // Not even root can make a folder below a file.
    let file = bench.path("file");
    fs::write(&file, "").unwrap();
    for cache in [file.join("cache"), Path::new("/proc/none").into()] {
        assert!(!bench.compiler_with(&clang, &cache).code_object(&spec("a")).unwrap().is_empty());
        assert_eq!(bench.events(), ["compiling", "compiled", "not kept"], "{}", cache.display());
    }
}

#[test]
fn entries_are_readable_to_other_users_and_the_code_comes_first() {
    use std::os::unix::fs::PermissionsExt;
    let bench = Bench::new();
    let clang = bench.clang("clang", DEBIAN_22, "0");
    let code = bench.compiler(&clang).code_object(&spec("a")).unwrap();
    let entry = bench.entry();
    assert!(fs::read(&entry).unwrap().starts_with(&code));
    let plain = bench.path("plain");
    fs::write(&plain, "").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&entry), mode(&plain));
}

#[test]
fn threads_wait_for_the_first() {
    let bench = Bench::new();
    let clang = bench.clang("clang", DEBIAN_22, "0.3");
    let one = bench.compiler(&clang);
    let start = Barrier::new(16);
    let codes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16)
            .map(|i| {
                let (one, start, bench, clang) = (&one, &start, &bench, &clang);
                // Some share a compiler, some have their own, as devices do.
                let get = move |compiler: &Compiler| compiler.code_object(&spec("a")).unwrap();
                scope.spawn(move || {
                    start.wait();
                    if i % 2 == 0 { get(one) } else { get(&bench.compiler(clang)) }
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(codes.iter().all(|code| *code == codes[0]));
    assert_eq!(bench.compilations(), 1);
    let mut events = bench.events();
    events.sort();
    assert_eq!(events.iter().filter(|&&event| event == "hit").count(), 15);
    assert_eq!(events[..2], ["compiled", "compiling"]);
}

#[test]
fn an_error_reaches_every_waiting_thread_and_is_not_kept() {
    let bench = Bench::new();
    let clang =
        bench.script("clang", &format!("if [ \"$1\" = --version ]; then echo '{DEBIAN_22}'; exit; fi\nsleep 0.2\necho bad >&2\nexit 1\n"));
    let compiler = bench.compiler(&clang);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| compiler.code_object(&spec("a")).unwrap_err().to_string())).collect();
        threads.into_iter().for_each(|thread| assert!(thread.join().unwrap().contains("bad")));
    });
    bench.clang("clang", DEBIAN_22, "0");
    compiler.code_object(&spec("a")).unwrap();
}
