//! What the tests share: kernels, the simulator's controls, and who may run beside whom.

use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use candle::{Device, Result, Tensor};
use candle_paged_attn::rocm::{DeviceSettings, Kernel, RocmDevice, RocmTensor};
use libloading::Library;

static BESIDE: RwLock<()> = RwLock::new(());

/// Functions of which a failure has nobody to be told, or is made good: what is given back, and an allocation, which is tried again once the pool
/// has given back what it kept.
pub const UNTOLD: [&str; 9] = [
    "hipFree",
    "hipHostFree",
    "hipEventDestroy",
    "hipGraphDestroy",
    "hipGraphExecDestroy",
    "hipModuleUnload",
    "hipStreamDestroy",
    "hipStreamSynchronize",
    "hipMalloc",
];

/// For tests that do not mind others.
pub fn beside_others() -> RwLockReadGuard<'static, ()> {
    BESIDE.read().unwrap_or_else(PoisonError::into_inner)
}

/// For tests that count what is alive in the process.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    BESIDE.write().unwrap_or_else(PoisonError::into_inner)
}

pub fn device() -> RocmDevice {
    RocmDevice::new(0).unwrap()
}

pub fn device_with_cap(pool_cap_bytes: usize) -> RocmDevice {
    RocmDevice::with_settings(0, DeviceSettings { pool_cap_bytes, ..DeviceSettings::default() }).unwrap()
}

/// `0, 1, 2, ...` as F32 on the CPU.
pub fn counting(n: usize) -> Tensor {
    Tensor::from_iter((0..n).map(|i| i as f32), &Device::Cpu).unwrap()
}

pub fn values(tensor: &RocmTensor) -> Vec<f32> {
    tensor.to_tensor().unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Arguments of the kernels in kernels.hip.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Add {
    pub from: u64,
    pub to: u64,
    pub add: f32,
    pub n: i32,
}

/// `to = from + add`.
pub fn add(device: &RocmDevice, kernel: &Kernel, from: &RocmTensor, to: &RocmTensor, add: f32) -> Result<()> {
    let n = from.elem_count();
    let args = Add { from: from.address(), to: to.address(), add, n: n as i32 };
    // SAFETY: the kernel's own arguments; both tensors have n floats and live until it is enqueued.
    unsafe { device.launch(kernel, [n.div_ceil(256) as u32, 1, 1], 256, &args) }
}

/// The code object of kernels.hip for the GPU that is there.
pub fn code_object() -> &'static [u8] {
    static CODE: OnceLock<Vec<u8>> = OnceLock::new();
    CODE.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("kernels.co");
        let arch = format!("--offload-arch={}", device().arch().name);
        let run = Command::new(clang())
            .args(["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc", "-O3", &arch, "-o"])
            .arg(&output)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/rocm_runtime/kernels.hip"))
            .output()
            .unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        std::fs::read(output).unwrap()
    })
}

fn clang() -> String {
    let named = std::env::var("CANDLE_PAGED_ATTN_CLANG").ok();
    let candidates = named.into_iter().chain((20..=24).rev().map(|version| format!("clang-{version}")));
    let runs = |clang: &String| Command::new(clang).arg("--version").output().is_ok_and(|output| output.status.success());
    candidates.into_iter().find(runs).expect("no clang of version 20 or newer (scripts/install-llvm installs one)")
}

/// The controls of the simulated HIP runtime.
pub struct Simulator(Library);

/// The simulator, if that is the HIP runtime here; tests of failures on demand are passed over on a GPU.
pub fn simulator() -> Option<&'static Simulator> {
    static SIMULATOR: OnceLock<Option<Simulator>> = OnceLock::new();
    let found = SIMULATOR.get_or_init(|| {
        let path = PathBuf::from(std::env::var_os("HIP_PATH")?).join("lib/libamdhip64.so");
        // SAFETY: the HIP runtime that the crate has opened, or will.
        let library = unsafe { Library::new(path) }.ok()?;
        // SAFETY: a symbol that is looked at, not called.
        let simulated = unsafe { library.get::<unsafe extern "C" fn()>("hip_sim_fail_any\0") }.is_ok();
        simulated.then_some(Simulator(library))
    });
    if found.is_none() {
        println!("SKIPPED: the HIP runtime is not the simulator");
    }
    found.as_ref()
}

impl Simulator {
    /// The `nth` next call of `function` by this thread fails with `code`; 0: with what it usually fails.
    pub fn fail(&self, function: &str, nth: u64, code: u32) {
        let name = CString::new(function).unwrap();
        // SAFETY: the simulator's function of this type.
        unsafe { self.0.get::<unsafe extern "C" fn(*const c_char, u64, u32)>("hip_sim_fail\0").unwrap()(name.as_ptr(), nth, code) }
    }

    /// The `nth` next call of any function by this thread fails.
    pub fn fail_any(&self, nth: u64, code: u32) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(u64, u32)>("hip_sim_fail_any\0").unwrap()(nth, code) }
    }

    /// The function that failed on demand last, on this thread.
    pub fn failed(&self) -> Option<String> {
        let mut name = [0u8; 64];
        // SAFETY: as above; the buffer has so many bytes.
        let length = unsafe {
            self.0.get::<unsafe extern "C" fn(*mut c_char, usize) -> usize>("hip_sim_last_failed\0").unwrap()(
                name.as_mut_ptr().cast(),
                name.len(),
            )
        };
        (length > 0).then(|| String::from_utf8_lossy(&name[..length]).into_owned())
    }

    /// Forgets what is to fail.
    pub fn clear(&self) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn()>("hip_sim_clear\0").unwrap()() }
    }

    /// Brings a lost device back.
    pub fn revive(&self) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(i32)>("hip_sim_revive\0").unwrap()(0) }
    }

    pub fn count(&self, name: &str) -> i64 {
        let name = CString::new(name).unwrap();
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(i32, *const c_char) -> i64>("hip_sim_count\0").unwrap()(0, name.as_ptr()) }
    }

    /// Whether work is left undone until something waits for it.
    pub fn queues(&self) -> bool {
        std::env::var("HIP_SIM_ASYNC").is_ok_and(|value| value == "1")
    }

    /// How many of each kind of thing are alive.
    pub fn alive(&self) -> Vec<(&'static str, i64)> {
        ["allocations", "bytes", "host_allocations", "streams", "events", "modules", "graphs", "graph_execs"]
            .map(|name| (name, self.count(name)))
            .into()
    }
}

/// Runs the test `name` of this program in a process of its own, with other environment variables. There, [`in_child`] is true.
pub fn child(name: &str, environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env("ROCM_RUNTIME_CHILD", "1").envs(environment.iter().copied());
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{name}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Whether this is the process of [`child`].
pub fn in_child() -> bool {
    std::env::var_os("ROCM_RUNTIME_CHILD").is_some()
}

/// Whether `result` is an error whose message has every part.
#[track_caller]
pub fn assert_error<T>(result: Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("no error, where one with {parts:?} was due") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}
