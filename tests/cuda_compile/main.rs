//! NVRTC compiles every NVIDIA kernel that the GPU's tests and the benchmarks run, for each arch, and NVRTC 13.0 within the registers and the local memory of
//! `tests/data/nvidia_registers.txt`. No GPU is needed; without NVRTC the test is skipped, and says so, but in CI it fails (`scripts/install-nvrtc`
//! installs it).
//!
//! `UPDATE_SNAPSHOT=1` rewrites the file, for a reviewer to diff: the most registers and bytes of each class of kernels.
mod cubin;
mod named;
#[path = "../cuda_op/specs.rs"]
mod specs;

use std::collections::BTreeMap;
use std::path::Path;

use candle_paged_attn::jit::{Compiler, JitSettings, Specialization};
use candle_paged_attn::registry::{Arch, ArchName};
use rayon::prelude::*;

use cubin::{Usage, has_illegal_copy, has_serial_products};

/// What the file was written with.
const NVRTC: &str = "NVRTC 13.0";

/// Registers of a thread come in eights, on every arch from sm80 to sm90. Below that NVRTC's count of one kernel differs from machine to machine (166 and
/// 168), which no GPU sees.
const REGISTER_UNIT: u32 = 8;

/// As a GPU grants them.
fn granted(usage: Usage) -> Usage {
    Usage { registers: usage.registers.next_multiple_of(REGISTER_UNIT), ..usage }
}

/// The kernel's name without what barely matters: page, dtype of the output, options.
fn class(spec: &Specialization) -> String {
    let parts =
        spec.kernel.strip_prefix(&format!("pa_{}_", spec.arch)).or(spec.kernel.strip_prefix("pa_")).unwrap_or(&spec.kernel).split('_');
    let is_kept = |part: &&str| {
        let is_page = part.strip_prefix('p').is_some_and(|page| page.parse::<u32>().is_ok());
        !is_page && !matches!(*part, "ragged" | "per" | "head")
    };
    let parts: Vec<&str> = match parts.clone().next() {
        // The kind of such a kernel is the class.
        Some(kind @ "write") => vec![kind],
        Some("reduce") => parts.filter(is_kept).filter(|part| !matches!(*part, "bf16" | "f16" | "f32")).collect(),
        _ => parts.filter(is_kept).collect(),
    };
    format!("{} {}", spec.arch, parts.join(" "))
}

/// The most of each class, or what could not be compiled or must not run.
fn measured() -> Result<BTreeMap<String, Usage>, Vec<String>> {
    let compiler = Compiler::new(JitSettings::default());
    let specs: Vec<Specialization> = [Arch::sm80(), Arch::sm89(), Arch::sm90()].iter().flat_map(named::specializations).collect();
    println!("{} kernels", specs.len());
    let compile = |spec: &Specialization| match compiler.code_object(spec) {
        Ok(code) if spec.arch == ArchName::Sm90 && has_illegal_copy(&code) => {
            Err(format!("{} {}: an illegal instruction {:?}", spec.arch, spec.kernel, spec.defines))
        }
        Ok(code) if spec.arch == ArchName::Sm90 && has_serial_products(&code) => {
            Err(format!("{} {}: products wait for each other {:?}", spec.arch, spec.kernel, spec.defines))
        }
        Ok(code) => Ok((class(spec), granted(Usage::of(&code)))),
        Err(error) => Err(format!("{} {}: {error}", spec.arch, spec.kernel)),
    };
    let (usages, failed): (Vec<_>, Vec<_>) = specs.par_iter().map(compile).partition(Result::is_ok);
    if !failed.is_empty() {
        return Err(failed.into_iter().filter_map(Result::err).collect());
    }
    let mut most = BTreeMap::<String, Usage>::new();
    for (class, usage) in usages.into_iter().flatten() {
        let known = most.entry(class).or_default();
        *known = known.max(usage);
    }
    Ok(most)
}

fn recorded(text: &str) -> BTreeMap<String, Usage> {
    let line = |line: &str| {
        let (class, rest) = line.split_once(": ")?;
        let mut numbers = rest.split(' ').filter_map(|word| word.parse().ok());
        Some((class.to_string(), Usage { registers: numbers.next()?, local_bytes: numbers.next()? }))
    };
    text.lines().filter_map(line).collect()
}

fn written(most: &BTreeMap<String, Usage>) -> String {
    most.iter()
        .map(|(class, usage)| format!("{class}: {} registers, {} bytes of local memory\n", usage.registers, usage.local_bytes))
        .collect()
}

#[test]
fn every_kernel_compiles_within_its_registers() {
    let most = match measured() {
        Ok(most) => most,
        Err(failed) if failed[0].contains("no NVRTC") && std::env::var_os("CI").is_none() => {
            eprintln!("skipped: {}", failed[0]);
            return;
        }
        Err(failed) => panic!("{} kernels do not compile or must not run:\n{}", failed.len(), failed[..failed.len().min(5)].join("\n\n")),
    };
    let compiler = Compiler::new(JitSettings::default());
    match compiler.compiler_of(ArchName::Sm90) {
        Ok(NVRTC) => {}
        other => {
            eprintln!(
                "not compared with the registers under {NVRTC}: {}",
                other.unwrap_or("the kernels are from the cache, and no NVRTC is there")
            );
            return;
        }
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/nvidia_registers.txt");
    if std::env::var_os("UPDATE_SNAPSHOT").is_some() {
        std::fs::write(&file, written(&most)).unwrap();
        return;
    }
    let recorded = recorded(&std::fs::read_to_string(&file).unwrap());
    let over = |(class, usage): (&String, &Usage)| match recorded.get(class) {
        Some(limit) if usage.registers <= limit.registers && usage.local_bytes <= limit.local_bytes => None,
        Some(limit) => Some(format!("{class}: {usage:?}, at most {limit:?} before")),
        None => Some(format!("{class}: {usage:?}, not in the file")),
    };
    let gone = recorded.keys().filter(|class| !most.contains_key(*class)).map(|class| format!("{class}: in the file alone"));
    let wrong: Vec<String> = most.iter().filter_map(over).chain(gone).collect();
    assert!(wrong.is_empty(), "{} (UPDATE_SNAPSHOT=1 rewrites it):\n{}", file.display(), wrong.join("\n"));
}

#[test]
fn classes_leave_out_pages_and_options() {
    let arch = Arch::sm90();
    let classes: Vec<String> = named::specializations(&arch).iter().map(class).collect();
    for class in [
        "sm90 bf16 d128 w1x4s2c32",
        "sm90 fp8 d128 w1x4s3c32k8",
        "sm90 fp8 d128 wg4x2s4c64",
        "sm90 fp8 d128 wg4x1s3c64",
        "sm90 reduce d128 w8 split",
        "sm90 mxfp4 d64 plain",
        "sm90 reduce d128 w8",
        "sm90 write",
    ] {
        assert!(classes.iter().any(|known| known == class), "{class}: {classes:?}");
    }
}
