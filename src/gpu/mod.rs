//! What the GPU backends share.

pub(crate) mod args;
pub(crate) mod launch;
