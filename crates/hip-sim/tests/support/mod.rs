//! Shared by the tests: compiled kernels, a fresh machine, and short forms of the calls.
#![allow(dead_code)]

use std::ffi::{CString, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use amdhip64::api::control::*;
use amdhip64::api::event::*;
use amdhip64::api::memory::*;
use amdhip64::api::module::*;
use amdhip64::api::stream::*;
pub use amdhip64::error::Code;
pub use amdhip64::handles::Handle;

#[path = "../../../cdna-sim/tests/support/mod.rs"]
mod compiler;

pub use compiler::clang;

pub const DEFAULT: c_uint = 4;

/// A machine of its own for a test: the tests of a process take turns.
pub fn machine(settings: &[(&str, &str)]) -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let defaults = [("ARCH", ""), ("CUS", ""), ("DEVICES", ""), ("MEMORY", ""), ("ASYNC", ""), ("LIMIT", "")];
    for (name, value) in defaults.iter().chain(settings) {
        let name = CString::new(format!("HIP_SIM_{name}")).unwrap();
        let value = CString::new(*value).unwrap();
        // SAFETY: two strings.
        unsafe { hip_sim_set(name.as_ptr(), value.as_ptr()) };
    }
    hip_sim_reset();
    hip_sim_clear();
    turn
}

/// The test kernels, compiled once for each arch.
pub fn object(arch: &str) -> &'static [u8] {
    static GFX942: LazyLock<Vec<u8>> = LazyLock::new(|| compiler::compile(include_str!("../kernels.hip"), "gfx942", &[]));
    static GFX950: LazyLock<Vec<u8>> = LazyLock::new(|| compiler::compile(include_str!("../kernels.hip"), "gfx950", &[]));
    if arch == "gfx950" { &GFX950 } else { &GFX942 }
}

pub fn ok(code: Code) {
    assert_eq!(code, Code::SUCCESS, "{:?}", code.name());
}

pub fn done(code: Code) -> Result<(), Code> {
    if code == Code::SUCCESS { Ok(()) } else { Err(code) }
}

pub fn malloc(bytes: usize) -> Result<*mut c_void, Code> {
    let mut pointer = null_mut();
    // SAFETY: a place for one pointer.
    done(unsafe { hipMalloc(&mut pointer, bytes) }).map(|()| pointer)
}

pub fn host_malloc(bytes: usize) -> Result<*mut c_void, Code> {
    let mut pointer = null_mut();
    // SAFETY: a place for one pointer.
    done(unsafe { hipHostMalloc(&mut pointer, bytes, 0) }).map(|()| pointer)
}

pub fn stream() -> Result<Handle, Code> {
    let mut stream = null_mut();
    // SAFETY: a place for one handle.
    done(unsafe { hipStreamCreateWithFlags(&mut stream, 1) }).map(|()| stream)
}

pub fn event() -> Result<Handle, Code> {
    let mut event = null_mut();
    // SAFETY: a place for one handle.
    done(unsafe { hipEventCreateWithFlags(&mut event, 0) }).map(|()| event)
}

pub fn module(object: &[u8]) -> Result<Handle, Code> {
    let mut module = null_mut();
    // SAFETY: a place for one handle, and a whole file.
    done(unsafe { hipModuleLoadData(&mut module, object.as_ptr().cast()) }).map(|()| module)
}

pub fn function(module: Handle, name: &str) -> Result<Handle, Code> {
    let (mut function, name) = (null_mut(), CString::new(name).unwrap());
    // SAFETY: a place for one handle, and a string.
    done(unsafe { hipModuleGetFunction(&mut function, module, name.as_ptr()) }).map(|()| function)
}

/// A kernel of the test kernels.
pub fn kernel(arch: &str, name: &str) -> Handle {
    function(module(object(arch)).unwrap(), name).unwrap()
}

/// Launches with the arguments' bytes in a buffer.
pub fn launch_shaped(function: Handle, grid: u32, block: u32, shared: u32, stream: Handle, args: &[u8]) -> Code {
    let mut size = args.len();
    let mut extra = [
        std::ptr::without_provenance_mut(1),
        args.as_ptr() as *mut c_void,
        std::ptr::without_provenance_mut(2),
        (&raw mut size).cast(),
        std::ptr::without_provenance_mut(3),
    ];
    // SAFETY: the arrays outlive the call.
    unsafe { hipModuleLaunchKernel(function, grid, 1, 1, block, 1, 1, shared, stream, null_mut(), extra.as_mut_ptr()) }
}

pub fn launch(function: Handle, grid: u32, stream: Handle, args: &[u8]) -> Code {
    launch_shaped(function, grid, 256, 0, stream, args)
}

/// Arguments of `add`.
pub fn add_args(a: *mut c_void, b: *mut c_void, out: *mut c_void, n: u32) -> Vec<u8> {
    let pointers = [a, b, out].map(|pointer| (pointer as u64).to_le_bytes()).concat();
    [pointers, n.to_le_bytes().to_vec()].concat()
}

pub fn upload(to: *mut c_void, values: &[f32], stream: Handle) -> Code {
    // SAFETY: the runtime checks the device's side; ours is a slice.
    unsafe { hipMemcpyAsync(to, values.as_ptr().cast(), 4 * values.len(), 1, stream) }
}

pub fn download(from: *mut c_void, count: usize, stream: Handle) -> Result<Vec<f32>, Code> {
    let mut values = vec![0.0f32; count];
    // SAFETY: as above.
    done(unsafe { hipMemcpyAsync(values.as_mut_ptr().cast(), from, 4 * count, 2, stream) })?;
    done(hipStreamSynchronize(stream))?;
    Ok(values)
}

pub fn count(name: &str) -> i64 {
    let name = CString::new(name).unwrap();
    // SAFETY: a string.
    unsafe { hip_sim_count(0, name.as_ptr()) }
}

pub fn fail(call: &str, nth: u64, code: Code) {
    let call = CString::new(call).unwrap();
    // SAFETY: a string.
    unsafe { hip_sim_fail(call.as_ptr(), nth, code.0) };
}

/// Everything that was made is given back.
pub fn assert_nothing_alive() {
    for name in ["allocations", "bytes", "host_allocations", "host_bytes", "streams", "events", "modules", "graphs", "graph_execs"] {
        assert_eq!(count(name), 0, "{name}");
    }
}
