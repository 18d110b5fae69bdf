//! A workgroup's LDS, with the record that finds races between its waves.
//!
//! All waves of a workgroup are always in the same barrier interval, so an earlier access by another wave is ordered before this one exactly
//! when the other wave had *proven* it done (by its waits) before the last barrier. LDS-direct loads are proven by vmcnt, the rest by lgkmcnt.

use crate::error::Fault;
use crate::waits::Waits;

/// The last write of a unit of LDS, packed so that all zeros, which memory comes with for nothing, is none.
#[derive(Clone, Copy)]
struct Write {
    seq: u32,
    inst: u32,
    wave: u8,
    vector: bool,
    atomic: bool,
}

impl Write {
    fn pack(self) -> [u64; 2] {
        let flags = u64::from(self.wave) | u64::from(self.vector) << 8 | u64::from(self.atomic) << 9;
        [u64::from(self.seq) << 32 | u64::from(self.inst), flags]
    }

    fn unpack([operation, flags]: [u64; 2]) -> Self {
        Self {
            seq: (operation >> 32) as u32,
            inst: operation as u32,
            wave: flags as u8,
            vector: flags >> 8 & 1 == 1,
            atomic: flags >> 9 & 1 == 1,
        }
    }
}

/// The last read of a unit by one wave: number and instruction. 0: none.
fn pack_read(seq: u32, inst: u32) -> u64 {
    u64::from(seq) << 32 | u64::from(inst)
}

/// Who accesses, and how.
#[derive(Clone, Copy)]
pub struct Access<'a> {
    /// The wave in its workgroup.
    pub wave: usize,
    /// Index of the instruction.
    pub inst: u32,
    /// The wave's scoreboard, before the access is issued.
    pub waits: &'a Waits,
    /// An LDS-direct load, counted by vmcnt.
    pub vector: bool,
    /// An atomic.
    pub atomic: bool,
}

/// A conflict, to be completed into a [`Fault`] by who knows the instructions' texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Race {
    pub offset: u64,
    pub access: &'static str,
    pub other_access: &'static str,
    pub other_wave: usize,
    pub other_inst: u32,
    pub own: bool,
}

/// What can go wrong in LDS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LdsFault {
    /// Outside the group segment.
    Bounds(Fault),
    /// A race.
    Race(Race),
}

/// LDS of one workgroup.
pub struct Lds {
    data: Vec<u8>,
    shift: u32,
    waves: usize,
    writes: Vec<[u64; 2]>,
    reads: Vec<u64>,
    /// By wave: (vector, LDS) operations proven done at the last barrier.
    released: Vec<(u32, u32)>,
}

impl Lds {
    /// `size` bytes for `waves` waves, tracked in units of `1 << shift` bytes.
    pub fn new(size: usize, waves: usize, shift: u32) -> Self {
        let units = size.div_ceil(1 << shift);
        Self {
            data: vec![0xff; size],
            shift,
            waves,
            writes: vec![[0; 2]; units],
            reads: vec![0; units * waves],
            released: vec![(0, 0); waves],
        }
    }

    /// A barrier was passed by all waves; `done` gives what each has proven.
    pub fn release(&mut self, wave: usize, done: (u32, u32)) {
        self.released[wave] = done;
    }

    fn bounds(&self, offset: u64, bytes: usize) -> Result<std::ops::Range<usize>, LdsFault> {
        let size = self.data.len();
        let start = usize::try_from(offset).ok().filter(|&start| start.checked_add(bytes).is_some_and(|end| end <= size));
        match start {
            Some(start) => Ok(start..start + bytes),
            None => Err(LdsFault::Bounds(Fault::SegmentOutOfBounds { segment: "LDS", offset, bytes, size })),
        }
    }

    /// Reads bytes.
    #[inline]
    pub fn read(&mut self, by: Access, offset: u64, bytes: usize) -> Result<&[u8], LdsFault> {
        let range = self.bounds(offset, bytes)?;
        let read = pack_read(by.waits.lds_issued + 1, by.inst);
        for unit in range.start >> self.shift..=(range.end - 1) >> self.shift {
            self.after_write(by, unit, "read")?;
            self.reads[unit * self.waves + by.wave] = read;
        }
        Ok(&self.data[range])
    }

    /// Reads bytes as part of an atomic, whose write does the checks.
    pub fn peek(&self, offset: u64, bytes: usize) -> Result<&[u8], LdsFault> {
        Ok(&self.data[self.bounds(offset, bytes)?])
    }

    /// Writes bytes.
    #[inline]
    pub fn write(&mut self, by: Access, offset: u64, data: &[u8]) -> Result<(), LdsFault> {
        let range = self.bounds(offset, data.len())?;
        let issued = if by.vector { by.waits.vector_issued } else { by.waits.lds_issued };
        let write = Write { seq: issued + 1, inst: by.inst, wave: by.wave as u8, vector: by.vector, atomic: by.atomic }.pack();
        for unit in range.start >> self.shift..=(range.end - 1) >> self.shift {
            self.after_write(by, unit, "write")?;
            self.after_reads(by, unit)?;
            self.writes[unit] = write;
        }
        self.data[range].copy_from_slice(data);
        Ok(())
    }

    #[inline]
    fn after_write(&self, by: Access, unit: usize, access: &'static str) -> Result<(), LdsFault> {
        if self.writes[unit][0] == 0 {
            return Ok(());
        }
        let write = Write::unpack(self.writes[unit]);
        let other = usize::from(write.wave);
        let ordered = if other == by.wave {
            !write.vector || by.vector || write.seq <= by.waits.vector_done
        } else {
            let released = self.released[other];
            (by.atomic && write.atomic) || write.seq <= if write.vector { released.0 } else { released.1 }
        };
        if ordered {
            return Ok(());
        }
        Err(self.race(by, unit, access, "write", other, write.inst))
    }

    #[inline]
    fn after_reads(&self, by: Access, unit: usize) -> Result<(), LdsFault> {
        for (other, read) in self.reads[unit * self.waves..(unit + 1) * self.waves].iter().enumerate() {
            let seq = (read >> 32) as u32;
            let ordered = if other == by.wave { !by.vector || seq <= by.waits.lds_done } else { seq <= self.released[other].1 };
            if seq != 0 && !ordered {
                return Err(self.race(by, unit, "write", "read", other, *read as u32));
            }
        }
        Ok(())
    }

    #[cold]
    fn race(&self, by: Access, unit: usize, access: &'static str, other_access: &'static str, other: usize, inst: u32) -> LdsFault {
        let own = other == by.wave;
        LdsFault::Race(Race { offset: (unit as u64) << self.shift, access, other_access, other_wave: other, other_inst: inst, own })
    }
}
