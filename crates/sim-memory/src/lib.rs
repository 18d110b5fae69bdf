//! Device memory of the GPU simulators: live allocations of real host memory, and checked access to them.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

/// An access that no live allocation contains.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("global {access} of {bytes} bytes at {address:#x} is outside every live allocation{near}")]
pub struct OutOfBounds {
    /// `load`, `store` or `atomic`.
    pub access: &'static str,
    /// The address.
    pub address: u64,
    /// Bytes accessed.
    pub bytes: usize,
    /// The nearest allocation below, in words; may be empty.
    pub near: String,
}

/// Alignment of allocations, as the HIP runtime's.
const ALIGN: usize = 256;

/// Bytes behind an allocation that are no other's: what strays that far is always found.
const GUARD: usize = 8 << 10;

/// Of an allocation and what guards it.
fn guarded(len: usize) -> Option<Layout> {
    Layout::from_size_align(len.checked_add(GUARD)?, ALIGN).ok()
}

struct Block {
    len: usize,
    owned: bool,
}

/// The live allocations of a device. Addresses are host addresses.
#[derive(Default)]
pub struct Memory {
    blocks: RwLock<BTreeMap<u64, Block>>,
}

/// What a launch sees of the memory: allocations by address.
pub type Map = Arc<[(u64, u64)]>;

impl Memory {
    /// No allocations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allocates `len` zeroed bytes and returns their address; `None` where the host has none left or `len` is 0.
    pub fn alloc(&self, len: usize) -> Option<u64> {
        let layout = guarded(len).filter(|_| len > 0)?;
        // SAFETY: the layout's size is not zero.
        let address = unsafe { alloc_zeroed(layout) } as u64;
        if address == 0 {
            return None;
        }
        self.blocks.write().ok()?.insert(address, Block { len, owned: true });
        Some(address)
    }

    /// Allocates a copy of `data`.
    pub fn upload(&self, data: &[u8]) -> Option<u64> {
        let address = self.alloc(data.len())?;
        self.write(address, data).then_some(address)
    }

    /// Frees an allocation or forgets a registered range; false where `address` starts none.
    pub fn free(&self, address: u64) -> bool {
        let Some(block) = self.blocks.write().ok().and_then(|mut blocks| blocks.remove(&address)) else { return false };
        if block.owned {
            free_block(address, &block);
        }
        true
    }

    /// Makes host memory that someone else owns accessible to kernels.
    ///
    /// # Safety
    /// `address..address + len` must stay valid for reads and writes until [`Memory::free`] is called with `address`, and nothing else may
    /// access it while a launch runs.
    pub unsafe fn register(&self, address: u64, len: usize) {
        if let Ok(mut blocks) = self.blocks.write() {
            blocks.insert(address, Block { len, owned: false });
        }
    }

    /// Writes bytes; false where they do not lie in one allocation.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        let inside = self.contains(address, data.len());
        if inside {
            // SAFETY: the range lies in a live allocation, and `data` is a separate borrow.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len()) };
        }
        inside
    }

    /// Reads bytes; `None` where they do not lie in one allocation.
    pub fn read(&self, address: u64, len: usize) -> Option<Vec<u8>> {
        // SAFETY: the range lies in a live allocation.
        self.contains(address, len).then(|| unsafe { std::slice::from_raw_parts(address as *const u8, len) }.to_vec())
    }

    /// Whether the range lies in one live allocation.
    pub fn contains(&self, address: u64, len: usize) -> bool {
        let Ok(blocks) = self.blocks.read() else { return false };
        let Some((start, block)) = blocks.range(..=address).next_back() else { return false };
        (address - start).checked_add(len as u64).is_some_and(|end| end <= block.len as u64)
    }

    /// Live allocations.
    pub fn live(&self) -> usize {
        self.blocks.read().map_or(0, |blocks| blocks.len())
    }

    /// The allocations that a launch may touch.
    pub fn map(&self) -> Map {
        let Ok(blocks) = self.blocks.read() else { return Arc::from([]) };
        blocks.iter().map(|(&start, block)| (start, start + block.len as u64)).collect()
    }
}

