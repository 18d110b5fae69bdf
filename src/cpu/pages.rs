//! From token positions to places in the cache.

use super::job::{Job, Scale};
use super::workspace::STEP;

/// Neighbouring tokens of a step that share a page.
#[derive(Clone, Copy, Default)]
pub(super) struct Segment {
    /// First token, counted from the step's begin.
    pub first: usize,
    pub tokens: usize,
    pub page: usize,
    /// The first token's place in the page.
    pub slot: usize,
}

/// The tokens of one step, page by page.
pub(super) struct Segments {
    list: [Segment; STEP],
    len: usize,
}

impl Segments {
    pub fn new() -> Self {
        Self { list: [Segment::default(); STEP], len: 0 }
    }

    /// Looks up tokens `begin..begin + tokens` (at most STEP) of a sequence's (and head's) table. Only the columns of these tokens are read.
    pub fn locate(&mut self, job: &Job<'_>, sequence: usize, head: usize, begin: usize, tokens: usize) {
        let page_size = job.dims.page_size;
        let last_page = job.dims.pages - 1;
        self.len = 0;
        let mut first = 0;
        while first < tokens {
            let (column, slot) = ((begin + first) / page_size, (begin + first) % page_size);
            // Ids were checked; clamping keeps even an unchecked one inside the cache.
            let page = job.table.page(sequence, head, column).clamp(0, last_page as i64) as usize;
            let n = (page_size - slot).min(tokens - first);
            self.list[self.len] = Segment { first, tokens: n, page, slot };
            self.len += 1;
            first += n;
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = Segment> + '_ {
        self.list[..self.len].iter().copied()
    }
}

/// The factor of each token in `segments`, or nothing for a scale that is one number or lies inside the rows (MXFP4).
///
/// # Safety
/// `to` holds STEP floats.
pub(super) unsafe fn token_scales(scale: &Scale<'_>, head: usize, segments: &Segments, to: *mut f32) -> Option<*const f32> {
    let Scale::PerToken { data, start, page_stride, head_stride, token_stride } = *scale else {
        return None;
    };
    for segment in segments.iter() {
        let base = start + segment.page * page_stride + head * head_stride + segment.slot * token_stride;
        for i in 0..segment.tokens {
            unsafe { *to.add(segment.first + i) = data[base + i * token_stride] }
        }
    }
    Some(to)
}
