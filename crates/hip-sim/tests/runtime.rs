//! Devices, memory, streams, events, modules, launches.

mod support;

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;

use amdhip64::api::control::*;
use amdhip64::api::device::*;
use amdhip64::api::error::*;
use amdhip64::api::event::*;
use amdhip64::api::memory::*;
use amdhip64::api::module::*;
use amdhip64::api::stream::*;
use support::*;

fn attribute(which: u32) -> c_int {
    let mut value = -1;
    // SAFETY: a place for one number.
    ok(unsafe { hipDeviceGetAttribute(&mut value, which, 0) });
    value
}

#[test]
fn devices_are_what_the_environment_says() {
    for (arch, cus, units, lds) in [("gfx942", "", 304, 65536), ("gfx942", "80", 80, 65536), ("gfx950", "", 256, 163_840)] {
        let _turn = machine(&[("ARCH", arch), ("CUS", cus), ("DEVICES", "2")]);
        let mut found = 0;
        // SAFETY: places for what is written.
        let prop = unsafe {
            ok(hipGetDeviceCount(&mut found));
            let mut prop = std::mem::zeroed();
            ok(hipGetDevicePropertiesR0600(&mut prop, 1));
            prop
        };
        assert_eq!(found, 2);
        let name: Vec<u8> = prop.gcn_arch_name.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
        assert_eq!(String::from_utf8(name).unwrap(), format!("{arch}:sramecc+:xnack-"));
        assert_eq!((prop.multi_processor_count, prop.shared_mem_per_block, prop.warp_size), (units, lds, 64));
        // Multiprocessors, LDS of a block, wave size, threads of a block.
        assert_eq!([63, 74, 87, 56].map(attribute), [units, lds as c_int, 64, 1024]);
        assert_eq!(hipSetDevice(2), Code::INVALID_DEVICE);
        ok(hipSetDevice(1));
        let mut current = 0;
        // SAFETY: a place for one number.
        ok(unsafe { hipGetDevice(&mut current) });
        assert_eq!(current, 1);
        ok(hipSetDevice(0));
    }
}

#[test]
fn without_a_device_everything_says_so() {
    let _turn = machine(&[("DEVICES", "0")]);
    let mut found = -1;
    // SAFETY: a place for one number.
    assert_eq!(unsafe { hipGetDeviceCount(&mut found) }, Code::NO_DEVICE);
    assert_eq!(found, 0);
    assert_eq!(hipInit(0), Code::NO_DEVICE);
    assert_eq!(hipSetDevice(0), Code::NO_DEVICE);
    assert_eq!(malloc(16), Err(Code::NO_DEVICE));
    assert_eq!(stream(), Err(Code::NO_DEVICE));
    assert_eq!(hipDeviceSynchronize(), Code::NO_DEVICE);
    assert_eq!(hipGetLastError(), Code::NO_DEVICE);
    assert_eq!(hipGetLastError(), Code::SUCCESS);
}

#[test]
fn errors_have_names_and_texts() {
    let (name, text) = (hipGetErrorName(Code::OUT_OF_MEMORY), hipGetErrorString(Code::OUT_OF_MEMORY));
    // SAFETY: strings that live for good.
    unsafe {
        assert_eq!(CStr::from_ptr(name), c"hipErrorOutOfMemory");
        assert_eq!(CStr::from_ptr(text), c"out of memory");
        assert_eq!(CStr::from_ptr(hipGetErrorName(Code(123_456))), c"hipErrorUnknown");
    }
}

