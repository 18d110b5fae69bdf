//! The exported functions, under the HIP runtime's names and with its signatures.
#![allow(non_snake_case)]
// The HIP headers say what callers promise; each function's safety contract is theirs.
#![allow(clippy::missing_safety_doc)]

pub mod control;
pub mod device;
pub mod error;
pub mod event;
pub mod graph;
pub mod memory;
pub mod module;
pub mod stream;
