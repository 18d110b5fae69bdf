//! Software prefetch: while one step is computed, the next step's cache lines are asked for two at a time between the multiplications.
//! Pages are scattered, so the hardware's own prefetchers lose the trail at every page; and a burst of requests would stop the core.

use super::isa::Isa;
use super::pack::Head;
use super::pages::Segments;

const LINE: usize = 64;
/// Bytes asked for at once.
const ASKED: usize = 2 * LINE;
/// Requests a step may have; more (only from large heads in small pieces) are left to the hardware.
const REQUESTS: usize = 1024;

/// `rows` stretches of `bytes`, `stride` bytes apart.
#[derive(Clone, Copy)]
pub(super) struct Stretches {
    pub data: *const u8,
    pub rows: usize,
    pub bytes: usize,
    pub stride: usize,
}

impl Stretches {
    /// Stretches that follow each other are one.
    pub fn new(data: *const u8, rows: usize, bytes: usize, stride: usize) -> Self {
        match bytes == stride {
            true => Self { data, rows: 1, bytes: rows * bytes, stride: 0 },
            false => Self { data, rows, bytes, stride },
        }
    }
}

/// Lines still to be asked for.
pub(super) struct Ahead {
    requests: [std::mem::MaybeUninit<*const u8>; REQUESTS],
    next: usize,
    len: usize,
}

impl Ahead {
    pub fn new() -> Self {
        Self { requests: [const { std::mem::MaybeUninit::uninit() }; REQUESTS], next: 0, len: 0 }
    }

    /// Starts over with the lines of `segments`.
    pub fn aim(&mut self, head: &Head<'_, '_>, segments: &Segments) {
        (self.next, self.len) = (0, 0);
        for segment in segments.iter() {
            let Stretches { data, rows, bytes, stride } = head.stretches(&segment);
            for row in 0..rows {
                for at in (0..bytes).step_by(ASKED) {
                    if self.len == REQUESTS {
                        return;
                    }
                    self.requests[self.len].write(data.wrapping_add(row * stride + at));
                    self.len += 1;
                }
            }
        }
    }

    /// Asks for the next lines, if any are left.
    #[inline(always)]
    pub unsafe fn ask<I: Isa>(&mut self) {
        if self.next < self.len {
            // SAFETY: the first `len` requests were written.
            unsafe {
                let at = self.requests.get_unchecked(self.next).assume_init();
                I::prefetch(at);
                I::prefetch(at.wrapping_add(LINE));
            }
            self.next += 1;
        }
    }

    /// Asks for all of them.
    #[inline(always)]
    pub unsafe fn ask_all<I: Isa>(&mut self) {
        while self.next < self.len {
            unsafe { self.ask::<I>() }
        }
    }
}
