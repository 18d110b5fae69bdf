//! Every number that predictions rest on, in one table, with where it comes from.

use cdna_sim::Arch;
use serde::Serialize;

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Constant {
    pub name: &'static str,
    pub unit: &'static str,
    pub gfx942: f64,
    pub gfx950: f64,
    /// Fitted to published times of other kernels, not documented.
    pub fitted: bool,
    pub source: &'static str,
}

/// Declares [`Machine`] and the table with the same names, so that no number is without a source.
macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $unit:literal, $gfx942:expr, $gfx950:expr, $kind:ident $source:literal;)*) => {
        /// The numbers of one arch.
        #[derive(Debug, Clone, Copy, PartialEq, Serialize)]
        pub struct Machine {
            $($(#[$doc])* pub $name: f64,)*
        }

        /// gfx942: MI300X (MI308X has fewer compute units and the same clock).
        pub const GFX942: Machine = Machine { $($name: $gfx942,)* };
        /// gfx950: MI355X.
        pub const GFX950: Machine = Machine { $($name: $gfx950,)* };

        /// All constants in order.
        pub const TABLE: &[Constant] = &[
            $(Constant { name: stringify!($name), unit: $unit, gfx942: $gfx942, gfx950: $gfx950, fitted: constants!(@$kind), source: $source },)*
        ];
    };
    (@documented) => { false };
    (@fitted) => { true };
}

constants! {
    /// Clock of the compute units.
    clock: "GHz", 2.1, 2.4, documented "AMD data sheets of the MI300X and the MI355X: peak engine clock";
    /// One wave issues at most one instruction this often.
    issue: "cycles", 4.0, 4.0, documented "GCN and CDNA: the sequencer serves the four SIMDs of a compute unit in turn (ROCm Compute Profiler, pipeline descriptions)";
    /// A vector instruction of 64 lanes.
    valu: "cycles", 4.0, 4.0, documented "CDNA3 ISA guide: 16-lane SIMDs, a wave of 64 in four cycles";
    /// Exponentials, logarithms, reciprocals, 32-bit integer products.
    quarter_rate: "cycles", 16.0, 16.0, documented "CDNA3 ISA guide: quarter rate; LLVM's SISchedule.td (WriteTrans32, WriteQuarterRate32)";
    /// One pass of an MFMA; passes follow from the shape and the peak rate of its dtype.
    mfma_pass: "cycles", 4.0, 4.0, documented "CDNA3 and CDNA4 ISA guides; rates of 2048 (16-bit) and 4096 (8-bit) FLOP a cycle and compute unit on gfx942, twice those on gfx950 for the shapes of twice the K";
    /// Wait states after an MFMA's passes until a vector instruction reads its result.
    mfma_result: "slots", 3.0, 4.0, documented "LLVM's GCNHazardRecognizer: passes + 3 on gfx942, + 4 on gfx950";
    /// Issue slots after an MFMA with A and B of 16 bytes until the next vector instruction: 1 + bytes / 16.
    mfma_hold: "slots", 1.0, 1.0, documented "LLVM pull request 233721, from thread traces of an MI308X and an MI350X";
    /// Slots beyond an MFMA's passes until packed F32 arithmetic may follow (one more for operands of 16 bytes and wider).
    mfma_packed_hold: "slots", 2.0, 2.0, documented "LLVM pull request 233721";
    /// LDS reads a cycle.
    lds_read: "bytes/cycle", 128.0, 256.0, documented "CDNA3: 32 banks of 4 bytes; CDNA4: twice that for reads (published optimization notes for the MI355X)";
    /// LDS writes a cycle.
    lds_write: "bytes/cycle", 128.0, 128.0, documented "as reads on CDNA3; CDNA4 doubles reads only";
    /// From an LDS read's issue to its result, unloaded.
    lds_latency: "cycles", 128.0, 128.0, fitted "MI355X times per tile of one workgroup; unloaded it is published as 48 to 64 cycles";
    /// Vector memory data path of a compute unit: 64 lanes of 16 bytes take 16 cycles.
    vmem: "bytes/cycle", 64.0, 64.0, documented "CDNA3 white paper: 64 bytes a cycle from the vector L1 cache of a compute unit";
    /// Least cycles of a vector memory instruction: addresses of 16 lanes a cycle.
    vmem_least: "cycles", 4.0, 4.0, documented "ROCm Compute Profiler, vector L1 cache: the address unit takes 16 lanes a cycle";
    /// Vector L1 cache.
    l1_lines: "lines of 128 B", 256.0, 256.0, documented "AMD GPU specifications: 32 KiB";
    /// A load that hits the vector L1 cache.
    l1_latency: "cycles", 144.0, 144.0, documented "a published performance model of the MI300X (which gives its LDS 48 and its L2 254 cycles)";
    /// A load of lines that other calls and workgroups use too: page ids, records, queries, kernel arguments.
    l2_latency: "cycles", 600.0, 700.0, fitted "MI355X times per tile of one workgroup: 290 ns, more than an L2 hit and less than HBM";
    /// A load of K, V or scales whose lines the compute unit has not seen: from the last-level cache or HBM.
    memory_latency: "cycles", 1840.0, 2100.0, fitted "MI355X times per tile of one workgroup: 875 ns; gfx942 the same time";
    /// New lines into one compute unit.
    fill: "bytes/cycle", 52.0, 52.0, fitted "MI355X times per tile of one workgroup; at most 64";
    /// A scalar load that hits.
    scalar_latency: "cycles", 100.0, 100.0, fitted "order of magnitude of the scalar cache's and L2's latencies";
    /// From the last wave's arrival at a barrier to the first instruction after it.
    barrier: "cycles", 60.0, 60.0, fitted "MI355X times per tile of one workgroup";
    /// HBM.
    hbm: "TB/s", 5.3, 8.0, documented "AMD data sheets of the MI300X and the MI355X: peak";
    /// Part of the peak that long streams of ordinary loads reach.
    hbm_share: "", 0.72, 0.72, fitted "MI355X: 346 MB of BF16 KV in 64.5 us less the launches";
    /// Of nontemporal loads.
    hbm_share_nontemporal: "", 0.81, 0.81, fitted "MI355X: 346 MB of BF16 KV in 57.7 us less the launches; published copies of 4.3 TB/s on an MI300X";
    /// Last-level cache.
    mall: "TB/s", 17.2, 17.2, documented "AMD's MI300X presentation: peak of the Infinity Cache; CDNA4 keeps it";
    /// Part of the peak that replays of a cached KV reach.
    mall_share: "", 0.45, 0.45, fitted "MI355X: 134 MB of BF16 KV replayed in 23.2 us less the launches";
    /// What the last-level cache holds.
    mall_bytes: "MiB", 256.0, 256.0, documented "AMD GPU specifications";
    /// The first dispatch of a call in a captured graph: until its first wave runs, and after its last has ended.
    launch: "us", 1.1, 1.1, fitted "MI355X: 7.3 to 7.4 us for one sequence of 8192 tokens, less chain and reducer";
    /// The second dispatch, and the reducer's work.
    reducer: "us", 1.7, 1.7, fitted "MI355X: 3.4 us for two fills; 1.9 us saved once the tile kernel stores the rows itself";
}

impl Machine {
    /// The numbers of `arch`.
    pub fn of(arch: Arch) -> &'static Self {
        match arch {
            Arch::Gfx942 => &GFX942,
            Arch::Gfx950 => &GFX950,
        }
    }

    /// Microseconds of `cycles`.
    pub fn us(&self, cycles: f64) -> f64 {
        cycles / self.clock / 1e3
    }
}
