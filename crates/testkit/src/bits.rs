//! Results that must be the same bit for bit.

use std::fmt;

use candle::Tensor;

use crate::reference::floats;

/// Every value's bits, of a CPU tensor. Shown as their number: there may be millions.
#[derive(Clone, PartialEq, Eq)]
pub struct Bits {
    dims: Vec<usize>,
    values: Vec<u64>,
}

/// The bits of a CPU tensor.
pub fn bits(tensor: &Tensor) -> Bits {
    Bits { dims: tensor.dims().to_vec(), values: floats(tensor).unwrap().into_iter().map(f64::to_bits).collect() }
}

impl fmt::Debug for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the bits of {:?} values", self.dims)
    }
}

/// What [`assert_same!`](crate::assert_same) compares.
pub trait Same {
    /// Where and how `self` first differs from `want`.
    fn difference(&self, want: &Self) -> Option<String>;
}

impl Same for Bits {
    /// Shapes may differ where the values are as many.
    fn difference(&self, want: &Self) -> Option<String> {
        if self.values.len() != want.values.len() {
            return Some(format!("{:?} values where {:?} are due", self.dims, want.dims));
        }
        let differs = |&at: &usize| self.values[at] != want.values[at];
        let first = (0..self.values.len()).find(differs)?;
        let many = (first..self.values.len()).filter(differs).count();
        let index = unravel(first, &self.dims);
        let [got, due] = [self, want].map(|bits| f64::from_bits(bits.values[first]));
        Some(format!("{many} of {:?} values differ, the first is {index:?}: {got:e}, not {due:e}", self.dims))
    }
}

impl Same for (Bits, Bits) {
    fn difference(&self, want: &Self) -> Option<String> {
        let second = || self.1.difference(&want.1).map(|text| format!("of the second: {text}"));
        self.0.difference(&want.0).or_else(second)
    }
}

impl Same for Vec<Bits> {
    fn difference(&self, want: &Self) -> Option<String> {
        if self.len() != want.len() {
            return Some(format!("{} tensors where {} are due", self.len(), want.len()));
        }
        let at = |i: usize| self[i].difference(&want[i]).map(|text| format!("of tensor {i}: {text}"));
        (0..self.len()).find_map(at)
    }
}

/// The index of element `at` of a contiguous tensor.
fn unravel(mut at: usize, dims: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = dims
        .iter()
        .rev()
        .map(|&n| {
            let here = at % n;
            at /= n;
            here
        })
        .collect();
    index.reverse();
    index
}

/// See [`assert_same!`](crate::assert_same).
#[track_caller]
pub fn assert_same<T: Same>(got: &T, want: &T, what: &str) {
    if let Some(difference) = got.difference(want) {
        panic!("{what}{}{difference}", if what.is_empty() { "" } else { ": " })
    }
}

/// Panics unless both are the same [`Bits`] (or pairs or lists of them), naming the first value that differs. What follows says what they are.
#[macro_export]
macro_rules! assert_same {
    ($got:expr, $want:expr $(,)?) => { $crate::bits::assert_same(&$got, &$want, "") };
    ($got:expr, $want:expr, $($what:tt)+) => { $crate::bits::assert_same(&$got, &$want, &format!($($what)+)) };
}

#[cfg(test)]
mod tests {
    use candle::{Device, Result};

    use super::*;

    #[test]
    fn the_first_difference_is_named() -> Result<()> {
        let of = |values: &[f32; 6]| Tensor::new(values, &Device::Cpu).and_then(|t| t.reshape((2, 3))).map(|t| bits(&t));
        let (one, other) = (of(&[0., 1., 2., 3., 4., 5.])?, of(&[0., 1., 2., -3., f32::NAN, 5.])?);
        assert_eq!(one.difference(&one.clone()), None);
        assert_eq!(one.difference(&other).unwrap(), "2 of [2, 3] values differ, the first is [1, 0]: 3e0, not -3e0");
        assert!((one.clone(), other.clone()).difference(&(one.clone(), one.clone())).unwrap().starts_with("of the second: 2 of"));
        assert!(vec![one.clone()].difference(&vec![]).is_some());
        assert_eq!(format!("{one:?}"), "the bits of [2, 3] values");
        Ok(())
    }

    #[test]
    #[should_panic(expected = "page 7: 1 of [1] values differ, the first is [0]: 1e0, not 2e0")]
    fn what_differs_is_said() {
        let of = |value: f32| bits(&Tensor::new(&[value], &Device::Cpu).unwrap());
        assert_same!(of(1.0), of(2.0), "page {}", 7);
    }
}
