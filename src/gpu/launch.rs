//! The shapes that the helper kernels of `kernels/common` are launched in.

use crate::plan::PLANNER_THREADS;

/// A launch: threads of a block, and the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaunchShape {
    pub threads: u32,
    pub grid: [u32; 3],
}

/// The planner's one block.
pub(crate) const PLAN: LaunchShape = LaunchShape { threads: PLANNER_THREADS as u32, grid: [1; 3] };

/// Partials that a reducer's thread has in flight at a time.
#[cfg(feature = "rocm")]
const IN_FLIGHT: usize = 8;

/// Threads of a reducer's block, the fewest first.
#[cfg(feature = "rocm")]
pub(crate) const REDUCER_THREADS: [usize; 3] = [64, 256, 1024];

/// The reducer's launch for `sequences` of at most `query_len` rows. Its threads (the specialization's PA_THREADS) are enough to have all tasks
/// of a plan row of average length in flight at once: that depends on the plan's sizes alone, so a captured graph stays right.
#[cfg(feature = "rocm")]
pub(crate) fn reducer(
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

/// The cache write's launch.
pub(crate) fn writer(tokens: usize, kv_heads: usize) -> LaunchShape {
    LaunchShape { threads: 256, grid: [tokens.div_ceil(16) as u32, kv_heads as u32, 2] }
}

#[cfg(all(test, feature = "rocm"))]
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
