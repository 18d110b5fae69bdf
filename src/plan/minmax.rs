//! The min-max split: the longest task of a batch is as short as its slots allow.

/// A row of `t` tiles gets `min(ceil(t / bound), max_partitions)` tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MinMaxRule {
    /// Most tiles of a task, but where `max_partitions` cuts in.
    pub bound: u32,
    /// Most tasks of a row.
    pub max_partitions: u32,
}

impl MinMaxRule {
    /// Tasks of a row of `tiles` tiles.
    pub fn tasks(&self, tiles: u32) -> u32 {
        tiles.div_ceil(self.bound.max(1)).min(self.max_partitions)
    }
}

/// The bound T of the min-max split: the smallest in `[ceil(total / capacity), ceil(total / (capacity - rows))]` for which
/// `min(ceil(t / T), max_partitions)`, summed over the rows' tile counts `t`, is at most `capacity`.
///
/// `total` sums the tiles and `rows` counts the nonempty rows. The top of the interval always fits: `ceil(t / T)` is below `t / T + 1`.
/// So does the longest row, which keeps the search in int32 (256 rows of 2^23 tiles sum to 2^31) and short. Fitting is monotonic in T: a
/// binary search finds the smallest, one sum a halving.
///
/// Every nonempty row gets its one task, and nothing is searched, where `capacity` is not above `rows`: the bound is then `i32::MAX`.
/// It is the same where there is no tile at all.
pub fn tile_bound(tiles: impl Iterator<Item = u32> + Clone, capacity: usize, max_partitions: u32) -> u32 {
    let capacity = capacity as u64;
    let (mut total, mut rows, mut longest) = (0u64, 0u64, 0u32);
    for t in tiles.clone() {
        total += u64::from(t);
        rows += u64::from(t > 0);
        longest = longest.max(t);
    }
    if rows == 0 || capacity <= rows {
        return i32::MAX as u32;
    }
    let clamp = |bound: u64| bound.min(u64::from(longest)) as u32;
    let (mut low, mut high) = (clamp(total.div_ceil(capacity)), clamp(total.div_ceil(capacity - rows)));
    while low < high {
        let bound = low + (high - low) / 2;
        let rule = MinMaxRule { bound, max_partitions };
        let tasks: u64 = tiles.clone().map(|t| u64::from(rule.tasks(t))).sum();
        if tasks <= capacity { high = bound } else { low = bound + 1 }
    }
    low
}
