//! Allocations: device memory, pinned host memory, and what an address belongs to.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::sync::RwLock;

use crate::device::Device;
use crate::error::{Code, Result};

/// Where an allocation lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// On the device with this ordinal.
    Device(usize),
    /// Pinned host memory, allocated while this device was current.
    Host(usize),
}

/// A live allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// First address.
    pub address: u64,
    /// Bytes asked for.
    pub len: usize,
    /// Where.
    pub place: Place,
}

/// What is alive, by address.
#[derive(Default)]
pub struct Allocations(RwLock<BTreeMap<u64, Allocation>>);

/// Alignment of pinned memory: a page.
const HOST_ALIGN: usize = 4096;

/// Fresh allocations up to this size hold bytes 0xff (NaN in most formats) instead of zeros, so that reading what was never written shows.
const POISONED: usize = 16 << 20;

impl Allocations {
    /// The live allocation that contains `address`.
    pub fn containing(&self, address: u64) -> Option<Allocation> {
        let allocations = read(&self.0);
        let (_, &found) = allocations.range(..=address).next_back()?;
        (address - found.address < found.len as u64).then_some(found)
    }

    /// The live allocation that `address..address + len` lies in, an error where it leaves the one it starts in.
    pub fn range(&self, address: u64, len: usize) -> Result<Option<Allocation>> {
        let Some(found) = self.containing(address) else { return Ok(None) };
        let room = found.len as u64 - (address - found.address);
        if len as u64 > room { Err(Code::INVALID_VALUE) } else { Ok(Some(found)) }
    }

    /// Allocates device memory.
    pub fn device(&self, device: &Device, len: usize, limit: usize) -> Result<u64> {
        let used = usize::try_from(device.counts.bytes.get()).unwrap_or(0);
        if len > limit.saturating_sub(used) {
            return Err(Code::OUT_OF_MEMORY);
        }
        let address = device.memory.alloc(len).ok_or(Code::OUT_OF_MEMORY)?;
        if len <= POISONED {
            // SAFETY: a fresh allocation of `len` bytes that nobody else knows.
            unsafe { std::ptr::write_bytes(address as *mut u8, 0xff, len) };
        }
        write(&self.0).insert(address, Allocation { address, len, place: Place::Device(device.ordinal) });
        device.counts.allocations.add(1);
        device.counts.mallocs.add(1);
        device.counts.bytes.add(len as i64);
        Ok(address)
    }

    /// Allocates pinned memory, which every device sees.
    pub fn host(&self, devices: &[Device], current: usize, len: usize) -> Result<u64> {
        let layout = Layout::from_size_align(len, HOST_ALIGN).map_err(|_| Code::OUT_OF_MEMORY)?;
        // SAFETY: the caller has refused a length of 0.
        let address = unsafe { alloc_zeroed(layout) } as u64;
        if address == 0 {
            return Err(Code::OUT_OF_MEMORY);
        }
        for device in devices {
            // SAFETY: `free` unregisters the range before it is deallocated, and waits for what runs.
            unsafe { device.memory.register(address, len) };
        }
        write(&self.0).insert(address, Allocation { address, len, place: Place::Host(current) });
        let counts = &devices[current].counts;
        counts.host_allocations.add(1);
        counts.host_mallocs.add(1);
        counts.host_bytes.add(len as i64);
        Ok(address)
    }

    /// Frees the allocation that starts at `address` and satisfies `wanted`; nothing may be running.
    pub fn free(&self, devices: &[Device], address: u64, wanted: impl Fn(Place) -> bool) -> Result {
        let mut allocations = write(&self.0);
        let found = allocations.get(&address).copied().filter(|found| wanted(found.place)).ok_or(Code::INVALID_VALUE)?;
        allocations.remove(&address);
        match found.place {
            Place::Device(ordinal) => {
                let device = &devices[ordinal];
                device.memory.free(address);
                device.counts.allocations.add(-1);
                device.counts.bytes.add(-(found.len as i64));
            }
            Place::Host(ordinal) => {
                devices.iter().for_each(|device| {
                    device.memory.free(address);
                });
                if let Ok(layout) = Layout::from_size_align(found.len, HOST_ALIGN) {
                    // SAFETY: allocated by `host` with this layout and just taken out of the map.
                    unsafe { dealloc(address as *mut u8, layout) };
                }
                let counts = &devices[ordinal].counts;
                counts.host_allocations.add(-1);
                counts.host_bytes.add(-(found.len as i64));
            }
        }
        Ok(())
    }

    /// All allocations of a device.
    pub fn of_device(&self, ordinal: usize) -> Vec<Allocation> {
        read(&self.0).values().filter(|found| matches!(found.place, Place::Device(n) | Place::Host(n) if n == ordinal)).copied().collect()
    }
}

impl Drop for Allocations {
    fn drop(&mut self) {
        let pinned = read(&self.0).values().filter(|found| matches!(found.place, Place::Host(_))).copied().collect::<Vec<_>>();
        for Allocation { address, len, .. } in pinned {
            if let Ok(layout) = Layout::from_size_align(len, HOST_ALIGN) {
                // SAFETY: allocated by `host` with this layout; the runtime that registered it is gone.
                unsafe { dealloc(address as *mut u8, layout) };
            }
        }
    }
}

/// A read lock that outlives a panic of another holder.
pub fn read<T>(lock: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A write lock that outlives a panic of another holder.
pub fn write<T>(lock: &RwLock<T>) -> std::sync::RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(std::sync::PoisonError::into_inner)
}
