//! Opaque handles: never addresses, so that a stale or made-up one is found out.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What callers hold.
pub type Handle = *mut c_void;

/// The objects of one kind that are alive.
pub struct Table<T>(Mutex<HashMap<u64, Arc<T>>>);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// A number that no other handle has; odd, so that no pointer to an object looks like it.
pub fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0x5151_0000_0001);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

impl<T> Table<T> {
    /// Adds an object under a fresh handle.
    pub fn insert(&self, make: impl FnOnce(u64) -> T) -> Handle {
        let id = fresh();
        lock(&self.0).insert(id, Arc::new(make(id)));
        id as Handle
    }

    /// The object of a handle.
    pub fn get(&self, handle: Handle) -> Option<Arc<T>> {
        lock(&self.0).get(&(handle as u64)).cloned()
    }

    /// Takes the object of a handle out.
    pub fn remove(&self, handle: Handle) -> Option<Arc<T>> {
        lock(&self.0).remove(&(handle as u64))
    }

    /// All objects.
    pub fn all(&self) -> Vec<Arc<T>> {
        lock(&self.0).values().cloned().collect()
    }

    /// Forgets those that `keep` says no to.
    pub fn retain(&self, keep: impl Fn(&T) -> bool) {
        lock(&self.0).retain(|_, object| keep(object));
    }
}

/// A lock that outlives a panic of another holder.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
