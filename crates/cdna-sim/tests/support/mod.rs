//! Shared by the tests that run AMD's code objects and those that compile their own.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// AMD's code object called `name`, or why it cannot be had.
pub fn aiter(name: &str) -> Result<Vec<u8>, String> {
    static FOLDER: std::sync::OnceLock<Result<PathBuf, String>> = std::sync::OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let output = Command::new(root().join("scripts/aiter-code-objects")).output().map_err(|e| e.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_string());
        }
        Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
    });
    std::fs::read(folder.as_ref().map_err(String::clone)?.join(name)).map_err(|e| format!("{name}: {e}"))
}

/// Relative L2 distance.
pub fn relative_l2(got: &[f64], want: &[f64]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = want.iter().copied().map(square).sum();
    if got.iter().any(|x| !x.is_finite()) { f64::INFINITY } else { (error / norm).sqrt() }
}

/// A clang for AMD GPUs: `CANDLE_PAGED_ATTN_CLANG`, or the newest on the path.
pub fn clang() -> Result<String, String> {
    let named = std::env::var("CANDLE_PAGED_ATTN_CLANG").ok();
    let candidates = named.into_iter().chain((20..=24).rev().map(|version| format!("clang-{version}")));
    candidates
        .into_iter()
        .find(|clang| Command::new(clang).arg("--version").output().is_ok_and(|output| output.status.success()))
        .ok_or_else(|| "no clang of version 20 or newer (scripts/install-llvm installs one)".to_string())
}

/// Skips the calling test, saying why, where there is no clang.
#[macro_export]
macro_rules! require_clang {
    () => {
        if let Err(reason) = support::clang() {
            println!("SKIPPED {}: {reason}", module_path!());
            return;
        }
    };
}

fn build(arguments: &[&str], source: &str, extension: &str) -> Vec<u8> {
    static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let stem = std::env::temp_dir().join(format!("cdna-sim-{}-{number}", std::process::id()));
    let (input, output) = (stem.with_extension(extension), stem.with_extension("co"));
    std::fs::write(&input, source).unwrap();
    let run = Command::new(clang().unwrap()).args(arguments).arg(&input).arg("-o").arg(&output).output().unwrap();
    assert!(run.status.success(), "{}\n{source}", String::from_utf8_lossy(&run.stderr));
    let object = std::fs::read(&output).unwrap();
    let _ = (std::fs::remove_file(input), std::fs::remove_file(output));
    object
}

/// The architectures.
pub const ARCHS: [&str; 2] = ["gfx942", "gfx950"];

/// Compiles C for this machine into a shared library, which the caller removes.
pub fn host_library(source: &str) -> PathBuf {
    let object = build(
        &["-x", "c", "-shared", "-fPIC", "-O1", "-ffp-contract=off", "-fwrapv", "-Xclang", "-ffloat16-excess-precision=none", "-w"],
        source,
        "c",
    );
    static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let file = std::env::temp_dir().join(format!("cdna-sim-{}-{number}.so", std::process::id()));
    std::fs::write(&file, object).unwrap();
    file
}

/// Compiles freestanding HIP.
pub fn compile(source: &str, arch: &str, more: &[&str]) -> Vec<u8> {
    let arch = format!("--offload-arch={arch}");
    let mut arguments = vec!["-x", "hip", "--cuda-device-only", &arch, "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc", "-O3"];
    arguments.extend(more);
    build(&arguments, source, "hip")
}

/// Assembles a kernel `test` from its instructions: kernarg pointer in s[0:1], workgroup in s2, work item in v0, 256 bytes of arguments,
/// 32 VGPRs and 16 AGPRs.
pub fn assemble(body: &str, arch: &str, lds: usize, scratch: usize) -> Vec<u8> {
    let source = format!(
        r#"
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.text
.globl test
.p2align 8
.type test,@function
test:
{body}
s_endpgm
.Lend:
.size test, .Lend-test
.rodata
.p2align 6
.amdhsa_kernel test
  .amdhsa_next_free_vgpr 48
  .amdhsa_next_free_sgpr 32
  .amdhsa_accum_offset 32
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {scratch}
  .amdhsa_enable_private_segment {}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_count 2
  .amdhsa_kernarg_size 256
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.kernels:
  - .name: test
    .symbol: test.kd
    .kernarg_segment_size: 256
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: {scratch}
    .wavefront_size: 64
    .sgpr_count: 32
    .vgpr_count: 48
    .max_flat_workgroup_size: 1024
...
.end_amdgpu_metadata
"#,
        u8::from(scratch > 0)
    );
    build(&["-x", "assembler", "-target", "amdgcn-amd-amdhsa", &format!("-mcpu={arch}")], &source, "s")
}