#[test]
fn memory_is_counted_limited_and_checked() {
    let _turn = machine(&[("MEMORY", "10000")]);
    assert_eq!(malloc(0), Ok(null_mut()));
    let a = malloc(6000).unwrap();
    assert_eq!(malloc(6000), Err(Code::OUT_OF_MEMORY));
    assert_eq!((count("allocations"), count("bytes")), (1, 6000));
    let (mut free, mut total) = (0, 0);
    // SAFETY: places for two numbers.
    ok(unsafe { hipMemGetInfo(&mut free, &mut total) });
    assert_eq!((free, total), (4000, 10000));
    let host = host_malloc(100).unwrap();
    let pageable = [7u8; 64];
    // SAFETY: our sides are alive; the runtime checks the device's.
    unsafe {
        let copy = |dst: *mut c_void, src: *const c_void, size, kind| hipMemcpy(dst, src, size, kind);
        ok(copy(a, pageable.as_ptr().cast(), 64, 1));
        ok(copy(host, a, 64, 2));
        assert_eq!(*host.cast::<[u8; 64]>(), pageable);
        // Fresh memory holds what nobody should read.
        ok(copy(host, a.byte_add(64), 4, DEFAULT));
        assert_eq!(*host.cast::<u32>(), u32::MAX);
        // Past the end, from no allocation, from null, in no direction.
        assert_eq!(copy(a.byte_add(5960), pageable.as_ptr().cast(), 64, 1), Code::INVALID_VALUE);
        assert_eq!(copy(a, host.byte_add(90), 64, DEFAULT), Code::INVALID_VALUE);
        let mut mine = [0u8; 64];
        assert_eq!(copy(mine.as_mut_ptr().cast(), pageable.as_ptr().cast(), 64, 1), Code::INVALID_VALUE);
        assert_eq!(copy(null_mut(), pageable.as_ptr().cast(), 64, 1), Code::INVALID_VALUE);
        assert_eq!(copy(a, pageable.as_ptr().cast(), 64, 9), Code::INVALID_MEMCPY_DIRECTION);
        ok(hipMemsetD32Async(a, 0x0102_0304, 3, null_mut()));
        ok(copy(host, a, 12, 2));
        assert_eq!(*host.cast::<[u32; 3]>(), [0x0102_0304; 3]);
        assert_eq!(hipMemsetD32Async(a.byte_add(2), 0, 1, null_mut()), Code::INVALID_VALUE);
        assert_eq!(hipMemsetAsync(a.byte_add(5990), 0, 11, null_mut()), Code::INVALID_VALUE);
    }
    assert_eq!(hipHostFree(a), Code::INVALID_VALUE);
    assert_eq!(hipFree(a.wrapping_byte_add(16)), Code::INVALID_VALUE);
    ok(hipFree(a));
    assert_eq!(hipFree(a), Code::INVALID_VALUE);
    ok(hipFree(null_mut()));
    ok(hipHostFree(host));
    assert_nothing_alive();
}

#[test]
fn kernels_run_with_both_ways_of_passing_arguments() {
    require_clang!();
    for arch in ["gfx942", "gfx950"] {
        let _turn = machine(&[("ARCH", arch)]);
        hip_sim_counters_clear();
        let (stream, module) = (stream().unwrap(), module(object(arch)).unwrap());
        let add = function(module, "add").unwrap();
        let n = 600u32;
        let [mut a, mut b, mut out] = [(); 3].map(|()| malloc(4 * n as usize).unwrap());
        let (x, y): (Vec<f32>, Vec<f32>) = (0..n).map(|i| (i as f32, 0.5 * i as f32)).unzip();
        ok(upload(a, &x, stream));
        ok(upload(b, &y, stream));
        let want: Vec<f32> = (0..n).map(|i| 1.5 * i as f32).collect();
        ok(launch(add, 3, stream, &add_args(a, b, out, n)));
        assert_eq!(download(out, n as usize, stream).unwrap(), want);
        ok(hipMemsetAsync(out, 0, 4 * n as usize, stream));
        let mut count_of = n;
        let mut params: [*mut c_void; 4] = [(&raw mut a).cast(), (&raw mut b).cast(), (&raw mut out).cast(), (&raw mut count_of).cast()];
        // SAFETY: the arrays outlive the call.
        ok(unsafe { hipModuleLaunchKernel(add, 3, 1, 1, 256, 1, 1, 0, stream, params.as_mut_ptr(), null_mut()) });
        assert_eq!(download(out, n as usize, stream).unwrap(), want);
        assert_eq!((count("launches"), count("kernels"), count("copies"), count("memsets")), (2, 2, 4, 1));
        // SAFETY: strings.
        let counter = |field: &CStr| unsafe { hip_sim_counters(c"add".as_ptr(), field.as_ptr()) };
        assert_eq!((counter(c"launches"), counter(c"workgroups"), counter(c"global_stored")), (2, 6, 2 * 4 * i64::from(n)));
        assert!(counter(c"longest_wave") > 0 && counter(c"nonsense") == -1);
        let mut registers = 0;
        // SAFETY: a place for one number.
        ok(unsafe { hipFuncGetAttribute(&mut registers, 4, add) });
        assert!(registers >= 8);
        [a, b, out].into_iter().for_each(|pointer| ok(hipFree(pointer)));
        ok(hipModuleUnload(module));
        assert_eq!(launch(add, 3, stream, &add_args(a, b, out, n)), Code::INVALID_HANDLE);
        ok(hipStreamDestroy(stream));
        assert_eq!(hipStreamSynchronize(stream), Code::CONTEXT_IS_DESTROYED);
        assert_nothing_alive();
    }
}

