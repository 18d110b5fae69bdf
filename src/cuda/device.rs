//! What is kept of a GPU: its arch, and the kernels loaded so far.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock};

use candle::cuda_backend::WrapErr;
use candle::cuda_backend::cudarc::driver::sys::CUdevice_attribute as Attribute;
use candle::cuda_backend::cudarc::driver::{CudaContext, CudaStream};
use candle::{CudaDevice, DType, Device, Result, bail};

use super::launch::Kernel;
use super::specialize::{self, ReducerCut, WriteKey};
use crate::jit::{Compiler, JitSettings};
use crate::registry::{Arch, ArchName, Selection};

/// A GPU, whatever candle device it is used through.
pub(super) struct Gpu {
    pub arch: Arch,
    compiler: RwLock<Arc<Compiler>>,
    kernels: RwLock<HashMap<KernelId, Kernel>>,
}

/// What tells kernels of one GPU apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum KernelId {
    Tile(crate::registry::KernelKey),
    Reduce { head_dim: usize, output: DType, ragged: bool, per_head: bool, cut: ReducerCut },
    Plan { bucket: usize, ragged: bool },
    Write { key: WriteKey, value: DType, latest: bool },
}

impl KernelId {
    fn cluster(&self) -> usize {
        match self {
            Self::Tile(key) => key.cuda.map_or(1, |shape| shape.cluster),
            Self::Reduce { .. } | Self::Plan { .. } | Self::Write { .. } => 1,
        }
    }
}

/// By ordinal: candle uses the primary context, in which modules are loaded once for all its devices.
static GPUS: LazyLock<Mutex<HashMap<usize, Arc<Gpu>>>> = LazyLock::new(Mutex::default);

/// The GPU of `device` as the registry and the planner know it.
///
/// # Errors
/// Not a CUDA device; a GPU of a compute capability below 8.0 or above 9.0.
pub fn arch_of(device: &Device) -> Result<Arch> {
    Ok(gpu_of(device)?.arch.clone())
}

/// Has the kernels of the GPU of `device` compiled and kept with `settings` from now on, for the whole process, in place of [`JitSettings`]'s default. Those
/// that are loaded stay: set it before the first call, or before [`crate::cache::PagedKvCache::warm_up`].
///
/// # Errors
/// As [`arch_of`].
pub fn set_jit_settings(device: &Device, settings: JitSettings) -> Result<()> {
    let gpu = gpu_of(device)?;
    *gpu.compiler.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(Compiler::new(settings));
    Ok(())
}

/// Kernels that are loaded on the GPU of `device` so far.
///
/// # Errors
/// As [`arch_of`].
pub fn loaded_kernels(device: &Device) -> Result<usize> {
    Ok(gpu_of(device)?.kernels.read().unwrap_or_else(PoisonError::into_inner).len())
}

fn gpu_of(device: &Device) -> Result<Arc<Gpu>> {
    match device {
        Device::Cuda(device) => Gpu::of(device),
        other => bail!("device: {:?} is not a CUDA device", other.location()),
    }
}

impl Gpu {
    pub fn of(device: &CudaDevice) -> Result<Arc<Self>> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = gpus.get(&context.ordinal()) {
            return Ok(gpu.clone());
        }
        let compiler = RwLock::new(Arc::new(Compiler::new(JitSettings::default())));
        let gpu = Arc::new(Self { arch: arch(context)?, compiler, kernels: RwLock::default() });
        gpus.insert(context.ordinal(), gpu.clone());
        Ok(gpu)
    }

    /// Whether kernels may start while the one ahead drains.
    pub fn overlaps(&self) -> bool {
        self.arch.name == ArchName::Sm90
    }

    pub fn tile(&self, stream: &CudaStream, selection: &Selection) -> Result<Kernel> {
        self.kernel(stream, KernelId::Tile(selection.key), selection.lds_bytes, || specialize::tile(selection))
    }

    pub fn reducer(
        &self,
        stream: &CudaStream,
        head_dim: usize,
        output: DType,
        ragged: bool,
        per_head: bool,
        cut: ReducerCut,
    ) -> Result<Kernel> {
        let id = KernelId::Reduce { head_dim, output, ragged, per_head, cut };
        self.kernel(stream, id, 0, || specialize::reduce(self.arch.name, head_dim, output, ragged, per_head, cut))
    }

    pub fn planner(&self, stream: &CudaStream, rows: usize, ragged: bool) -> Result<Kernel> {
        let id = KernelId::Plan { bucket: crate::plan::batch_bucket(rows), ragged };
        self.kernel(stream, id, 0, || specialize::plan(&self.arch, rows, ragged))
    }

    /// See [`specialize::write_with`].
    pub fn writer(&self, stream: &CudaStream, key: WriteKey, value: DType, latest: bool) -> Result<Kernel> {
        self.kernel(stream, KernelId::Write { key, value, latest }, 0, || specialize::write_with(&key, value, latest))
    }

    /// The kernel `id`: loaded before, or compiled (or found in the cache) and loaded now.
    fn kernel(
        &self,
        stream: &CudaStream,
        id: KernelId,
        shared_bytes: usize,
        spec: impl FnOnce() -> Result<crate::jit::Specialization>,
    ) -> Result<Kernel> {
        stream.context().bind_to_thread().w()?;
        if let Some(kernel) = self.kernels.read().unwrap_or_else(PoisonError::into_inner).get(&id) {
            return Ok(*kernel);
        }
        let spec = spec()?;
        let compiler = self.compiler.read().unwrap_or_else(PoisonError::into_inner).clone();
        let code = compiler.code_object(&spec)?;
        let mut kernels = self.kernels.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(&id) {
            return Ok(*kernel);
        }
        let kernel = Kernel::load(&code, &spec.kernel, shared_bytes, id.cluster())?;
        kernels.insert(id, kernel);
        Ok(kernel)
    }
}

/// The registry's arch whose kernels run on a GPU, with the GPU's own sizes.
fn arch(context: &CudaContext) -> Result<Arch> {
    let (major, minor) = context.compute_capability().w()?;
    let arch = match (major, minor) {
        (8, 9) => Arch::sm89(),
        (8, _) => Arch::sm80(),
        (9, 0) => Arch::sm90(),
        _ => bail!("device: compute capability {major}.{minor} has no kernels here; 8.0 to 9.0 have"),
    };
    let size = |attribute| context.attribute(attribute).w().map(|size| size as usize);
    let shared = size(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    let arch = arch.with_compute_units(size(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?)?;
    Ok(Arch { lds_bytes: shared.min(arch.lds_bytes), ..arch })
}
