//! The proportional split: slots follow tiles.

/// A nonempty row of `t` tiles gets one task, and of the slots beyond one a row its share by tiles: `1 + floor(spare * t / total)` tasks,
/// at most `t` and `max_partitions`.
///
/// One pass and no search, so it suits batches of more rows than a planner block has threads. Rows of equal length get equal counts; what
/// rounding leaves over stays padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProportionalRule {
    /// Slots beyond one a nonempty row.
    pub spare: u64,
    /// Tiles of the batch.
    pub total: u64,
    /// Most tasks of a row.
    pub max_partitions: u32,
}

impl ProportionalRule {
    /// The rule for a batch whose rows have `tiles` tiles each.
    pub fn new(tiles: impl Iterator<Item = u32>, capacity: usize, max_partitions: u32) -> Self {
        let (mut total, mut rows) = (0u64, 0u64);
        for t in tiles {
            total += u64::from(t);
            rows += u64::from(t > 0);
        }
        Self { spare: (capacity as u64).saturating_sub(rows), total, max_partitions }
    }

    /// Tasks of a row of `tiles` tiles.
    pub fn tasks(&self, tiles: u32) -> u32 {
        if tiles == 0 {
            return 0;
        }
        // Slots are at most 2^24 and tiles 2^23 a row, so the product fits.
        let share = self.spare.saturating_mul(u64::from(tiles)) / self.total.max(1);
        share.saturating_add(1).min(u64::from(tiles.min(self.max_partitions))) as u32
    }
}
