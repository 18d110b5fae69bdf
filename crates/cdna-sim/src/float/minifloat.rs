//! The 8-bit and 4-bit formats: FP8 and BF8 in the OCP (gfx950) and FNUZ (gfx942) encodings, E2M1, and the E8M0 scale.

use std::sync::OnceLock;

/// The scale byte that makes a whole block NaN.
pub const E8M0_NAN: u8 = 0xff;

/// Which encoding of FP8 and BF8 an architecture has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Encoding {
    /// OCP 8-bit floating point: gfx950.
    Ocp,
    /// Finite, NaN is 0x80, no negative zero, bias one higher: gfx942.
    Fnuz,
}

impl Fp8Encoding {
    /// FP8 (E4M3) in this encoding.
    pub fn fp8(self) -> MiniFloat {
        match self {
            Fp8Encoding::Ocp => MiniFloat::E4m3,
            Fp8Encoding::Fnuz => MiniFloat::E4m3Fnuz,
        }
    }

    /// BF8 (E5M2) in this encoding.
    pub fn bf8(self) -> MiniFloat {
        match self {
            Fp8Encoding::Ocp => MiniFloat::E5m2,
            Fp8Encoding::Fnuz => MiniFloat::E5m2Fnuz,
        }
    }
}

/// A floating-point format of at most 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MiniFloat {
    /// OCP FP8: bias 7, largest 448, NaN 0x7f and 0xff, no infinity.
    E4m3,
    /// OCP BF8: bias 15, largest 57344, infinity 0x7c.
    E5m2,
    /// FNUZ FP8: bias 8, largest 240, NaN 0x80.
    E4m3Fnuz,
    /// FNUZ BF8: bias 16, largest 57344, NaN 0x80.
    E5m2Fnuz,
    /// OCP FP4: bias 1, largest 6, neither infinity nor NaN.
    E2m1,
}

impl MiniFloat {
    const ALL: [MiniFloat; 5] = [MiniFloat::E4m3, MiniFloat::E5m2, MiniFloat::E4m3Fnuz, MiniFloat::E5m2Fnuz, MiniFloat::E2m1];

    /// Bits of a code.
    pub fn bits(self) -> u32 {
        if self == MiniFloat::E2m1 { 4 } else { 8 }
    }

    /// The bits of a byte that belong to a code.
    pub fn mask(self) -> u8 {
        if self == MiniFloat::E2m1 { 0xf } else { 0xff }
    }

    /// The code of the largest finite value.
    pub fn max_code(self) -> u8 {
        match self {
            MiniFloat::E4m3 => 0x7e,
            MiniFloat::E5m2 => 0x7b,
            MiniFloat::E4m3Fnuz | MiniFloat::E5m2Fnuz => 0x7f,
            MiniFloat::E2m1 => 0x7,
        }
    }

    fn mantissa_bits(self) -> u32 {
        match self {
            MiniFloat::E4m3 | MiniFloat::E4m3Fnuz => 3,
            MiniFloat::E5m2 | MiniFloat::E5m2Fnuz => 2,
            MiniFloat::E2m1 => 1,
        }
    }

    fn bias(self) -> i32 {
        match self {
            MiniFloat::E4m3 => 7,
            MiniFloat::E5m2 => 15,
            MiniFloat::E4m3Fnuz => 8,
            MiniFloat::E5m2Fnuz => 16,
            MiniFloat::E2m1 => 1,
        }
    }

    fn is_fnuz(self) -> bool {
        matches!(self, MiniFloat::E4m3Fnuz | MiniFloat::E5m2Fnuz)
    }

