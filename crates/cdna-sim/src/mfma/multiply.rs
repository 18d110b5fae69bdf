//! The arithmetic of an MFMA on unpacked matrices.

use super::{Input, MfmaOp, Modifiers, Register, Scale, layout};

/// How the products of f32-accumulating MFMAs are summed.
#[derive(Clone, Copy)]
struct Order {
    /// Products that are summed before the accumulator is rounded.
    group: usize,
    /// One f32 fused multiply-add a product instead.
    fused_f32: bool,
    fp16_ovfl: bool,
}

/// The scale factors of both matrices as `[scale block][row or column]`.
struct Factors {
    a: Vec<f64>,
    b: Vec<f64>,
}

/// Products of values that fit in 32 bits, with f32 accumulation. `a` and `b` are `[block][k][m]`.
pub(super) fn floats(op: &MfmaOp, a: &[f64], b: &[f64], c: &[Register], d: &mut [Register], modifiers: &Modifiers) {
    let group = match op.a {
        Input::F8F6F4 => 32,
        Input::Fp8 | Input::Bf8 => 16,
        _ => 8,
    };
    let order = Order { group: group.min(op.k), fused_f32: op.a == Input::F32, fp16_ovfl: modifiers.fp16_ovfl };
    let factors = modifiers.scales.as_ref().map(|[a, b]| Factors { a: factors(op, a), b: factors(op, b) });
    let multiply = match op.m {
        4 => block::<4>,
        16 => block::<16>,
        _ => block::<32>,
    };
    let size = op.k * op.m;
    for index in 0..op.blocks {
        let rows = |row: usize| layout::result_row(op, index, row);
        multiply(order, &a[index * size..][..size], &b[index * size..][..size], factors.as_ref(), &rows, c, d);
    }
}

fn factors(op: &MfmaOp, scale: &Scale) -> Vec<f64> {
    (0..op.k / 32).flat_map(|k_block| (0..op.m).map(move |row| scale.factor(layout::scale_lane(op, row, k_block)))).collect()
}

type Rows<'a> = &'a dyn Fn(usize) -> (usize, usize);

