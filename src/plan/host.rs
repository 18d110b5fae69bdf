//! A plan as plain records.

use std::cmp::Reverse;

use candle::Result;

use super::split::Rule;
use super::{PlanRequest, Split, TileRange, capacity};
use crate::registry::Arch;

/// The record of a slot without a task.
pub const PADDING: [i32; 4] = [-1, 0, 0, 0];

/// A plan as plain records.
///
/// `work[slot] = [row, first tile, end tile, partition index]`, padding is [`PADDING`]; `reduce[row] = [first slot, count]`. The tasks of
/// a row fill consecutive slots in the order of their tiles, and rows follow each other without gaps, padding last: on the CPU and AMD GPUs as they
/// come, on NVIDIA GPUs those with the longest tasks first, which start first then. A row without a task has count 0, so a task's slot need not be
/// its row's number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlan {
    /// One record a slot.
    pub work: Vec<[i32; 4]>,
    /// One record a row.
    pub reduce: Vec<[i32; 2]>,
}

impl HostPlan {
    /// Plans `request` for `arch`, by the arch's own [`Split`].
    ///
    /// # Errors
    /// What [`capacity`] refuses.
    pub fn new(request: &PlanRequest<'_>, arch: &Arch) -> Result<Self> {
        Self::with_split(request, arch, Split::of(request.rows(), arch))
    }

    /// [`HostPlan::new`] by a given split.
    ///
    /// # Errors
    /// What [`capacity`] refuses.
    pub fn with_split(request: &PlanRequest<'_>, arch: &Arch, split: Split) -> Result<Self> {
        let capacity = capacity(request, arch)?;
        let max_partitions = request.max_partitions.and_then(|most| u32::try_from(most).ok()).unwrap_or(u32::MAX);
        // A row's entry is its tile range until its reduce record replaces it.
        let mut reduce: Vec<[i32; 2]> = request.tile_ranges(arch).map(|range| [range.first, range.end]).collect();
        let tiles = reduce.iter().map(|&[first, end]| TileRange { first, end }.tiles());
        let rule = split.rule(tiles, capacity, max_partitions);
        let mut work = Vec::with_capacity(capacity);
        let mut place = |(row, entry): (usize, &mut [i32; 2])| {
            let range = TileRange { first: entry[0], end: entry[1] };
            let count = rule.tasks(range.tiles());
            *entry = [work.len() as i32, count as i32];
            push_tasks(&mut work, row as i32, range, count);
        };
        if arch.name.is_cuda() {
            let longest = |range: &[i32; 2]| longest_task(TileRange { first: range[0], end: range[1] }.tiles(), &rule);
            let mut order: Vec<(u32, u32)> = reduce.iter().zip(0..).map(|(range, row)| (longest(range), row)).collect();
            order.sort_unstable_by_key(|&(longest, row)| (Reverse(longest), row));
            order.into_iter().for_each(|(_, row)| place((row as usize, &mut reduce[row as usize])));
        } else {
            reduce.iter_mut().enumerate().for_each(place);
        }
        work.resize(capacity, PADDING);
        Ok(Self { work, reduce })
    }

    /// The plan-free split on `arch`: each row is one task in the slot of its own number; an empty row's slot is padding.
    ///
    /// `request` is taken as it is. Where its `query_lens` has no entry for a row, the row's window is left out of account.
    pub fn free(request: &PlanRequest<'_>, arch: &Arch) -> Self {
        let record = |(row, range): (usize, TileRange)| if range.tiles() > 0 { [row as i32, range.first, range.end, 0] } else { PADDING };
        let work: Vec<[i32; 4]> = request.tile_ranges(arch).enumerate().map(record).collect();
        let reduce = work.iter().enumerate().map(|(row, task)| [row as i32, i32::from(*task != PADDING)]).collect();
        Self { work, reduce }
    }

    /// Slots of the plan.
    pub fn capacity(&self) -> usize {
        self.work.len()
    }

    /// Whether no row is more than one task: then nothing is merged, and a row's slot may as well be its own number.
    pub fn is_one_task_a_row(&self) -> bool {
        self.reduce.iter().all(|&[_, count]| count <= 1)
    }

    /// Tiles of the longest task.
    pub fn longest_task(&self) -> usize {
        self.work.iter().map(|&[_, first, end, _]| end.abs_diff(first) as usize).max().unwrap_or(0)
    }

    /// Slots that hold a task.
    pub fn tasks(&self) -> usize {
        self.work.iter().filter(|record| record[0] >= 0).count()
    }
}

/// Tiles of the longest task of a row of `tiles`, as rows are placed by them: the device's planner has 24 bits for it.
fn longest_task(tiles: u32, rule: &Rule) -> u32 {
    tiles.div_ceil(rule.tasks(tiles).max(1)).min((1 << 24) - 1)
}

/// Appends the `count` tasks of `row`: task i starts at `floor(i * tiles / count)` of the range.
fn push_tasks(work: &mut Vec<[i32; 4]>, row: i32, range: TileRange, count: u32) {
    let tiles = u64::from(range.tiles());
    let mut start = range.first;
    for task in 1..=count {
        let end = range.first + (u64::from(task) * tiles / u64::from(count)) as i32;
        work.push([row, start, end, task as i32 - 1]);
        start = end;
    }
}
