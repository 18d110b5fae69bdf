//! The NVIDIA kernels, instruction by instruction on a simulator of PTX: calls against float64, plans against the host's, cache writes against the
//! CPU's. The calls are those of the GPU's own tests (`tests/cuda_op`), by what the host decides for H200, L40S and A100; and some more.
//!
//! Without NVRTC the tests are skipped, and say so, but in CI they fail (`scripts/install-nvrtc` installs it).
mod call;
mod cases;
mod compile;
#[path = "../cuda_op/cuts.rs"]
mod cuts;
mod device;
mod planner;
mod random;
mod shapes;
#[path = "../cuda_op/specs.rs"]
mod specs;
mod variants;
mod writes;
