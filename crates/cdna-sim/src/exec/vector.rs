//! Vector ALU.

use super::{Step, Stop, unsupported};
use crate::exec::lanes::{PackedOp, Row, Ty};
use crate::exec::math;
use crate::float::{self, Wide};
use crate::operand::EXEC;
use crate::program::{CarryOp, Kind, LaneOp, Select, Unused, Vector, VectorSrc};
use crate::wave::{Wave, lanes};

fn flush(row: &mut Row) {
    for x in row.iter_mut() {
        if *x & 0x7f80_0000 == 0 {
            *x &= 0x8000_0000;
        }
    }
}

fn select(x: u32, s: Select) -> u32 {
    if s.bits == 32 {
        return x;
    }
    let field = x >> s.shift & ((1 << s.bits) - 1);
    if s.sext { ((field << (32 - s.bits)) as i32 >> (32 - s.bits)) as u32 } else { field }
}

/// Lanes that a vector instruction writes.
fn active(wave: &Wave, v: &Vector) -> u64 {
    let exec = wave.exec();
    let Some(dpp) = &v.dpp else { return exec };
    let mut mask = exec & dpp.enabled;
    if !dpp.bound_zero {
        for lane in lanes(mask) {
            let source = dpp.map[lane];
            if source == 255 || exec >> source & 1 == 0 {
                mask &= !(1 << lane);
            }
        }
    }
    mask
}

fn source_row(wave: &Wave, v: &Vector, i: usize, second: bool) -> Row {
    let input = &v.inputs[i];
    let mut row = match input.src {
        VectorSrc::Row(row) => wave.v[usize::from(row) + usize::from(second)],
        VectorSrc::Scalar(src) => {
            let value = wave.scalar(src, if input.ty.registers() == 2 { 2 } else { 1 });
            [if second { (value >> 32) as u32 } else { value as u32 }; 64]
        }
    };
    if i == 0
        && let Some(dpp) = &v.dpp
    {
        let (exec, old) = (wave.exec(), row);
        for (lane, x) in row.iter_mut().enumerate() {
            let source = dpp.map[lane];
            *x = if source != 255 && exec >> source & 1 == 1 { old[usize::from(source)] } else { 0 };
        }
    }
    row
}

/// A 32-bit source with its modifiers.
fn input(wave: &Wave, v: &Vector, i: usize) -> Row {
    let input = &v.inputs[i];
    let mut row = source_row(wave, v, i, false);
    if let Some(sdwa) = &v.sdwa
        && i < 2
    {
        row.iter_mut().for_each(|x| *x = select(*x, sdwa.src[i]));
    }
    let sign = if input.ty == Ty::F16 { 0x8000 } else { 0x8000_0000 };
    if input.ty.is_half() && v.op_sel >> i & 1 == 1 {
        row.iter_mut().for_each(|x| *x >>= 16);
    }
    if input.abs {
        row.iter_mut().for_each(|x| *x &= !sign);
    }
    if input.neg {
        row.iter_mut().for_each(|x| *x ^= sign);
    }
    row
}

fn flushed(wave: &Wave, v: &Vector, i: usize) -> Row {
    let mut row = input(wave, v, i);
    if v.inputs[i].ty == Ty::F32 && wave.mode.flushes_f32() {
        flush(&mut row);
    }
    row
}

/// As [`flushed`], in place where the register itself is what the instruction sees.
#[inline]
fn flushed_ref<'a>(wave: &'a Wave, v: &Vector, i: usize, room: &'a mut Row) -> &'a Row {
    let input = &v.inputs[i];
    let flushes = input.ty == Ty::F32 && wave.mode.flushes_f32();
    let plain = !flushes && !input.abs && !input.neg && v.sdwa.is_none() && v.op_sel == 0 && (i > 0 || v.dpp.is_none());
    match input.src {
        VectorSrc::Row(row) if plain => &wave.v[usize::from(row)],
        _ => {
            *room = flushed(wave, v, i);
            room
        }
    }
}

/// A 64-bit (or widened 32-bit) source with its modifiers.
fn wide_input(wave: &Wave, v: &Vector, i: usize) -> [u64; 64] {
    let ty = v.inputs[i].ty;
    if ty.registers() == 1 {
        let row = flushed(wave, v, i);
        return std::array::from_fn(|lane| row[lane].into());
    }
    let (low, high) = (source_row(wave, v, i, false), source_row(wave, v, i, true));
    let (abs, neg) = (v.inputs[i].abs, v.inputs[i].neg);
    std::array::from_fn(|lane| {
        let mut x = u64::from(low[lane]) | u64::from(high[lane]) << 32;
        if abs {
            x &= !(1 << 63);
        }
        if neg {
            x ^= 1 << 63;
        }
        x
    })
}

