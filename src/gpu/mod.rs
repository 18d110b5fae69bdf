//! What the GPU backends share.

#[cfg(any(feature = "rocm", feature = "cuda"))]
pub(crate) mod args;
#[cfg(any(feature = "rocm", feature = "cuda"))]
pub(crate) mod bytes;
#[cfg(any(feature = "rocm", feature = "cuda"))]
pub(crate) mod launch;
pub(crate) mod plan_shape;
pub(crate) mod specialize;
#[cfg(any(feature = "rocm", feature = "cuda"))]
pub(crate) mod strides;
