//! A wave's registers.

use sim_memory::View;

use crate::exec::lanes::Row;
use crate::operand::{EXEC, VCC};
use crate::program::ScalarSrc;
use crate::waits::Waits;

/// Floating-point mode bits that change results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode(pub u32);

impl Mode {
    /// Single-precision subnormals are flushed.
    pub fn flushes_f32(self) -> bool {
        self.0 >> 4 & 3 != 3
    }

    /// Rounding of any precision is other than nearest even, or only one side of the subnormals is flushed.
    pub fn unsupported(self) -> bool {
        self.0 & 15 != 0 || matches!(self.0 >> 4 & 3, 1 | 2) || self.0 >> 6 & 3 != 3
    }

    /// FP16_OVFL: 8- and 16-bit conversions saturate.
    pub fn saturates(self) -> bool {
        self.0 >> 23 & 1 == 1
    }
}

/// One wave.
pub struct Wave {
    /// Its number in the workgroup.
    pub index: usize,
    /// Next instruction.
    pub pc: usize,
    /// SGPRs, VCC, M0, EXEC.
    pub s: [u32; 128],
    /// VGPRs, then AGPRs, as far as the program names them.
    pub v: Box<[Row]>,
    pub scc: bool,
    pub mode: Mode,
    pub waits: Waits,
    /// Scratch, lane after lane.
    pub scratch: Vec<u8>,
    pub view: View,
    /// Instructions executed.
    pub executed: u64,
    pub state: State,
}

/// What a wave is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Running,
    AtBarrier,
    Ended,
}

impl Wave {
    /// A wave with all registers at a value that no test relies on.
    pub fn new(index: usize, view: View, mode: Mode, scratch: usize, rows: usize) -> Self {
        Self {
            index,
            pc: 0,
            s: [0xdead_beef; 128],
            v: vec![[0x7fc0_dead; 64]; rows].into(),
            scc: false,
            mode,
            waits: Waits::default(),
            scratch: vec![0xff; scratch],
            view,
            executed: 0,
            state: State::Running,
        }
    }

    /// Two scalar registers.
    #[inline]
    pub fn pair(&self, first: u16) -> u64 {
        u64::from(self.s[usize::from(first)]) | u64::from(self.s[usize::from(first) + 1]) << 32
    }

    /// Sets two scalar registers.
    #[inline]
    pub fn set_pair(&mut self, first: u16, value: u64) {
        self.s[usize::from(first)] = value as u32;
        self.s[usize::from(first) + 1] = (value >> 32) as u32;
    }

    /// The active lanes.
    #[inline]
    pub fn exec(&self) -> u64 {
        self.pair(EXEC)
    }

    /// VCC.
    pub fn vcc(&self) -> u64 {
        self.pair(VCC)
    }

    /// A scalar source of one or two registers.
    #[inline]
    pub fn scalar(&self, src: ScalarSrc, registers: u16) -> u64 {
        match src {
            ScalarSrc::Reg(first) if registers == 2 => self.pair(first),
            ScalarSrc::Reg(first) => self.s[usize::from(first)].into(),
            ScalarSrc::Const(value) if registers == 2 => value,
            ScalarSrc::Const(value) => u64::from(value as u32),
            ScalarSrc::Scc => self.scc.into(),
            ScalarSrc::VccZ => (self.vcc() == 0).into(),
            ScalarSrc::ExecZ => (self.exec() == 0).into(),
        }
    }

    /// Writes the lanes in `mask` of a row.
    #[inline]
    pub fn write_row(&mut self, row: u16, value: &Row, mask: u64) {
        let dst = &mut self.v[usize::from(row)];
        if mask == u64::MAX {
            *dst = *value;
            return;
        }
        for (lane, (d, &x)) in dst.iter_mut().zip(value).enumerate() {
            if mask >> lane & 1 == 1 {
                *d = x;
            }
        }
    }
}

/// The lanes of a mask.
pub fn lanes(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (mask != 0).then(|| {
            let lane = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            lane
        })
    })
}
