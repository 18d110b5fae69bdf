//! The HIP runtime's functions, found at run time: a program built with this crate starts where ROCm is not installed.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;

use candle::{Result, bail};
use hip_runtime_sys::{
    hipDeviceAttribute_t, hipEvent_t, hipFunction_attribute, hipFunction_t, hipGraph_t, hipGraphExec_t, hipGraphNode_t, hipMemcpyKind,
    hipModule_t, hipStream_t, hipStreamCaptureMode,
};
use libloading::Library;
use once_cell::sync::OnceCell;

use super::error::Failure;

/// The first is what a development package installs; packages for running alone have the second kind.
const FILES: [&str; 3] = ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"];

/// Bytes of ROCm 6's and 7's `hipDeviceProp_tR0600`, of which only the arch's name is read.
const PROPERTIES_BYTES: usize = 1472;
const ARCH_NAME_OFFSET: usize = 1160;
const ARCH_NAME_BYTES: usize = 256;

/// Device properties as the runtime fills them in, with room for a runtime whose structure has grown.
#[repr(C, align(8))]
pub(super) struct Properties([u8; 2 * PROPERTIES_BYTES]);

impl Properties {
    /// The field `gcnArchName`: `gfx942:sramecc+:xnack-`.
    fn arch_name(&self) -> String {
        let field = &self.0[ARCH_NAME_OFFSET..ARCH_NAME_OFFSET + ARCH_NAME_BYTES];
        let bytes: Vec<u8> = field.iter().copied().take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        /// Addresses of the functions, of C's calling convention and HIP's types; a code is a plain number, for a newer runtime knows more of
        /// them than an enum made from an older header.
        #[allow(non_snake_case)]
        struct Table {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
            hipGetErrorName: unsafe extern "C" fn(u32) -> *const c_char,
            hipGetErrorString: unsafe extern "C" fn(u32) -> *const c_char,
        }

        impl Table {
            /// # Safety
            /// `library` is a HIP runtime.
            unsafe fn load(library: &Library) -> std::result::Result<Self, &'static str> {
                // SAFETY: each symbol is looked up by its name and given the type that HIP's header declares for it.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!(stringify!($name), "\0")).map_err(|_| stringify!($name))?,)*
                        hipGetErrorName: *library.get("hipGetErrorName\0").map_err(|_| "hipGetErrorName")?,
                        hipGetErrorString: *library.get("hipGetErrorString\0").map_err(|_| "hipGetErrorString")?,
                    })
                }
            }
        }

        /// The functions, each failing with its own name.
        ///
        /// # Safety
        /// As HIP documents each: pointers that it reads or writes are valid for as long as it says, handles are alive.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        impl Hip {
            $(pub unsafe fn $name(&self, $($arg: $type),*) -> std::result::Result<(), Failure> {
                // SAFETY: the caller's.
                let code = unsafe { (self.table.$name)($($arg),*) };
                self.check(stringify!($name), code)
            })*
        }
    };
}

functions! {
    hipGetDeviceCount(count: *mut c_int);
    hipSetDevice(device: c_int);
    hipGetDevicePropertiesR0600(properties: *mut Properties, device: c_int);
    hipDeviceGetAttribute(value: *mut c_int, attribute: hipDeviceAttribute_t, device: c_int);
    hipMemGetInfo(free: *mut usize, total: *mut usize);
    hipMalloc(pointer: *mut *mut c_void, bytes: usize);
    hipFree(pointer: *mut c_void);
    hipHostMalloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
    hipHostFree(pointer: *mut c_void);
    hipMemcpyAsync(to: *mut c_void, from: *const c_void, bytes: usize, kind: hipMemcpyKind, stream: hipStream_t);
    hipMemsetAsync(to: *mut c_void, value: c_int, bytes: usize, stream: hipStream_t);
    hipStreamCreateWithFlags(stream: *mut hipStream_t, flags: c_uint);
    hipStreamDestroy(stream: hipStream_t);
    hipStreamSynchronize(stream: hipStream_t);
    hipStreamBeginCapture(stream: hipStream_t, mode: hipStreamCaptureMode);
    hipStreamEndCapture(stream: hipStream_t, graph: *mut hipGraph_t);
    hipGraphInstantiate(
        executable: *mut hipGraphExec_t,
        graph: hipGraph_t,
        error_node: *mut hipGraphNode_t,
        log: *mut c_char,
        log_bytes: usize
    );
    hipGraphLaunch(executable: hipGraphExec_t, stream: hipStream_t);
    hipGraphDestroy(graph: hipGraph_t);
    hipGraphExecDestroy(executable: hipGraphExec_t);
    hipEventCreateWithFlags(event: *mut hipEvent_t, flags: c_uint);
    hipEventRecord(event: hipEvent_t, stream: hipStream_t);
    hipEventQuery(event: hipEvent_t);
    hipEventSynchronize(event: hipEvent_t);
    hipEventDestroy(event: hipEvent_t);
    hipModuleLoadData(module: *mut hipModule_t, image: *const c_void);
    hipModuleUnload(module: hipModule_t);
    hipModuleGetFunction(function: *mut hipFunction_t, module: hipModule_t, name: *const c_char);
    hipFuncGetAttribute(value: *mut c_int, attribute: hipFunction_attribute, function: hipFunction_t);
    hipModuleLaunchKernel(
        function: hipFunction_t,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        dynamic_lds_bytes: c_uint,
        stream: hipStream_t,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void
    );
}

