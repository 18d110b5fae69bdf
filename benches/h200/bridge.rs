//! This crate for `bench.py`, as a shared library: calls over device memory that belongs to Python, captured in CUDA graphs which Python then launches beside
//! the graphs of others, in one process and one context. Registry, plan, specialization and launches are the crate's own.
//!
//! ```text
//! cargo build --release --features cuda --example h200
//! ```
//!
//! A function that fails returns null or a negative number; [`pa_bench_error`] then says why.

mod borrowed;
mod call;
mod read;

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use candle::cuda_backend::cudarc::driver::sys;
use candle::{CudaDevice, Device};
use candle_paged_attn::cache::KvDtype;
use candle_paged_attn::cuda;
use candle_paged_attn::registry::preferred_layout;
use testkit::workloads::find;

use crate::call::{Buffers, Captured};

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

/// The device that Python uses, through a stream of candle's own.
fn device() -> Result<&'static CudaDevice> {
    static DEVICE: OnceLock<CudaDevice> = OnceLock::new();
    if let Some(device) = DEVICE.get() {
        return Ok(device);
    }
    let device = CudaDevice::new_with_stream(0)?;
    // SAFETY: all of candle's work is on the one stream, and Python's is waited for on both sides of it.
    unsafe { device.disable_event_tracking() };
    Ok(DEVICE.get_or_init(|| device))
}

/// `result`, or `failed` with the error kept for [`pa_bench_error`].
fn kept<T>(result: Result<T>, failed: T) -> T {
    result.unwrap_or_else(|error| {
        ERROR.set(CString::new(format!("{error:#}").replace('\0', " ")).unwrap_or_default());
        failed
    })
}

/// # Safety
/// `text` is a C string.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str> {
    // SAFETY: the caller's word.
    Ok(unsafe { CStr::from_ptr(text) }.to_str()?)
}

/// Why the last function of this thread failed. Valid until the next one fails.
#[unsafe(no_mangle)]
pub extern "C" fn pa_bench_error() -> *const c_char {
    ERROR.with_borrow(|error| error.as_ptr())
}

/// Writes the context lengths of `FAMILY/NAME`, at most `room` of them. Returns how many there are.
///
/// # Safety
/// `workload` is a C string, `lengths` has room for `room` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pa_bench_contexts(workload: *const c_char, lengths: *mut i32, room: usize) -> c_int {
    let write = || {
        // SAFETY: the caller's word.
        let (contexts, lengths) = unsafe { (find(text(workload)?)?.contexts(), std::slice::from_raw_parts_mut(lengths, room)) };
        lengths.iter_mut().zip(&contexts).for_each(|(to, &tokens)| *to = tokens as i32);
        Ok(contexts.len() as c_int)
    };
    kept(write(), -1)
}

/// The layout that the registry prefers for FP8 caches on this GPU.
#[unsafe(no_mangle)]
pub extern "C" fn pa_bench_fp8_layout() -> *const c_char {
    let name = || Ok(preferred_layout(&cuda::arch_of(&Device::Cuda(device()?.clone()))?, KvDtype::Fp8).name());
    match kept(name(), "") {
        "nhd" => c"nhd".as_ptr(),
        "hnd" => c"hnd".as_ptr(),
        "vllm" => c"vllm".as_ptr(),
        "shuffled" => c"shuffled".as_ptr(),
        _ => std::ptr::null(),
    }
}

/// Runs `FAMILY/NAME` once on the first cache, then captures a graph of `calls` calls over the caches in turn. `layout` names a cache layout.
/// `plan_in_call`: every call plans on the device; otherwise one plan made beforehand serves all, as within a step of a model.
///
/// # Safety
/// C strings; buffers of the sizes that [`Buffers`] gives, which outlive the result, with no work on them under way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pa_bench_capture(
    workload: *const c_char,
    layout: *const c_char,
    plan_in_call: bool,
    calls: usize,
    buffers: *const Buffers,
) -> *mut Captured {
    let capture = || {
        // SAFETY: the caller's word.
        let (path, layout, buffers) = unsafe { (text(workload)?, text(layout)?, buffers.as_ref().context("no buffers")?) };
        // SAFETY: the caller's word.
        let captured = unsafe { Captured::new(device()?, &find(path)?, layout, plan_in_call, calls, buffers) };
        Ok(Box::into_raw(Box::new(captured?)))
    };
    kept(capture(), null_mut())
}

/// What was chosen for the call, as a JSON object.
///
/// # Safety
/// `captured` is a result of [`pa_bench_capture`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pa_bench_choice(captured: *const Captured) -> *const c_char {
    // SAFETY: the caller's word.
    unsafe { &*captured }.choice.as_ptr()
}

/// Launches the graph on a stream of the same device.
///
/// # Safety
/// `captured` is a result of [`pa_bench_capture`], `stream` a stream; the graph's launches do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pa_bench_launch(captured: *const Captured, stream: *mut c_void) -> c_int {
    // SAFETY: the caller's word.
    unsafe { sys::cuGraphLaunch((*captured).graph.cu_graph_exec(), stream.cast()) as c_int }
}

/// # Safety
/// `captured` is a result of [`pa_bench_capture`] which is not used again and whose launches have ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pa_bench_free(captured: *mut Captured) {
    // SAFETY: the caller's word.
    drop(unsafe { Box::from_raw(captured) });
}

/// Bytes a second that a kernel which does nothing else reads; negative where that fails.
#[unsafe(no_mangle)]
pub extern "C" fn pa_bench_read_rate() -> f64 {
    kept(device().and_then(read::rate), -1.0)
}
