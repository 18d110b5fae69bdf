//! Code objects on the device: loaded once, found again by what they were compiled from.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use candle::{DType, Result, bail};
use hip_runtime_sys::{hipFunction_attribute, hipFunction_t, hipModule_t};
use once_cell::sync::OnceCell;

use super::context::Context;
use super::device::{Inner, RocmDevice};
use super::hip::Hip;
use super::specialize::WriteKey;
use crate::jit::Specialization;
use crate::registry::KernelKey;

/// A kernel loaded on a device, for as long as the device is open.
#[derive(Clone)]
pub struct Kernel {
    pub(super) loaded: Arc<Loaded>,
}

/// What is known of a kernel.
pub(super) struct Loaded {
    pub name: String,
    pub function: hipFunction_t,
    pub device: Weak<Inner>,
    pub max_threads: u32,
    lds_bytes: usize,
    scratch_bytes: usize,
    registers: usize,
}

// SAFETY: a function handle is read-only, may be used from any thread, and is launched only with its device, which keeps the module.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Kernel {
    /// The entry point's name.
    pub fn name(&self) -> &str {
        &self.loaded.name
    }

    /// LDS that a workgroup uses, bytes.
    pub fn lds_bytes(&self) -> usize {
        self.loaded.lds_bytes
    }

    /// Vector registers of a lane.
    pub fn registers(&self) -> usize {
        self.loaded.registers
    }

    /// Scratch memory of a lane, bytes: 0 where nothing is spilled.
    pub fn scratch_bytes(&self) -> usize {
        self.loaded.scratch_bytes
    }

    /// Most threads a workgroup may have.
    pub fn max_threads(&self) -> u32 {
        self.loaded.max_threads
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel")
            .field("name", &self.name())
            .field("lds_bytes", &self.lds_bytes())
            .field("registers", &self.registers())
            .field("scratch_bytes", &self.scratch_bytes())
            .finish()
    }
}

/// A module's handle.
struct Module(hipModule_t);

// SAFETY: HIP's functions take modules from any thread.
unsafe impl Send for Module {}

/// What tells the kernels of this crate on one device apart, without the text of their specializations: every call asks for some.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum KernelId {
    Tile(KernelKey),
    Reduce { head_dim: usize, output: DType, ragged: bool, threads: u32 },
    Plan { bucket: usize, ragged: bool },
    Write(WriteKey),
}

/// The modules of a device.
#[derive(Default)]
pub(super) struct Modules {
    loaded: Mutex<Vec<Module>>,
    kernels: Mutex<HashMap<Specialization, Arc<OnceCell<Kernel>>>>,
    /// Those of them that calls have run.
    known: RwLock<HashMap<KernelId, Kernel>>,
}

impl Modules {
    /// The kernel of `specialization`, made by `load` at its first use. Threads that want the same kernel wait for the first.
    pub fn get(&self, specialization: &Specialization, load: impl FnOnce() -> Result<Kernel>) -> Result<Kernel> {
        let cell = {
            let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
            match kernels.get(specialization) {
                Some(cell) => cell.clone(),
                None => kernels.entry(specialization.clone()).or_default().clone(),
            }
        };
        cell.get_or_try_init(load).cloned()
    }

    fn keep(&self, module: Module) {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).push(module);
    }

    /// Unloads all; no work is under way.
    pub fn close(&self, context: &Context) {
        for module in self.loaded.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: from hipModuleLoadData, and none of its functions is launched any more.
            let _ = unsafe { context.hip().hipModuleUnload(module.0) };
        }
    }
}

impl RocmDevice {
    /// Loads the kernel called `name` of a code object for this device's arch (an ELF file, as clang's `--no-gpu-bundle-output` makes). Not
    /// while a graph is captured.
    pub fn load(&self, code_object: &[u8], name: &str) -> Result<Kernel> {
        let inner = &self.inner;
        inner.stream.refuse_capture(&format!("loading kernel {name}"))?;
        if !code_object.starts_with(b"\x7fELF") {
            bail!("rocm: the code object of kernel {name} is no ELF file ({} bytes)", code_object.len())
        }
        let context = &inner.context;
        let hip = context.enter()?;
        let mut module = null_mut();
        // SAFETY: reads the image, whose length its ELF header tells, and writes one handle.
        let result = unsafe { hip.hipModuleLoadData(&mut module, code_object.as_ptr().cast::<c_void>()) };
        context.check(result, format_args!("loading kernel {name}"))?;
        match look_up(hip, context, module, name) {
            Ok((function, [lds_bytes, scratch_bytes, registers, max_threads])) => {
                inner.modules.keep(Module(module));
                let device = Arc::downgrade(inner);
                // A runtime that does not tell leaves the hardware's limit.
                let max_threads = u32::try_from(max_threads).ok().filter(|threads| *threads > 0).unwrap_or(1024);
                let loaded = Loaded { name: name.into(), function, device, max_threads, lds_bytes, scratch_bytes, registers };
                Ok(Kernel { loaded: Arc::new(loaded) })
            }
            Err(error) => {
                // SAFETY: loaded above; nobody has a function of it.
                let _ = unsafe { context.hip().hipModuleUnload(module) };
                Err(error)
            }
        }
    }

    /// The kernel of a specialization: compiled (or found in the on-disk cache) and loaded at its first use on this device, which must not
    /// be while a graph is captured.
    pub fn kernel(&self, specialization: &Specialization) -> Result<Kernel> {
        self.inner.modules.get(specialization, || {
            self.inner.stream.refuse_capture(&format!("compiling kernel {}", specialization.kernel))?;
            self.load(&self.inner.compiler.code_object(specialization)?, &specialization.kernel)
        })
    }
}

impl RocmDevice {
    /// [`RocmDevice::kernel`] of a call's kernel, whose `specialization` is made where the kernel is not known.
    pub(super) fn kernel_of(&self, id: KernelId, specialization: impl FnOnce() -> Result<Specialization>) -> Result<Kernel> {
        let known = &self.inner.modules.known;
        if let Some(kernel) = known.read().unwrap_or_else(PoisonError::into_inner).get(&id) {
            return Ok(kernel.clone());
        }
        let kernel = self.kernel(&specialization()?)?;
        known.write().unwrap_or_else(PoisonError::into_inner).insert(id, kernel.clone());
        Ok(kernel)
    }
}

/// A module's function by its name, and its attributes: LDS bytes, scratch bytes, registers, most threads.
fn look_up(hip: &Hip, context: &Context, module: hipModule_t, name: &str) -> Result<(hipFunction_t, [usize; 4])> {
    use hip_runtime_sys::hipFunction_attribute::*;
    let c_name = CString::new(name).map_err(|_| candle::Error::msg(format!("rocm: kernel name {name:?} has a zero byte")))?;
    let mut function = null_mut();
    // SAFETY: the module is loaded, the name a C string; writes one handle.
    let result = unsafe { hip.hipModuleGetFunction(&mut function, module, c_name.as_ptr()) };
    context.check(result, format_args!("kernel {name}"))?;
    let attribute = |attribute: hipFunction_attribute| -> Result<usize> {
        let mut value: c_int = 0;
        // SAFETY: the function's module is loaded; writes one integer.
        let result = unsafe { hip.hipFuncGetAttribute(&mut value, attribute, function) };
        context.check(result, format_args!("kernel {name}"))?;
        Ok(usize::try_from(value).unwrap_or(0))
    };
    let attributes = [
        attribute(HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
        attribute(HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
        attribute(HIP_FUNC_ATTRIBUTE_NUM_REGS)?,
        attribute(HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
    ];
    Ok((function, attributes))
}
