//! What tests, benches and examples share: the float64 reference, random calls, the workload list, machine rates.

pub mod arguments;
pub mod bits;
pub mod cases;
pub mod contracts;
pub mod errors;
mod mersenne;
pub mod peers;
pub mod plans;
pub mod quantized;
pub mod random;
pub mod rates;
pub mod raw;
pub mod reference;
pub mod rotation;
pub mod step;
pub mod workloads;
pub mod writes;
