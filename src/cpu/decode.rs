//! Stored elements as f32 or BF16, run by run: tables and plain loops, which an instruction set may override.

use half::f16;

/// E4M3 (OCP) codes as BF16 bits; every finite E4M3 value is a BF16 value.
pub(super) static FP8_AS_BF16: [u16; 256] = fp8_table();

/// E2M1 codes as f32.
pub(super) static E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

pub(super) const fn fp8_table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) & 15, code & 7);
        let magnitude = if code & 0x7f == 0x7f {
            0x7fc0
        } else if exponent == 0 {
            // mantissa * 2^-9
            ((mantissa as f32 / 512.0).to_bits() >> 16) as u16
        } else {
            ((exponent + 120) << 7 | mantissa << 4) as u16
        };
        table[code] = magnitude | ((code & 0x80) << 8) as u16;
        code += 1;
    }
    table
}

/// E8M0: `2^(code - 127)`, NaN for 255.
#[inline(always)]
pub(super) fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}

#[inline(always)]
pub(super) unsafe fn f16_to_f32(from: *const u16, to: *mut f32, n: usize) {
    for i in 0..n {
        unsafe { *to.add(i) = f16::from_bits(*from.add(i)).to_f32() }
    }
}

#[inline(always)]
pub(super) unsafe fn bf16_to_f32(from: *const u16, to: *mut f32, n: usize) {
    for i in 0..n {
        unsafe { *to.add(i) = f32::from_bits(u32::from(*from.add(i)) << 16) }
    }
}

#[inline(always)]
pub(super) unsafe fn fp8_to_bf16(from: *const u8, to: *mut u16, n: usize) {
    for i in 0..n {
        unsafe { *to.add(i) = FP8_AS_BF16[usize::from(*from.add(i))] }
    }
}

#[inline(always)]
pub(super) unsafe fn fp8_to_f32(from: *const u8, to: *mut f32, n: usize) {
    for i in 0..n {
        unsafe { *to.add(i) = f32::from_bits(u32::from(FP8_AS_BF16[usize::from(*from.add(i))]) << 16) }
    }
}

#[inline(always)]
unsafe fn mxfp4(from: *const u8, scales: *const u8, n: usize, mut put: impl FnMut(usize, f32)) {
    for block in 0..n / 32 {
        let scale = if scales.is_null() { 1.0 } else { e8m0(unsafe { *scales.add(block) }) };
        for i in 0..16 {
            let byte = usize::from(unsafe { *from.add(block * 16 + i) });
            put(block * 32 + 2 * i, E2M1[byte & 15] * scale);
            put(block * 32 + 2 * i + 1, E2M1[byte >> 4] * scale);
        }
    }
}

#[inline(always)]
pub(super) unsafe fn mxfp4_to_f32(from: *const u8, scales: *const u8, to: *mut f32, n: usize) {
    unsafe { mxfp4(from, scales, n, |i, x| *to.add(i) = x) }
}

#[inline(always)]
pub(super) unsafe fn mxfp4_to_bf16(from: *const u8, scales: *const u8, to: *mut u16, n: usize) {
    // Two significand bits: the upper half of the f32 is the value (a NaN scale gives the quiet NaN).
    unsafe { mxfp4(from, scales, n, |i, x| *to.add(i) = (x.to_bits() >> 16) as u16) }
}

#[inline(always)]
pub(super) unsafe fn interleave(a: *const u16, b: *const u16, to: *mut u32, n: usize) {
    for i in 0..n {
        unsafe { *to.add(i) = u32::from(*a.add(i)) | u32::from(*b.add(i)) << 16 }
    }
}

#[inline(always)]
pub(super) unsafe fn transpose(from: *const u32, from_stride: usize, to: *mut u32, to_stride: usize, rows: usize, columns: usize) {
    for c in 0..columns {
        for r in 0..rows {
            unsafe { *to.add(c * to_stride + r) = from.byte_add(r * from_stride).add(c).read_unaligned() }
        }
    }
}
