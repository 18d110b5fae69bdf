//! Every HIP call fails once, in turn: an error names it, nothing leaks, and the same call made again works.

use candle::{DType, Result};
use candle_paged_attn::rocm::{DeviceSettings, RocmDevice, RocmGraph, RocmTensor};

use crate::support::*;

/// Makes calls, each once more if it fails.
struct Persistent {
    errors: Vec<String>,
    again: bool,
}

impl Persistent {
    fn call<T>(&mut self, mut call: impl FnMut() -> Result<T>) -> Result<T> {
        call().or_else(|error| {
            self.errors.push(error.to_string());
            if !self.again {
                return Err(error);
            }
            Ok(call().expect("the next call works"))
        })
    }
}

/// One of everything the layer does, its results checked.
fn everything(caller: &mut Persistent) -> Result<()> {
    let settings = || DeviceSettings { pool_cap_bytes: 8 << 10, ..DeviceSettings::default() };
    let device = caller.call(|| RocmDevice::with_settings(0, settings()))?;
    let kernel = caller.call(|| device.load(code_object(), "add"))?;
    let input = caller.call(|| RocmTensor::from_tensor(&counting(256), &device))?;
    let out = caller.call(|| RocmTensor::zeros(256, DType::F32, &device))?;
    caller.call(|| add(&device, &kernel, &input, &out, 1.0))?;
    let back = caller.call(|| out.to_tensor())?;
    assert_eq!(back.to_vec1::<f32>()?, (counting(256) + 1.0)?.to_vec1::<f32>()?);
    let work = || {
        let temporary = RocmTensor::empty(256, DType::F32, &device)?;
        temporary.copy_from_device(&input)?;
        add(&device, &kernel, &temporary, &out, 2.0)
    };
    caller.call(work)?;
    let graph: RocmGraph = caller.call(|| device.capture(work))?;
    for round in 0..2 {
        let data = (counting(256) * f64::from(round))?;
        caller.call(|| input.copy_from(&data))?;
        caller.call(|| out.fill_bytes(0xff))?;
        caller.call(|| graph.replay())?;
        let back = caller.call(|| out.to_tensor())?;
        assert_eq!(back.to_vec1::<f32>()?, (data + 2.0)?.to_vec1::<f32>()?);
    }
    let upload = caller.call(|| device.upload(&[&[7; 100], &[8; 300]]))?;
    let back = caller.call(|| upload.tensor(1, 300, DType::U8)?.to_tensor())?;
    assert_eq!(back.to_vec1::<u8>()?, [8; 300]);
    drop(graph);
    // Over the pool's cap.
    drop(caller.call(|| device.alloc(16 << 10))?);
    caller.call(|| device.synchronize())?;
    caller.call(|| device.trim())
}

/// Fails the nth call of any function for n = 1, 2, ... until nothing is left to fail; `check` sees each run. The number of runs.
fn each_call(simulator: &Simulator, code: u32, again: bool, check: impl Fn(&str, Result<()>, &[String])) -> u64 {
    everything(&mut Persistent { errors: vec![], again }).unwrap();
    let before = simulator.alive();
    for nth in 1.. {
        let mut caller = Persistent { errors: vec![], again };
        simulator.clear();
        simulator.fail_any(nth, code);
        let result = everything(&mut caller);
        let failed = simulator.failed();
        simulator.clear();
        simulator.revive();
        let Some(failed) = failed else { return nth - 1 };
        check(&failed, result, &caller.errors);
        assert_eq!(simulator.alive(), before, "call {nth}, {failed}: leaked");
    }
    0
}

#[test]
fn every_call_may_fail_once() {
    let _alone = alone();
    let Some(simulator) = simulator() else { return };
    let seen = std::cell::RefCell::new(std::collections::BTreeMap::new());
    let runs = each_call(simulator, 0, true, |failed, result, errors| {
        result.unwrap();
        let (told, untold) = *seen.borrow().get(failed).unwrap_or(&(0, 0));
        seen.borrow_mut().insert(failed.to_string(), (told + errors.len(), untold + usize::from(errors.is_empty())));
        match errors {
            [error] => assert!(error.contains(&format!("{failed}: ")), "{failed}: {error}"),
            [] => assert!(UNTOLD.contains(&failed), "{failed} failed, and nobody was told"),
            errors => panic!("{failed}: more than one error: {errors:?}"),
        }
    });
    println!("{runs} calls failed in turn: function, times told, times in a destructor or made good");
    for (function, (told, untold)) in &*seen.borrow() {
        println!("{function:<30} {told:>3} {untold:>3}");
    }
    for function in [
        "hipGetDeviceCount",
        "hipSetDevice",
        "hipGetDevicePropertiesR0600",
        "hipDeviceGetAttribute",
        "hipMalloc",
        "hipHostMalloc",
        "hipMemcpyAsync",
        "hipMemsetAsync",
        "hipStreamCreateWithFlags",
        "hipStreamSynchronize",
        "hipStreamBeginCapture",
        "hipStreamEndCapture",
        "hipGraphInstantiate",
        "hipGraphLaunch",
        "hipEventCreateWithFlags",
        "hipEventRecord",
        "hipEventQuery",
        "hipModuleLoadData",
        "hipModuleGetFunction",
        "hipFuncGetAttribute",
        "hipModuleLaunchKernel",
    ] {
        assert!(seen.borrow().get(function).is_some_and(|(told, _)| *told > 0), "no failure of {function} was told");
    }
}

