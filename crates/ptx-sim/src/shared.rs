//! A CTA's shared memory, with who last touched each word of it: an access that is not ordered after the conflicting ones before is a race.

use crate::clock::{Agent, SEVERAL, WARP};
use crate::error::Fault;
use crate::parse::SHARED_BASE;

/// Bytes whose accesses are told apart.
const WORD: usize = 4;
/// The epoch of an access that goes on until it is waited for.
const UNDER_WAY: u32 = u32::MAX;
/// The epoch of a word that is an mbarrier from then on: nothing else may touch it.
const MBARRIER: u32 = u32::MAX - 1;

/// The last write of a word; at epoch 0 nobody's.
#[derive(Debug, Clone, Copy, Default)]
struct Write {
    epoch: u32,
    agent: u16,
    lane: u8,
}

/// The last reads of a word by one warp: its epoch and lane.
#[derive(Debug, Clone, Copy, Default)]
struct Read(u32);

impl Read {
    const UNDER_WAY: Self = Self(u32::MAX);

    fn new(epoch: u32, lane: u8) -> Self {
        Self(epoch << 6 | u32::from(lane))
    }

    fn epoch(self) -> u32 {
        self.0 >> 6
    }

    fn lane(self) -> u8 {
        (self.0 & 63) as u8
    }
}

/// Shared memory of a CTA.
pub struct Shared {
    bytes: Vec<u8>,
    writes: Vec<Write>,
    /// By word, then by warp of the CTA.
    reads: Vec<Read>,
    warps: usize,
    /// The first warp's number among the agents.
    first_agent: usize,
}

/// Who accesses: an agent, and the lane, [`WARP`] for all as one.
#[derive(Clone, Copy)]
pub struct Who<'a> {
    pub agent: &'a Agent,
    pub lane: u8,
}

impl Shared {
    /// `size` bytes of NaNs.
    pub fn new(size: usize, warps: usize, first_agent: usize) -> Self {
        let words = size.div_ceil(WORD);
        Self {
            bytes: vec![0xff; words * WORD],
            writes: vec![Write::default(); words],
            reads: vec![Read::default(); words * warps],
            warps,
            first_agent,
        }
    }

    fn range(&self, address: u32, len: usize, access: &'static str) -> Result<usize, Fault> {
        if !(address as usize).is_multiple_of(len.min(16)) {
            return Err(Fault::Misaligned { address: address.into(), bytes: len });
        }
        let at = address.wrapping_sub(SHARED_BASE) as usize;
        if address < SHARED_BASE || at + len > self.bytes.len() {
            return Err(Fault::Shared { access, address, bytes: len, start: SHARED_BASE, size: self.bytes.len() });
        }
        Ok(at)
    }

    /// Reads up to 16 bytes, the first the lowest.
    pub fn read(&mut self, address: u32, bytes: usize, who: Who<'_>) -> Result<u128, Fault> {
        let at = self.range(address, bytes, "read")?;
        let own = who.agent.index - self.first_agent;
        for word in at / WORD..(at + bytes).div_ceil(WORD) {
            self.after_write(word, who, "read")?;
            let read = &mut self.reads[word * self.warps + own];
            if read.0 != Read::UNDER_WAY.0 {
                // What the warp read as one is before all that its lanes do next.
                let is_other = read.epoch() >= who.agent.together && read.lane() != who.lane && read.lane() != WARP;
                *read = Read::new(who.agent.now(), if is_other { SEVERAL } else { who.lane });
            }
        }
        Ok(little_endian(&self.bytes[at..at + bytes]))
    }

    /// Reads 16 bytes for the tensor cores, which go on reading until [`Shared::finish_read`].
    pub fn begin_read(&mut self, address: u32, who: Who<'_>) -> Result<u128, Fault> {
        let at = self.range(address, 16, "read")?;
        let own = who.agent.index - self.first_agent;
        for word in at / WORD..(at + 16) / WORD {
            self.after_write(word, who, "read by wgmma")?;
            let Write { agent, epoch, .. } = self.writes[word];
            if who.agent.clocks.fenced[usize::from(agent)] < epoch {
                let address = SHARED_BASE + (word * WORD) as u32;
                let other = format!("{}, as no fence.proxy.async lies between", self.said(self.writes[word]));
                return Err(Fault::Race { access: "read by wgmma", address, other });
            }
            self.reads[word * self.warps + own] = Read::UNDER_WAY;
        }
        Ok(little_endian(&self.bytes[at..at + 16]))
    }

