//! What a HIP function answers when it fails.

use std::fmt;

use hip_runtime_sys::hipError_t;

/// The HIP function that failed, its code, and the runtime's words for the code.
#[derive(Debug)]
pub(super) struct Failure {
    pub call: &'static str,
    pub code: u32,
    pub name: String,
    pub text: String,
}

impl Failure {
    pub fn is(&self, code: hipError_t) -> bool {
        self.code == code as u32
    }

    /// Whether the device answers every later call with an error as well: the process has to be started again.
    pub fn loses_device(&self) -> bool {
        use hipError_t::*;
        [
            hipErrorECCNotCorrectable,
            hipErrorIllegalAddress,
            hipErrorLaunchTimeOut,
            hipErrorContextIsDestroyed,
            hipErrorAssert,
            hipErrorLaunchFailure,
        ]
        .iter()
        .any(|code| self.is(*code))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({}, {})", self.call, self.text, self.name, self.code)
    }
}
