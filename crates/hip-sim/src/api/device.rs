//! Devices.

use std::ffi::{c_char, c_int, c_uint};

use crate::error::Code;
use crate::guard::{call, put, query, wanted};
use crate::props::{DeviceProp, attribute, properties};

/// ROCm 6.4.
const VERSION: c_int = 60_443_483;

/// Initializes the runtime.
#[unsafe(no_mangle)]
pub extern "C" fn hipInit(flags: c_uint) -> Code {
    query("hipInit", |runtime| {
        runtime.current()?;
        if flags == 0 { Ok(()) } else { Err(Code::INVALID_VALUE) }
    })
}

/// Version of the driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDriverGetVersion(version: *mut c_int) -> Code {
    // SAFETY: the caller's pointer.
    query("hipDriverGetVersion", |_| unsafe { put(version, VERSION) })
}

/// Version of the runtime.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipRuntimeGetVersion(version: *mut c_int) -> Code {
    // SAFETY: the caller's pointer.
    query("hipRuntimeGetVersion", |_| unsafe { put(version, VERSION) })
}

/// How many GPUs there are; none is an error as well.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDeviceCount(count: *mut c_int) -> Code {
    query("hipGetDeviceCount", |runtime| {
        // SAFETY: the caller's pointer.
        unsafe { put(count, runtime.devices.len() as c_int) }?;
        runtime.current().map(|_| ())
    })
}

/// The thread's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevice(device: *mut c_int) -> Code {
    // SAFETY: the caller's pointer.
    query("hipGetDevice", |runtime| unsafe { put(device, runtime.current()?.ordinal as c_int) })
}

/// Changes the thread's device.
#[unsafe(no_mangle)]
pub extern "C" fn hipSetDevice(device: c_int) -> Code {
    query("hipSetDevice", |runtime| {
        runtime.current()?;
        runtime.set_current(device)
    })
}

/// The device with a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGet(device: *mut c_int, ordinal: c_int) -> Code {
    query("hipDeviceGet", |runtime| {
        runtime.device(ordinal)?;
        // SAFETY: the caller's pointer.
        unsafe { put(device, ordinal) }
    })
}

/// An attribute of a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetAttribute(value: *mut c_int, which: c_uint, device: c_int) -> Code {
    query("hipDeviceGetAttribute", |runtime| {
        let ordinal = runtime.device(device)?.ordinal;
        // SAFETY: the caller's pointer.
        unsafe { put(value, attribute(&runtime.config, ordinal, which)?) }
    })
}

/// The properties of a device, as ROCm 6 lays them out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevicePropertiesR0600(prop: *mut DeviceProp, device: c_int) -> Code {
    query("hipGetDevicePropertiesR0600", |runtime| {
        let ordinal = runtime.device(device)?.ordinal;
        // SAFETY: the caller's pointer.
        unsafe { put(prop, properties(&runtime.config, ordinal)) }
    })
}

/// The name of a device, cut to `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> Code {
    query("hipDeviceGetName", |runtime| {
        runtime.device(device)?;
        wanted(name)?;
        let room = usize::try_from(len).ok().and_then(|len| len.checked_sub(1)).ok_or(Code::INVALID_VALUE)?;
        let text = runtime.config.product().as_bytes();
        let text = &text[..text.len().min(room)];
        // SAFETY: the caller's buffer has `len` bytes, more than the text by its terminator.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), text.len());
            name.add(text.len()).write(0);
        }
        Ok(())
    })
}

/// Bytes of memory of a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceTotalMem(bytes: *mut usize, device: c_int) -> Code {
    query("hipDeviceTotalMem", |runtime| {
        runtime.device(device)?;
        // SAFETY: the caller's pointer.
        unsafe { put(bytes, runtime.config.memory) }
    })
}

/// Waits for all work of the thread's device.
#[unsafe(no_mangle)]
pub extern "C" fn hipDeviceSynchronize() -> Code {
    call("hipDeviceSynchronize", |runtime| {
        runtime.forbid_in_any_capture(Code::CAPTURE_UNSUPPORTED)?;
        let device = runtime.current()?;
        device.counts.synchronizations.add(1);
        runtime.finish_device(device)
    })
}