fn free_block(address: u64, block: &Block) {
    if let Some(layout) = guarded(block.len) {
        // SAFETY: an owned block came from `alloc_zeroed` with this layout and was just taken out of the map.
        unsafe { dealloc(address as *mut u8, layout) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Ok(blocks) = self.blocks.get_mut() else { return };
        blocks.iter().filter(|(_, block)| block.owned).for_each(|(&address, block)| free_block(address, block));
    }
}

/// A wave's checked view of a [`Map`]; remembers the allocation last hit.
#[derive(Clone)]
pub struct View {
    map: Map,
    hit: (u64, u64),
}

impl View {
    /// A view of `map`.
    pub fn new(map: Map) -> Self {
        Self { map, hit: (0, 0) }
    }

    /// Checks that `address..address + bytes` lies in one allocation.
    #[inline]
    pub fn check(&mut self, address: u64, bytes: usize, access: &'static str) -> Result<(), OutOfBounds> {
        let end = address.wrapping_add(bytes as u64);
        if address >= self.hit.0 && end <= self.hit.1 && address <= end {
            return Ok(());
        }
        self.find(address, end, bytes, access)
    }

    #[cold]
    fn find(&mut self, address: u64, end: u64, bytes: usize, access: &'static str) -> Result<(), OutOfBounds> {
        let after = self.map.partition_point(|&(start, _)| start <= address);
        if let Some(&range) = after.checked_sub(1).and_then(|i| self.map.get(i))
            && end <= range.1
            && address <= end
        {
            self.hit = range;
            return Ok(());
        }
        let near = match after.checked_sub(1).and_then(|i| self.map.get(i)) {
            Some(&(start, stop)) if address < stop.saturating_add(1 << 32) => {
                format!(" ({:#x} bytes past the start of the allocation {start:#x}..{stop:#x})", address - start)
            }
            _ => String::new(),
        };
        Err(OutOfBounds { access, address, bytes, near })
    }

    /// Loads up to 4 dwords' worth of bytes.
    #[inline]
    pub fn load<const N: usize>(&mut self, address: u64) -> Result<[u8; N], OutOfBounds> {
        self.check(address, N, "load")?;
        // SAFETY: the range lies in a live allocation; arrays of bytes have no alignment.
        Ok(unsafe { std::ptr::read(address as *const [u8; N]) })
    }

    /// Stores bytes.
    #[inline]
    pub fn store(&mut self, address: u64, data: &[u8]) -> Result<(), OutOfBounds> {
        self.check(address, data.len(), "store")?;
        // SAFETY: the range lies in a live allocation that no Rust reference covers while a launch runs.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len()) };
        Ok(())
    }

    /// Replaces the 4 or 8 bytes at an aligned address by `f` of them, atomically, and returns what was there.
    pub fn update(&mut self, address: u64, bytes: u16, f: impl Fn(u64) -> u64) -> Result<u64, OutOfBounds> {
        self.check(address, bytes.into(), "atomic")?;
        if bytes == 4 {
            // SAFETY: the range lies in a live allocation and the address is aligned.
            let cell = unsafe { AtomicU32::from_ptr(address as *mut u32) };
            let old = cell.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| Some(f(old.into()) as u32));
            return Ok(old.unwrap_or_else(|old| old).into());
        }
        // SAFETY: as above.
        let cell = unsafe { AtomicU64::from_ptr(address as *mut u64) };
        Ok(cell.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| Some(f(old))).unwrap_or_else(|old| old))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_are_confined_to_live_allocations() {
        let memory = Memory::new();
        let a = memory.upload(&[1, 2, 3, 4, 5]).unwrap();
        let mut view = View::new(memory.map());
        assert_eq!(view.load::<4>(a + 1).unwrap(), [2, 3, 4, 5]);
        assert!(matches!(view.load::<4>(a + 2).unwrap_err(), OutOfBounds { access: "load", bytes: 4, .. }));
        assert!(view.store(a.wrapping_sub(1), &[0]).is_err());
        assert!(view.load::<4>(u64::MAX - 1).is_err());
        assert!(memory.free(a) && !memory.free(a) && memory.live() == 0);
        assert!(View::new(memory.map()).load::<1>(a).is_err());
    }
}
