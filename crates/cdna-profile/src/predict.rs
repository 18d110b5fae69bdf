//! The predicted time of a call: the largest of what bounds its launches and of the chain that its longest workgroups are, and the launches.

use cdna_sim::Arch;
use serde::Serialize;

use crate::bounds::{Bound, Bounds};
use crate::constants::Machine;
use crate::counts::Counts;

/// A tile kernel's launch on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Grid {
    pub compute_units: usize,
    /// Workgroups that have work.
    pub workgroups: usize,
    /// Workgroups that a compute unit holds at a time.
    pub resident: usize,
    /// Bytes of K, V and scales of the whole call, which decide whether replays find them in the last-level cache.
    pub kv_bytes: f64,
    /// Part of these that nontemporal loads read.
    pub nontemporal: f64,
}

impl Grid {
    /// Workgroups of the busiest compute unit.
    pub fn busiest(&self) -> usize {
        self.workgroups.div_ceil(self.compute_units.max(1))
    }

    /// Of these, the ones it runs at a time.
    pub fn together(&self) -> usize {
        self.busiest().min(self.resident).max(1)
    }

    /// How often it does so.
    pub fn rounds(&self) -> usize {
        self.busiest().div_ceil(self.together())
    }

    /// Bytes a cycle from memory, of all compute units: from the last-level cache where it holds what the call reads, as in replays.
    pub fn bandwidth(&self, machine: &Machine) -> f64 {
        let cached = self.kv_bytes <= machine.mall_bytes * 1024.0 * 1024.0;
        let streamed = machine.hbm_share + (machine.hbm_share_nontemporal - machine.hbm_share) * self.nontemporal;
        let tera = if cached { machine.mall * machine.mall_share } else { machine.hbm * streamed };
        tera * 1e3 / machine.clock
    }

    /// Bytes a cycle from memory of the busiest compute unit: as much of the whole as it has of the workgroups, since those with less are done
    /// earlier and leave theirs.
    pub fn share(&self, machine: &Machine) -> f64 {
        let part = self.busiest() as f64 / self.workgroups.max(1) as f64;
        (self.bandwidth(machine) * part).min(machine.fill)
    }
}

/// A predicted time. Not measured: no such GPU was at hand.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Predicted {
    /// The call.
    pub us: f64,
    /// The tile kernel without its launch.
    pub kernel_us: f64,
    /// Launches, and the reducer's work.
    pub overhead_us: f64,
    /// What the kernel's time is.
    pub bound: Bound,
    /// Each bound alone, microseconds.
    pub bounds: BoundTimes,
}

/// Microseconds of the busiest compute unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct BoundTimes {
    pub memory: f64,
    pub valu: f64,
    pub mfma: f64,
    pub lds: f64,
    pub chain: f64,
}

/// Cycles of [`Grid::together`] workgroups with the longest task on one compute unit ([`crate::time`]).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chain {
    /// With the compute unit's share of the bandwidth ([`Grid::share`]).
    pub shared: f64,
    /// With all that one compute unit can take.
    pub alone: f64,
}

/// How much longer the share of the bandwidth makes the chain before it, not the chain, is what bounds a call.
const SHARE_COUNTS: f64 = 1.1;

