//! Numerics of the CDNA3 and CDNA4 vector ALU as pure functions on bits.
//!
//! Everything that the ISA defines exactly (conversions, rounding, saturation, NaN and signed-zero rules) is exact here. The
//! transcendental functions ([`special`]) are not bit-documented by AMD; they are computed in f64 and rounded, and hardware is within
//! 1 ulp of that. Facts come from the CDNA3 and CDNA4 instruction set architecture documents (chapters "Matrix Arithmetic", sections on
//! BF8/FP8 conversions, and the pseudocode of each instruction), and from LLVM's AMDGPU documentation for the MODE register.
//!
//! Stochastic rounding is not modelled.

mod arith;
mod compare;
mod convert;
mod half;
mod minifloat;
mod mode;
pub mod special;

pub use arith::{add_f32, fma_f16, fma_f32, mul_f32, mul_legacy_f32};
pub use compare::{clamp_f16, clamp_f32, class_f32, max_f16, max_f32, maximum_f32, med3_f32, min_f16, min_f32, minimum_f32};
pub use convert::{
    Wide, cvt_f32_fp8, cvt_pk_bf16_f32, cvt_pk_f16_f32, cvt_pk_f32_fp8, cvt_pk_fp8_f32, cvt_pkrtz_f16_f32, cvt_scalef32_pk_from,
    cvt_scalef32_pk_to, f32_to_i32, f32_to_u32,
};
pub use half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, f64_to_f16, flush_f16};
pub use minifloat::{E8M0_NAN, Fp8Encoding, MiniFloat, e8m0_to_f64, f32_scale_exponent};
pub use mode::{Denorm, Mode, Round};

/// `bits` with a denormal replaced by a zero of the same sign.
pub fn flush_f32(bits: u32) -> u32 {
    if bits & 0x7f80_0000 == 0 { bits & 0x8000_0000 } else { bits }
}
