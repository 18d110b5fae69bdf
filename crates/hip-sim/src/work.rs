//! What a stream executes: kernels, copies, fills, recordings of events.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use cdna_sim::Launch;

use crate::device::Device;
use crate::error::{Code, Result};
use crate::handles::lock;
use crate::kernels;
use crate::memory::{Allocations, Place, read, write};
use crate::module::Function;
use crate::stream::{Event, Recorded};

/// One end of a copy.
#[derive(Debug, Clone, Copy)]
pub struct End {
    /// First address.
    pub address: u64,
    /// Whether it lies in an allocation of the runtime, which has to be alive then; otherwise it is memory of the caller's.
    pub owned: bool,
}

/// A function that the caller wants called.
pub type HostFn = unsafe extern "C" fn(*mut c_void);

/// A piece of a stream's work.
pub enum Work {
    /// A kernel with its arguments' bytes.
    Kernel { function: Arc<Function>, args: Vec<u8>, launch: Launch },
    /// A copy.
    Copy { dst: End, src: End, len: usize },
    /// A copy of bytes taken at the call.
    Upload { dst: End, data: Vec<u8> },
    /// `count` times the low `width` bytes of `value`.
    Fill { dst: u64, value: u32, width: usize, count: usize },
    /// The recording of an event with this number.
    Record(Arc<Event>, u64),
    /// Takes an allocation away.
    Free(u64),
    /// A call into the program.
    Call(HostFn, usize),
}

impl Work {
    /// Executes it. An error is what the device reports, already said on standard error.
    pub fn execute(&self, device: &Device, devices: &[Device], allocations: &Allocations, in_graph: bool) -> Result {
        if let Work::Free(address) = self {
            let _alone = write(&device.busy);
            return allocations.free(devices, *address, |place| matches!(place, Place::Device(_)));
        }
        let _running = read(&device.busy);
        match self {
            Work::Kernel { function, args, launch } => kernel(device, function, args, launch, in_graph),
            Work::Copy { dst, src, len } => {
                check(device, allocations, "copy from", *src, *len)?;
                check(device, allocations, "copy to", *dst, *len)?;
                copied(device, *len);
                // SAFETY: ends in allocations of the runtime were just found alive and stay so while `busy` is held; the caller vouches for
                // the rest until the copy is done.
                unsafe { std::ptr::copy(src.address as *const u8, dst.address as *mut u8, *len) };
                Ok(())
            }
            Work::Upload { dst, data } => {
                check(device, allocations, "copy to", *dst, data.len())?;
                copied(device, data.len());
                // SAFETY: as above.
                unsafe { std::ptr::copy(data.as_ptr(), dst.address as *mut u8, data.len()) };
                Ok(())
            }
            &Work::Fill { dst, value, width, count } => {
                check(device, allocations, "fill of", End { address: dst, owned: true }, width * count)?;
                device.counts.memsets.add(1);
                let pattern = value.to_le_bytes();
                // SAFETY: the range was just found alive and stays so while `busy` is held.
                let bytes = unsafe { std::slice::from_raw_parts_mut(dst as *mut u8, width * count) };
                bytes.chunks_exact_mut(width).for_each(|element| element.copy_from_slice(&pattern[..width]));
                Ok(())
            }
            Work::Record(event, number) => {
                let mut state = lock(&event.state);
                if event.recordings.load(Ordering::Acquire) == *number {
                    *state = Recorded::At(Instant::now());
                }
                Ok(())
            }
            Work::Call(function, data) => {
                // SAFETY: the caller of hipLaunchHostFunc vouches for the function and its data.
                unsafe { function(*data as *mut c_void) };
                Ok(())
            }
            Work::Free(_) => Ok(()),
        }
    }
}

fn copied(device: &Device, len: usize) {
    device.counts.copies.add(1);
    device.counts.copied_bytes.add(len as i64);
}

/// Memory that work refers to has to be alive when it executes.
fn check(device: &Device, allocations: &Allocations, what: &str, end: End, len: usize) -> Result {
    if !end.owned || matches!(allocations.range(end.address, len), Ok(Some(_))) {
        return Ok(());
    }
    eprintln!("hip-sim: {what} {len} bytes at {:#x} that no allocation holds any more", end.address);
    Err(device.note(Code::ILLEGAL_ADDRESS))
}

fn kernel(device: &Device, function: &Function, args: &[u8], launch: &Launch, in_graph: bool) -> Result {
    let info = function.info();
    if in_graph && !function.is_loaded() {
        eprintln!("hip-sim: a graph launches {}, whose module was unloaded", info.name);
        return Err(device.note(Code::LAUNCH_FAILURE));
    }
    device.counts.kernels.add(1);
    match function.module.code.launch(&device.memory, info, args, launch) {
        Ok(counters) => {
            kernels::add(&info.name, counters);
            Ok(())
        }
        Err(error) => {
            eprintln!("hip-sim: kernel {}, grid {:?}, block {:?}: {error}", info.name, launch.grid, launch.block);
            let code = match error.fault() {
                Some(cdna_sim::Fault::Runaway(_)) => Code::LAUNCH_TIME_OUT,
                _ => Code::LAUNCH_FAILURE,
            };
            Err(device.note(code))
        }
    }
}
