//! Faults of kernels, and failures on demand.

mod support;

use std::ffi::c_char;
use std::ptr::null_mut;

use amdhip64::api::control::*;
use amdhip64::api::device::*;
use amdhip64::api::error::*;
use amdhip64::api::event::*;
use amdhip64::api::graph::*;
use amdhip64::api::memory::*;
use amdhip64::api::module::*;
use amdhip64::api::stream::*;
use support::*;

#[test]
fn a_fault_loses_the_device_until_everything_is_given_back() {
    require_clang!();
    for name in ["stray", "race"] {
        let _turn = machine(&[("DEVICES", "2")]);
        let (stream, loaded) = (stream().unwrap(), module(object("gfx942")).unwrap());
        let bad = function(loaded, name).unwrap();
        let out = malloc(1024).unwrap();
        let mut args = (out as u64).to_le_bytes().to_vec();
        if name == "stray" {
            args.extend(100u32.to_le_bytes());
        }
        assert_eq!(launch(bad, 1, stream, &args), Code::LAUNCH_FAILURE);
        assert_eq!(malloc(16), Err(Code::LAUNCH_FAILURE));
        assert_eq!(hipStreamSynchronize(stream), Code::LAUNCH_FAILURE);
        assert_eq!(hipDeviceSynchronize(), Code::LAUNCH_FAILURE);
        assert_eq!(hipGetLastError(), Code::LAUNCH_FAILURE);
        assert_eq!(hipGetLastError(), Code::LAUNCH_FAILURE);
        // The other device is well.
        ok(hipSetDevice(1));
        ok(hipFree(malloc(16).unwrap()));
        ok(hipSetDevice(0));
        // What is given back is gone, whatever the code.
        assert_eq!(hipFree(out), Code::LAUNCH_FAILURE);
        assert_eq!(hipModuleUnload(loaded), Code::LAUNCH_FAILURE);
        assert_eq!(hipStreamDestroy(stream), Code::LAUNCH_FAILURE);
        assert_nothing_alive();
        hip_sim_revive(0);
        ok(hipFree(malloc(16).unwrap()));
    }
}

#[test]
fn a_loop_without_end_is_ended() {
    require_clang!();
    let _turn = machine(&[("LIMIT", "10000")]);
    let out = malloc(4).unwrap();
    ok(hipMemsetAsync(out, 0, 4, null_mut()));
    assert_eq!(launch(kernel("gfx942", "forever"), 1, null_mut(), &(out as u64).to_le_bytes()), Code::LAUNCH_TIME_OUT);
    assert_eq!(hipDeviceSynchronize(), Code::LAUNCH_TIME_OUT);
}

#[test]
fn the_nth_call_fails_with_the_code_asked_for() {
    let _turn = machine(&[]);
    fail("hipMalloc", 2, Code::SUCCESS);
    fail("hipDeviceSynchronize", 1, Code::UNKNOWN);
    let first = malloc(16).unwrap();
    assert_eq!(malloc(16), Err(Code::OUT_OF_MEMORY));
    let second = malloc(16).unwrap();
    // Other threads are not meant.
    std::thread::scope(|scope| {
        scope.spawn(|| ok(hipDeviceSynchronize()));
    });
    assert_eq!(hipDeviceSynchronize(), Code::UNKNOWN);
    ok(hipDeviceSynchronize());
    assert_eq!(hip_sim_failed(), 2);
    // Giving back fails in name only.
    fail("hipFree", 1, Code::INVALID_VALUE);
    assert_eq!(hipFree(first), Code::INVALID_VALUE);
    ok(hipFree(second));
    assert_nothing_alive();
    // A fault's code loses the device.
    fail("hipStreamCreateWithFlags", 1, Code::LAUNCH_FAILURE);
    assert_eq!(stream(), Err(Code::LAUNCH_FAILURE));
    assert_eq!(malloc(16), Err(Code::LAUNCH_FAILURE));
    hip_sim_clear();
}

