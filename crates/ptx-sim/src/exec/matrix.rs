//! Matrix products: `mma.sync` of a warp, `wgmma` of a warpgroup. Sums are exact to F64 and rounded once, where the hardware rounds more.

use std::ops::Range;
use std::sync::LazyLock;

use half::{bf16, f16};

use super::{Env, elements, set, uniform, value, vector};
use crate::alu::e4m3;
use crate::clock::WARP;
use crate::cluster::Cluster;
use crate::error::Fault;
use crate::inst::{Element, Inst, LANES, Op, Operand, Ty};
use crate::shared::Who;
use crate::warp::{Busy, Lanes, Product, Warp};

/// Rows of a warp's product.
const ROWS: usize = 16;

fn number(element: Element, bits: u32) -> f64 {
    static E4M3: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|byte| e4m3(byte as u8)));
    f64::from(match element {
        Element::F16 => f16::from_bits(bits as u16).to_f32(),
        Element::Bf16 => bf16::from_bits(bits as u16).to_f32(),
        Element::E4m3 => E4M3[bits as usize & 0xff],
    })
}

/// The elements of a register.
fn unpacked(element: Element, register: u64) -> impl Iterator<Item = f64> {
    let bits = 8 * element.bytes();
    (0..32 / bits).map(move |i| number(element, (register >> (bits * i)) as u32 & (u32::MAX >> (32 - bits))))
}

/// `[rows, columns]`, row by row.
struct Matrix {
    columns: usize,
    numbers: Vec<f64>,
}

impl Matrix {
    fn new(rows: usize, columns: usize) -> Self {
        Self { columns, numbers: vec![0.0; rows * columns] }
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.numbers[row * self.columns..][..self.columns]
    }

    fn set(&mut self, row: usize, column: usize, x: f64) {
        self.numbers[row * self.columns + column] = x;
    }
}

/// `A[16, k]` out of a warp's four registers.
fn rows_of_a(element: Element, a: &[Lanes]) -> Matrix {
    let k = element.k();
    let mut rows = Matrix::new(ROWS, k);
    for lane in 0..LANES {
        for (i, register) in a.iter().enumerate() {
            let (row, column) = (lane / 4 + 8 * (i % 2), (i / 2 * 4 + lane % 4) * (k / 8));
            unpacked(element, register[lane]).enumerate().for_each(|(j, x)| rows.set(row, column + j, x));
        }
    }
    rows
}

/// Row and column of a lane's `i`th element of C.
fn place_in_c(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + 8 * (i % 4 / 2), i / 4 * 8 + lane % 4 * 2 + i % 2)
}

/// `D[16, n] = A[16, k] B[k, n] + C`; C is zero without.
fn multiply(warp: &mut Warp, to: &[Operand], a: &Matrix, b: &Matrix, c: Option<&[Lanes]>) {
    let mut sums = Matrix::new(ROWS, b.columns);
    for (i, c) in c.unwrap_or_default().iter().enumerate() {
        for (lane, &c) in c.iter().enumerate() {
            let (row, column) = place_in_c(lane, i);
            sums.set(row, column, f32::from_bits(c as u32).into());
        }
    }
    for (row, sums) in sums.numbers.chunks_exact_mut(b.columns).enumerate() {
        for (k, &x) in a.row(row).iter().enumerate() {
            sums.iter_mut().zip(b.row(k)).for_each(|(sum, &y)| *sum += x * y);
        }
    }
    for (i, to) in to.iter().enumerate() {
        let element = |lane: usize| {
            let (row, column) = place_in_c(lane, i);
            u64::from((sums.row(row)[column] as f32).to_bits())
        };
        set(warp, to, u32::MAX, Ty::F32, element);
    }
}

/// `mma.sync.m16n8k16`, or `k32` of E4M3.
pub fn mma(warp: &mut Warp, env: &Env<'_>, inst: &Inst, element: Element) {
    let [a, b, c] = [1, 2, 3].map(|i| vector(warp, env, &inst.operands[i]));
    let k = element.k();
    let mut rows = Matrix::new(k, 8);
    for lane in 0..LANES {
        for (i, register) in b.iter().enumerate() {
            let first = (i * 4 + lane % 4) * (k / 8);
            unpacked(element, register[lane]).enumerate().for_each(|(j, x)| rows.set(first + j, lane / 4, x));
        }
    }
    multiply(warp, elements(&inst.operands[0]), &rows_of_a(element, &a), &rows, Some(&c));
}

/// A matrix in shared memory as a descriptor has it: rows of 128 bytes, swizzled in atoms of eight.
struct Descriptor {
    start: u32,
    /// Bytes to the next 128 of a row.
    leading: u32,
    /// Bytes to the next eight rows.
    stride: u32,
}

impl Descriptor {
    fn of(bits: u64) -> Result<Self, Fault> {
        let field = |at: u32| (bits >> at & 0x3fff) as u32 * 16;
        if bits >> 62 != 1 || bits >> 49 & 7 != 0 {
            return Err(Fault::Misuse(format!("the matrix descriptor {bits:#x} has no swizzle of 128 bytes from aligned atoms on")));
        }
        Ok(Self { start: field(0), leading: field(16), stride: field(32) })
    }

    /// Where byte `at` of a row is.
    fn address(&self, row: usize, at: usize) -> u32 {
        let [row, at] = [row as u32, at as u32];
        let plain = self.start + at / 128 * self.leading + row / 8 * self.stride + row % 8 * 128 + at % 128;
        plain ^ (plain >> 3 & 0x70)
    }

