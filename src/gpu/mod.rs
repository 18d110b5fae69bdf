//! What the GPU backends share.

pub(crate) mod args;
