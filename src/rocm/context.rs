//! HIP calls made on one device: the device is made the thread's current one, failures get their place, and a lost device stays lost.

use std::ffi::c_int;
use std::fmt;
use std::sync::OnceLock;

use candle::{Result, bail};

use super::error::Failure;
use super::hip::Hip;

pub(super) struct Context {
    hip: &'static Hip,
    pub ordinal: c_int,
    /// As messages name it: `device 0 (gfx950)`.
    pub name: String,
    lost: OnceLock<String>,
}

impl Context {
    pub fn new(hip: &'static Hip, ordinal: c_int, arch: &str) -> Self {
        Self { hip, ordinal, name: format!("device {ordinal} ({arch})"), lost: OnceLock::new() }
    }

    /// The runtime, with this device the thread's current one.
    pub fn enter(&self) -> Result<&'static Hip> {
        if let Some(first) = self.lost.get() {
            bail!("{first}");
        }
        // SAFETY: no pointers.
        self.check(unsafe { self.hip.hipSetDevice(self.ordinal) }, "")?;
        Ok(self.hip)
    }

    /// The runtime for calls that give something back, which are made whatever the device's state: handles and memory know their device. A
    /// failure of theirs is told nobody, and the call not made again: what it was to give back may be another's by then.
    pub fn hip(&self) -> &'static Hip {
        self.hip
    }

    /// `result`, its failure told with `detail` ("asked for 4096 bytes") and the device. From a failure that loses the device on, every
    /// call on it fails with that first message.
    pub fn check(&self, result: std::result::Result<(), Failure>, detail: impl fmt::Display) -> Result<()> {
        let Err(failure) = result else { return Ok(()) };
        let detail = detail.to_string();
        let message = format!("{failure}{}{detail} on {}", if detail.is_empty() { "" } else { ", " }, self.name);
        if failure.loses_device() {
            let first = self.lost.get_or_init(|| format!("{message}: the device is lost, and stays so in this process: start a new one"));
            bail!("{first}");
        }
        bail!("{message}")
    }
}
