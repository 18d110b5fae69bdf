//! A GPU: its stream, memory and kernels.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle::{Result, bail};
use hip_runtime_sys::{hipDeviceAttribute_t, hipError_t, hipMemcpyKind};

use super::context::Context;
use super::graph::Executable;
use super::hip::Hip;
use super::module::Modules;
use super::pinned::Staging;
use super::pool::Pool;
use super::scalar::Scalars;
use super::storage::RocmStorage;
use super::stream::Stream;
use crate::jit::{Compiler, JitSettings};
use crate::registry::Arch;

/// What kernels are written for, for messages.
const SUPPORTED: &str = "gfx942 (MI300X, MI308X, MI325X), gfx950 (MI350X, MI355X)";

/// How a device is opened.
#[derive(Clone, Debug)]
pub struct DeviceSettings {
    /// Most bytes of freed device memory that are kept to be used again. 1 GiB by default; 0 keeps none, and each free then waits for the GPU.
    pub pool_cap_bytes: usize,
    /// Where kernels are compiled and kept.
    pub jit: JitSettings,
}

impl Default for DeviceSettings {
    fn default() -> Self {
        Self { pool_cap_bytes: 1 << 30, jit: JitSettings::default() }
    }
}

/// What a device has done since it was opened, and the memory it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Kernel launches, captured ones included (once).
    pub launches: u64,
    /// Copies between host and device and inside the device.
    pub copies: u64,
    /// Fills with a byte.
    pub fills: u64,
    /// Graph replays.
    pub replays: u64,
    /// Times that the host waited for the device.
    pub synchronizations: u64,
    /// Bytes in use, as the pool's blocks are sized.
    pub live_bytes: usize,
    /// Allocations in use.
    pub live_allocations: usize,
    /// Bytes that the pool keeps to be used again.
    pub cached_bytes: usize,
}

#[derive(Default)]
pub(super) struct Counters {
    pub launches: AtomicU64,
    pub copies: AtomicU64,
    pub fills: AtomicU64,
    pub replays: AtomicU64,
    pub synchronizations: AtomicU64,
}

/// An AMD GPU with a stream on which everything happens in order, a pool of memory and the kernels loaded so far. Clones are the same
/// device; opening an ordinal twice makes two, whose memory and work are apart. May be used from any thread.
#[derive(Clone)]
pub struct RocmDevice {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub context: Context,
    arch: Arch,
    pub stream: Stream,
    pub pool: Pool,
    pub staging: Staging,
    pub scalars: Scalars,
    pub modules: Modules,
    pub compiler: Compiler,
    pub counts: Counters,
    /// Graphs dropped during a capture, and whether each had run, to be destroyed after it.
    retired: Mutex<Vec<(Executable, bool)>>,
}

impl RocmDevice {
    /// How many AMD GPUs there are, at least 1. None, or no HIP runtime, is an error that says so.
    pub fn count() -> Result<usize> {
        let hip = Hip::get()?;
        match hip.device_count() {
            Ok(0) => bail!(
                "rocm: no AMD GPU: the HIP runtime sees none (is /dev/kfd there, may this user open it, what is ROCR_VISIBLE_DEVICES?)"
            ),
            Err(failure) if failure.is(hipError_t::hipErrorNoDevice) => {
                bail!("rocm: no AMD GPU: {failure} (is /dev/kfd there, may this user open it, what is ROCR_VISIBLE_DEVICES?)")
            }
            Ok(count) => Ok(count),
            Err(failure) => bail!("{failure}"),
        }
    }

