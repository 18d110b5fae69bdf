//! Matrix products: `mma.sync` of a warp, `wgmma` of a warpgroup. Sums are exact to F64 and rounded once, where the hardware rounds more.

use half::{bf16, f16};

use super::{Env, elements, set, value, vector};
use crate::alu::e4m3;
use crate::clock::WARP;
use crate::cluster::Cluster;
use crate::error::Fault;
use crate::inst::{Element, Inst, LANES, Operand, Ty};
use crate::shared::Who;
use crate::warp::{Lanes, Warp};

/// Rows of a warp's product.
const ROWS: usize = 16;

fn number(element: Element, bits: u32) -> f32 {
    match element {
        Element::F16 => f16::from_bits(bits as u16).to_f32(),
        Element::Bf16 => bf16::from_bits(bits as u16).to_f32(),
        Element::E4m3 => e4m3(bits as u8),
    }
}

/// The elements of a register.
fn unpacked(element: Element, register: u64) -> impl Iterator<Item = f32> {
    let bits = 8 * element.bytes();
    (0..32 / bits).map(move |i| number(element, (register >> (bits * i)) as u32 & (u32::MAX >> (32 - bits))))
}

/// `A[16, k]` out of a warp's four registers.
fn rows_of_a(element: Element, a: &[Lanes]) -> Vec<Vec<f32>> {
    let k = element.k();
    let mut rows = vec![vec![0.0; k]; ROWS];
    for lane in 0..LANES {
        for (i, register) in a.iter().enumerate() {
            let (row, column) = (lane / 4 + 8 * (i % 2), (i / 2 * 4 + lane % 4) * (k / 8));
            unpacked(element, register[lane]).enumerate().for_each(|(j, x)| rows[row][column + j] = x);
        }
    }
    rows
}

/// Row and column of a lane's `i`th element of C.
fn place_in_c(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + 8 * (i % 4 / 2), i / 4 * 8 + lane % 4 * 2 + i % 2)
}

/// A row times a column, on top of `start`.
fn dot(row: &[f32], column: &[f32], start: f32) -> f32 {
    row.iter().zip(column).map(|(&x, &y)| f64::from(x) * f64::from(y)).fold(f64::from(start), |sum, x| sum + x) as f32
}

/// `D[16, n] = A B + C`, B given by columns; C is zero without.
fn multiply(warp: &mut Warp, to: &[Operand], a: &[Vec<f32>], b: &[Vec<f32>], c: Option<&[Lanes]>) {
    for (i, to) in to.iter().enumerate() {
        let element = |lane: usize| {
            let (row, column) = place_in_c(lane, i);
            let start = c.map_or(0.0, |c| f32::from_bits(c[i][lane] as u32));
            u64::from(dot(&a[row], &b[column], start).to_bits())
        };
        set(warp, to, u32::MAX, Ty::F32, element);
    }
}

/// `mma.sync.m16n8k16`, or `k32` of E4M3.
pub fn mma(warp: &mut Warp, env: &Env<'_>, inst: &Inst, element: Element) {
    let [a, b, c] = [1, 2, 3].map(|i| vector(warp, env, &inst.operands[i]));
    let k = element.k();
    let mut columns = vec![vec![0.0; k]; 8];
    for lane in 0..LANES {
        for (i, register) in b.iter().enumerate() {
            let first = (i * 4 + lane % 4) * (k / 8);
            unpacked(element, register[lane]).enumerate().for_each(|(j, x)| columns[lane / 4][first + j] = x);
        }
    }
    multiply(warp, elements(&inst.operands[0]), &rows_of_a(element, &a), &columns, Some(&c));
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

    /// `rows` rows of `bytes` bytes from the row's beginning on.
    fn read(&self, warp: &mut Warp, cluster: &mut Cluster, rows: usize, bytes: usize) -> Result<Vec<Vec<u8>>, Fault> {
        let mut matrix = vec![vec![]; rows];
        for (row, data) in matrix.iter_mut().enumerate() {
            for at in (0..bytes).step_by(16) {
                let address = self.address(row, at);
                let who = Who { agent: &warp.agent, lane: WARP };
                data.extend(cluster.ctas[warp.cta].shared.begin_read(address, who)?);
                warp.products.push(address);
            }
        }
        Ok(matrix)
    }
}

fn numbers(element: Element, bytes: &[u8]) -> Vec<f32> {
    match element {
        Element::E4m3 => bytes.iter().map(|&byte| e4m3(byte)).collect(),
        _ => bytes.as_chunks().0.iter().map(|half| number(element, u16::from_le_bytes(*half).into())).collect(),
    }
}

/// `wgmma.m64nNk16` (or `k32`): `D[64, n] = A B (+ D)`, this warp's 16 rows of it. Operands: D, A, B, whether D is added to, signs, transpositions.
pub fn wgmma(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst, columns: usize, element: Element) -> Result<(), Fault> {
    let operands = &inst.operands;
    let flag = |warp: &Warp, i: usize| operands.get(i).map_or(0, |operand| value(warp, env, operand)[0] & 1);
    let a_in_shared = !matches!(operands[1], Operand::Vector(_));
    // A in registers has no transposition.
    let (a_across, b_across) = if a_in_shared { (flag(warp, 6), flag(warp, 7)) } else { (0, flag(warp, 6)) };
    if flag(warp, 4) != 1 || flag(warp, 5) != 1 || a_across != 0 {
        return Err(Fault::Misuse("negated operands, or A across, are not supported".to_string()));
    }
    let k = element.k();
    let a = if a_in_shared {
        let descriptor = Descriptor::of(value(warp, env, &operands[1])[0])?;
        let first = warp.index % 4 * ROWS;
        let rows = descriptor.read(warp, cluster, first + ROWS, 32)?;
        rows[first..].iter().map(|row| numbers(element, row)).collect()
    } else {
        rows_of_a(element, &vector(warp, env, &operands[1]))
    };
    let descriptor = Descriptor::of(value(warp, env, &operands[2])[0])?;
    let b = if b_across == 1 {
        let rows = descriptor.read(warp, cluster, k, columns * element.bytes())?;
        let rows: Vec<Vec<f32>> = rows.iter().map(|row| numbers(element, row)).collect();
        (0..columns).map(|column| rows.iter().map(|row| row[column]).collect()).collect()
    } else {
        let rows = descriptor.read(warp, cluster, columns, 32)?;
        rows.iter().map(|row| numbers(element, row)).collect::<Vec<_>>()
    };
    let c = vector(warp, env, &operands[0]);
    let adds = flag(warp, 3) == 1;
    multiply(warp, elements(&operands[0]), &a, &b, adds.then_some(c.as_slice()));
    Ok(())
}

/// Waits for products: what they read may be written again.
pub fn wait(warp: &mut Warp, cluster: &mut Cluster, env: &Env<'_>, inst: &Inst) {
    let left = value(warp, env, &inst.operands[0])[0] as usize;
    let shared = &mut cluster.ctas[warp.cta].shared;
    warp.products.take_done(left).into_iter().for_each(|address| shared.finish_read(address, &warp.agent, false));
    // One that is still under way may read the same.
    warp.products.iter().for_each(|&address| shared.finish_read(address, &warp.agent, true));
}