/// A little of everything, given back as a careful program does.
fn everything() -> Result<Vec<f32>, Code> {
    /// Gives back what was made, in reverse.
    struct Made(Vec<Box<dyn Fn() -> Code>>);
    impl Drop for Made {
        fn drop(&mut self) {
            self.0.drain(..).rev().for_each(|give_back| {
                give_back();
            });
        }
    }
    let mut made = Made(Vec::new());
    let mut count = 0;
    // SAFETY: a place for one number.
    done(unsafe { hipGetDeviceCount(&mut count) })?;
    done(hipSetDevice(0))?;
    let stream = stream()?;
    made.0.push(Box::new(move || hipStreamDestroy(stream)));
    let module = module(object("gfx942"))?;
    made.0.push(Box::new(move || hipModuleUnload(module)));
    let add = function(module, "add")?;
    let mut buffers = Vec::new();
    for _ in 0..2 {
        let buffer = malloc(1024)?;
        made.0.push(Box::new(move || hipFree(buffer)));
        buffers.push(buffer);
    }
    let pinned = host_malloc(1024)?;
    made.0.push(Box::new(move || hipHostFree(pinned)));
    // SAFETY: 256 floats of pinned memory.
    unsafe { std::slice::from_raw_parts_mut(pinned.cast::<f32>(), 256) }.fill(3.0);
    // SAFETY: both sides are alive.
    done(unsafe { hipMemcpyAsync(buffers[0], pinned, 1024, 1, stream) })?;
    done(hipMemsetAsync(buffers[1], 0, 1024, stream))?;
    let event = event()?;
    made.0.push(Box::new(move || hipEventDestroy(event)));
    done(hipEventRecord(event, stream))?;
    done(hipEventSynchronize(event))?;
    done(hipStreamBeginCapture(stream, 1))?;
    let recorded = done(launch(add, 1, stream, &add_args(buffers[0], buffers[0], buffers[1], 256)));
    let mut graph = null_mut();
    // SAFETY: a place for one handle.
    let ended = done(unsafe { hipStreamEndCapture(stream, &mut graph) });
    if !graph.is_null() {
        made.0.push(Box::new(move || hipGraphDestroy(graph)));
    }
    recorded.and(ended)?;
    let mut exec = null_mut();
    // SAFETY: a place for one handle.
    done(unsafe { hipGraphInstantiate(&mut exec, graph, null_mut(), null_mut(), 0) })?;
    made.0.push(Box::new(move || hipGraphExecDestroy(exec)));
    done(hipGraphLaunch(exec, stream))?;
    let result = download(buffers[1], 256, stream)?;
    // Failures of what gives back are seen too.
    while let Some(give_back) = made.0.pop() {
        done(give_back())?;
    }
    Ok(result)
}

#[test]
fn every_call_can_fail_in_turn_without_a_leak() {
    require_clang!();
    for queued in ["0", "1"] {
        let _turn = machine(&[("ASYNC", queued)]);
        let mut names = Vec::new();
        for nth in 1.. {
            hip_sim_clear();
            hip_sim_fail_any(nth, 0);
            let result = everything();
            if hip_sim_failed() == 0 {
                assert_eq!(result.unwrap(), [6.0; 256]);
                break;
            }
            let mut name = [0 as c_char; 64];
            // SAFETY: a buffer of 64 bytes.
            let length = unsafe { hip_sim_last_failed(name.as_mut_ptr(), name.len()) };
            let name: String = name[..length].iter().map(|&c| c as u8 as char).collect();
            assert!(result.is_err(), "{name}");
            assert_nothing_alive();
            names.push(name);
            // And the next run is a whole one.
            hip_sim_clear();
            assert_eq!(everything().unwrap(), [6.0; 256]);
        }
        hip_sim_clear();
        assert!(names.len() > 25, "{names:?}");
        for call in
            ["hipModuleLoadData", "hipModuleLaunchKernel", "hipGraphInstantiate", "hipMemcpyAsync", "hipHostFree", "hipGetDeviceCount"]
        {
            assert!(names.iter().any(|name| name == call), "{call} in {names:?}");
        }
    }
}