    /// Opens GPU `ordinal` with the default settings. Errors: see [the module](super).
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::with_settings(ordinal, DeviceSettings::default())
    }

    /// Opens GPU `ordinal`. Errors: see [the module](super).
    pub fn with_settings(ordinal: usize, settings: DeviceSettings) -> Result<Self> {
        let count = Self::count()?;
        let index = match i32::try_from(ordinal) {
            Ok(index) if ordinal < count => index,
            _ => bail!("rocm: there is no device {ordinal}: the HIP runtime sees {count} (0 to {})", count - 1),
        };
        let hip = Hip::get()?;
        let name = hip.arch_name(index).map_err(|failure| candle::Error::msg(format!("{failure} on device {ordinal}")))?;
        let arch = supported(ordinal, &name)?;
        let context = Context::new(hip, index, &arch.name.to_string());
        let mut units = 0;
        let found = hip.attribute(index, hipDeviceAttribute_t::hipDeviceAttributeMultiprocessorCount).map(|value| units = value);
        context.check(found, "the number of compute units")?;
        let arch = arch.with_compute_units(usize::try_from(units).unwrap_or(0))?;
        // The last that can fail: nothing else has to be undone.
        let stream = Stream::new(&context)?;
        let inner = Inner {
            context,
            arch,
            stream,
            pool: Pool::new(settings.pool_cap_bytes),
            staging: Staging::default(),
            scalars: Scalars::default(),
            modules: Modules::default(),
            compiler: Compiler::new(settings.jit),
            counts: Counters::default(),
            retired: Mutex::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The processor, with the device's own number of CUs.
    pub fn arch(&self) -> &Arch {
        &self.inner.arch
    }

    /// The ordinal it was opened with.
    pub fn ordinal(&self) -> usize {
        self.inner.context.ordinal as usize
    }

    /// As messages name it: `device 0 (gfx950)`.
    pub fn name(&self) -> &str {
        &self.inner.context.name
    }

    /// Waits until everything enqueued is done. Errors of kernels show here at the latest. Not while a graph is captured.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.stream.synchronize(&self.inner.context)?;
        self.inner.counts.synchronizations.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Memory of `bytes` bytes, uninitialised, from the pool.
    pub fn alloc(&self, bytes: usize) -> Result<RocmStorage> {
        RocmStorage::new(self, bytes)
    }

    /// Gives the pool's kept memory back to the runtime (which waits for the device). Not while a graph is captured.
    pub fn trim(&self) -> Result<()> {
        self.inner.stream.refuse_capture("trimming the pool")?;
        self.inner.pool.trim(&self.inner.context, 0);
        Ok(())
    }

    /// What it has done so far.
    pub fn counts(&self) -> Counts {
        let (counts, usage) = (&self.inner.counts, self.inner.pool.usage());
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counts {
            launches: get(&counts.launches),
            copies: get(&counts.copies),
            fills: get(&counts.fills),
            replays: get(&counts.replays),
            synchronizations: get(&counts.synchronizations),
            live_bytes: usage.live_bytes,
            live_allocations: usage.live_blocks,
            cached_bytes: usage.cached_bytes,
        }
    }

    /// Whether both are the same open device: only then one's work comes in the other's order.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Refuses what is on another device.
    pub(crate) fn check_same(&self, other: &Self, what: &str) -> Result<()> {
        if self.is_same(other) {
            return Ok(());
        }
        bail!(
            "rocm: {what}: the arguments are on different devices, {} and {} (opening an ordinal twice makes two)",
            self.name(),
            other.name()
        )
    }
}

/// The arch that the runtime calls `name`, if there are kernels for it.
fn supported(ordinal: usize, name: &str) -> Result<Arch> {
    match Arch::from_name(name) {
        Ok(arch) if arch.name.is_amd() => Ok(arch),
        _ => bail!("rocm: device {ordinal} is a {name:?}: there are kernels for {SUPPORTED} alone"),
    }
}

impl fmt::Debug for RocmDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RocmDevice({}, {})", self.ordinal(), self.arch())
    }
}

impl Inner {
    /// Enqueues a copy.
    pub fn copy(&self, what: &str, to: *mut c_void, from: *const c_void, bytes: usize, kind: hipMemcpyKind) -> Result<()> {
        self.stream.enqueue(what, |stream| {
            // SAFETY: callers in this module give ranges inside allocations that live until the stream has passed this.
            let result = unsafe { self.context.enter()?.hipMemcpyAsync(to, from, bytes, kind, stream) };
            self.context.check(result, format_args!("{what} of {bytes} bytes"))
        })?;
        self.counts.copies.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Destroys a graph that nobody has any more: now, or after the capture that is going on.
    pub fn retire_graph(&self, executable: Executable, replayed: bool) {
        if self.stream.is_capturing() {
            self.retired.lock().unwrap_or_else(PoisonError::into_inner).push((executable, replayed));
            return;
        }
        if replayed {
            // It may be running.
            self.stream.settle(&self.context);
        }
        executable.destroy(self);
    }

    /// Does what had to wait for the end of a capture.
    pub fn after_capture(&self) {
        let retired = std::mem::take(&mut *self.retired.lock().unwrap_or_else(PoisonError::into_inner));
        for (executable, replayed) in retired {
            self.retire_graph(executable, replayed);
        }
        self.pool.trim_to_cap(&self.context);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let context = &self.context;
        // Every tensor and graph held this, so none is left.
        self.stream.destroy(context);
        self.staging.close(context);
        self.scalars.close(context, &self.pool);
        self.modules.close(context);
        self.pool.trim(context, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::ArchName;

    #[test]
    fn supported_archs_are_taken_with_their_marks_and_others_are_told_which_there_are() {
        assert_eq!(supported(0, "gfx942:sramecc+:xnack-").unwrap().name, ArchName::Gfx942);
        assert_eq!(supported(0, "gfx950:sramecc+:xnack-").unwrap().name, ArchName::Gfx950);
        for name in ["gfx90a:sramecc+:xnack-", "gfx1100", "", "sm90", "cpu"] {
            let error = supported(3, name).unwrap_err().to_string();
            assert!(error.contains("device 3") && error.contains(name) && error.contains("gfx942") && error.contains("gfx950"), "{error}");
        }
    }

    #[test]
    fn devices_and_what_is_on_them_may_be_used_from_any_thread() {
        fn shared<T: Send + Sync>() {}
        shared::<RocmDevice>();
        shared::<RocmStorage>();
        shared::<crate::rocm::RocmTensor>();
        shared::<crate::rocm::RocmGraph>();
        shared::<crate::rocm::Kernel>();
        shared::<crate::rocm::Upload>();
    }
}
