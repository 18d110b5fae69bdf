//! What tests ask of the simulator. Look these up in the library that the program under test has opened.

use std::ffi::{CStr, c_char, c_int, c_uint};

use crate::error::Code;
use crate::handles::lock;
use crate::runtime::{reset, runtime};
use crate::{config, inject, kernels};

/// # Safety
/// Null, or a string.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Lets the `nth` following call of the function `call` by this thread fail with `code`; 0 stands for what it usually fails with
/// (`hipErrorOutOfMemory` of allocations, `hipErrorUnknown` of others). A code that a fault gives (700, 702, 710, 719) loses the device.
/// Functions that give something back do so nevertheless.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hip_sim_fail(call: *const c_char, nth: u64, code: c_uint) {
    // SAFETY: the caller's string.
    inject::plan(&unsafe { text(call) }, nth, Code(code));
}

/// Lets the `nth` following call of any function by this thread fail.
#[unsafe(no_mangle)]
pub extern "C" fn hip_sim_fail_any(nth: u64, code: c_uint) {
    inject::plan("", nth, Code(code));
}

/// How many of this thread's planned failures have happened.
#[unsafe(no_mangle)]
pub extern "C" fn hip_sim_failed() -> u64 {
    inject::failed().len() as u64
}

/// The function whose call failed on demand last in this thread, cut to `len` bytes; its length, 0 without one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hip_sim_last_failed(name: *mut c_char, len: usize) -> usize {
    let last = inject::failed().pop().unwrap_or_default();
    if !name.is_null() && len > 0 {
        let cut = last.len().min(len - 1);
        // SAFETY: the caller's buffer has `len` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(last.as_ptr(), name.cast(), cut);
            name.add(cut).write(0);
        }
    }
    last.len()
}

/// Forgets this thread's failures, planned and happened.
#[unsafe(no_mangle)]
pub extern "C" fn hip_sim_clear() {
    inject::clear();
}

/// A count of a device by name (see [`crate::counts::Counts`]); -1 where there is no such device or count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hip_sim_count(device: c_int, name: *const c_char) -> i64 {
    // SAFETY: the caller's string.
    let name = unsafe { text(name) };
    runtime().device(device).ok().and_then(|device| device.counts.named(&name)).unwrap_or(-1)
}

/// Prints the counts of a device on standard error.
#[unsafe(no_mangle)]
pub extern "C" fn hip_sim_counts(device: c_int) {
    let runtime = runtime();
    let Ok(device) = runtime.device(device) else { return };
    for (name, value) in device.counts.all() {
        eprintln!("{name:<26} {value:>14}");
    }
}

/// What launches of a kernel (of all of them where `kernel` is empty) executed, by the field's name: `launches`, `workgroups`,
/// `instructions`, a class (`Matrix`, `Lds`, `VectorMemory`, ...), `mfma`, `lds_accesses`, `lds_bank_conflicts`, `global_loaded`, ...;
/// -1 where there is no such field.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hip_sim_counters(kernel: *const c_char, field: *const c_char) -> i64 {
    // SAFETY: the caller's strings.
    let (kernel, field) = unsafe { (text(kernel), text(field)) };
    kernels::field(&kernel, &field).map_or(-1, |value| value as i64)
}

/// Forgets what launches executed.
#[unsafe(no_mangle)]
pub extern "C" fn hip_sim_counters_clear() {
    kernels::clear();
}

/// Sets a variable (`HIP_SIM_ARCH`, ...) from the next reset on, whatever the environment says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hip_sim_set(name: *const c_char, value: *const c_char) {
    // SAFETY: the caller's strings.
    let (name, value) = unsafe { (text(name), text(value)) };
    config::set(&name, &value);
}

/// Starts over as a fresh process would: all memory, handles and faults are gone. No call may be under way.
#[unsafe(no_mangle)]
pub extern "C" fn hip_sim_reset() {
    reset();
}

/// Brings a lost device back, its memory as it is.
#[unsafe(no_mangle)]
pub extern "C" fn hip_sim_revive(device: c_int) {
    let runtime = runtime();
    if let Ok(device) = runtime.device(device) {
        device.queues.clear();
        device.revive();
    }
    lock(&runtime.sessions).clear();
}