    /// The tensor cores have read the 16 bytes at `address` (`under_way`: for one product, but still read them for another).
    pub fn finish_read(&mut self, address: u32, agent: &Agent, under_way: bool) {
        let (at, own) = ((address - SHARED_BASE) as usize, agent.index - self.first_agent);
        let read = if under_way { Read::UNDER_WAY } else { Read::new(agent.now(), WARP) };
        (at / WORD..(at + 16) / WORD).for_each(|word| self.reads[word * self.warps + own] = read);
    }

    /// Writes up to 16 bytes, a whole number of words. `under_way`: until [`Shared::finish_write`].
    pub fn write(&mut self, address: u32, data: &[u8], who: Who<'_>, under_way: bool) -> Result<(), Fault> {
        let epoch = if under_way { UNDER_WAY } else { who.agent.now() };
        self.write_as(address, data, who, Write { agent: who.agent.index as u16, lane: who.lane, epoch })
    }

    /// Makes 8 bytes an mbarrier.
    pub fn make_mbarrier(&mut self, address: u32, who: Who<'_>) -> Result<(), Fault> {
        self.write_as(address, &[0; 8], who, Write { agent: who.agent.index as u16, lane: who.lane, epoch: MBARRIER })
    }

    /// Writes what is sent to an mbarrier's CTA: seen by who waits for the barrier, as the barrier's work at `epoch`.
    pub fn receive(&mut self, address: u32, data: &[u8], who: Who<'_>, barrier: usize, epoch: u32) -> Result<(), Fault> {
        self.write_as(address, data, who, Write { agent: barrier as u16, lane: WARP, epoch })
    }

    fn write_as(&mut self, address: u32, data: &[u8], who: Who<'_>, write: Write) -> Result<(), Fault> {
        let at = self.range(address, data.len(), "write")?;
        if !data.len().is_multiple_of(WORD) {
            return Err(Fault::Misuse(format!(
                "a write of {} bytes to shared memory is not supported: races are found by words",
                data.len()
            )));
        }
        for word in at / WORD..(at + data.len()) / WORD {
            self.after_write(word, who, "write")?;
            self.after_reads(word, who)?;
            self.writes[word] = write;
        }
        self.bytes[at..at + data.len()].copy_from_slice(data);
        Ok(())
    }

    /// A lane's copy of `len` bytes has landed.
    pub fn finish_write(&mut self, address: u32, len: usize, agent: &Agent) {
        let at = (address - SHARED_BASE) as usize;
        for write in &mut self.writes[at / WORD..(at + len) / WORD] {
            if usize::from(write.agent) == agent.index && write.epoch == UNDER_WAY {
                write.epoch = agent.now();
            }
        }
    }

    fn after_write(&self, word: usize, who: Who<'_>, access: &'static str) -> Result<(), Fault> {
        let write = self.writes[word];
        let is_ordered =
            write.epoch == 0 || write.epoch < MBARRIER && who.agent.is_after(write.agent.into(), write.lane, write.epoch, who.lane);
        if is_ordered {
            return Ok(());
        }
        Err(Fault::Race { access, address: SHARED_BASE + (word * WORD) as u32, other: self.said(write) })
    }

    fn after_reads(&mut self, word: usize, who: Who<'_>) -> Result<(), Fault> {
        for warp in 0..self.warps {
            let read = std::mem::take(&mut self.reads[word * self.warps + warp]);
            let is_under_way = read.0 == Read::UNDER_WAY.0;
            let is_ordered = read.0 == 0 || who.agent.is_after(self.first_agent + warp, read.lane(), read.epoch(), who.lane);
            if is_under_way || !is_ordered {
                let by = if is_under_way { "wgmma, not waited for, of" } else { "a read of" };
                let other = format!("{by} warp {warp} of the CTA");
                return Err(Fault::Race { access: "write", address: SHARED_BASE + (word * WORD) as u32, other });
            }
        }
        Ok(())
    }

    fn said(&self, write: Write) -> String {
        let kind = match write.epoch {
            UNDER_WAY => "a copy, not waited for,",
            MBARRIER => "the making of an mbarrier",
            _ => "a write",
        };
        match usize::from(write.agent).checked_sub(self.first_agent) {
            Some(warp) if warp < self.warps => format!("{kind} of warp {warp} of the CTA, lane {}", write.lane),
            _ => format!("{kind} from another CTA"),
        }
    }
}

/// Up to 16 bytes as a number, the first the lowest.
pub fn little_endian(bytes: &[u8]) -> u128 {
    let mut all = [0; 16];
    all[..bytes.len()].copy_from_slice(bytes);
    u128::from_le_bytes(all)
}
