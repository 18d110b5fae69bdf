//! What the tile takes of a compute unit, for each class of specialization: compiled, read from the code objects' notes, printed as a table
//! (`cargo test --release --features rocm --test rocm_registers -- --nocapture`). Nothing may spill, and LDS is what the registry said.
#![cfg(feature = "rocm")]

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::jit::{Compiler, JitEvent, JitSettings, Source};
use candle_paged_attn::registry::{Arch, ArchName, Problem, ScaleMode, Selection};
use candle_paged_attn::rocm::specialize::{self, WriteKey};
use cdna_sim::elf::{CodeObject, Resources, resources};

const KV: [(KvDtype, ScaleMode); 5] = [
    (KvDtype::Bf16, ScaleMode::None),
    (KvDtype::F16, ScaleMode::None),
    (KvDtype::Fp8, ScaleMode::Scalar),
    (KvDtype::Fp8, ScaleMode::PerToken),
    (KvDtype::Mxfp4, ScaleMode::Block),
];
const HEAD_DIMS: [usize; 4] = [64, 128, 192, 256];

/// Around a cache dtype, a head_dim and a number of M-tiles: what adds registers or moves them.
fn variants(base: &Problem) -> Vec<(&'static str, Problem)> {
    let all = Problem { ragged: true, windowed: true, softcap: true, per_head_tables: true, positive_scale: false, ..base.clone() };
    let other = if base.kv_dtype == KvDtype::Mxfp4 { CacheLayout::Nhd } else { CacheLayout::Vllm };
    let mut variants = vec![("all options", all.clone())];
    // Fewer of these, to save compiling.
    if matches!(base.query_len, 1 | 4) {
        variants.push(("plain", base.clone()));
    }
    if base.query_len == 1 {
        variants.push(("one partition, page 16", Problem { max_partitions: Some(1), page_size: 16, ..base.clone() }));
        variants.push(("plan-free, f32 query", Problem { plan_free: true, query_dtype: DType::F32, layout: other, ..base.clone() }));
    }
    if base.query_len == 4 {
        variants.push(("direct, page 16", Problem { max_partitions: Some(1), page_size: 16, ..base.clone() }));
        variants.push(("f32 query, other layout", Problem { query_dtype: DType::F32, layout: other, ..all.clone() }));
        // BF16_MTP_FUSED and FP8_MTP4_LEAN, which have registers to spare for none of these.
        let forms = Problem { max_partitions: Some(1), query_dtype: DType::F32, layout: other, ragged: true, ..base.clone() };
        variants.push(("direct, f32, ragged, other layout", forms));
        // Lanes of a 16 have different pages; an FP8 page has 16 tokens at least.
        if base.kv_dtype != KvDtype::Fp8 {
            variants.push(("all options, page 8", Problem { page_size: 8, ..all }));
        }
    }
    variants
}

/// Every class that `arch` has: (variant, selection).
fn classes(arch: &Arch) -> Vec<(&'static str, Selection)> {
    let mut classes = vec![];
    for (kv_dtype, scales) in KV.into_iter().filter(|(kv, _)| arch.name == ArchName::Gfx950 || *kv != KvDtype::Mxfp4) {
        let layout = if kv_dtype == KvDtype::Mxfp4 { CacheLayout::Hnd } else { CacheLayout::Shuffled };
        for (head_dim, query_len) in HEAD_DIMS.into_iter().flat_map(|d| [1, 2, 3, 4].map(|q| (d, q))) {
            let base = Problem { batch: 16, head_dim, query_len, kv_dtype, scales, layout, ..Problem::default() };
            for (name, problem) in variants(&base) {
                let selection = specialize::select(&problem, arch).unwrap();
                // Rows that are split over workgroups are a smaller class again.
                if !classes.contains(&(name, selection.clone())) {
                    classes.push((name, selection));
                }
            }
        }
    }
    classes
}

