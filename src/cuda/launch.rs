//! Driver calls: loading a kernel and launching it.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;

use candle::cuda_backend::cudarc::driver::{CudaStream, sys};
use candle::{Error, Result};

use crate::gpu::launch::LaunchShape;

/// `result`, its failure told with what was asked for.
pub(super) fn check(result: sys::CUresult, what: impl std::fmt::Display) -> Result<()> {
    result.result().map_err(|error| Error::msg(format!("{what}: {error}")))
}

/// A loaded kernel. Its module is never unloaded: graphs may hold it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    function: sys::CUfunction,
    shared_bytes: u32,
    cluster: u32,
}

// SAFETY: a handle that any thread may use while its context is current.
unsafe impl Send for Kernel {}
// SAFETY: as above; nothing is written through it.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads `code`'s entry `name` into the current context, for blocks of `shared_bytes` of dynamic shared memory in clusters of `cluster`.
    pub fn load(code: &[u8], name: &str, shared_bytes: usize, cluster: usize) -> Result<Self> {
        let entry = CString::new(name).map_err(Error::wrap)?;
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: a whole code object; the driver copies it.
        check(unsafe { sys::cuModuleLoadData(&mut module, code.as_ptr().cast()) }, format_args!("cuModuleLoadData of {name}"))?;
        // SAFETY: a module that was loaded, a C string.
        check(unsafe { sys::cuModuleGetFunction(&mut function, module, entry.as_ptr()) }, format_args!("cuModuleGetFunction of {name}"))?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a function that was found.
        let set = unsafe { sys::cuFuncSetAttribute(function, attribute, shared_bytes as i32) };
        check(set, format_args!("{shared_bytes} bytes of shared memory for {name}"))?;
        if cluster > 1 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
            // SAFETY: a function that was found.
            check(unsafe { sys::cuFuncSetAttribute(function, attribute, 1) }, format_args!("clusters of {cluster} blocks for {name}"))?;
        }
        Ok(Self { function, shared_bytes: shared_bytes as u32, cluster: cluster as u32 })
    }

    /// Enqueues it. `overlapped`: it may start before the kernel ahead of it has ended, and itself waits for that. A grid with nothing in it launches
    /// nothing.
    ///
    /// # Safety
    /// `A` is what the kernel takes, and with these arguments it touches only memory that lives until the stream has passed it.
    pub unsafe fn launch<A: Copy>(&self, stream: &CudaStream, shape: LaunchShape, overlapped: bool, args: &A) -> Result<()> {
        let [x, y, z] = shape.grid;
        if shape.grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: plain data.
        let [mut early, mut clusters]: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        early.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        early.value.programmaticStreamSerializationAllowed = i32::from(overlapped);
        clusters.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        clusters.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: self.cluster, y: 1, z: 1 };
        let mut attributes = [early, clusters];
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared_bytes,
            hStream: stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            // GPUs before sm_90 know none of the two.
            numAttrs: if self.cluster > 1 { 2 } else { u32::from(overlapped) },
        };
        let mut parameters = [(&raw const *args).cast_mut().cast::<c_void>()];
        // SAFETY: one parameter of the kernel's type, copied by the driver; the rest is the caller's word.
        let result = unsafe { sys::cuLaunchKernelEx(&config, self.function, parameters.as_mut_ptr(), null_mut()) };
        check(result, format_args!("cuLaunchKernelEx, grid {:?} of {} threads", shape.grid, shape.threads))
    }
}
