//! Software prefetch: while one step is computed, the next step's cache lines are asked for a few at a time. Pages are scattered, so
//! the hardware's own prefetchers lose the trail at every page.

use super::isa::Isa;
use super::pack::Head;
use super::pages::Segments;
use super::workspace::STEP;

const LINE: usize = 64;

/// `rows` stretches of `lines` cache lines, `stride` bytes apart.
#[derive(Clone, Copy)]
pub(super) struct Stretches {
    pub data: *const u8,
    pub rows: usize,
    pub lines: usize,
    pub stride: usize,
}

impl Stretches {
    pub fn new(data: *const u8, rows: usize, bytes: usize, stride: usize) -> Self {
        match bytes == stride {
            true => Self { data, rows: 1, lines: (rows * bytes).div_ceil(LINE), stride: 0 },
            false => Self { data, rows, lines: bytes.div_ceil(LINE), stride },
        }
    }
}

/// Lines still to be asked for.
pub(super) struct Ahead {
    list: [Stretches; STEP],
    len: usize,
    /// Where the next line is: stretches, row, line.
    at: usize,
    row: usize,
    line: usize,
    left: usize,
}

impl Ahead {
    pub fn new() -> Self {
        let none = Stretches { data: std::ptr::null(), rows: 0, lines: 0, stride: 0 };
        Self { list: [none; STEP], len: 0, at: 0, row: 0, line: 0, left: 0 }
    }

    /// Starts over with the lines of `segments`.
    pub fn aim(&mut self, head: &Head<'_, '_>, segments: &Segments) {
        (self.len, self.at, self.row, self.line, self.left) = (0, 0, 0, 0, 0);
        for segment in segments.iter() {
            let stretches = head.stretches(&segment);
            self.left += stretches.rows * stretches.lines;
            self.list[self.len] = stretches;
            self.len += 1;
        }
    }

    /// Lines for each of `parts` parts of a computation.
    pub fn share(&self, parts: usize) -> usize {
        self.left.div_ceil(parts.max(1))
    }

    /// Asks for the next `count` lines.
    #[inline(always)]
    pub unsafe fn ask<I: Isa>(&mut self, count: usize) {
        let mut count = count.min(self.left);
        self.left -= count;
        while count > 0 {
            let stretches = self.list[self.at];
            let n = count.min(stretches.lines - self.line);
            let from = stretches.data.wrapping_add(self.row * stretches.stride + self.line * LINE);
            for i in 0..n {
                unsafe { I::prefetch(from.wrapping_add(i * LINE)) }
            }
            count -= n;
            self.line += n;
            if self.line == stretches.lines {
                (self.line, self.row) = (0, self.row + 1);
            }
            if self.row == stretches.rows {
                (self.row, self.at) = (0, self.at + 1);
            }
        }
    }
}
