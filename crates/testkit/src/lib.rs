//! What tests, benches and examples share: the float64 reference, random calls, the workload list, machine rates.

pub mod cases;
pub mod reference;
