//! Where an MFMA's matrix elements live in registers and lanes.

use std::borrow::Cow;

use super::{Element, Input, MfmaOp, Register};
use crate::float::{MiniFloat, f16_to_f32, flush_f32};

/// The lane that is read for A in place of `lane`.
pub(super) fn broadcast_a(lane: usize, cbsz: u32, abid: u32) -> usize {
    let group = 64 >> cbsz;
    lane % group + group * abid as usize
}

/// The lane that is read for B in place of `lane`.
pub(super) fn permute_b(lane: usize, blgp: u32) -> usize {
    match blgp {
        0 => lane,
        1 => lane % 32,
        2 => lane % 32 + 32,
        3 => (lane + 16) % 64,
        source => lane % 16 + 16 * (source as usize - 4),
    }
}

/// The registers with every lane replaced by the one that `source` names.
pub(super) fn permuted(registers: &[Register], source: impl Fn(usize) -> usize, needed: bool) -> Cow<'_, [Register]> {
    if !needed {
        return Cow::Borrowed(registers);
    }
    registers.iter().map(|register| std::array::from_fn(|lane| register[source(lane)])).collect()
}

/// Where the m values of a block at one k are: register, first bit and first lane; the others are in the lanes that follow.
fn place(op: &MfmaOp, bits: usize, block: usize, k: usize) -> (usize, usize, usize) {
    let per_lane = op.k * op.m * op.blocks / 64;
    // 8-bit inputs of F8F6F4 come as two halves of K, each spread over all lanes.
    let (half, k) = if op.a == Input::F8F6F4 && bits == 8 { (k / (op.k / 2), k % (op.k / 2)) } else { (0, k) };
    let run = if op.a == Input::F8F6F4 && bits == 8 { per_lane / 2 } else { per_lane };
    let item = half * run + k % run;
    (item * bits / 32, item * bits % 32, op.m * (block + op.blocks * (k / run)))
}

/// The values of A or B as `[block][k][row of A or column of B]`.
pub(super) fn unpack(op: &MfmaOp, element: Element, registers: &[Register], flush: bool) -> Vec<f64> {
    match element {
        Element::F32 if flush => unpack_with(op, 32, registers, |word| f64::from(f32::from_bits(flush_f32(word)))),
        Element::F32 => unpack_with(op, 32, registers, |word| f64::from(f32::from_bits(word))),
        Element::F16 => unpack_with(op, 16, registers, |word| f64::from(f16_to_f32(word as u16))),
        Element::Bf16 => unpack_with(op, 16, registers, |word| f64::from(f32::from_bits(word << 16))),
        Element::I8 => unpack_with(op, 8, registers, |word| f64::from(word as i8)),
        Element::Mini(format) => unpack_mini(op, format, registers),
    }
}

fn unpack_mini(op: &MfmaOp, format: MiniFloat, registers: &[Register]) -> Vec<f64> {
    let table = format.table();
    let mask = format.mask();
    unpack_with(op, format.bits() as usize, registers, |word| f64::from(table[usize::from(word as u8 & mask)]))
}

/// As [`unpack`], for I8.
pub(super) fn unpack_i8(op: &MfmaOp, registers: &[Register]) -> Vec<i32> {
    unpack_with(op, 8, registers, |word| i32::from(word as i8))
}

#[inline(always)]
fn unpack_with<T>(op: &MfmaOp, bits: usize, registers: &[Register], decode: impl Fn(u32) -> T) -> Vec<T> {
    let mut values = Vec::with_capacity(op.blocks * op.k * op.m);
    for block in 0..op.blocks {
        for k in 0..op.k {
            let (register, shift, lane) = place(op, bits, block, k);
            values.extend(registers[register][lane..lane + op.m].iter().map(|&word| decode(word >> shift)));
        }
    }
    values
}

/// Where row `row` of a block of C and D is: register and first lane; its m columns are in the lanes that follow.
pub(super) fn result_row(op: &MfmaOp, block: usize, row: usize) -> (usize, usize) {
    // Four rows are stacked in consecutive registers; as many such stacks as fit lie side by side in the lanes.
    const STACK: usize = 4;
    let blocks_across = (64 * STACK).div_ceil(op.m * op.m);
    let stacks_across = 64 / blocks_across / op.m;
    let stacks = op.m / (STACK * stacks_across);
    let register = row % STACK + STACK * (row / (STACK * stacks_across) + stacks * (block / blocks_across));
    (register, op.m * (row / STACK % stacks_across + stacks_across * (block % blocks_across)))
}

/// The lane whose scale applies to row `row` of A (or column of B) in scale block `k_block` of 32 values.
pub(super) fn scale_lane(op: &MfmaOp, row: usize, k_block: usize) -> usize {
    row + op.m * k_block
}
