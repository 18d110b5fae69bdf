//! Specializations of the tile: their macros, and their code objects by clang, kept in the target folder.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex};

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::{ScaleMode, Selection};
use cdna_sim::Module;

/// The kernel's name in every code object of these tests.
pub const KERNEL: &str = "tile";

/// A clang for AMD GPUs: `CANDLE_PAGED_ATTN_CLANG`, or the newest on the path.
pub fn clang() -> Option<String> {
    let named = std::env::var("CANDLE_PAGED_ATTN_CLANG").ok();
    let candidates = named.into_iter().chain((20..=24).rev().map(|version| format!("clang-{version}")));
    candidates.into_iter().find(|clang| Command::new(clang).arg("--version").output().is_ok_and(|output| output.status.success()))
}

/// Skips the calling test, saying why, where there is no clang.
#[macro_export]
macro_rules! require_clang {
    () => {
        if $crate::compile::clang().is_none() {
            println!("SKIPPED {}: no clang of version 20 or newer", module_path!());
            return;
        }
    };
}

/// The tile's arguments before its struct: 14 dwords.
const LEADING_ARGUMENTS: usize = 9;

/// Schedules that the kernels have, by the names of their flags.
const WRITTEN: [&str; 21] = [
    "DIRECT_OUTPUT",
    "DUAL_GROUP",
    "MXFP4_TILE",
    "MXFP4_STAGED_PAGES",
    "BF16_MTP_FUSED",
    "BF16_DECODE_NT_KV",
    "DECODE_Q_EARLY",
    "DECODE_LAST_V_AFTER_QK",
    "PAGE16_VPIPE",
    "PAGE16_PAGES_FIRST",
    "PAGE16_EARLY_K",
    "FP8_SCALES_AFTER_Q",
    "FP8_LOOP_SCALES_LATE",
    "FP8_MTP4_LEAN",
    "FP8_MTP4_Q_LDS",
    "FP8_MTP4_PAGES_AHEAD",
    "FP8_DECODE_NT_V",
    "PACKED_Q_ABSMAX",
    "HEAD256_PIPE",
    "HEAD256_INTERIOR_UNMASKED",
    "FP8_PACK_NO_OLD",
];

/// What a selection's kernel is compiled with.
pub fn flags_of(selection: &Selection) -> Vec<String> {
    let key = &selection.key;
    let query = match key.query_dtype {
        DType::BF16 => 0,
        DType::F16 => 1,
        _ => 2,
    };
    let kv = match key.kv_dtype {
        KvDtype::Bf16 => 0,
        KvDtype::F16 => 1,
        KvDtype::Fp8 => 2,
        _ => 3,
    };
    let scales = match key.scales {
        ScaleMode::None => 0,
        ScaleMode::Scalar => 1,
        ScaleMode::PerToken => 2,
        ScaleMode::Block => 3,
    };
    let layouts = [CacheLayout::Shuffled, CacheLayout::Vllm, CacheLayout::Nhd, CacheLayout::Hnd];
    let layout = layouts.iter().position(|layout| *layout == key.layout).unwrap();
    let values = [
        ("HEAD_DIM", key.head_dim),
        ("PAGE", key.page_size),
        ("GROUP", key.group),
        ("SINGLE_QUERY", usize::from(key.single_query)),
        ("M_TILES", key.m_tiles),
        ("QUERY", query),
        ("KV", kv),
        ("SCALES", scales),
        ("LAYOUT", layout),
        ("PER_HEAD", usize::from(key.per_head_tables)),
        ("RAGGED", usize::from(key.ragged)),
        ("WINDOW", usize::from(key.windowed)),
        ("SOFTCAP", usize::from(key.softcap)),
        ("POSITIVE_SCALE", usize::from(key.positive_scale)),
        ("LDS_BYTES", selection.lds_bytes - selection.staged_bytes),
    ];
    let switches = key.flags.all().into_iter().map(|(name, set)| (name, usize::from(set && WRITTEN.contains(&name))));
    let macros = values.into_iter().chain(switches).map(|(name, value)| format!("-DPA_{name}={value}"));
    let mut flags: Vec<String> = std::iter::once(format!("-DPA_KERNEL={KERNEL}")).chain(macros).collect();
    if key.flags.kernarg_preload > 0 {
        flags.extend(["-mllvm".to_string(), format!("-amdgpu-kernarg-preload-count={LEADING_ARGUMENTS}")]);
    }
    flags
}

fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

/// A number that changes with any source file.
static SOURCES: LazyLock<u64> = LazyLock::new(|| {
    let mut hasher = DefaultHasher::new();
    for folder in ["amd", "common"] {
        let mut files: Vec<PathBuf> = std::fs::read_dir(kernels().join(folder)).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files.iter().for_each(|file| std::fs::read(file).unwrap_or_default().hash(&mut hasher));
    }
    hasher.finish()
});

/// The tile compiled for `arch` with these flags.
pub fn code_object(arch: &str, flags: &[String]) -> Vec<u8> {
    let mxfp4 = flags.iter().any(|flag| flag == "-DPA_KV=3");
    code_object_of(if mxfp4 { "tile_mxfp4" } else { "tile" }, arch, flags)
}

/// A root of kernels/amd compiled for `arch` with these flags.
pub fn code_object_of(root: &str, arch: &str, flags: &[String]) -> Vec<u8> {
    let clang = clang().expect("callers have asked for a clang");
    let mut hasher = DefaultHasher::new();
    (&clang, root, arch, flags, *SOURCES).hash(&mut hasher);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("amd_tile");
    std::fs::create_dir_all(&folder).unwrap();
    let kept = folder.join(format!("{:016x}.co", hasher.finish()));
    if let Ok(object) = std::fs::read(&kept) {
        return object;
    }
    let fresh = kept.with_extension(format!("{:?}", std::thread::current().id()));
    let output = Command::new(clang)
        .args(["-x", "hip", "--cuda-device-only", &format!("--offload-arch={arch}"), "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc"])
        .args(["-O3", "-std=c++17", "-Wall", "-Wextra", "-Werror"])
        .args(flags)
        .arg(kernels().join("amd").join(root).with_extension("hip"))
        .arg("-o")
        .arg(&fresh)
        .output()
        .unwrap();
    assert!(output.status.success(), "{flags:?}\n{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&fresh, &kept).unwrap();
    std::fs::read(kept).unwrap()
}

/// [`code_object`], loaded once.
pub fn module(arch: &str, flags: &[String]) -> Arc<Module> {
    type Modules = Mutex<HashMap<(String, Vec<String>), Arc<Module>>>;
    static LOADED: LazyLock<Modules> = LazyLock::new(Modules::default);
    let key = (arch.to_string(), flags.to_vec());
    if let Some(module) = LOADED.lock().unwrap().get(&key) {
        return module.clone();
    }
    let module = Arc::new(Module::load(&code_object(arch, flags)).unwrap_or_else(|e| panic!("{arch} {flags:?}: {e}")));
    LOADED.lock().unwrap().insert(key, module.clone());
    module
}
