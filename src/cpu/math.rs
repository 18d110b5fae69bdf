//! The arithmetic of the two products: f32, or BF16 pairs with f32 sums. (`tiles` has another: BF16 pairs in whole tiles.)

use super::ahead::Ahead;
use super::gemm::{Scores, Weighted};
use super::isa::Isa;

/// How scores and outputs are multiplied out.
///
/// # Safety
/// As [`Isa`].
pub(super) trait Math: Copy + 'static {
    /// Elements of a unit.
    const PAIR: usize;
    /// Bytes of an element.
    const BYTES: usize = 4 / Self::PAIR;
    /// Whether queries and values must come as plain units, not in a form of the vector set's own.
    const PLAIN: bool = false;
    unsafe fn dot<I: Isa>(a: I::V, b: I::V, c: I::V) -> I::V;

    /// Scores of a step (see [`Scores`]): the vector set's register tiles, unless the arithmetic has better.
    #[inline(always)]
    unsafe fn scores<I: Isa>(job: &Scores, ahead: &mut Ahead) {
        unsafe { I::scores::<Self>(job, ahead) }
    }
    /// Adds a run's weighted values to the output rows (see [`Weighted`]), likewise.
    #[inline(always)]
    unsafe fn weighted<I: Isa>(job: &Weighted, ahead: &mut Ahead) {
        unsafe { I::weighted::<Self>(job, ahead) }
    }
}

/// f32 throughout.
#[derive(Clone, Copy)]
pub(super) struct Singles;

/// BF16 factors, f32 sums. Only x86 has sets that multiply them.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
#[derive(Clone, Copy)]
pub(super) struct Pairs;

impl Math for Singles {
    const PAIR: usize = 1;
    #[inline(always)]
    unsafe fn dot<I: Isa>(a: I::V, b: I::V, c: I::V) -> I::V {
        unsafe { I::mul_add(a, b, c) }
    }
}

impl Math for Pairs {
    const PAIR: usize = 2;
    #[inline(always)]
    unsafe fn dot<I: Isa>(a: I::V, b: I::V, c: I::V) -> I::V {
        unsafe { I::dot_pairs(a, b, c) }
    }
}
