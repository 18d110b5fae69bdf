//! What is missing is named. Each in a process of its own.

use candle_paged_attn::jit::{JitSettings, Source, Specialization};
use candle_paged_attn::rocm::{DeviceSettings, RocmDevice, RocmTensor};

use crate::support::*;

#[test]
fn without_a_runtime() {
    if in_child() {
        if RocmDevice::count().is_ok() {
            println!("SKIPPED: the loader finds a HIP runtime of the system's");
            return;
        }
        for error in [RocmDevice::count().map(|_| ()), RocmDevice::new(0).map(|_| ())] {
            assert_error(error, &["no HIP runtime", "libamdhip64.so", "$HIP_PATH/lib", "$ROCM_PATH/lib", "/opt/rocm/lib", "HIP_PATH"]);
        }
    } else if std::path::Path::new("/opt/rocm/lib").exists() {
        println!("SKIPPED: ROCm is installed");
    } else {
        child("errors::without_a_runtime", &[("HIP_PATH", "/nowhere"), ("ROCM_PATH", "/nowhere"), ("LD_LIBRARY_PATH", "")]);
    }
}

#[test]
fn with_a_library_that_is_no_runtime() {
    if in_child() {
        assert_error(RocmDevice::count(), &["libamdhip64.so has no function hipGetDeviceCount", "ROCm 6 or newer"]);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("lib")).unwrap();
    // Any shared library does.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let library = maps.lines().find_map(|line| line.find('/').map(|at| &line[at..]).filter(|path| path.contains("/libc.so"))).unwrap();
    std::fs::copy(library, folder.path().join("lib/libamdhip64.so")).unwrap();
    child("errors::with_a_library_that_is_no_runtime", &[("HIP_PATH", folder.path().to_str().unwrap())]);
}

/// Whether a HIP runtime is mapped into this process.
fn runtime_is_mapped() -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains("libamdhip64")
}

#[test]
fn the_runtime_is_opened_at_first_use_not_at_the_start() {
    if in_child() {
        assert!(!runtime_is_mapped(), "linked");
        RocmDevice::count().unwrap();
        assert!(runtime_is_mapped());
    } else {
        child("errors::the_runtime_is_opened_at_first_use_not_at_the_start", &[]);
    }
}

#[test]
fn without_a_gpu() {
    if in_child() {
        for error in [RocmDevice::count().map(|_| ()), RocmDevice::new(0).map(|_| ())] {
            assert_error(error, &["no AMD GPU", "hipGetDeviceCount", "hipErrorNoDevice, 100"]);
        }
    } else if simulator().is_some() {
        child("errors::without_a_gpu", &[("HIP_SIM_DEVICES", "0")]);
    }
}

#[test]
fn with_an_ordinal_that_is_not_there() {
    let count = RocmDevice::count().unwrap();
    assert_error(RocmDevice::new(count), &[&format!("no device {count}"), &format!("sees {count}")]);
    assert_error(RocmDevice::new(usize::MAX), &["no device 18446744073709551615"]);
}

#[test]
fn with_several_gpus_each_has_its_own() {
    if in_child() {
        assert_eq!(RocmDevice::count().unwrap(), 3);
        let devices = [2, 0, 1].map(|ordinal| RocmDevice::new(ordinal).unwrap());
        assert_eq!(devices.each_ref().map(RocmDevice::ordinal), [2, 0, 1]);
        let kernels = devices.each_ref().map(|device| device.load(code_object(), "add").unwrap());
        let tensors = devices.each_ref().map(|device| RocmTensor::from_tensor(&counting(256), device).unwrap());
        for ((device, kernel), tensor) in devices.iter().zip(&kernels).zip(&tensors) {
            std::thread::scope(|scope| {
                scope.spawn(|| add(device, kernel, tensor, tensor, device.ordinal() as f32).unwrap());
            });
        }
        for (device, tensor) in devices.iter().zip(&tensors) {
            assert_eq!(values(tensor), (counting(256) + device.ordinal() as f64).unwrap().to_vec1::<f32>().unwrap());
        }
        assert_error(tensors[0].copy_from_device(&tensors[1]), &["different devices", "device 2 (", "device 0 ("]);
    } else if simulator().is_some() {
        child("errors::with_several_gpus_each_has_its_own", &[("HIP_SIM_DEVICES", "3")]);
    }
}

