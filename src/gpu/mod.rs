//! What the GPU backends share.

pub(crate) mod args;
pub(crate) mod launch;
pub(crate) mod macros;
pub(crate) mod plan_shape;
