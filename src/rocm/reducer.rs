//! The shape that the reducer is launched in.

use crate::gpu::launch::LaunchShape;

/// Partials that a reducer's thread has in flight at a time.
const IN_FLIGHT: usize = 8;

/// Threads that a reducer's block may have, the fewest first.
pub const REDUCER_THREADS: [usize; 3] = [64, 256, 1024];

/// The reducer's launch for `sequences` of at most `query_len` rows. Its threads (the specialization's PA_THREADS) are enough to have all tasks
/// of a plan row of average length in flight at once: that depends on the plan's sizes alone, so a captured graph stays right.
pub(super) fn reducer(
    head_dim: usize,
    query_len: usize,
    q_heads: usize,
    sequences: usize,
    capacity: usize,
    plan_rows: usize,
) -> LaunchShape {
    let chunk = [256, 128, 64].into_iter().find(|chunk| head_dim.is_multiple_of(*chunk)).unwrap_or(64);
    let tasks = capacity.div_ceil(plan_rows.max(1));
    let enough = |threads: &usize| threads / (chunk / 4) * IN_FLIGHT >= tasks;
    let [.., most] = REDUCER_THREADS;
    let threads = REDUCER_THREADS.into_iter().find(enough).unwrap_or(most);
    LaunchShape { threads: threads as u32, grid: [(query_len * head_dim.div_ceil(chunk)) as u32, q_heads as u32, sequences as u32] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reducers_have_threads_for_their_tasks() {
        let threads = |head_dim, capacity, rows| reducer(head_dim, 1, 8, rows, capacity, rows).threads;
        assert_eq!([threads(128, 512, 256), threads(128, 512, 8), threads(128, 512, 1)], [64, 256, 1024]);
        assert_eq!([threads(256, 512, 64), threads(64, 512, 16)], [64, 64]);
        assert_eq!(reducer(1024, 4, 8, 2, 2, 2), LaunchShape { threads: 64, grid: [16, 8, 2] });
        assert_eq!(reducer(192, 1, 1, 0, 0, 0).grid, [3, 1, 0]);
    }
}
