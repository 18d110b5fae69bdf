//! What the environment says about the machine that is simulated.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use cdna_sim::Arch;

use crate::handles::lock;

static SET: LazyLock<Mutex<HashMap<String, String>>> = LazyLock::new(Mutex::default);

/// Sets what `name` says from the next reset on, whatever the environment says.
pub fn set(name: &str, value: &str) {
    lock(&SET).insert(name.to_string(), value.to_string());
}

/// The simulated machine.
#[derive(Debug, Clone)]
pub struct Config {
    /// `HIP_SIM_ARCH`: gfx942 (the default) or gfx950.
    pub arch: Arch,
    /// `HIP_SIM_CUS`: compute units, else 304 or 256.
    pub compute_units: i32,
    /// `HIP_SIM_DEVICES`: how many GPUs there are, else 1.
    pub devices: i32,
    /// `HIP_SIM_MEMORY`: bytes of memory of each GPU, else 192 GiB or 288 GiB.
    pub memory: usize,
    /// `HIP_SIM_LIMIT`: instructions of one wave that count as a loop without end, else 50 million.
    pub instruction_limit: u64,
    /// `HIP_SIM_ASYNC`: 1 keeps work queued until something waits for it.
    pub queued: bool,
}

impl Config {
    /// From the environment; what cannot be understood is said and ignored.
    pub fn from_env() -> Self {
        let arch = match text("HIP_SIM_ARCH").as_deref() {
            None | Some("gfx942") => Arch::Gfx942,
            Some("gfx950") => Arch::Gfx950,
            Some(other) => {
                eprintln!("hip-sim: HIP_SIM_ARCH={other} is neither gfx942 nor gfx950; gfx942 is taken");
                Arch::Gfx942
            }
        };
        let (compute_units, memory) = match arch {
            Arch::Gfx942 => (304, 192 << 30),
            Arch::Gfx950 => (256, 288 << 30),
        };
        Self {
            arch,
            compute_units: number("HIP_SIM_CUS", compute_units).clamp(1, 1 << 16) as i32,
            devices: number("HIP_SIM_DEVICES", 1).min(64) as i32,
            memory: usize::try_from(number("HIP_SIM_MEMORY", memory)).unwrap_or(usize::MAX),
            instruction_limit: number("HIP_SIM_LIMIT", 50_000_000),
            queued: number("HIP_SIM_ASYNC", 0) != 0,
        }
    }

    /// `gcnArchName`, features included.
    pub fn arch_name(&self) -> String {
        format!("{}:sramecc+:xnack-", self.arch.name())
    }

    /// The product's name.
    pub fn product(&self) -> &'static str {
        match self.arch {
            Arch::Gfx942 => "AMD Instinct MI300X (simulated)",
            Arch::Gfx950 => "AMD Instinct MI355X (simulated)",
        }
    }
}

fn text(name: &str) -> Option<String> {
    lock(&SET).get(name).cloned().or_else(|| std::env::var(name).ok()).filter(|value| !value.is_empty())
}

fn number(name: &str, default: u64) -> u64 {
    let Some(value) = text(name) else { return default };
    value.parse().unwrap_or_else(|_| {
        eprintln!("hip-sim: {name}={value} is no number; {default} is taken");
        default
    })
}