    /// The value of `code` (the low [`MiniFloat::bits`] bits); NaN codes give a quiet NaN of their sign.
    pub fn decode(self, code: u8) -> f32 {
        let sign_bit = 1u8 << (self.bits() - 1);
        let sign = if code & sign_bit != 0 { -1.0 } else { 1.0 };
        let magnitude = code & (sign_bit - 1);
        if self.is_fnuz() && code == 0x80 {
            return f32::NAN;
        }
        if magnitude > self.max_code() {
            let infinite = self == MiniFloat::E5m2 && magnitude == 0x7c;
            return if infinite { sign * f32::INFINITY } else { f32::NAN.copysign(sign) };
        }
        let mantissa_bits = self.mantissa_bits();
        let exponent = i32::from(magnitude >> mantissa_bits);
        let fraction = i32::from(magnitude & ((1 << mantissa_bits) - 1));
        let steps = if exponent == 0 { fraction } else { fraction + (1 << mantissa_bits) };
        sign * steps as f32 * 2f32.powi(exponent.max(1) - self.bias() - mantissa_bits as i32)
    }

    /// The values of all codes, indexed by code (E2M1's sixteen repeat).
    pub fn table(self) -> &'static [f32; 256] {
        static TABLES: [OnceLock<[f32; 256]>; 5] = [const { OnceLock::new() }; 5];
        TABLES[self as usize].get_or_init(|| std::array::from_fn(|code| MiniFloat::ALL[self as usize].decode(code as u8)))
    }

    /// `x` rounded to the nearest code, ties to even.
    ///
    /// What exceeds the largest finite value after rounding, and an infinity, becomes that value with `saturate` (MODE.FP16_OVFL), else
    /// NaN, or infinity in E5M2. A NaN stays one with either. E2M1 has only the saturating form, whatever `saturate` says. NaN results
    /// carry the sign of `x` where the encoding can; E2M1 has no NaN and the documents do not say what becomes of one: here it is the
    /// largest value. A negative zero, also by underflow, is kept except in FNUZ, which has none.
    pub fn encode(self, x: f64, saturate: bool) -> u8 {
        let sign = if x.is_sign_negative() { 1u8 << (self.bits() - 1) } else { 0 };
        if x.is_nan() {
            return self.nan_code(sign);
        }
        match self.finite_code(x.abs()) {
            Some(0) if self.is_fnuz() => 0,
            Some(code) => sign | code,
            None if saturate || self == MiniFloat::E2m1 => sign | self.max_code(),
            None if self == MiniFloat::E5m2 => sign | 0x7c,
            None => self.nan_code(sign),
        }
    }

    fn nan_code(self, sign: u8) -> u8 {
        match self {
            MiniFloat::E4m3Fnuz | MiniFloat::E5m2Fnuz => 0x80,
            MiniFloat::E4m3 | MiniFloat::E5m2 => sign | 0x7f,
            MiniFloat::E2m1 => sign | self.max_code(),
        }
    }

    /// The code of a magnitude, or `None` where it rounds beyond the largest finite value.
    fn finite_code(self, magnitude: f64) -> Option<u8> {
        let mantissa_bits = self.mantissa_bits() as i32;
        let lowest = 1 - self.bias();
        let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(lowest);
        if exponent > 16 {
            return None;
        }
        let steps = (magnitude * 2f64.powi(mantissa_bits - exponent)).round_ties_even() as i32;
        // Consecutive codes are consecutive magnitudes, so a mantissa that rounds up to the next power of two carries by itself.
        let code = ((exponent - lowest) << mantissa_bits) + steps;
        (code <= i32::from(self.max_code())).then_some(code as u8)
    }
}

/// The power of two that an E8M0 scale stands for; NaN for [`E8M0_NAN`].
pub fn e8m0_to_f64(code: u8) -> f64 {
    if code == E8M0_NAN { f64::NAN } else { f64::from_bits((u64::from(code) + 1023 - 127) << 52) }
}

/// The E8M0 scale that a `scalef32` conversion takes from its f32 scale operand: the exponent field alone.
pub fn f32_scale_exponent(scale: u32) -> u8 {
    (scale >> 23) as u8
}
