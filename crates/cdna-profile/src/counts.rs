//! What waves execute, finer than the simulator's own counters.

use std::collections::BTreeMap;

use cdna_sim::{Class, Inst, KernelInfo, Program, Trace};
use serde::Serialize;

use crate::op::{is_conversion, is_exchange, mfma_shape};
use crate::tag::{Tag, Tags};
use crate::waits::waits;

/// Bytes moved between global memory and registers or LDS.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Bytes {
    /// By ordinary accesses.
    pub cached: f64,
    /// By nontemporal ones.
    pub nontemporal: f64,
}

impl Bytes {
    /// Both together.
    pub fn total(&self) -> f64 {
        self.cached + self.nontemporal
    }
}

/// Executed instructions and bytes. Numbers are not whole where they are averages.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Counts {
    /// Wave instructions altogether.
    pub instructions: f64,
    /// Vector ALU instructions, conversions and MFMAs apart.
    pub valu: f64,
    /// Of these, those at a quarter of the rate (exponentials, reciprocals, ...).
    pub transcendental: f64,
    /// Conversions.
    pub conversions: f64,
    /// MFMAs by shape.
    pub mfma: BTreeMap<String, f64>,
    /// LDS accesses, exchanges between lanes apart.
    pub lds: f64,
    /// Exchanges between lanes through the LDS crossbar.
    pub lds_exchanges: f64,
    /// Bytes that LDS accesses and exchanges of 64 lanes read and write.
    pub lds_read: f64,
    pub lds_written: f64,
    /// Cycles that bank conflicts add.
    pub lds_conflicts: f64,
    /// Vector memory instructions.
    pub vmem: f64,
    /// Scalar ALU instructions.
    pub salu: f64,
    /// Scalar loads.
    pub scalar_loads: f64,
    /// Branches.
    pub branches: f64,
    /// `s_nop`.
    pub nops: f64,
    /// `s_barrier`.
    pub barriers: f64,
    /// `s_waitcnt`.
    pub waits: f64,
    /// Waits that forced outstanding loads of K, V, ...
    pub forced: BTreeMap<Tag, f64>,
    /// Of these, the ones after which the wave read none of that kind before a barrier or a wait for another kind: it waited earlier than it had to.
    pub drained: BTreeMap<Tag, f64>,
    /// Bytes loaded.
    pub loaded: BTreeMap<Tag, Bytes>,
    /// Bytes stored.
    pub stored: BTreeMap<Tag, Bytes>,
}

impl Counts {
    /// What all waves of a traced workgroup executed.
    pub fn of_trace(program: &Program, trace: &Trace, tags: &Tags) -> Self {
        let mut counts = Self::default();
        for event in trace.waves.iter().flatten() {
            let inst = &program.insts[event.inst as usize];
            counts.add(inst);
            counts.lds_conflicts += f64::from(event.conflicts);
            let Some(touched) = event.touched.as_deref() else { continue };
            let side = if touched.store { &mut counts.stored } else { &mut counts.loaded };
            let bytes = side.entry(tags.of(touched.address)).or_default();
            *(if touched.nontemporal { &mut bytes.nontemporal } else { &mut bytes.cached }) += f64::from(touched.bytes);
        }
        for wait in waits(program, trace, tags).iter().flatten() {
            wait.forced.keys().for_each(|&tag| *counts.forced.entry(tag).or_default() += 1.0);
            wait.early.iter().for_each(|&tag| *counts.drained.entry(tag).or_default() += 1.0);
        }
        counts
    }

    fn add(&mut self, inst: &Inst) {
        self.instructions += 1.0;
        let slot = match inst.class {
            Class::Matrix => self.mfma.entry(mfma_shape(inst)).or_default(),
            Class::Vector | Class::Transcendental if is_conversion(inst) => &mut self.conversions,
            Class::Vector => &mut self.valu,
            Class::Transcendental => {
                self.transcendental += 1.0;
                &mut self.valu
            }
            Class::Lds if is_exchange(inst) => &mut self.lds_exchanges,
            Class::Lds => &mut self.lds,
            Class::VectorMemory => &mut self.vmem,
            Class::Scalar => &mut self.salu,
            Class::ScalarMemory => &mut self.scalar_loads,
            Class::Branch => &mut self.branches,
            Class::Barrier => &mut self.barriers,
            Class::Wait => &mut self.waits,
            Class::Other => &mut self.nops,
        };
        *slot += 1.0;
        let lds = f64::from(inst.lds_bytes().unwrap_or(0)) * 64.0;
        *(if inst.writes().is_empty() { &mut self.lds_written } else { &mut self.lds_read }) += lds;
    }