#[test]
fn images_for_other_machines_and_no_images_are_refused() {
    require_clang!();
    let _turn = machine(&[("ARCH", "gfx942")]);
    assert_eq!(module(object("gfx950")), Err(Code::NO_BINARY_FOR_GPU));
    assert_eq!(module(&[0; 64]), Err(Code::INVALID_IMAGE));
    let mut cpu = object("gfx942").to_vec();
    cpu[18] = 62;
    assert_eq!(module(&cpu), Err(Code::INVALID_IMAGE));
    let loaded = module(object("gfx942")).unwrap();
    assert_eq!(function(loaded, "subtract"), Err(Code::NOT_FOUND));
    assert_eq!(function(0x1234 as Handle, "add"), Err(Code::INVALID_HANDLE));
    // A bundle of both: the right one is taken.
    let mut bundle = b"__CLANG_OFFLOAD_BUNDLE__".to_vec();
    let entries = ["gfx950", "gfx942"].map(|arch| (format!("hipv4-amdgcn-amd-amdhsa--{arch}"), object(arch)));
    let header = 32 + entries.iter().map(|(name, _)| 24 + name.len()).sum::<usize>();
    bundle.extend(2u64.to_le_bytes());
    let mut offset = header;
    for (name, object) in &entries {
        bundle.extend([offset, object.len(), name.len()].into_iter().flat_map(|x| (x as u64).to_le_bytes()));
        bundle.extend(name.as_bytes());
        offset += object.len();
    }
    entries.iter().for_each(|(_, object)| bundle.extend(*object));
    let bundled = module(&bundle).unwrap();
    function(bundled, "add").unwrap();
    ok(hipModuleUnload(bundled));
    ok(hipModuleUnload(loaded));
    assert_eq!(hipModuleUnload(loaded), Code::INVALID_HANDLE);
}

#[test]
fn shapes_that_no_device_runs_are_refused_and_leave_it_well() {
    require_clang!();
    let _turn = machine(&[]);
    let out = malloc(4096).unwrap();
    let (add, narrow) = (kernel("gfx942", "add"), kernel("gfx942", "narrow"));
    let args = add_args(out, out, out, 16);
    assert_eq!(launch(add, 0, null_mut(), &args), Code::INVALID_VALUE);
    assert_eq!(launch_shaped(add, 1, 0, 0, null_mut(), &args), Code::INVALID_CONFIGURATION);
    assert_eq!(launch_shaped(add, 1, 2048, 0, null_mut(), &args), Code::INVALID_VALUE);
    assert_eq!(launch_shaped(add, 1, 256, 65537, null_mut(), &args), Code::INVALID_VALUE);
    assert_eq!(launch_shaped(kernel("gfx942", "race"), 1, 256, 65536, null_mut(), &args[..8]), Code::LAUNCH_OUT_OF_RESOURCES);
    assert_eq!(launch(add, 1, null_mut(), &args[..24]), Code::INVALID_VALUE);
    assert_eq!(launch(add, 1, null_mut(), &[&args[..], &[0; 4096]].concat()), Code::INVALID_VALUE);
    assert_eq!(launch(add, 1, 0x77 as Handle, &args), Code::INVALID_VALUE);
    assert_eq!(launch_shaped(narrow, 1, 128, 0, null_mut(), &args[..8]), Code::LAUNCH_FAILURE);
    ok(launch_shaped(add, 1, 64, 0, null_mut(), &args));
    assert_eq!(count("launches"), 1);
}