/// Says `times` times that the copy from a pinned buffer is not done.
fn keep_busy(simulator: &Simulator, times: u64) {
    for nth in 1..=times {
        // hipErrorNotReady.
        simulator.fail("hipEventQuery", nth, 600);
    }
}

#[test]
fn a_wait_for_a_pinned_buffer_may_fail_too() -> Result<()> {
    let _alone = alone();
    let Some(simulator) = simulator() else { return Ok(()) };
    let device = device();
    let data = vec![3; 30 << 20];
    simulator.clear();
    keep_busy(simulator, 100);
    // As many as are kept pinned.
    (0..8).try_for_each(|_| device.upload(&[&data]).map(|_| ()))?;
    assert_eq!((simulator.count("host_bytes"), device.counts().synchronizations), (256 << 20, 0));
    device.upload(&[&data])?;
    assert_eq!((simulator.count("host_bytes"), device.counts().synchronizations), (256 << 20, 1));
    simulator.clear();
    keep_busy(simulator, 100);
    simulator.fail("hipEventSynchronize", 1, 0);
    assert_error(device.upload(&[&data]), &["hipEventSynchronize: unknown error (hipErrorUnknown, 999) on device 0"]);
    let upload = device.upload(&[&data])?;
    simulator.clear();
    assert!(upload.tensor(0, data.len(), DType::U8)?.to_tensor()?.to_vec1::<u8>()? == data);
    drop((upload, device));
    assert_eq!(simulator.count("host_bytes"), 0);
    Ok(())
}

#[test]
fn a_pinned_buffer_whose_event_failed_is_used_again_after_a_wait() -> Result<()> {
    let _alone = alone();
    let Some(simulator) = simulator() else { return Ok(()) };
    let device = device();
    simulator.clear();
    simulator.fail("hipEventRecord", 1, 0);
    assert_error(device.upload(&[&[1]]), &["hipEventRecord: unknown error (hipErrorUnknown, 999) on device 0"]);
    device.upload(&[&[2]])?;
    assert_eq!(simulator.count("host_allocations"), 1);
    // Where the wait fails too nothing tells when the copy is done: the buffer is left alone until the device goes.
    device.synchronize()?;
    simulator.clear();
    simulator.fail("hipEventRecord", 1, 0);
    simulator.fail("hipStreamSynchronize", 1, 0);
    assert_error(device.upload(&[&[3]]), &["hipEventRecord"]);
    simulator.clear();
    device.upload(&[&[4]])?;
    device.upload(&[&[5]])?;
    assert_eq!(simulator.count("host_allocations"), if simulator.queues() { 3 } else { 2 });
    drop(device);
    assert_eq!(simulator.count("host_allocations"), 0);
    Ok(())
}

#[test]
fn out_of_memory_is_told_when_the_rest_cannot_be_asked_either() {
    let _alone = alone();
    let Some(simulator) = simulator() else { return };
    let device = device();
    simulator.clear();
    simulator.fail("hipMalloc", 1, 0);
    simulator.fail("hipMemGetInfo", 1, 0);
    assert_error(device.alloc(4096), &["hipMalloc: out of memory (hipErrorOutOfMemory, 2), asked for 4096 bytes on device 0"]);
    simulator.clear();
}

#[test]
fn every_call_may_lose_the_device() {
    let _alone = alone();
    let Some(simulator) = simulator() else { return };
    // hipErrorLaunchFailure.
    let runs = each_call(simulator, 719, false, |failed, result, errors| match result {
        Err(error) => {
            let message = error.to_string();
            assert!(errors.len() == 1 && message.contains("719"), "{failed}: {message}");
            let before_a_device = ["hipGetDeviceCount", "hipGetDevicePropertiesR0600"].contains(&failed);
            assert!(before_a_device || message.contains("the device is lost"), "{failed}: {message}");
        }
        Ok(()) => assert!(UNTOLD.contains(&failed), "{failed} failed, and nobody was told"),
    });
    println!("{runs} calls lost the device in turn");
}
