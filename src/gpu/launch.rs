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

/// The cache write's launch.
pub(crate) fn writer(tokens: usize, kv_heads: usize) -> LaunchShape {
    LaunchShape { threads: 256, grid: [tokens.div_ceil(16) as u32, kv_heads as u32, 2] }
}
