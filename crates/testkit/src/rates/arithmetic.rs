//! Arithmetic rates of loops that never leave the registers.

use std::hint::black_box;

use super::{best_seconds, threads};

/// A rate and the instructions that reached it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arithmetic {
    pub instructions: &'static str,
    /// Over all cores, two for a multiply-add.
    pub flops: f64,
}

/// A loop that stays in registers.
struct Kernel {
    instructions: &'static str,
    flops_per_iteration: usize,
    run: fn(usize),
}

impl Kernel {
    fn measure(&self) -> Arithmetic {
        let timed = |iterations, passes| best_seconds(&vec![iterations; threads()], passes, |&n| (self.run)(n));
        // Long enough that starting the threads does not show.
        let mut iterations = 1 << 10;
        while timed(iterations, 1) < 0.02 {
            iterations *= 2;
        }
        let flops = (self.flops_per_iteration * iterations * threads()) as f64 / timed(iterations, 7);
        Arithmetic { instructions: self.instructions, flops }
    }
}

/// F32 multiply-adds: AVX-512, AVX2 or whatever the compiler makes of a plain loop.
pub fn f32_fma() -> Arithmetic {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was detected.
            return Kernel { instructions: "AVX-512 FMA", flops_per_iteration: 16 * 16 * 2, run: |n| unsafe { x86::fma_avx512(n) } }
                .measure();
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the features were detected.
            return Kernel { instructions: "AVX2 FMA", flops_per_iteration: 12 * 8 * 2, run: |n| unsafe { x86::fma_avx2(n) } }.measure();
        }
    }
    Kernel { instructions: "plain f32", flops_per_iteration: PLAIN * 2, run: fma_plain }.measure()
}

/// BF16 products summed in F32: AMX, AVX512-BF16, or, without either, [`f32_fma`].
pub fn bf16_dot() -> Arithmetic {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if amx::available() {
        // SAFETY: AMX-BF16 is there and the kernel permits its state.
        return Kernel { instructions: "AMX-BF16", flops_per_iteration: 4 * 16 * 16 * 32 * 2, run: |n| unsafe { amx::dot(n) } }.measure();
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bf16") {
        // SAFETY: the feature was detected.
        return Kernel { instructions: "AVX512-BF16", flops_per_iteration: 16 * 32 * 2, run: |n| unsafe { x86::dot_avx512(n) } }.measure();
    }
    f32_fma()
}

const PLAIN: usize = 64;

fn fma_plain(iterations: usize) {
    let (a, b) = (black_box(0.999f32), black_box(0.001f32));
    let mut sums = [0f32; PLAIN];
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = *sum * a + b;
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    /// 16 independent chains: four cycles of latency on two ports need eight.
    #[target_feature(enable = "avx512f")]
    pub fn fma_avx512(iterations: usize) {
        let (a, b) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(0.001)));
        let mut sums = [_mm512_setzero_ps(); 16];
        for _ in 0..iterations {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }

    /// 12 chains: 16 would not fit the 16 registers beside the operands.
    #[target_feature(enable = "avx2,fma")]
    pub fn fma_avx2(iterations: usize) {
        let (a, b) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(0.001)));
        let mut sums = [_mm256_setzero_ps(); 12];
        for _ in 0..iterations {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub fn dot_avx512(iterations: usize) {
        let a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(0.25)));
        let mut sums = [_mm512_setzero_ps(); 16];
        for _ in 0..iterations {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, a, a);
            }
        }
        black_box(sums);
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use std::arch::asm;
    use std::arch::x86_64::__cpuid_count;

    /// What `ldtilecfg` loads: eight tiles of 16 rows of 64 bytes.
    #[repr(C, align(64))]
    struct TileConfig {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    /// Whether the processor has AMX-BF16 and Linux lets this process use it.
    pub fn available() -> bool {
        let features = __cpuid_count(7, 0).edx;
        let (bf16, tile) = (features >> 22 & 1 == 1, features >> 24 & 1 == 1);
        bf16 && tile && request_permission()
    }

    /// arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); every thread of the process then has it.
    fn request_permission() -> bool {
        let result: i64;
        // SAFETY: a system call that reads and writes no memory of ours.
        unsafe {
            asm!("syscall", inlateout("rax") 158i64 => result, in("rdi") 0x1023, in("rsi") 18, lateout("rcx") _, lateout("r11") _);
        }
        result == 0
    }

    /// Four accumulator tiles, fed from two A and two B tiles.
    ///
    /// # Safety
    /// [`available`] must have returned true.
    pub unsafe fn dot(iterations: usize) {
        let mut config = TileConfig { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: AMX is there and permitted; the configuration is 64 bytes, aligned; the loop touches tile registers only, and
        // releases them. A zero count would wrap, so at least one iteration is run.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {count}",
                "jnz 2b",
                "tilerelease",
                config = in(reg) &config,
                count = inout(reg) iterations.max(1) => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}