/// Output modifiers and the write of a 32-bit result.
fn finish(wave: &mut Wave, v: &Vector, ty: Ty, mut out: Row, keeps_half: bool) {
    if ty == Ty::F32 {
        if v.omod != 1.0 {
            out.iter_mut().for_each(|x| *x = (f32::from_bits(*x) * v.omod).to_bits());
        }
        if v.clamp {
            out.iter_mut().for_each(|x| *x = math::max(f32::from_bits(*x), 0.0).min(1.0).to_bits());
        }
        if wave.mode.flushes_f32() {
            flush(&mut out);
        }
    }
    let old = &wave.v[usize::from(v.dst)];
    if let Some(sdwa) = &v.sdwa {
        let (bits, shift) = (sdwa.dst.bits, sdwa.dst.shift);
        if bits < 32 {
            let mask = ((1u32 << bits) - 1) << shift;
            for (x, old) in out.iter_mut().zip(old) {
                let field = *x << shift & mask;
                *x = match sdwa.unused {
                    Unused::Zero => field,
                    Unused::SignExtend => (((field >> shift) << (32 - bits)) as i32 >> (32 - bits) << shift) as u32,
                    Unused::Preserve => old & !mask | field,
                };
            }
        }
    } else if v.op_sel & 8 != 0 {
        out.iter_mut().zip(old).for_each(|(x, old)| *x = old & 0xffff | *x << 16);
    } else if keeps_half {
        out.iter_mut().zip(old).for_each(|(x, old)| *x = old & 0xffff_0000 | *x & 0xffff);
    }
    let mask = active(wave, v);
    wave.write_row(v.dst, &out, mask);
}

fn write_wide(wave: &mut Wave, v: &Vector, ty: Ty, out: &[u64; 64]) {
    let mask = active(wave, v);
    wave.write_row(v.dst, &std::array::from_fn(|lane| out[lane] as u32), mask);
    if ty.registers() == 2 {
        wave.write_row(v.dst + 1, &std::array::from_fn(|lane| (out[lane] >> 32) as u32), mask);
    }
}

