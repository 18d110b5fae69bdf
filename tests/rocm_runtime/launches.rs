//! Kernels are loaded and launched.

use std::sync::{Arc, Mutex};

use candle::{DType, Result};
use candle_paged_attn::jit::{JitEvent, JitSettings, Progress};
use candle_paged_attn::rocm::{DeviceSettings, RocmDevice, RocmTensor, specialize};

use crate::support::*;

#[test]
fn a_kernel_reads_and_writes_tensors() -> Result<()> {
    let _beside = beside_others();
    let device = device();
    let kernel = device.load(code_object(), "add")?;
    let from = RocmTensor::from_tensor(&counting(1000), &device)?;
    let to = RocmTensor::zeros(1024, DType::F32, &device)?;
    add(&device, &kernel, &from, &to, 0.5)?;
    let want: Vec<f32> = (0..1024).map(|i| if i < 1000 { i as f32 + 0.5 } else { 0.0 }).collect();
    assert_eq!(values(&to), want);
    assert_eq!(device.counts().launches, 1);
    Ok(())
}

#[test]
fn a_kernel_knows_what_it_takes() -> Result<()> {
    let _beside = beside_others();
    let device = device();
    let [add, reverse] = ["add", "reverse"].map(|name| device.load(code_object(), name).unwrap());
    assert_eq!((add.name(), add.lds_bytes(), add.scratch_bytes()), ("add", 0, 0));
    assert_eq!((reverse.name(), reverse.lds_bytes(), reverse.max_threads()), ("reverse", 1024, 1024));
    assert!(add.registers() > 0 && reverse.registers() > 0, "{add:?} {reverse:?}");
    Ok(())
}

#[test]
fn launches_that_cannot_be_are_refused_by_name() -> Result<()> {
    let _beside = beside_others();
    let (device, other) = (device(), device());
    let kernel = device.load(code_object(), "add")?;
    let args = Add { from: 0, to: 0, add: 0.0, n: 0 };
    // SAFETY: n is 0: the kernel touches nothing.
    let launch = |on: &RocmDevice, grid, threads| unsafe { on.launch(&kernel, grid, threads, &args) };
    assert_error(launch(&device, [1, 1, 1], 0), &["launch", "add", "1 to 1024", "asked for 0"]);
    assert_error(launch(&device, [1, 1, 1], 1025), &["launch", "add", "1 to 1024", "asked for 1025"]);
    assert_error(launch(&device, [1 << 24, 1, 1], 256), &["launch", "add", "2^32"]);
    assert_error(launch(&other, [1, 1, 1], 64), &["launch", "add", "another device"]);
    launch(&device, [1, 0, 1], 64)?;
    assert_eq!(device.counts().launches, 0);
    launch(&device, [2, 3, 4], 64)?;
    assert_eq!(device.counts().launches, 1);
    Ok(())
}

#[test]
fn code_that_cannot_be_loaded_is_refused_by_name() {
    let _alone = alone();
    let device = device();
    let before = simulator().map(|simulator| simulator.alive());
    assert_error(device.load(b"not a code object", "add"), &["add", "no ELF file", "17 bytes"]);
    assert_error(device.load(code_object(), "subtract"), &["hipModuleGetFunction", "hipErrorNotFound", "kernel subtract"]);
    assert_error(device.load(code_object(), "a\0b"), &["zero byte"]);
    assert_eq!(simulator().map(|simulator| simulator.alive()), before);
}

#[test]
fn a_specialization_is_compiled_once_and_loaded_once_a_device() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let compiled = Arc::new(Mutex::new(0));
    let open = || {
        let count = compiled.clone();
        let progress: Progress = Arc::new(move |event: &JitEvent| {
            *count.lock().unwrap() += usize::from(matches!(event, JitEvent::Compiled { .. }));
        });
        let jit = JitSettings { clang: None, cache_dir: Some(folder.path().into()), progress: Some(progress) };
        RocmDevice::with_settings(0, DeviceSettings { jit, ..DeviceSettings::default() }).unwrap()
    };
    let loads = || simulator().map(|simulator| simulator.count("module_loads"));
    let before = loads();
    let devices = [open(), open()];
    let specialization = specialize::plan(devices[0].arch(), 8, false).unwrap();
    for device in &devices {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(device.kernel(&specialization).unwrap().name(), specialization.kernel));
            }
        });
        // Known by now: also while capturing.
        device.capture(|| device.kernel(&specialization).map(|_| ())).unwrap();
    }
    assert_eq!(*compiled.lock().unwrap(), 1);
    assert_eq!(loads(), before.map(|loads| loads + 2));
}
