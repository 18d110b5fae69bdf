//! The AMD tile for MXFP4 caches, instruction by instruction on the simulator: results against float64 on the dequantized cache.
//!
//! Skipped by name only where no clang of version 20 or newer is found.

#[allow(dead_code)] // shared with the tests of the other tile
#[path = "amd_tile/call.rs"]
mod call;
#[path = "amd_mxfp4/cases.rs"]
mod cases;
#[path = "amd_tile/compile.rs"]
mod compile;
#[path = "amd_mxfp4/counts.rs"]
mod counts;
#[path = "amd_mxfp4/dual.rs"]
mod dual;