pub fn step(wave: &mut Wave, kind: &Kind) -> Step {
    match kind {
        Kind::Row { op, v } => {
            let f = if wave.mode.saturates() { op.saturating.unwrap_or(op.f) } else { op.f };
            let (mut a, mut b, mut c, mut out) = ([0; 64], [0; 64], [0; 64], [0; 64]);
            let arity = f.arity();
            let first = flushed_ref(wave, v, 0, &mut a);
            let second = if arity > 1 { flushed_ref(wave, v, 1, &mut b) } else { first };
            let third = if arity > 2 { flushed_ref(wave, v, 2, &mut c) } else { first };
            f.call([first, second, third], &mut out);
            finish(wave, v, op.dst, out, op.keeps_half);
        }
        Kind::Wide { op, v } => {
            let src: [[u64; 64]; 3] = std::array::from_fn(|i| if i < op.arity { wide_input(wave, v, i) } else { [0; 64] });
            let mut out: [u64; 64] = std::array::from_fn(|lane| (op.f)(src[0][lane], src[1][lane], src[2][lane]));
            if op.dst == Ty::F32 {
                let mut row: Row = std::array::from_fn(|lane| out[lane] as u32);
                if wave.mode.flushes_f32() {
                    flush(&mut row);
                }
                out = std::array::from_fn(|lane| row[lane].into());
            }
            write_wide(wave, v, op.dst, &out);
        }
        Kind::Packed { op, v, sel_lo, sel_hi, neg_lo, neg_hi } => packed(wave, *op, v, [*sel_lo, *sel_hi], [*neg_lo, *neg_hi]),
        Kind::PackedMove { v, sel } => {
            let (low, high) = (source_row(wave, v, 0, sel & 1 == 1), source_row(wave, v, 1, sel >> 1 & 1 == 1));
            let mask = active(wave, v);
            wave.write_row(v.dst, &low, mask);
            wave.write_row(v.dst + 1, &high, mask);
        }
        Kind::FmaMix { v, sel, half, dst_half } => fma_mix(wave, v, *sel, *half, *dst_half),
        Kind::Bit3 { v, table } => {
            let src: [Row; 3] = std::array::from_fn(|i| input(wave, v, i));
            let mut out = [0u32; 64];
            for (lane, x) in out.iter_mut().enumerate() {
                let (a, b, c) = (src[0][lane], src[1][lane], src[2][lane]);
                // Bit (a << 2 | b << 1 | c) of the table is the result.
                for i in (0..8u32).filter(|i| table >> i & 1 == 1) {
                    let pick = |bits: u32, at: u32| if i >> at & 1 == 1 { bits } else { !bits };
                    *x |= pick(a, 2) & pick(b, 1) & pick(c, 0);
                }
            }
            let half = v.inputs[0].ty == Ty::B16;
            if half {
                out.iter_mut().for_each(|x| *x &= 0xffff);
            }
            finish(wave, v, v.inputs[0].ty, out, half);
        }
        Kind::ScaledTo { v, from, to, part } => {
            let two = *from == Wide::F32;
            let (a, b) = (flushed(wave, v, 0), flushed(wave, v, 1));
            let scale = if two { input(wave, v, 2) } else { b };
            let (old, mode) = (wave.v[usize::from(v.dst)], if wave.mode.saturates() { &math::SATURATE } else { &math::KEEP });
            let convert = |lane: usize| {
                let s = [a[lane], if two { b[lane] } else { 0 }];
                float::cvt_scalef32_pk_to(old[lane], s, scale[lane], *part, *from, *to, mode)
            };
            finish(wave, v, Ty::B32, std::array::from_fn(convert), false);
        }
        Kind::ScaledFrom { v, from, to, part } => {
            let (a, scale) = (input(wave, v, 0), input(wave, v, 1));
            let both: [[u32; 2]; 64] =
                std::array::from_fn(|lane| float::cvt_scalef32_pk_from(a[lane], scale[lane], *part, *from, *to, &math::KEEP));
            let ty = if *to == Wide::F32 { Ty::B64 } else { Ty::B32 };
            write_wide(wave, v, ty, &both.map(|[low, high]| u64::from(low) | u64::from(high) << 32));
        }
        Kind::Compare { f, v, dst, exec } => {
            let mask = f(&wide_input(wave, v, 0), &wide_input(wave, v, 1)) & wave.exec();
            wave.set_pair(*dst, mask);
            if *exec {
                wave.set_pair(EXEC, mask);
            }
        }
        Kind::CompareClass { v, dst } => {
            let (x, classes) = (input(wave, v, 0), input(wave, v, 1));
            let mask = lanes(wave.exec()).filter(|&lane| classes[lane] & class_of(x[lane]) != 0).fold(0, |mask, lane| mask | 1 << lane);
            wave.set_pair(*dst, mask);
        }
        Kind::Select { v, mask } => {
            let (a, b, mask) = (input(wave, v, 0), input(wave, v, 1), wave.pair(*mask));
            let out = std::array::from_fn(|lane| if mask >> lane & 1 == 1 { b[lane] } else { a[lane] });
            finish(wave, v, Ty::B32, out, false);
        }
        Kind::Carry { op, v, out, carry } => {
            let (a, b) = (input(wave, v, 0), input(wave, v, 1));
            let carry = carry.map_or(0, |first| wave.pair(first));
            let (mut row, mut carries) = ([0; 64], 0u64);
            for lane in 0..64 {
                let (x, y, c) = (u64::from(a[lane]), u64::from(b[lane]), carry >> lane & 1);
                let full = match op {
                    CarryOp::Add => x + y + c,
                    CarryOp::Sub => x.wrapping_sub(y + c),
                    CarryOp::SubRev => y.wrapping_sub(x + c),
                };
                row[lane] = full as u32;
                carries |= u64::from(full >> 32 != 0) << lane;
            }
            let exec = wave.exec();
            finish(wave, v, Ty::B32, row, false);
            wave.set_pair(*out, carries & exec);
        }
        Kind::MulAdd64 { v, signed, out } => {
            let src: [[u64; 64]; 3] = std::array::from_fn(|i| wide_input(wave, v, i));
            let mut carries = 0;
            let result = std::array::from_fn(|lane| {
                let (a, b) = (src[0][lane], src[1][lane]);
                let product = if *signed { (i64::from(a as i32) * i64::from(b as i32)) as u64 } else { a * b };
                let (sum, carry) = product.overflowing_add(src[2][lane]);
                carries |= u64::from(carry) << lane;
                sum
            });
            let exec = wave.exec();
            write_wide(wave, v, Ty::B64, &result);
            wave.set_pair(*out, carries & exec);
        }
        Kind::DivScale { v, out } => div_scale(wave, v, *out),
        Kind::DivFmas { v } => {
            let (src, vcc): ([Row; 3], u64) = (std::array::from_fn(|i| flushed(wave, v, i)), wave.vcc());
            let mut row = [0; 64];
            math::fma(&src[0], &src[1], &src[2], &mut row);
            for (lane, x) in row.iter_mut().enumerate().filter(|(lane, _)| vcc >> lane & 1 == 1) {
                // The addend tells the scale that div_scale chose.
                let up = (src[2][lane] >> 23 & 0xff) > 127;
                let [a, b, c] = [0, 1, 2].map(|i| f64::from(f32::from_bits(src[i][lane])));
                *x = math::scaled_fma(a, b, c, if up { 64 } else { -64 }).to_bits();
            }
            finish(wave, v, Ty::F32, row, false);
        }
        Kind::Lane(op) => return lane_op(wave, op),
        _ => return Err(unsupported("instruction without an implementation")),
    }
    Ok(())
}

