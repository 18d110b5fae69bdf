//! The AMD tile kernel, instruction by instruction on the simulator: results against float64, poisoned caches, registers and LDS.
//!
//! Skipped by name only where no clang of version 20 or newer is found.

#[path = "amd_tile/call.rs"]
mod call;
#[path = "amd_tile/cases.rs"]
mod cases;
#[path = "amd_tile/compile.rs"]
mod compile;
#[path = "amd_tile/dual.rs"]
mod dual;
#[path = "amd_tile/variants.rs"]
mod variants;