/// Predicts a call. `counts`: of a workgroup with the longest task; `waves`: of a workgroup; `reduced`: whether a reducer follows.
pub fn predict(arch: Arch, grid: &Grid, counts: &Counts, waves: usize, chain: Chain, reduced: bool) -> Predicted {
    let m = Machine::of(arch);
    let per_wave = counts.per(&Counts::default(), waves as f64);
    let all_bounds = Bounds::new(&per_wave, (waves * grid.busiest()) as f64, arch, grid.share(m));
    // Bytes go over the whole GPU's bandwidth, however unevenly the workgroups lie.
    let memory = counts.bytes() * grid.workgroups as f64 / grid.bandwidth(m);
    let bounds = Bounds { memory, ..all_bounds };
    let rounds = grid.rounds() as f64;
    let bound_of_chain = if chain.shared > chain.alone * SHARE_COUNTS { Bound::Memory } else { Bound::Chain };
    let (largest, bound) = bounds.largest();
    let chain = chain.shared * rounds;
    let (cycles, bound) = if chain > largest { (chain, bound_of_chain) } else { (largest, bound) };
    let overhead_us = m.launch + if reduced { m.reducer } else { 0.0 };
    let times =
        BoundTimes { memory: m.us(memory), valu: m.us(bounds.valu), mfma: m.us(bounds.mfma), lds: m.us(bounds.lds), chain: m.us(chain) };
    Predicted { us: m.us(cycles) + overhead_us, kernel_us: m.us(cycles), overhead_us, bound, bounds: times }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::GFX950;
    use crate::counts::Bytes;
    use crate::tag::Tag;

    fn grid(workgroups: usize, resident: usize, kv_bytes: f64) -> Grid {
        Grid { compute_units: 256, workgroups, resident, kv_bytes, nontemporal: 0.5 }
    }

    #[test]
    fn workgroups_are_dealt_out_evenly() {
        let of = |workgroups, resident| {
            let grid = grid(workgroups, resident, 0.0);
            (grid.busiest(), grid.together(), grid.rounds())
        };
        assert_eq!(
            [of(1, 2), of(256, 2), of(257, 2), of(512, 2), of(513, 2), of(1024, 3)],
            [(1, 1, 1), (1, 1, 1), (2, 2, 1), (2, 2, 1), (3, 2, 2), (4, 3, 2)]
        );
    }

    #[test]
    fn what_the_last_level_cache_holds_is_faster() {
        let mib = 1024.0 * 1024.0;
        let (cached, streamed) = (grid(256, 1, 256.0 * mib), grid(256, 1, 257.0 * mib));
        assert_eq!(cached.bandwidth(&GFX950), 17.2 * 0.45 * 1e3 / 2.4);
        assert_eq!(streamed.bandwidth(&GFX950), 8.0 * (0.72 + (0.81 - 0.72) * 0.5) * 1e3 / 2.4);
        assert_eq!(streamed.share(&GFX950), streamed.bandwidth(&GFX950) / 256.0);
        // 71 of 256 compute units have one workgroup, the others two.
        assert_eq!(grid(441, 2, 257.0 * mib).share(&GFX950), streamed.bandwidth(&GFX950) * (2.0 / 441.0));
        assert_eq!(grid(4, 1, 257.0 * mib).share(&GFX950), GFX950.fill);
    }

    #[test]
    fn the_largest_bound_and_the_launches_make_the_time() {
        let mut counts = Counts { valu: 4000.0, transcendental: 400.0, conversions: 400.0, lds_read: 25_600.0, ..Counts::default() };
        counts.mfma.insert("16x16x32_bf16".into(), 800.0);
        counts.loaded.insert(Tag::Key, Bytes { cached: 1e6, nontemporal: 0.0 });
        let of = |alone, shared, workgroups, reduced| {
            predict(Arch::Gfx950, &grid(workgroups, 2, 1e9), &counts, 4, Chain { alone, shared }, reduced)
        };
        // A workgroup of four waves, one a SIMD: (4400 - 400) * 4 + 400 * 16 = 22,400 cycles' worth of VALU over 4 SIMDs.
        let chain = of(9000.0, 9000.0, 1, false);
        let cycles = |us: f64| us * 2.4e3;
        assert_eq!(
            [cycles(chain.bounds.valu), cycles(chain.bounds.mfma), cycles(chain.bounds.lds)].map(f64::round),
            [5600.0, 3200.0, 100.0]
        );
        assert_eq!((cycles(chain.kernel_us).round(), chain.bound, chain.overhead_us), (9000.0, Bound::Chain, GFX950.launch));
        assert_eq!(of(100.0, 100.0, 1, false).bound, Bound::Valu);
        assert_eq!(of(9000.0, 12_000.0, 1, true).bound, Bound::Memory);
        // 256 MB at 6.12 TB/s, half of them nontemporal.
        let streamed = of(100.0, 100.0, 256, true);
        assert_eq!((streamed.bound, (streamed.kernel_us - 256e6 / 6.12e6).abs() < 1e-9), (Bound::Memory, true));
        assert!((streamed.us - streamed.kernel_us - GFX950.launch - GFX950.reducer).abs() < 1e-9);
    }
}