#[test]
fn events_tell_order_and_time() {
    let _turn = machine(&[]);
    let (stream, start, stop) = (stream().unwrap(), event().unwrap(), event().unwrap());
    let mut ms = -1.0;
    // SAFETY: a place for one number.
    let elapsed = |ms: &mut f32| unsafe { hipEventElapsedTime(ms, start, stop) };
    assert_eq!(elapsed(&mut ms), Code::INVALID_HANDLE);
    ok(hipEventQuery(start));
    ok(hipEventRecord(start, stream));
    ok(hipEventRecord(stop, stream));
    ok(hipStreamWaitEvent(null_mut(), stop, 0));
    ok(hipEventSynchronize(stop));
    ok(elapsed(&mut ms));
    assert!((0.0..1000.0).contains(&ms));
    ok(hipEventDestroy(start));
    assert_eq!(hipEventRecord(start, stream), Code::INVALID_HANDLE);
    ok(hipEventDestroy(stop));
    ok(hipStreamDestroy(stream));
    assert_nothing_alive();
}

#[test]
fn queued_work_runs_when_something_waits_for_it() {
    require_clang!();
    let _turn = machine(&[("ASYNC", "1")]);
    let [first, second] = [(); 2].map(|()| stream().unwrap());
    let add = kernel("gfx942", "add");
    let [a, out, twice] = [(); 3].map(|()| malloc(64).unwrap());
    let host = host_malloc(64).unwrap();
    // SAFETY: pinned memory of 16 floats.
    let pinned = || unsafe { std::slice::from_raw_parts_mut(host.cast::<f32>(), 16) };
    // Pageable memory is read at the call, pinned memory when the copy runs.
    let mut values = vec![1.0f32; 16];
    ok(upload(a, &values, first));
    values.fill(9.0);
    ok(launch(add, 1, first, &add_args(a, a, out, 16)));
    let ready = event().unwrap();
    ok(hipEventRecord(ready, first));
    ok(hipStreamWaitEvent(second, ready, 0));
    ok(launch(add, 1, second, &add_args(out, out, twice, 16)));
    pinned().fill(5.0);
    // SAFETY: pinned memory that outlives the copy.
    ok(unsafe { hipMemcpyAsync(host, twice, 64, 2, second) });
    assert_eq!((count("kernels"), pinned()[0]), (0, 5.0));
    assert_eq!(hipStreamQuery(second), Code::NOT_READY);
    assert_eq!(hipEventQuery(ready), Code::NOT_READY);
    ok(hipStreamSynchronize(second));
    assert_eq!((count("kernels"), pinned()[0]), (2, 4.0));
    ok(hipEventQuery(ready));
    ok(hipStreamQuery(first));
    // What is never waited for on a non-blocking stream is not seen by the null stream.
    ok(launch(add, 1, first, &add_args(out, out, twice, 16)));
    let mut seen = [0.0f32; 16];
    // SAFETY: a slice of ours.
    ok(unsafe { hipMemcpy(seen.as_mut_ptr().cast(), twice, 64, 2) });
    assert_eq!((count("kernels"), seen[0]), (2, 4.0));
    // Freeing waits.
    ok(hipFree(twice));
    assert_eq!(count("kernels"), 3);
    // A fault shows where it is waited for. Right behind an allocation lies none; farther away the code object may.
    let stray = kernel("gfx942", "stray");
    ok(launch(stray, 1, first, &[(out as u64).to_le_bytes().to_vec(), 16u32.to_le_bytes().to_vec()].concat()));
    assert_eq!(hipStreamSynchronize(first), Code::LAUNCH_FAILURE);
    assert_eq!(hipDeviceSynchronize(), Code::LAUNCH_FAILURE);
}

#[test]
fn threads_share_the_device() {
    require_clang!();
    let _turn = machine(&[]);
    object("gfx942");
    std::thread::scope(|scope| {
        for seed in 0..6 {
            scope.spawn(move || {
                let stream = stream().unwrap();
                let loaded = module(object("gfx942")).unwrap();
                let add = function(loaded, "add").unwrap();
                for round in 0..20 {
                    let [a, out] = [(); 2].map(|()| malloc(1024).unwrap());
                    let value = (seed * 100 + round) as f32;
                    ok(upload(a, &[value; 256], stream));
                    ok(launch(add, 1, stream, &add_args(a, a, out, 256)));
                    assert_eq!(download(out, 256, stream).unwrap(), vec![2.0 * value; 256]);
                    ok(hipFree(a));
                    ok(hipFree(out));
                }
                ok(hipModuleUnload(loaded));
                ok(hipStreamDestroy(stream));
            });
        }
    });
    assert_eq!((count("kernels"), count("mallocs")), (120, 240));
    assert_nothing_alive();
}
