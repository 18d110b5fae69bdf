//! Why a kernel was chosen. Kept as what decided, put into words where it is shown: a selection is made in every call.

use std::fmt;

use super::{amd, cuda};

/// Why a kernel was chosen, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(pub(super) Why);

/// What decided, of each kind of processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Why {
    Cpu(&'static str),
    Amd(amd::Why),
    Cuda(cuda::Why),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Why::Cpu(why) => f.write_str(why),
            Why::Amd(why) => why.fmt(f),
            Why::Cuda(why) => why.fmt(f),
        }
    }
}
