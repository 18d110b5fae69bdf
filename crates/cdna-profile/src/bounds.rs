//! What a launch can be no faster than, from counts alone.

use cdna_sim::Arch;
use serde::Serialize;

use crate::constants::Machine;
use crate::counts::Counts;

/// What bounds a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    Memory,
    Valu,
    Mfma,
    Lds,
    /// Dependent loads, barriers and what else one workgroup waits for.
    Chain,
}

/// Times of a compute unit's work. Cycles.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bounds {
    /// Bytes over the compute unit's share of the bandwidth.
    pub memory: f64,
    /// Vector instructions (conversions among them) of the busiest SIMD.
    pub valu: f64,
    pub mfma: f64,
    pub lds: f64,
}

impl Bounds {
    /// Of `waves` waves on one compute unit that execute `counts` each (means over the waves), where `share` is the bytes a cycle that the compute
    /// unit gets from memory.
    pub fn new(counts: &Counts, waves: f64, arch: Arch, share: f64) -> Self {
        let m = Machine::of(arch);
        let waves_a_simd = waves / 4.0;
        let slow = counts.transcendental;
        let passes: f64 = counts.mfma.iter().map(|(shape, count)| count * passes_of(shape, arch)).sum();
        Self {
            memory: counts.bytes() * waves / share,
            valu: ((counts.valu + counts.conversions - slow) * m.valu + slow * m.quarter_rate) * waves_a_simd,
            mfma: passes * m.mfma_pass * waves_a_simd,
            lds: (counts.lds_read / m.lds_read + counts.lds_written / m.lds_write + counts.lds_conflicts) * waves,
        }
    }

    /// The largest, and which it is.
    pub fn largest(&self) -> (f64, Bound) {
        [(self.memory, Bound::Memory), (self.valu, Bound::Valu), (self.mfma, Bound::Mfma), (self.lds, Bound::Lds)]
            .into_iter()
            .fold((0.0, Bound::Memory), |a, b| if b.0 > a.0 { b } else { a })
    }
}

/// Passes of an MFMA shape with 8-bit operands where the shape leaves that open.
fn passes_of(shape: &str, arch: Arch) -> f64 {
    crate::op::passes(shape, false, arch) as f64
}