    /// MFMAs of all shapes.
    pub fn mfmas(&self) -> f64 {
        self.mfma.values().sum()
    }

    /// Bytes loaded and stored.
    pub fn bytes(&self) -> f64 {
        self.loaded.values().chain(self.stored.values()).map(Bytes::total).sum()
    }

    /// Combines two counts number by number.
    fn zip(&self, other: &Self, f: impl Fn(f64, f64) -> f64 + Copy) -> Self {
        let bytes = |a: Bytes, b: Bytes| Bytes { cached: f(a.cached, b.cached), nontemporal: f(a.nontemporal, b.nontemporal) };
        Self {
            instructions: f(self.instructions, other.instructions),
            valu: f(self.valu, other.valu),
            transcendental: f(self.transcendental, other.transcendental),
            conversions: f(self.conversions, other.conversions),
            mfma: zip_maps(&self.mfma, &other.mfma, f),
            lds: f(self.lds, other.lds),
            lds_exchanges: f(self.lds_exchanges, other.lds_exchanges),
            lds_read: f(self.lds_read, other.lds_read),
            lds_written: f(self.lds_written, other.lds_written),
            lds_conflicts: f(self.lds_conflicts, other.lds_conflicts),
            vmem: f(self.vmem, other.vmem),
            salu: f(self.salu, other.salu),
            scalar_loads: f(self.scalar_loads, other.scalar_loads),
            branches: f(self.branches, other.branches),
            nops: f(self.nops, other.nops),
            barriers: f(self.barriers, other.barriers),
            waits: f(self.waits, other.waits),
            forced: zip_maps(&self.forced, &other.forced, f),
            drained: zip_maps(&self.drained, &other.drained, f),
            loaded: zip_maps(&self.loaded, &other.loaded, bytes),
            stored: zip_maps(&self.stored, &other.stored, bytes),
        }
    }

    /// What `self` has more than `other`, over `parts`: a steady tile of a wave, where `self` ran more tiles than `other` and `parts` counts the
    /// (wave, tile) pairs between.
    pub fn per(&self, other: &Self, parts: f64) -> Self {
        self.zip(other, |a, b| (a - b) / parts)
    }

    /// Both together.
    pub fn plus(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
}

fn zip_maps<K: Ord + Clone, V: Copy + Default + PartialEq>(
    a: &BTreeMap<K, V>,
    b: &BTreeMap<K, V>,
    f: impl Fn(V, V) -> V,
) -> BTreeMap<K, V> {
    let keys = a.keys().chain(b.keys());
    let of = |map: &BTreeMap<K, V>, key: &K| map.get(key).copied().unwrap_or_default();
    keys.map(|key| (key.clone(), f(of(a, key), of(b, key)))).filter(|(_, value)| *value != V::default()).collect()
}

/// Instructions of a whole kernel's binary, each counted once, and what it occupies.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Static {
    /// As [`Counts::valu`], and so on.
    pub valu: usize,
    pub conversions: usize,
    pub mfma: BTreeMap<String, usize>,
    pub lds: usize,
    pub barriers: usize,
    /// VGPRs and AGPRs of a wave, together and AGPRs apart.
    pub registers: usize,
    pub agprs: usize,
    pub spilled: usize,
    /// Bytes of LDS of a workgroup.
    pub lds_bytes: usize,
    /// Bytes of scratch a lane.
    pub scratch_bytes: usize,
}

impl Static {
    /// Counts `kernel` in `program`, up to the next kernel of `kernels`.
    pub fn of(program: &Program, kernel: &KernelInfo, kernels: &[KernelInfo]) -> Self {
        let end = kernels.iter().map(|other| other.entry).filter(|&entry| entry > kernel.entry).min().unwrap_or(u64::MAX);
        let mut counts = Counts::default();
        program.insts.iter().filter(|inst| (kernel.entry..end).contains(&inst.address)).for_each(|inst| counts.add(inst));
        Self {
            valu: counts.valu as usize,
            conversions: counts.conversions as usize,
            mfma: counts.mfma.into_iter().map(|(shape, count)| (shape, count as usize)).collect(),
            lds: (counts.lds + counts.lds_exchanges) as usize,
            barriers: counts.barriers as usize,
            registers: kernel.vgpr_count as usize,
            agprs: kernel.agpr_count as usize,
            spilled: kernel.vgpr_spill_count as usize,
            lds_bytes: kernel.group_segment_size,
            scratch_bytes: kernel.private_segment_size,
        }
    }
}
