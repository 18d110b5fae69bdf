//! Which instruction sets this machine has.

use crate::registry::CpuIsa;

/// The best instruction set of this machine that the kernels know.
pub(crate) fn detect() -> CpuIsa {
    const BEST_FIRST: [CpuIsa; 6] = [CpuIsa::AmxBf16, CpuIsa::Avx512Bf16, CpuIsa::Avx512, CpuIsa::Avx2, CpuIsa::Neon, CpuIsa::Portable];
    BEST_FIRST.into_iter().find(|&isa| available(isa)).unwrap_or(CpuIsa::Portable)
}

/// Whether the kernels for `isa` run here.
pub(crate) fn available(isa: CpuIsa) -> bool {
    match isa {
        CpuIsa::Portable => true,
        CpuIsa::Neon => cfg!(target_arch = "aarch64"),
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c"),
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx512 => {
            available(CpuIsa::Avx2)
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        }
        #[cfg(target_arch = "x86_64")]
        CpuIsa::Avx512Bf16 => available(CpuIsa::Avx512) && is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vbmi"),
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        CpuIsa::AmxBf16 => available(CpuIsa::Avx512Bf16) && crate::cpu::tiles::Amx::available(),
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        _ => false,
    }
}
