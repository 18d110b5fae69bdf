//! From unnormalized partial outputs to the caller's rows: sinks, normalization, merging partitions.

use half::{bf16, f16};

use super::job::{Job, Output, OutputData};
use super::task::RowBlock;
use super::workspace::Workspace;

const LN_2: f32 = std::f32::consts::LN_2;
const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// The caller's output, writable from several threads: items write disjoint rows.
pub(super) struct Rows {
    data: Data,
    len: usize,
    start: usize,
    row_stride: usize,
    head_stride: usize,
    lse: Option<(*mut f32, usize)>,
}

#[derive(Clone, Copy)]
enum Data {
    F32(*mut f32),
    F16(*mut f16),
    Bf16(*mut bf16),
}

// SAFETY: each (row, head) belongs to one row block, and each row block is written by one item or merge.
unsafe impl Send for Rows {}
unsafe impl Sync for Rows {}

impl Rows {
    pub fn new(output: &mut Output<'_>) -> Self {
        let (data, len) = match &mut output.data {
            OutputData::F32(x) => (Data::F32(x.as_mut_ptr()), x.len()),
            OutputData::F16(x) => (Data::F16(x.as_mut_ptr()), x.len()),
            OutputData::Bf16(x) => (Data::Bf16(x.as_mut_ptr()), x.len()),
        };
        let lse = output.lse.as_mut().map(|lse| (lse.as_mut_ptr(), lse.len()));
        Self { data, len, start: output.start, row_stride: output.row_stride, head_stride: output.head_stride, lse }
    }

    /// Writes `values * factor` and the LSE of one (row, head).
    fn write(&self, job: &Job<'_>, (row, head): (usize, usize), values: &[f32], factor: f32, lse: f32) {
        let at = self.start + row * self.row_stride + head * self.head_stride;
        assert!(at + values.len() <= self.len, "output: row {row} of head {head} ends past its storage of {} elements", self.len);
        // SAFETY: in bounds by the check above; no other thread writes this row.
        unsafe {
            match self.data {
                Data::F32(to) => values.iter().enumerate().for_each(|(d, x)| *to.add(at + d) = x * factor),
                Data::F16(to) => values.iter().enumerate().for_each(|(d, x)| *to.add(at + d) = f16::from_f32(x * factor)),
                Data::Bf16(to) => values.iter().enumerate().for_each(|(d, x)| *to.add(at + d) = bf16::from_f32(x * factor)),
            }
        }
        if let Some((to, len)) = self.lse {
            let at = row * job.q_heads + head;
            assert!(at < len, "lse: row {row} of head {head} lies past its storage of {len} elements");
            // SAFETY: as above.
            unsafe { *to.add(at) = lse }
        }
    }

    /// Zeros and an LSE of -inf for every row of `block`.
    pub fn clear(&self, job: &Job<'_>, block: &RowBlock, zeros: &[f32]) {
        for r in 0..block.rows {
            self.write(job, block.place(r), zeros, 0.0, f32::NEG_INFINITY);
        }
    }

    /// Normalizes and writes row `r` of `block`; `max` and `sum` are in powers of two.
    fn normalize(&self, job: &Job<'_>, block: &RowBlock, r: usize, values: &[f32], max: f32, sum: f32) {
        let place = block.place(r);
        if block.position(r) < 0 {
            return self.write(job, place, values, 0.0, f32::NEG_INFINITY);
        }
        let (mut max, mut sum, mut factor) = (max, sum, 1.0);
        if let Some(sinks) = job.sinks {
            let sink = in_powers_of_two(sinks[place.1]);
            let top = if sink > max { sink } else { max };
            if top > f32::NEG_INFINITY {
                factor = (max - top).exp2();
                sum = sum * factor + (sink - top).exp2();
                max = top;
            }
        }
        let factor = factor / sum * job.value.scale.scalar();
        // All scores -inf: the softmax is undefined, and -inf would say that nothing was attended.
        let lse = if sum == 0.0 { f32::NAN } else { (max + sum.log2()) * LN_2 };
        self.write(job, place, values, factor, lse);
    }

    /// Writes a block that was attended in one piece.
    pub fn finish(&self, job: &Job<'_>, block: &RowBlock, work: &Workspace) {
        for r in 0..block.rows {
            // SAFETY: the workspace holds `rows` rows of `width` floats.
            let (values, max, sum) = unsafe {
                let values = std::slice::from_raw_parts(work.out.add(r * work.width), job.dims.head_dim);
                (values, *work.max.add(r), *work.sum.add(r))
            };
            self.normalize(job, block, r, values, max, sum);
        }
    }

    /// Merges the partials of a block's partitions, in their order, and writes it. `room` holds head_dim floats.
    pub fn merge(&self, job: &Job<'_>, block: &RowBlock, partials: &[f32], room: &mut [f32]) {
        let parts = partials.chunks_exact(partial_len(block, job.dims.head_dim));
        for r in 0..block.rows {
            let top = parts.clone().map(|part| max_of(part, r)).fold(f32::NEG_INFINITY, |top, max| if max > top { max } else { top });
            room.fill(0.0);
            let mut total = 0.0;
            for part in parts.clone().filter(|part| max_of(part, r) > f32::NEG_INFINITY || sum_of(part, block, r).is_nan()) {
                let weight = (max_of(part, r) - top).exp2();
                total += sum_of(part, block, r) * weight;
                let values = &part[2 * block.rows + r * room.len()..][..room.len()];
                room.iter_mut().zip(values).for_each(|(to, x)| *to += x * weight);
            }
            self.normalize(job, block, r, room, top, total);
        }
    }
}

/// A logit times log2(e); one that this would make infinite stays the largest float.
fn in_powers_of_two(logit: f32) -> f32 {
    if logit.is_finite() { (logit * LOG2_E).clamp(f32::MIN, f32::MAX) } else { logit }
}

/// Floats of a block's partial: maxima, sums, unnormalized values.
pub(super) fn partial_len(block: &RowBlock, head_dim: usize) -> usize {
    block.rows * (head_dim + 2)
}

fn max_of(part: &[f32], r: usize) -> f32 {
    part[r]
}

fn sum_of(part: &[f32], block: &RowBlock, r: usize) -> f32 {
    part[block.rows + r]
}

/// Stores what `attend` left in `work` as a partial.
///
/// # Safety
/// `to` holds `partial_len` floats that no other thread touches.
pub(super) unsafe fn store_partial(block: &RowBlock, head_dim: usize, work: &Workspace, to: *mut f32) {
    unsafe {
        work.max.copy_to_nonoverlapping(to, block.rows);
        work.sum.copy_to_nonoverlapping(to.add(block.rows), block.rows);
        for r in 0..block.rows {
            work.out.add(r * work.width).copy_to_nonoverlapping(to.add(2 * block.rows + r * head_dim), head_dim);
        }
    }
}