#[test]
fn the_arch_and_the_number_of_its_compute_units_are_the_devices() {
    if in_child() {
        let arch = RocmDevice::new(0).unwrap().arch().clone();
        assert_eq!(arch.to_string(), std::env::var("WANTED_ARCH").unwrap());
    } else if simulator().is_some() {
        for (arch, units, wanted) in [("gfx942", "80", "gfx942:80"), ("gfx942", "", "gfx942:304"), ("gfx950", "", "gfx950:256")] {
            let environment = [("HIP_SIM_ARCH", arch), ("HIP_SIM_CUS", units), ("WANTED_ARCH", wanted)];
            child("errors::the_arch_and_the_number_of_its_compute_units_are_the_devices", &environment);
        }
    }
}

#[test]
fn without_a_compiler() {
    let _beside = beside_others();
    let folder = tempfile::tempdir().unwrap();
    let jit = JitSettings { clang: Some("/nowhere/clang".into()), cache_dir: Some(folder.path().into()), progress: None };
    let device = RocmDevice::with_settings(0, DeviceSettings { jit, ..DeviceSettings::default() }).unwrap();
    let arch = device.arch().name;
    let specialization = Specialization { arch, source: Source::Reduce, kernel: "reduce".into(), defines: vec![], options: vec![] };
    assert_error(device.kernel(&specialization), &["/nowhere/clang"]);
    let graph = device.capture(|| {
        assert_error(device.kernel(&specialization), &["compiling kernel reduce while a graph is being captured"]);
        Ok(())
    });
    graph.unwrap();
}

/// A kernel that fails takes the device with it: that error, and every later one, says so.
#[test]
fn with_a_lost_device() {
    if !in_child() {
        if simulator().is_some() {
            child("errors::with_a_lost_device", &[]);
        }
        return;
    }
    let device = device();
    let kernel = device.load(code_object(), "add").unwrap();
    let there = RocmTensor::from_tensor(&counting(256), &device).unwrap();
    let graph = device.capture(|| add(&device, &kernel, &there, &there, 1.0)).unwrap();
    let stray = Add { from: there.address(), to: 4096, add: 0.0, n: 256 };
    // SAFETY: none. The simulator stops the kernel at its first write.
    let first = unsafe { device.launch(&kernel, [1, 1, 1], 256, &stray) }.and_then(|()| device.synchronize());
    let first = first.unwrap_err().to_string();
    for part in ["hip", "on device 0", "the device is lost", "start a new one"] {
        assert!(first.contains(part), "{first}");
    }
    // Even if the device worked again: what it held is not what it was.
    if let Some(simulator) = simulator() {
        simulator.revive();
    }
    let later = [
        device.synchronize(),
        device.alloc(100).map(|_| ()),
        device.upload(&[&[1]]).map(|_| ()),
        there.copy_from(&counting(256)),
        there.fill_bytes(0),
        there.to_tensor().map(|_| ()),
        add(&device, &kernel, &there, &there, 1.0),
        graph.replay(),
        device.capture(|| Ok(())).map(|_| ()),
        device.load(code_object(), "reverse").map(|_| ()),
    ];
    for (i, result) in later.into_iter().enumerate() {
        match result {
            Err(error) => assert!(error.to_string().contains("the device is lost"), "{i}: {error}"),
            Ok(()) => assert_eq!(i, 1, "only memory of the pool may still be had"),
        }
    }
    drop((graph, there));
}