/// An opened HIP runtime. It stays open for the life of the process.
pub(super) struct Hip {
    table: Table,
    _library: Library,
}

impl Hip {
    /// The process's HIP runtime, opened by the first call that finds one.
    pub fn get() -> Result<&'static Self> {
        static HIP: OnceCell<Hip> = OnceCell::new();
        HIP.get_or_try_init(|| Self::open(&candidates()))
    }

    /// Opens the first of `files` that there is.
    pub fn open(files: &[PathBuf]) -> Result<Self> {
        let mut tried = Vec::new();
        for file in files {
            // A folder that has no such file says nothing; a bare name is the loader's to find.
            if file.parent().is_some_and(|folder| !folder.as_os_str().is_empty()) && !file.exists() {
                continue;
            }
            // SAFETY: HIP runtimes run no code when loaded that this process has to prepare for.
            let library = match unsafe { Library::new(file) } {
                Ok(library) => library,
                Err(error) => {
                    tried.push(format!("{}: {}", file.display(), with_causes(&error)));
                    continue;
                }
            };
            // SAFETY: a library of this name is a HIP runtime.
            return match unsafe { Table::load(&library) } {
                Ok(table) => Ok(Self { table, _library: library }),
                Err(name) => bail!("rocm: {} has no function {name}; a HIP runtime of ROCm 6 or newer is needed", file.display()),
            };
        }
        bail!(
            "rocm: no HIP runtime: libamdhip64.so was looked for in $HIP_PATH/lib, $ROCM_PATH/lib, /opt/rocm/lib and where the loader looks. \
             Install ROCm 6 or newer, or set HIP_PATH ({}). ({})",
            hip_path(),
            tried.join("; ")
        )
    }

    fn check(&self, call: &'static str, code: u32) -> std::result::Result<(), Failure> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: both answer a text of static life for any code.
        let (name, text) = unsafe { (text((self.table.hipGetErrorName)(code)), text((self.table.hipGetErrorString)(code))) };
        Err(Failure { call, code, name: name.unwrap_or_else(|| "unknown".into()), text: text.unwrap_or_else(|| "unknown error".into()) })
    }

    /// How many GPUs the runtime sees. None is hipErrorNoDevice.
    pub fn device_count(&self) -> std::result::Result<usize, Failure> {
        let mut count = 0;
        // SAFETY: writes one integer.
        unsafe { self.hipGetDeviceCount(&mut count) }?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The runtime's name of a device's arch, feature marks included.
    pub fn arch_name(&self, device: c_int) -> std::result::Result<String, Failure> {
        let mut properties = Box::new(Properties([0; 2 * PROPERTIES_BYTES]));
        // SAFETY: fills in a structure of PROPERTIES_BYTES, for which there is room.
        unsafe { self.hipGetDevicePropertiesR0600(&mut *properties, device) }?;
        Ok(properties.arch_name())
    }

    pub fn attribute(&self, device: c_int, attribute: hipDeviceAttribute_t) -> std::result::Result<c_int, Failure> {
        let mut value = 0;
        // SAFETY: writes one integer.
        unsafe { self.hipDeviceGetAttribute(&mut value, attribute, device) }?;
        Ok(value)
    }
}

/// Where a HIP runtime may be, in the order it is looked for. A name without a folder is found by the loader.
fn candidates() -> Vec<PathBuf> {
    let roots = [env::var_os("HIP_PATH"), env::var_os("ROCM_PATH"), Some("/opt/rocm".into())];
    let folders = roots.into_iter().flatten().filter(|root| !root.is_empty()).map(|root| PathBuf::from(root).join("lib"));
    folders.chain([PathBuf::new()]).flat_map(|folder| FILES.map(|file| folder.join(file))).collect()
}

/// What `HIP_PATH` says, for a message.
fn hip_path() -> String {
    env::var_os("HIP_PATH").map_or_else(|| "not set now".into(), |path| format!("now {}", path.display()))
}

/// An error with what caused it: libloading tells the loader's words only there.
fn with_causes(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", with_causes(cause)),
        None => error.to_string(),
    }
}

/// # Safety
/// `text` is null or a C string that lives as long as the process.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: not null, and the caller's word.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_that_is_not_there_is_named_with_the_places() {
        let error = Hip::open(&["/nowhere/libamdhip64.so".into(), "libamdhip64-is-not-there.so".into()]).err().unwrap().to_string();
        assert!(error.contains("no HIP runtime") && error.contains("HIP_PATH") && error.contains("libamdhip64-is-not-there.so"), "{error}");
    }

    #[test]
    fn a_library_that_is_no_hip_runtime_is_told_by_the_function_it_lacks() {
        let error = Hip::open(&["libc.so.6".into()]).err().unwrap().to_string();
        assert!(error.contains("libc.so.6 has no function hipGetDeviceCount"), "{error}");
    }

    #[test]
    fn the_arch_name_is_read_where_rocm_6_puts_it() {
        let mut properties = Properties([0xff; 2 * PROPERTIES_BYTES]);
        let name = b"gfx950:sramecc+:xnack-\0";
        properties.0[ARCH_NAME_OFFSET..ARCH_NAME_OFFSET + name.len()].copy_from_slice(name);
        assert_eq!(properties.arch_name(), "gfx950:sramecc+:xnack-");
    }
}
