//! NVRTC compiles every NVIDIA kernel that the tests and the benchmarks run, for each arch, within its registers. No GPU is needed; without NVRTC the
//! test is skipped, and says so (`scripts/install-nvrtc` installs it).
#![cfg(feature = "nvrtc")]

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::cuda::specialize::{self, REDUCER_SPLIT, REDUCER_WARPS, ReducerCut, WriteKey};
use candle_paged_attn::jit::{Compiler, JitSettings, Specialization};
use candle_paged_attn::registry::{Arch, ArchName, Problem, ScaleMode, select};

fn problems() -> Vec<Problem> {
    let base = Problem { layout: CacheLayout::Nhd, capacity: 132, ..Problem::default() };
    let forms = [
        (KvDtype::Bf16, ScaleMode::None),
        (KvDtype::F16, ScaleMode::None),
        (KvDtype::Fp8, ScaleMode::Scalar),
        (KvDtype::Fp8, ScaleMode::PerToken),
    ];
    let mut problems = vec![];
    for (kv_dtype, scales) in forms {
        let form = Problem { kv_dtype, scales, ..base.clone() };
        problems.extend([
            form.clone(),
            Problem { query_len: 4, ..form.clone() },
            Problem { batch: 256, capacity: 264, ..form.clone() },
            Problem { head_dim: 256, query_len: 4, ..form.clone() },
            Problem { query_len: 4, windowed: true, softcap: true, ragged: true, per_head_tables: true, page_size: 16, ..form.clone() },
            Problem { layout: CacheLayout::Vllm, page_size: 16, ..form },
        ]);
    }
    let mxfp4 = Problem { kv_dtype: KvDtype::Mxfp4, scales: ScaleMode::Block, ..base.clone() };
    let f32 = Problem { kv_dtype: KvDtype::F32, query_dtype: DType::F32, ..base.clone() };
    problems.extend([
        mxfp4,
        f32,
        Problem { head_dim: 64, page_size: 24, ..base.clone() },
        Problem { head_dim: 256, page_size: 16, ..base.clone() },
        Problem { head_dim: 512, ..base },
    ]);
    problems
}

fn specializations(arch: &Arch) -> Vec<Specialization> {
    let mut all: Vec<_> = problems().iter().map(|p| specialize::tile(&select(p, arch).unwrap()).unwrap()).collect();
    for warps in REDUCER_WARPS {
        all.push(specialize::reduce(arch.name, 128, DType::BF16, false, false, ReducerCut { warps, split: 1 }).unwrap());
    }
    all.push(specialize::reduce(arch.name, 80, DType::F32, true, true, ReducerCut { warps: 4, split: 1 }).unwrap());
    for head_dim in [64, 128, 256, 512] {
        let cut = ReducerCut { warps: 8, split: REDUCER_SPLIT };
        all.push(specialize::reduce(arch.name, head_dim, DType::BF16, false, false, cut).unwrap());
    }
    for (rows, ragged) in [(1, false), (32, true), (256, false)] {
        all.push(specialize::plan(arch, rows, ragged).unwrap());
    }
    let key = WriteKey {
        arch: arch.name,
        head_dim: 128,
        page_size: 16,
        dtype: DType::BF16,
        kv_dtype: KvDtype::Bf16,
        scales: ScaleMode::None,
        layout: CacheLayout::Nhd,
    };
    for key in [
        key,
        WriteKey { kv_dtype: KvDtype::Fp8, scales: ScaleMode::PerToken, layout: CacheLayout::Shuffled, ..key },
        WriteKey { kv_dtype: KvDtype::Mxfp4, scales: ScaleMode::Block, ..key },
    ] {
        all.push(specialize::write(&key).unwrap());
    }
    all
}

/// Bytes that a thread keeps in local memory: the largest frame in the CUBIN's `.nv.info`.
fn frame_bytes(cubin: &[u8]) -> u32 {
    const FRAME_SIZE: u8 = 0x11;
    let word = |at: usize, bytes: usize| cubin[at..at + bytes].iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
    let (table, size, count, names) = (word(0x28, 8), word(0x3a, 2), word(0x3c, 2), word(0x3e, 2));
    let section = |i: u64| (table + i * size) as usize;
    let strings = word(section(names) + 0x18, 8) as usize;
    let name = |i: u64| cubin[strings + word(section(i), 4) as usize..].split(|&c| c == 0).next().unwrap();
    let info = (0..count).find(|&i| name(i) == b".nv.info").expect("a .nv.info section");
    let (mut at, bytes) = (word(section(info) + 0x18, 8) as usize, word(section(info) + 0x20, 8) as usize);
    let (end, mut frame) = (at + bytes, 0);
    while at + 4 <= end {
        let (format, attribute, value) = (cubin[at], cubin[at + 1], word(at + 2, 2) as usize);
        if attribute == FRAME_SIZE {
            frame = frame.max(word(at + 8, 4) as u32);
        }
        at += 4 + if format == 4 { value } else { 0 };
    }
    frame
}

/// Whether a kernel for `sm_90a` has an asynchronous copy that the GPU refuses as an illegal instruction: the ptxas of CUDA 13.0 makes one of a copy
/// with an L2 policy where a thread copies many rows at once. No copy of these kernels has the operands that the encoding stands for.
fn has_illegal_copy(cubin: &[u8]) -> bool {
    const COPY_OFF_A_UNIFORM_REGISTER: u16 = 0xdae;
    cubin.chunks_exact(16).any(|x| u16::from_le_bytes([x[0], x[1]]) & 0xfff == COPY_OFF_A_UNIFORM_REGISTER && x[8..10] == [0x40, 0x1d])
}

/// Bytes of registers that may go to memory: a few where head_dim 256 fills the registers with the output, and in the plain tile.
fn spills_allowed(spec: &Specialization) -> u32 {
    if spec.kernel.contains("_d256_") || spec.kernel.ends_with("plain") { 192 } else { 0 }
}

#[test]
fn every_kernel_compiles_without_spills() {
    let mut failed = vec![];
    for arch in [Arch::sm80(), Arch::sm89(), Arch::sm90()] {
        let compiler = Compiler::new(JitSettings::default());
        for spec in specializations(&arch) {
            match compiler.code_object(&spec) {
                Err(error) if error.to_string().contains("no NVRTC") && std::env::var_os("CI").is_none() => {
                    eprintln!("skipped: {error}");
                    return;
                }
                Err(error) => failed.push(format!("{} {}: {error}", spec.arch, spec.kernel)),
                Ok(cubin) if arch.name == ArchName::Sm90 && has_illegal_copy(&cubin) => {
                    failed.push(format!("{} {}: an illegal instruction {:?}", spec.arch, spec.kernel, spec.defines))
                }
                Ok(cubin) => match frame_bytes(&cubin) {
                    bytes if bytes <= spills_allowed(&spec) => {}
                    bytes => failed.push(format!("{} {}: {bytes} bytes of local memory {:?}", spec.arch, spec.kernel, spec.defines)),
                },
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}
