//! What the waves of one workgroup executed, instruction by instruction: for whoever counts finer than [`crate::Counters`] or estimates time.

/// Bytes of a line of the vector L1 cache and of the L2 cache (CDNA3 and CDNA4).
pub const LINE: u64 = 128;

/// What a global memory access touched.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Touched {
    /// Bytes that lanes moved.
    pub bytes: u32,
    /// Whether it stores (or is an atomic).
    pub store: bool,
    /// See [`crate::Counters::global_loaded_nontemporal`].
    pub nontemporal: bool,
    /// Lowest address.
    pub address: u64,
    /// Numbers of the distinct lines, ascending: address / [`LINE`].
    pub lines: Vec<u64>,
}

/// One executed instruction of a wave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Index in [`crate::Program::insts`].
    pub inst: u32,
    /// Cycles that LDS bank conflicts add.
    pub conflicts: u32,
    /// A global memory access; inactive waves touch nothing.
    pub touched: Option<Box<Touched>>,
}

impl Event {
    pub(crate) fn new(inst: u32) -> Self {
        Self { inst, conflicts: 0, touched: None }
    }
}

/// Events by wave, in the order of execution. Barriers align the waves: each passes as many as the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    /// Events of each wave.
    pub waves: Vec<Vec<Event>>,
}

/// Collects a trace while a workgroup runs.
#[derive(Default)]
pub(crate) struct Recorder {
    pub waves: Vec<Vec<Event>>,
}

impl Recorder {
    pub fn new(waves: usize) -> Self {
        Self { waves: vec![Vec::new(); waves] }
    }

    /// Completes the instruction that `wave` executes with the (address, bytes) of its lanes.
    pub fn touch(&mut self, wave: usize, mut touched: Touched, ranges: impl IntoIterator<Item = (u64, u32)>) {
        touched.address = u64::MAX;
        for (address, bytes) in ranges {
            touched.address = touched.address.min(address);
            touched.lines.extend(address / LINE..=(address + u64::from(bytes.max(1)) - 1) / LINE);
        }
        touched.lines.sort_unstable();
        touched.lines.dedup();
        if let Some(event) = self.waves[wave].last_mut() {
            event.touched = (!touched.lines.is_empty()).then(|| Box::new(touched));
        }
    }

    pub fn conflicts(&mut self, wave: usize, cycles: u32) {
        if let Some(event) = self.waves[wave].last_mut() {
            event.conflicts = cycles;
        }
    }
}
