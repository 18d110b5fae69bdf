//! `libamdhip64.so` without a GPU: the HIP runtime's C functions over [`cdna_sim`].
//!
//! A program that opens the library runs its kernels on the simulator: what would be silent corruption on hardware (accesses outside live
//! allocations, LDS races, registers read before their load has arrived) is printed on standard error and fails the launch, and the
//! device is lost from then on, as a real one would be. Calls that a real runtime refuses are refused with the code it gives. Work executes at the
//! call, or with `HIP_SIM_ASYNC=1` as late as the streams' order lets it, so that a missing wait shows.
//!
//! Environment: `HIP_SIM_ARCH` (gfx942, gfx950), `HIP_SIM_CUS`, `HIP_SIM_DEVICES` (0: no GPU), `HIP_SIM_MEMORY` (bytes), `HIP_SIM_LIMIT`
//! (instructions of a wave that count as a loop without end), `HIP_SIM_ASYNC`, `HIP_SIM_FAIL` (see [`inject`]). `hip_sim_*` functions ([`api::control`]) give tests counts and failures on demand.

pub mod api;
pub mod capture;
pub mod config;
pub mod counts;
pub mod device;
pub mod error;
pub mod guard;
pub mod handles;
pub mod inject;
pub mod kernels;
pub mod memory;
pub mod module;
pub mod props;
pub mod queue;
pub mod runtime;
pub mod stream;
pub mod work;
