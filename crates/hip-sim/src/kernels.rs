//! What the kernels executed, summed by name.

use std::collections::BTreeMap;
use std::sync::Mutex;

use cdna_sim::{Class, Counters};

use crate::handles::lock;

static SUMS: Mutex<BTreeMap<String, (u64, Counters)>> = Mutex::new(BTreeMap::new());

/// Adds a launch.
pub fn add(name: &str, counters: Counters) {
    let mut sums = lock(&SUMS);
    let (launches, sum) = sums.entry(name.to_string()).or_default();
    *launches += 1;
    *sum = std::mem::take(sum).merge(&counters);
}

/// Launches and sums of a kernel, or of all of them where `name` is empty.
pub fn sums(name: &str) -> (u64, Counters) {
    let sums = lock(&SUMS);
    let wanted = sums.iter().filter(|(kernel, _)| name.is_empty() || *kernel == name);
    wanted.fold((0, Counters::default()), |(launches, sum), (_, (n, counters))| (launches + n, sum.merge(counters)))
}

/// Forgets all.
pub fn clear() {
    lock(&SUMS).clear();
}

/// A sum by the name of its field or of an instruction class (`launches`, `instructions`, `Matrix`, `global_loaded`, ...).
pub fn field(name: &str, field: &str) -> Option<u64> {
    let (launches, c) = sums(name);
    if let Some(class) = Class::ALL.into_iter().find(|class| format!("{class:?}") == field) {
        return Some(c.class(class));
    }
    Some(match field {
        "launches" => launches,
        "workgroups" => c.workgroups,
        "longest_wave" => c.longest_wave,
        "instructions" => c.instructions(),
        "mfma" => c.mfma.values().sum(),
        "lds_accesses" => c.lds_accesses,
        "lds_bank_conflicts" => c.lds_bank_conflicts,
        "global_loaded" => c.global_loaded,
        "global_loaded_nontemporal" => c.global_loaded_nontemporal,
        "global_stored" => c.global_stored,
        "global_stored_nontemporal" => c.global_stored_nontemporal,
        "scratch" => c.scratch,
        _ => return None,
    })
}
