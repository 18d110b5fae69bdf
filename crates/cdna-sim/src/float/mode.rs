//! The floating-point fields of the MODE register.

use super::{flush_f16, flush_f32};

/// A rounding mode, in the encoding of MODE.fp_round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    NearestEven,
    Up,
    Down,
    TowardZero,
}

/// How denormals are treated, in the encoding of MODE.fp_denorm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denorm {
    FlushBoth,
    FlushResults,
    FlushSources,
    Keep,
}

impl Denorm {
    /// Whether source denormals become zero.
    pub fn flushes_sources(self) -> bool {
        matches!(self, Denorm::FlushBoth | Denorm::FlushSources)
    }

    /// Whether denormal results become zero.
    pub fn flushes_results(self) -> bool {
        matches!(self, Denorm::FlushBoth | Denorm::FlushResults)
    }
}

/// The fields of MODE that change what a floating-point instruction computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Rounding of f32 results, MODE bits 1:0.
    pub round_32: Round,
    /// Rounding of f16 and f64 results, MODE bits 3:2.
    pub round_16_64: Round,
    /// Denormals of f32, MODE bits 5:4.
    pub denorm_32: Denorm,
    /// Denormals of f16 and f64, MODE bits 7:6.
    pub denorm_16_64: Denorm,
    /// The clamp modifier turns NaN into 0, MODE bit 8.
    pub dx10_clamp: bool,
    /// Signaling NaNs are quieted and propagated by minimum and maximum, MODE bit 9.
    pub ieee: bool,
    /// Overflowing F16, FP8, BF8 and matrix results become the largest finite value, MODE bit 23.
    pub fp16_ovfl: bool,
}

impl Mode {
    /// Reads the fields out of a MODE register value (`hwreg(HW_REG_MODE)`).
    pub fn from_bits(bits: u32) -> Mode {
        let round = |shift: u32| match bits >> shift & 3 {
            0 => Round::NearestEven,
            1 => Round::Up,
            2 => Round::Down,
            _ => Round::TowardZero,
        };
        let denorm = |shift: u32| match bits >> shift & 3 {
            0 => Denorm::FlushBoth,
            1 => Denorm::FlushResults,
            2 => Denorm::FlushSources,
            _ => Denorm::Keep,
        };
        Mode {
            round_32: round(0),
            round_16_64: round(2),
            denorm_32: denorm(4),
            denorm_16_64: denorm(6),
            dx10_clamp: bits >> 8 & 1 == 1,
            ieee: bits >> 9 & 1 == 1,
            fp16_ovfl: bits >> 23 & 1 == 1,
        }
    }

    /// An f32 source as the ALU sees it.
    pub fn source_f32(&self, bits: u32) -> u32 {
        if self.denorm_32.flushes_sources() { flush_f32(bits) } else { bits }
    }

    /// An f32 result as the ALU writes it.
    pub fn result_f32(&self, bits: u32) -> u32 {
        if self.denorm_32.flushes_results() { flush_f32(bits) } else { bits }
    }

    /// An f16 source as the ALU sees it.
    pub fn source_f16(&self, bits: u16) -> u16 {
        if self.denorm_16_64.flushes_sources() { flush_f16(bits) } else { bits }
    }

    /// An f16 result as the ALU writes it.
    pub fn result_f16(&self, bits: u16) -> u16 {
        if self.denorm_16_64.flushes_results() { flush_f16(bits) } else { bits }
    }
}

impl Default for Mode {
    /// What a HIP kernel starts with: round to nearest even, denormals kept, DX10 clamp and IEEE on, no FP16_OVFL.
    fn default() -> Mode {
        Mode::from_bits(0x3f0)
    }
}