/// One block, with the widest vector instructions that the machine has. All variants give the same bits: products are exact in f64.
fn block<const M: usize>(order: Order, a: &[f64], b: &[f64], factors: Option<&Factors>, rows: Rows, c: &[Register], d: &mut [Register]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has AVX-512 F, which is all that the function asks for.
        return unsafe { block_avx512::<M>(order, a, b, factors, rows, c, d) };
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor has AVX2 and FMA, which is all that the function asks for.
        return unsafe { block_avx2::<M>(order, a, b, factors, rows, c, d) };
    }
    block_generic::<M, false>(order, a, b, factors, rows, c, d);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn block_avx2<const M: usize>(
    order: Order,
    a: &[f64],
    b: &[f64],
    factors: Option<&Factors>,
    rows: Rows,
    c: &[Register],
    d: &mut [Register],
) {
    block_generic::<M, true>(order, a, b, factors, rows, c, d);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn block_avx512<const M: usize>(
    order: Order,
    a: &[f64],
    b: &[f64],
    factors: Option<&Factors>,
    rows: Rows,
    c: &[Register],
    d: &mut [Register],
) {
    block_generic::<M, true>(order, a, b, factors, rows, c, d);
}

#[inline(always)]
fn block_generic<const M: usize, const FMA: bool>(
    order: Order,
    a: &[f64],
    b: &[f64],
    factors: Option<&Factors>,
    rows: Rows,
    c: &[Register],
    d: &mut [Register],
) {
    let (b, _) = b.as_chunks::<M>();
    for row in 0..M {
        let (register, lane) = rows(row);
        let mut sums: [f32; M] = std::array::from_fn(|column| f32::from_bits(c[register][lane + column]));
        if order.fused_f32 {
            for (k, b) in b.iter().enumerate() {
                let x = a[k * M + row] as f32;
                for (sum, y) in sums.iter_mut().zip(b) {
                    *sum = saturated(f64::from(x.mul_add(*y as f32, *sum)), f64::from(x) + y + f64::from(*sum), order.fp16_ovfl);
                }
            }
        } else {
            for (index, b) in b.chunks(order.group).enumerate() {
                let mut products = [0f64; M];
                for (k, b) in b.iter().enumerate() {
                    let x = a[(index * order.group + k) * M + row];
                    for (sum, y) in products.iter_mut().zip(b) {
                        *sum = if FMA { x.mul_add(*y, *sum) } else { *sum + x * y };
                    }
                }
                if let Some(factors) = factors {
                    let x = factors.a[index * M + row];
                    let (y, _) = factors.b.as_chunks::<M>();
                    for (sum, y) in products.iter_mut().zip(y[index]) {
                        *sum *= x * y;
                    }
                }
                for (sum, products) in sums.iter_mut().zip(products) {
                    let exact = products + f64::from(*sum);
                    *sum = saturated(exact, exact, order.fp16_ovfl);
                }
            }
        }
        for (word, sum) in d[register][lane..lane + M].iter_mut().zip(sums) {
            *word = sum.to_bits();
        }
    }
}

/// `x` rounded to f32; with `fp16_ovfl` an infinity that comes of finite operands (`witness` is finite) is the largest finite value.
#[inline(always)]
fn saturated(x: f64, witness: f64, fp16_ovfl: bool) -> f32 {
    let rounded = x as f32;
    if fp16_ovfl && rounded.is_infinite() && witness.is_finite() { f32::MAX.copysign(rounded) } else { rounded }
}

/// I8 products with i32 accumulation, wrapping or saturating at the end. `a` and `b` are `[block][k][m]`.
pub(super) fn integers(op: &MfmaOp, a: &[i32], b: &[i32], c: &[Register], d: &mut [Register], saturate: bool) {
    let size = op.k * op.m;
    for block in 0..op.blocks {
        let (a, b) = (&a[block * size..][..size], &b[block * size..][..size]);
        for row in 0..op.m {
            let (register, lane) = layout::result_row(op, block, row);
            let mut sums = [0i32; 32];
            for (a, b) in a.chunks(op.m).zip(b.chunks(op.m)) {
                for (sum, y) in sums.iter_mut().zip(b) {
                    *sum += a[row] * y;
                }
            }
            for (column, sum) in sums[..op.m].iter().enumerate() {
                let c = c[register][lane + column] as i32;
                d[register][lane + column] = if saturate { c.saturating_add(*sum) } else { c.wrapping_add(*sum) } as u32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::StdRng};

    /// The portable code and the machine's widest give the same bits, scaled or not.
    #[test]
    fn vector_variants_agree() {
        let mut rng = StdRng::seed_from_u64(31);
        let bf16 = |rng: &mut StdRng| f64::from(f32::from_bits(rng.random_range(-1.0e3..1.0e3f32).to_bits() & 0xffff_0000));
        let rows = |row: usize| (row % 4, 16 * (row / 4));
        for group in [8, 16, 32] {
            let a: Vec<f64> = (0..16 * 64).map(|_| bf16(&mut rng)).collect();
            let b: Vec<f64> = (0..16 * 64).map(|_| bf16(&mut rng)).collect();
            let c: [Register; 4] = std::array::from_fn(|_| std::array::from_fn(|_| rng.random_range(-1.0e6..1.0e6f32).to_bits()));
            let power = |_| 2f64.powi(rng.random_range(-9..9));
            let powers: Vec<f64> = (0..2 * 16 * 64 / group).map(power).collect();
            let (x, y) = powers.split_at(powers.len() / 2);
            let scales = Factors { a: x.to_vec(), b: y.to_vec() };
            for factors in [None, Some(&scales)] {
                for fused_f32 in [false, true] {
                    let order = Order { group, fused_f32, fp16_ovfl: false };
                    let (mut portable, mut widest) = ([[0; 64]; 4], [[0; 64]; 4]);
                    block_generic::<16, false>(order, &a, &b, factors, &rows, &c, &mut portable);
                    block::<16>(order, &a, &b, factors, &rows, &c, &mut widest);
                    assert_eq!(portable, widest);
                }
            }
        }
    }
}
