//! Kernel launches.

use std::ffi::c_void;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle::{Result, bail};

use super::device::RocmDevice;
use super::module::Kernel;
use crate::gpu::launch::LaunchShape;

/// HIP's marks in a launch's list of extras: what follows is the arguments' address, their size; the end.
const BUFFER_POINTER: *mut c_void = without_provenance_mut(1);
const BUFFER_SIZE: *mut c_void = without_provenance_mut(2);
const END: *mut c_void = without_provenance_mut(3);

/// What HIP admits in a grid's second and third dim.
const MOST_GROUPS_YZ: u32 = 65535;

impl RocmDevice {
    /// Launches `kernel` with `grid` workgroups of `threads` threads. `args` is the kernel's arguments as they lie in memory (a `repr(C)`
    /// structure), addresses as [`RocmStorage::address`](super::RocmStorage::address) gives them. A grid with nothing in it launches nothing.
    /// Enqueued; can be captured.
    ///
    /// # Safety
    /// `A` is what the kernel takes, and with these arguments it reads and writes only memory that is alive: of this device, not dropped before
    /// this call returns.
    pub unsafe fn launch<A: Copy>(&self, kernel: &Kernel, grid: [u32; 3], threads: u32, args: &A) -> Result<()> {
        // SAFETY: the caller's word.
        unsafe { self.launch_with_lds(kernel, grid, threads, 0, args) }
    }

    /// The same with `lds_bytes` of LDS besides the kernel's own.
    ///
    /// # Safety
    /// As [`RocmDevice::launch`].
    unsafe fn launch_with_lds<A: Copy>(&self, kernel: &Kernel, grid: [u32; 3], threads: u32, lds_bytes: u32, args: &A) -> Result<()> {
        let inner = &self.inner;
        let loaded = &kernel.loaded;
        if Arc::as_ptr(inner) != loaded.device.as_ptr() {
            bail!("rocm: launch: kernel {} was loaded on another device than {}", loaded.name, self.name())
        }
        if threads == 0 || threads > loaded.max_threads {
            bail!("rocm: launch: kernel {} runs in workgroups of 1 to {} threads, asked for {threads}", loaded.name, loaded.max_threads)
        }
        if grid.contains(&0) {
            return Ok(());
        }
        if grid.iter().zip([threads, 1, 1]).any(|(groups, threads)| u64::from(*groups) * u64::from(threads) > u64::from(u32::MAX)) {
            bail!(
                "rocm: launch: kernel {}: a grid of {grid:?} workgroups of {threads} threads has 2^32 threads or more in a row",
                loaded.name
            )
        }
        let mut bytes = size_of::<A>();
        let mut extra = [BUFFER_POINTER, (&raw const *args).cast_mut().cast(), BUFFER_SIZE, (&raw mut bytes).cast(), END];
        let [x, y, z] = grid;
        inner.stream.enqueue("launch", |stream| {
            let hip = inner.context.enter()?;
            // SAFETY: the function's module is loaded, the stream alive, the extras as HIP wants them (it copies the arguments); what the
            // kernel does with them is the caller's word.
            let result = unsafe {
                hip.hipModuleLaunchKernel(loaded.function, x, y, z, threads, 1, 1, lds_bytes, stream, null_mut(), extra.as_mut_ptr())
            };
            inner.context.check(result, format_args!("kernel {}, grid {grid:?} of {threads} threads", loaded.name))
        })?;
        inner.counts.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// A launch that is ready to be enqueued.
pub(super) struct Launch<A> {
    device: RocmDevice,
    kernel: Kernel,
    shape: LaunchShape,
    lds_bytes: u32,
    args: A,
}

impl<A: Copy> Launch<A> {
    /// The launch of `kernel` in `shape`. Errors: more workgroups than the runtime counts.
    ///
    /// # Safety
    /// As [`RocmDevice::launch`], for memory that lives until [`Launch::run`] returns.
    pub unsafe fn new(device: &RocmDevice, kernel: Kernel, shape: LaunchShape, args: A) -> Result<Self> {
        if shape.grid[1..].iter().any(|&groups| groups > MOST_GROUPS_YZ) {
            let grid = shape.grid;
            bail!(
                "rocm: launch: kernel {}: a grid of {grid:?} workgroups has more than {MOST_GROUPS_YZ} in its second or third dim",
                kernel.name()
            )
        }
        Ok(Self { device: device.clone(), kernel, shape, lds_bytes: 0, args })
    }

    /// The same with `lds_bytes` of LDS besides the kernel's own.
    pub fn with_lds(self, lds_bytes: u32) -> Self {
        Self { lds_bytes, ..self }
    }

    /// Enqueues it.
    pub fn run(&self) -> Result<()> {
        // SAFETY: the word of whoever made it.
        unsafe { self.device.launch_with_lds(&self.kernel, self.shape.grid, self.shape.threads, self.lds_bytes, &self.args) }
    }
}