trait ToBitsF32 {
    fn to_bits_f32(self) -> u32;
}

impl ToBitsF32 for f64 {
    fn to_bits_f32(self) -> u32 {
        (self as f32).to_bits()
    }
}

fn packed(wave: &mut Wave, op: PackedOp, v: &Vector, sel: [u32; 2], neg: [u32; 2]) {
    let mask = active(wave, v);
    match op {
        PackedOp::Single(f) => {
            let mut out = [[0; 64]; 2];
            for part in 0..2 {
                let mut src = [[0; 64]; 3];
                for (i, row) in src.iter_mut().enumerate().take(f.arity()) {
                    *row = source_row(wave, v, i, sel[part] >> i & 1 == 1);
                    if neg[part] >> i & 1 == 1 {
                        row.iter_mut().for_each(|x| *x ^= 0x8000_0000);
                    }
                    if wave.mode.flushes_f32() {
                        flush(row);
                    }
                }
                let [a, b, c] = &src;
                f.call([a, b, c], &mut out[part]);
                if wave.mode.flushes_f32() {
                    flush(&mut out[part]);
                }
            }
            wave.write_row(v.dst, &out[0], mask);
            wave.write_row(v.dst + 1, &out[1], mask);
        }
        PackedOp::Half { arity, f, .. } => {
            let src: [Row; 3] = std::array::from_fn(|i| if i < arity { source_row(wave, v, i, false) } else { [0; 64] });
            let pick = |lane: usize, i: usize, part: usize| {
                let half = (src[i][lane] >> (16 * (sel[part] >> i & 1))) as u16;
                half ^ (((neg[part] >> i & 1) as u16) << 15)
            };
            let half = |lane: usize, part: usize| u32::from(f(pick(lane, 0, part), pick(lane, 1, part), pick(lane, 2, part)));
            let out = std::array::from_fn(|lane| half(lane, 0) | half(lane, 1) << 16);
            wave.write_row(v.dst, &out, mask);
        }
    }
}

fn fma_mix(wave: &mut Wave, v: &Vector, sel: u32, half: u32, dst_half: Option<bool>) {
    let mut src = [[0; 64]; 3];
    for (i, row) in src.iter_mut().enumerate() {
        *row = source_row(wave, v, i, false);
        for x in row.iter_mut() {
            let mut value = f32::from_bits(*x);
            if half >> i & 1 == 1 {
                value = half::f16::from_bits((*x >> (16 * (sel >> i & 1))) as u16).to_f32();
            }
            if v.inputs[i].abs {
                value = value.abs();
            }
            *x = if v.inputs[i].neg { -value } else { value }.to_bits();
        }
    }
    let mut out = [0; 64];
    math::fma(&src[0], &src[1], &src[2], &mut out);
    let Some(high) = dst_half else { return finish(wave, v, Ty::F32, out, false) };
    let old = wave.v[usize::from(v.dst)];
    for (x, old) in out.iter_mut().zip(old) {
        let bits = u32::from(half::f16::from_f32(f32::from_bits(*x)).to_bits());
        *x = if high { old & 0xffff | bits << 16 } else { old & 0xffff_0000 | bits };
    }
    finish(wave, v, Ty::B32, out, false);
}

