//! The shared library itself, opened as programs open it.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Cargo puts the library beside its tests; a build of it alone, a folder above them.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().skip(1).take(2);
    folders.map(|folder| folder.join("libamdhip64.so")).find(|file| file.exists()).unwrap()
}

#[test]
fn the_library_exports_the_runtime() {
    let file = CString::new(library().to_str().unwrap()).unwrap();
    // SAFETY: the library runs nothing when it is opened; each symbol has the type that it is declared with.
    unsafe {
        let library = dlopen(file.as_ptr(), 2);
        assert!(!library.is_null(), "{file:?}");
        let symbol = |name: &CStr| {
            let symbol = dlsym(library, name.as_ptr());
            assert!(!symbol.is_null(), "{name:?}");
            symbol
        };
        for name in [c"hipModuleLaunchKernel", c"hipStreamBeginCapture", c"hipGetDevicePropertiesR0600", c"hip_sim_fail", c"hip_sim_count"]
        {
            symbol(name);
        }
        let count: extern "C" fn(*mut c_int) -> c_uint = std::mem::transmute(symbol(c"hipGetDeviceCount"));
        let mut devices = 0;
        assert_eq!(count(&mut devices), 0);
        assert_eq!(devices, 1);
        let name: extern "C" fn(c_uint) -> *const c_char = std::mem::transmute(symbol(c"hipGetErrorName"));
        assert_eq!(CStr::from_ptr(name(719)), c"hipErrorLaunchFailure");
    }
}