    /// `bytes` bytes of each of `rows` rows; `each` gets every element's row and column.
    fn read(
        &self,
        warp: &mut Warp,
        cluster: &mut Cluster,
        element: Element,
        rows: Range<usize>,
        bytes: usize,
        mut each: impl FnMut(usize, usize, f64),
    ) -> Result<(), Fault> {
        let shared = &mut cluster.ctas[warp.cta].shared;
        for row in rows.clone() {
            for at in (0..bytes).step_by(16) {
                let address = self.address(row, at);
                let data = shared.begin_read(address, Who { agent: &warp.agent, lane: WARP })?;
                warp.products.push(Product::Shared(address));
                let numbers = (0..4).flat_map(|word| unpacked(element, (data >> (32 * word)) as u64));
                numbers.enumerate().for_each(|(i, x)| each(row - rows.start, at / element.bytes() + i, x));
            }
        }
        Ok(())
    }
}

/// `wgmma.m64nNk16` (or `k32`): `D[64, n] = A B (+ D)`, this warp's 16 rows of it. Operands: D, A, B, whether D is added to, signs, transpositions.
pub fn wgmma(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst, columns: usize, element: Element) -> Result<(), Fault> {
    let operands = &inst.operands;
    let a_in_shared = !matches!(operands[1], Operand::Vector(_));
    // A in registers has no transposition.
    let b_across = matches!(operands.get(if a_in_shared { 7 } else { 6 }), Some(Operand::Imm(1)));
    let adds = uniform(warp, env, &operands[3])? == 1;
    let of_a = if a_in_shared { uniform(warp, env, &operands[1])? } else { 0 };
    let of_b = uniform(warp, env, &operands[2])?;
    begin(warp, operands)?;
    for part in [warp.here.pc.into(), adds.into(), of_a, of_b] {
        warp.products_executed = warp.products_executed.wrapping_mul(0x100_0000_01b3).wrapping_add(part).wrapping_add(1);
    }
    let k = element.k();
    let a = if a_in_shared {
        let descriptor = Descriptor::of(of_a)?;
        let first = warp.index % 4 * ROWS;
        let mut a = Matrix::new(ROWS, k);
        descriptor.read(warp, cluster, element, first..first + ROWS, 32, |row, column, x| a.set(row, column, x))?;
        a
    } else {
        rows_of_a(element, &vector(warp, env, &operands[1]))
    };
    let descriptor = Descriptor::of(of_b)?;
    let mut b = Matrix::new(k, columns);
    if b_across {
        descriptor.read(warp, cluster, element, 0..k, columns * element.bytes(), |row, column, x| b.set(row, column, x))?;
    } else {
        descriptor.read(warp, cluster, element, 0..columns, 32, |row, column, x| b.set(column, row, x))?;
    }
    let c = vector(warp, env, &operands[0]);
    multiply(warp, elements(&operands[0]), &a, &b, adds.then_some(c.as_slice()));
    Ok(())
}

/// The registers of a `wgmma` are the tensor cores' until it is waited for; several may sum into the same.
fn begin(warp: &mut Warp, operands: &[Operand]) -> Result<(), Fault> {
    if !warp.has_fenced_products {
        return Err(Fault::Misuse("a wgmma without a wgmma.fence before it".to_string()));
    }
    warp.busy.resize(warp.regs.len(), Busy::No);
    let a = if let Operand::Vector(a) = &operands[1] { a.as_slice() } else { &[] };
    let read = a.iter().map(|a| (a, Busy::Read));
    for (operand, becomes) in elements(&operands[0]).iter().map(|sum| (sum, Busy::Summed)).chain(read) {
        let Operand::Reg(register) = operand else { continue };
        let busy = &mut warp.busy[*register as usize];
        if *busy != Busy::No && *busy != becomes {
            return Err(under_way());
        }
        *busy = becomes;
        warp.products.push(Product::Register(*register));
    }
    Ok(())
}

fn under_way() -> Fault {
    Fault::Misuse("a register of a wgmma that is not waited for".to_string())
}

/// Whether an instruction leaves the registers alone that products under way have.
pub fn leaves_products(warp: &Warp, inst: &Inst) -> Result<(), Fault> {
    if warp.busy.is_empty() || matches!(inst.op, Op::Wgmma { .. }) {
        return Ok(());
    }
    let is_busy = |operand: &Operand| match operand {
        Operand::Reg(register) | Operand::Address { base: Some(register), .. } => warp.busy[*register as usize] != Busy::No,
        _ => false,
    };
    let touches = inst.operands.iter().any(|operand| elements(operand).iter().any(is_busy));
    if touches { Err(under_way()) } else { Ok(()) }
}

/// Waits for products: what they read may be written again, their sums are there.
pub fn wait(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst) {
    let left = value(warp, env, &inst.operands[0])[0] as usize;
    let shared = &mut cluster.ctas[warp.cta].shared;
    let before = warp.busy.clone();
    for product in warp.products.take_done(left) {
        match product {
            Product::Shared(address) => shared.finish_read(address, &warp.agent, false),
            Product::Register(register) => warp.busy[register as usize] = Busy::No,
        }
    }
    // One that is still under way may have the same.
    let mut is_idle = true;
    for product in warp.products.iter() {
        is_idle = false;
        match product {
            Product::Shared(address) => shared.finish_read(*address, &warp.agent, true),
            Product::Register(register) => warp.busy[*register as usize] = before[*register as usize],
        }
    }
    if is_idle {
        warp.busy.clear();
    }
}