fn compiler() -> Option<Compiler> {
    let there = |clang: &String| Command::new(clang).arg("--version").output().is_ok();
    let named = std::env::var("CANDLE_PAGED_ATTN_CLANG").ok();
    if !named.into_iter().chain((20..=24).map(|version| format!("clang-{version}"))).any(|clang| there(&clang)) {
        return None;
    }
    // One cache for all runs: what did not change is compiled once.
    let shared = std::env::var_os("CANDLE_PAGED_ATTN_CACHE").map(Into::into);
    let cache_dir = shared.or_else(|| Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels")));
    let progress = Arc::new(|event: &JitEvent| {
        if let JitEvent::CacheWriteFailed { path, error } = event {
            println!("{}: not kept: {error}", path.display());
        }
    });
    Some(Compiler::new(JitSettings { cache_dir, progress: Some(progress), ..JitSettings::default() }))
}

/// Does `work` to every item, on all cores; results in order.
fn on_all_cores<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, R)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((i, item)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, items.get(i)?))) {
                    let result = work(item);
                    results.lock().unwrap().push((i, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|(i, _)| *i);
    results.into_iter().map(|(_, result)| result).collect()
}

fn only(code: &[u8]) -> Resources {
    let [kernel] = resources(code).unwrap().try_into().expect("one kernel");
    kernel
}

#[test]
fn no_tile_spills_and_lds_is_what_the_registry_says() {
    let Some(compiler) = compiler() else {
        println!(
            "SKIPPED no_tile_spills_and_lds_is_what_the_registry_says: no clang of version 20 or newer (scripts/install-llvm installs one)"
        );
        return;
    };
    let classes: Vec<_> = [Arch::gfx942(304), Arch::gfx950()].iter().flat_map(classes).collect();
    let compiled = on_all_cores(&classes, |(_, selection)| compiler.code_object(&specialize::tile(selection)?).map(|code| only(&code)));
    println!("{:8} {:50} {:24} VGPRs AGPRs SGPRs spills scratch    LDS  (said)", "arch", "kernel", "variant");
    let mut wrong = vec![];
    for ((variant, selection), compiled) in classes.iter().zip(compiled) {
        let name = format!("{:8} {:50} {variant:24}", selection.key.arch.to_string(), selection.kernel());
        let r = match compiled {
            Ok(resources) => resources,
            Err(error) => {
                let text = error.to_string();
                let first: Vec<_> = text.lines().filter(|line| line.contains("rror:")).take(2).collect();
                wrong.push(format!("{name} does not compile: {}", first.join(" ")));
                continue;
            }
        };
        let spills = format!("{}+{}", r.vgpr_spills, r.sgpr_spills);
        let counts = format!(
            "{:5} {:5} {:5} {spills:>6} {:7} {:6} {:7}",
            r.vgprs, r.agprs, r.sgprs, r.scratch_bytes, r.lds_bytes, selection.lds_bytes
        );
        println!("{name} {counts}");
        let fits = (r.vgpr_spills, r.sgpr_spills, r.scratch_bytes) == (0, 0, 0) && r.lds_bytes as usize <= selection.lds_bytes;
        // Eight waves have half the registers each.
        let fits = fits && (selection.threads < 512 || r.vgprs <= 256);
        if !fits || !(1..=4).contains(&selection.key.m_tiles) {
            wrong.push(format!("{name} {counts}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {} tiles:\n{}", wrong.len(), classes.len(), wrong.join("\n"));
}

/// The hardware's dwords are those of the registry's flag, as far as whole arguments fit.
#[test]
fn leading_arguments_are_preloaded() {
    let Some(compiler) = compiler() else {
        println!("SKIPPED leading_arguments_are_preloaded: no clang of version 20 or newer (scripts/install-llvm installs one)");
        return;
    };
    let preloaded = |arch: &Arch, kernarg_preload| {
        let tile = specialize::tile(&specialize::select(&Problem { kernarg_preload, ..Problem::default() }, arch).unwrap()).unwrap();
        let object = CodeObject::parse(&compiler.code_object(&tile).unwrap()).unwrap();
        let kernel = object.kernel_named(&tile.kernel).unwrap();
        (kernel.preload_offset, kernel.preload_length)
    };
    assert_eq!([0, 3, 14, 16].map(|dwords| preloaded(&Arch::gfx950(), dwords)), [(0, 0), (0, 2), (0, 14), (0, 14)]);
    assert_eq!(preloaded(&Arch::gfx942(304), 16), (0, 0));
}

/// The kernels around the tile, gfx1250's among them.
#[test]
fn reducers_planners_and_writes_do_not_spill() {
    let Some(compiler) = compiler() else {
        println!("SKIPPED reducers_planners_and_writes_do_not_spill: no clang of version 20 or newer (scripts/install-llvm installs one)");
        return;
    };
    let mut specs = vec![];
    for arch in [Arch::gfx942(304), Arch::gfx950(), Arch::gfx1250()] {
        for (head_dim, ragged) in [(64, false), (128, true), (192, false), (1024, true)] {
            for threads in specialize::REDUCER_THREADS {
                specs.push(specialize::reduce(arch.name, head_dim, DType::F32, ragged, threads).unwrap());
            }
        }
        specs.extend([1, 64, 256, 2048].map(|rows| specialize::plan(&arch, rows, rows == 64).unwrap()));
        for (kv_dtype, scales) in KV {
            let layout = if kv_dtype == KvDtype::Mxfp4 { CacheLayout::Nhd } else { CacheLayout::Vllm };
            let key = WriteKey { arch: arch.name, head_dim: 256, page_size: 16, dtype: DType::F32, kv_dtype, scales, layout };
            specs.push(specialize::write(&key).unwrap());
        }
    }
    let compiled = on_all_cores(&specs, |spec| compiler.code_object(spec).map(|code| only(&code)));
    println!("{:8} {:45} VGPRs SGPRs    LDS", "arch", "kernel");
    for (spec, compiled) in specs.iter().zip(compiled) {
        let r = compiled.unwrap_or_else(|error| panic!("{} for {}: {error}", spec.kernel, spec.arch));
        println!("{:8} {:45} {:5} {:5} {:6}", spec.arch.to_string(), spec.kernel, r.vgprs, r.sgprs, r.lds_bytes);
        assert_ne!(spec.source, Source::Tile);
        assert_eq!((r.vgpr_spills, r.sgpr_spills, r.scratch_bytes), (0, 0, 0), "{} for {}", spec.kernel, spec.arch);
    }
}
