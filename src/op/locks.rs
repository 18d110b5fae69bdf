//! Read locks of several tensors at once.

use candle::{Storage, StorageRef, Tensor};

/// The storages of `tensors`, locked for reading until this is dropped; tensors that share one lock it once.
///
/// A second lock of a storage by the thread that holds the first would wait behind a writer that waits for the first.
pub(crate) struct Locks<'a, const N: usize> {
    guards: [Option<StorageRef<'a>>; N],
    /// For each tensor, whose guard is its own.
    first: [usize; N],
}

impl<'a, const N: usize> Locks<'a, N> {
    pub fn new(tensors: [&'a Tensor; N]) -> Self {
        Self::of(tensors.map(Some))
    }

    /// [`Locks::new`] of the tensors that there are.
    pub fn of(tensors: [Option<&'a Tensor>; N]) -> Self {
        let addresses = tensors.map(|tensor| tensor.map(storage_address));
        let first = std::array::from_fn(|i| addresses.iter().position(|&other| other == addresses[i]).unwrap_or(i));
        let guards = std::array::from_fn(|i| tensors[i].filter(|_| first[i] == i).map(|tensor| tensor.storage_and_layout().0));
        Self { guards, first }
    }

    /// The storage of tensor `i`, where it is there.
    #[cfg(feature = "cuda")]
    pub fn get_if(&self, i: usize) -> Option<&Storage> {
        self.guards[self.first[i]].as_deref()
    }

    /// The storage of tensor `i`, which must be there.
    pub fn get(&self, i: usize) -> &Storage {
        match &self.guards[self.first[i]] {
            Some(storage) => storage,
            None => unreachable!("tensor {i} is there, so the first of its storage holds a guard"),
        }
    }
}

/// Where a tensor's storage lives: equal for tensors that share it, whatever their views.
pub(crate) fn storage_address(tensor: &Tensor) -> *const Storage {
    std::ptr::from_ref(&*tensor.storage_and_layout().0)
}

#[cfg(test)]
mod tests {
    use candle::{DType, Device, Result};

    use super::*;

    #[test]
    fn views_of_one_storage_lock_it_once() -> Result<()> {
        let pages = Tensor::zeros((2, 2, 3), DType::F32, &Device::Cpu)?;
        let (key, value) = (pages.narrow(1, 0, 1)?, pages.narrow(1, 1, 1)?);
        let q = Tensor::zeros(3, DType::BF16, &Device::Cpu)?;
        let locks = Locks::new([&q, &key, &value]);
        assert_eq!(locks.guards.iter().flatten().count(), 2);
        assert!(std::ptr::eq(locks.get(1), locks.get(2)) && !std::ptr::eq(locks.get(0), locks.get(1)));
        Ok(())
    }
}