/// Class bits of `v_cmp_class_f32`.
fn class_of(bits: u32) -> u32 {
    let x = f32::from_bits(bits);
    let negative = x.is_sign_negative();
    match x.classify() {
        std::num::FpCategory::Nan => 1 << u32::from(bits & 0x40_0000 != 0),
        std::num::FpCategory::Infinite => {
            if negative {
                1 << 2
            } else {
                1 << 9
            }
        }
        std::num::FpCategory::Normal => {
            if negative {
                1 << 3
            } else {
                1 << 8
            }
        }
        std::num::FpCategory::Subnormal => {
            if negative {
                1 << 4
            } else {
                1 << 7
            }
        }
        std::num::FpCategory::Zero => {
            if negative {
                1 << 5
            } else {
                1 << 6
            }
        }
    }
}

/// Scales numerator or denominator so that a division's intermediate steps neither overflow nor underflow.
fn div_scale(wave: &mut Wave, v: &Vector, out: u16) {
    let src: [Row; 3] = std::array::from_fn(|i| flushed(wave, v, i));
    let exponent = |bits: u32| (bits >> 23 & 0xff) as i32;
    let scaled = |bits: u32, power: i32| (f64::from(f32::from_bits(bits)) * 2f64.powi(power)).to_bits_f32();
    let (mut row, mut vcc) = ([0; 64], 0u64);
    for lane in 0..64 {
        let (which, denominator, numerator) = (src[0][lane], src[1][lane], src[2][lane]);
        let (d, n) = (exponent(denominator), exponent(numerator));
        let is_denominator = which == denominator;
        let mut value = which;
        let zero = f32::from_bits(denominator) == 0.0 || f32::from_bits(numerator) == 0.0;
        if zero {
            value = f32::NAN.to_bits();
        } else if n - d >= 96 {
            vcc |= 1 << lane;
            if is_denominator {
                value = scaled(which, 64);
            }
        } else if d == 0 {
            value = scaled(which, 64);
        } else if d >= 253 && n - d <= -127 {
            // The ISA document's 2^64 would overflow; only 2^-64 gives what the last step scales back.
            vcc |= 1 << lane;
            if is_denominator {
                value = scaled(which, -64);
            }
        } else if d >= 253 {
            value = scaled(which, -64);
        } else if n - d <= -127 {
            vcc |= 1 << lane;
            if which == numerator {
                value = scaled(which, 64);
            }
        } else if n <= 23 {
            value = scaled(which, 64);
        }
        row[lane] = value;
    }
    let exec = wave.exec();
    finish(wave, v, Ty::F32, row, false);
    wave.set_pair(out, vcc & exec);
}

fn lane_op(wave: &mut Wave, op: &LaneOp) -> Result<(), Stop> {
    match *op {
        LaneOp::ReadFirst { dst, row } => {
            let lane = (wave.exec().trailing_zeros() as usize) % 64;
            wave.s[usize::from(dst)] = wave.v[usize::from(row)][lane];
        }
        LaneOp::Read { dst, row, lane } => {
            wave.s[usize::from(dst)] = wave.v[usize::from(row)][wave.scalar(lane, 1) as usize % 64];
        }
        LaneOp::Write { row, value, lane } => {
            let (value, lane) = (wave.scalar(value, 1) as u32, wave.scalar(lane, 1) as usize % 64);
            wave.v[usize::from(row)][lane] = value;
        }
        LaneOp::Swap { a, b } => {
            let (x, y, mask) = (wave.v[usize::from(a)], wave.v[usize::from(b)], wave.exec());
            wave.write_row(a, &y, mask);
            wave.write_row(b, &x, mask);
        }
        LaneOp::PermuteSwap { a, b, width } => {
            if wave.exec() != u64::MAX {
                return Err(unsupported("permlane swap with inactive lanes"));
            }
            let width = width as usize;
            let (x, y) = (wave.v[usize::from(a)], wave.v[usize::from(b)]);
            let upper = |lane: usize| lane / width % 2 == 1;
            wave.v[usize::from(a)] = std::array::from_fn(|lane| if upper(lane) { y[lane - width] } else { x[lane] });
            wave.v[usize::from(b)] = std::array::from_fn(|lane| if upper(lane) { y[lane] } else { x[lane + width] });
        }
        LaneOp::MaskCount { dst, mask, base, high } => {
            let v = Vector { dst, inputs: [mask, base, base], clamp: false, omod: 1.0, op_sel: 0, dpp: None, sdwa: None };
            let (mask, base) = (input(wave, &v, 0), input(wave, &v, 1));
            let out = std::array::from_fn(|lane| {
                let below = if high { ((1u64 << lane) - 1) >> 32 } else { (1u64 << lane) - 1 } as u32;
                (mask[lane] & below).count_ones().wrapping_add(base[lane])
            });
            let exec = wave.exec();
            wave.write_row(dst, &out, exec);
        }
    }
    Ok(())
}
