//! Errors.

use std::ffi::{CString, c_char};
use std::sync::{LazyLock, Mutex};

use crate::error::Code;
use crate::guard::{last_error, put};
use crate::handles::lock;

/// The thread's last error, which is forgotten.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetLastError() -> Code {
    last_error(true)
}

/// The thread's last error.
#[unsafe(no_mangle)]
pub extern "C" fn hipPeekAtLastError() -> Code {
    last_error(false)
}

/// An error's name.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(code: Code) -> *const c_char {
    code.name().as_ptr()
}

/// What an error means.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorString(code: Code) -> *const c_char {
    // Texts are kept for good: callers never free them.
    static TEXTS: LazyLock<Mutex<Vec<(&'static str, CString)>>> = LazyLock::new(Mutex::default);
    let text = code.text();
    let mut texts = lock(&TEXTS);
    if let Some((_, found)) = texts.iter().find(|(known, _)| *known == text) {
        return found.as_ptr();
    }
    let made = CString::new(text).unwrap_or_default();
    let pointer = made.as_ptr();
    texts.push((text, made));
    pointer
}

/// An error's name through a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDrvGetErrorName(code: Code, name: *mut *const c_char) -> Code {
    // SAFETY: the caller's pointer.
    unsafe { put(name, hipGetErrorName(code)) }.err().unwrap_or(Code::SUCCESS)
}

/// What an error means, through a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDrvGetErrorString(code: Code, text: *mut *const c_char) -> Code {
    // SAFETY: the caller's pointer.
    unsafe { put(text, hipGetErrorString(code)) }.err().unwrap_or(Code::SUCCESS)
}
