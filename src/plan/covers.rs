//! Whether a plan is the plan of a batch.

use candle::{Result, bail};

use super::{HostPlan, PlanRequest, TileRange};
use crate::registry::Arch;

impl HostPlan {
    /// Refuses a plan that does not cover exactly the tiles `request` needs on `arch`: a plan made for other lengths would leave tokens out, or count
    /// them twice, and say nothing.
    ///
    /// Any records may be given. After `Ok`, each row's slots are in range, hold that row's tasks in order with no gap or overlap, and no
    /// other slot holds a task.
    ///
    /// # Errors
    /// The first row or slot that is wrong, with its values; what [`PlanRequest::check`] refuses.
    pub fn check_covers(&self, request: &PlanRequest<'_>, arch: &Arch) -> Result<()> {
        request.check()?;
        if self.reduce.len() != request.rows() {
            bail!("plan: has {} rows, the call has {}", self.reduce.len(), request.rows())
        }
        let mut owned = 0;
        for (row, needed) in request.tile_ranges(arch).enumerate() {
            owned += self.check_row(row, needed)?;
        }
        // Rows own disjoint slots, since a record names one row: as many records as owned slots leave none over.
        if self.work.iter().filter(|record| record[0] != -1).count() != owned {
            return self.refuse_stray();
        }
        Ok(())
    }

    /// The number of slots that `row` owns, once they are seen to cover `needed`.
    fn check_row(&self, row: usize, needed: TileRange) -> Result<usize> {
        let [first_slot, count] = self.reduce[row];
        let slots = usize::try_from(first_slot).ok().zip(usize::try_from(count).ok());
        let Some(tasks) = slots.and_then(|(first, count)| self.work.get(first..first.checked_add(count)?)) else {
            bail!("plan row {row} owns {count} slots from {first_slot}, outside the plan's {}", self.work.len())
        };
        let mut next = needed.first;
        for (index, &[task_row, first, end, partition]) in tasks.iter().enumerate() {
            let slot = first_slot as usize + index;
            if usize::try_from(task_row) != Ok(row) {
                bail!("plan slot {slot} belongs to row {row}, its record names row {task_row}")
            }
            if first != next || end <= first || end > needed.end || usize::try_from(partition) != Ok(index) {
                bail!(
                    "plan row {row}: slot {slot} is partition {partition} with tiles {first}..{end}, where partition {index} should start at \
                     tile {next} of {}..{} (was the plan made for other lengths?)",
                    needed.first,
                    needed.end
                )
            }
            next = end;
        }
        if needed.tiles() > 0 && next != needed.end {
            bail!(
                "plan row {row} covers tiles {}..{next} in {count} tasks, the call needs {}..{} (was the plan made for other lengths?)",
                needed.first,
                needed.first,
                needed.end
            )
        }
        Ok(tasks.len())
    }

    /// Names the first task that no row owns.
    fn refuse_stray(&self) -> Result<()> {
        for (slot, record) in self.work.iter().enumerate() {
            let owner = usize::try_from(record[0]).ok().and_then(|row| self.reduce.get(row));
            let is_owned =
                owner.is_some_and(|&[first, count]| (i64::from(first)..i64::from(first) + i64::from(count)).contains(&(slot as i64)));
            if record[0] != -1 && !is_owned {
                bail!("plan slot {slot} holds the task {record:?}, which no row owns")
            }
        }
        bail!("the plan holds tasks that no row owns")
    }
}
