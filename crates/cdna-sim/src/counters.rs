//! What a launch executed.

use std::collections::BTreeMap;
use std::fmt;

use crate::program::{CLASSES, Class, Kind, Program};

/// Instructions that found this many vector memory operations in flight go into the last bucket and above.
pub const FLIGHT_BUCKETS: usize = 64;

/// Counts of one launch (or sums of several).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// Wave instructions by class, in [`Class::ALL`]'s order.
    pub classes: [u64; CLASSES],
    /// MFMA instructions by mnemonic.
    pub mfma: BTreeMap<String, u64>,
    /// LDS instructions, cross-lane ones apart.
    pub lds_accesses: u64,
    /// Cycles that LDS banks add because lanes of one pass want different rows of a bank.
    pub lds_bank_conflicts: u64,
    /// Bytes that lanes asked to load from global memory.
    pub global_loaded: u64,
    /// Of these, by nontemporal loads.
    pub global_loaded_nontemporal: u64,
    /// Bytes that lanes stored to global memory.
    pub global_stored: u64,
    /// Of these, by nontemporal stores.
    pub global_stored_nontemporal: u64,
    /// Bytes that lanes loaded or stored in scratch.
    pub scratch: u64,
    /// `in_flight[n]`: first uses of loaded registers that found n vector memory operations still in flight.
    pub in_flight: BTreeMap<usize, u64>,
    /// Uses of registers before the wait for their load, by addresses of load and use; only where a launch lets them pass.
    pub unproven: BTreeMap<(u64, u64), u64>,
    /// Workgroups.
    pub workgroups: u64,
    /// Instructions of the wave that executed most.
    pub longest_wave: u64,
}

impl Counters {
    /// Wave instructions altogether.
    pub fn instructions(&self) -> u64 {
        self.classes.iter().sum()
    }

    /// Wave instructions of a class.
    pub fn class(&self, class: Class) -> u64 {
        self.classes[class as usize]
    }

    /// Adds the executions of a program's instructions.
    pub(crate) fn add_executions(&mut self, program: &Program, executions: &[u64]) {
        for (inst, &count) in program.insts.iter().zip(executions).filter(|&(_, &count)| count > 0) {
            self.classes[inst.class as usize] += count;
            if matches!(inst.kind, Kind::Mfma(_)) {
                let name = inst.text.split_whitespace().next().unwrap_or_default();
                *self.mfma.entry(name.to_string()).or_default() += count;
            }
        }
    }

    /// Adds another launch's or workgroup's counts.
    pub fn merge(mut self, other: &Self) -> Self {
        self.classes.iter_mut().zip(other.classes).for_each(|(a, b)| *a += b);
        other.mfma.iter().for_each(|(name, count)| *self.mfma.entry(name.clone()).or_default() += count);
        other.in_flight.iter().for_each(|(&n, count)| *self.in_flight.entry(n).or_default() += count);
        other.unproven.iter().for_each(|(&site, count)| *self.unproven.entry(site).or_default() += count);
        self.lds_accesses += other.lds_accesses;
        self.lds_bank_conflicts += other.lds_bank_conflicts;
        self.global_loaded += other.global_loaded;
        self.global_loaded_nontemporal += other.global_loaded_nontemporal;
        self.global_stored += other.global_stored;
        self.global_stored_nontemporal += other.global_stored_nontemporal;
        self.scratch += other.scratch;
        self.workgroups += other.workgroups;
        self.longest_wave = self.longest_wave.max(other.longest_wave);
        self
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "workgroups                 {:>14}", self.workgroups)?;
        writeln!(f, "wave instructions          {:>14}", self.instructions())?;
        writeln!(f, "  of the longest wave        {:>12}", self.longest_wave)?;
        for class in Class::ALL {
            writeln!(f, "  {:<24} {:>14}", format!("{class:?}"), self.class(class))?;
        }
        for (name, count) in &self.mfma {
            writeln!(f, "  {name:<36} {count:>14}")?;
        }
        writeln!(f, "LDS accesses               {:>14}", self.lds_accesses)?;
        writeln!(f, "LDS bank conflict cycles   {:>14}", self.lds_bank_conflicts)?;
        writeln!(f, "global bytes loaded        {:>14} ({} nontemporal)", self.global_loaded, self.global_loaded_nontemporal)?;
        writeln!(f, "global bytes stored        {:>14} ({} nontemporal)", self.global_stored, self.global_stored_nontemporal)?;
        writeln!(f, "scratch bytes              {:>14}", self.scratch)?;
        for ((load, used), count) in &self.unproven {
            writeln!(f, "load at {load:#x} used at {used:#x} before its wait: {count} times")?;
        }
        let uses: u64 = self.in_flight.values().sum();
        let sum: u64 = self.in_flight.iter().map(|(&n, &count)| n as u64 * count).sum();
        if uses > 0 {
            writeln!(f, "in flight at first use     {:>14.2} (mean of {uses})", sum as f64 / uses as f64)?;
        }
        Ok(())
    }
}
