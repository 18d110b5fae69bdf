//! The planner: how a batch is split into tasks. Pure; no device code.
//!
//! A *plan row* is one sequence, or one (sequence, KV head) pair where each KV head has its own block table. The tokens a row attends are
//! counted in tiles (of 256 tokens, 128 on NVIDIA GPUs: [`ArchName::tile_tokens`](crate::registry::ArchName::tile_tokens)); a *task* is a contiguous range of one row's tiles, and occupies one *slot* of the plan. KV heads
//! that share a plan row run the same tasks, so a plan of `capacity` slots launches `capacity * kv_heads` workgroups.
//!
//! Planning goes in four steps, each a pure function that a device planner can repeat record for record:
//!
//! 1. [`tile_range`]: context length, query length and window of a row give the tiles it needs.
//! 2. [`capacity`]: batch, budget and partition limit give the number of slots. It does not depend on the lengths that rows have, so
//!    tensors and scratch of this size stay right for every step of a decode loop. On NVIDIA GPUs it depends on the most that they may
//!    have, [`PlanRequest::max_context_len`], which then has to be the loop's and not the step's. Calls that make their own plan from tables on the
//!    host name the step's.
//! 3. [`Split`]: how many tasks each row gets, by [`MinMaxRule`] or [`ProportionalRule`].
//! 4. [`HostPlan`]: the tasks packed row by row into slots; `n` tasks of `t` tiles start at tile `floor(i * t / n)` of the row's range.

mod block;
mod budget;
mod covers;
mod decode;
mod host;
mod minmax;
mod proportional;
mod request;
mod split;
mod tiles;

pub use block::{PLANNER_THREADS, PlannerBlock, batch_bucket};
pub use budget::{MAX_SLOTS, capacity, default_budget};
pub use decode::DecodePlan;
pub use host::{HostPlan, PADDING};
pub use minmax::{MinMaxRule, tile_bound};
pub use proportional::ProportionalRule;
pub use request::PlanRequest;
#[cfg(any(feature = "rocm", feature = "nvrtc"))]
pub(crate) use request::no_lengths;
pub use split::Split;
pub(crate) use tiles::first_token;
pub use tiles::{TILE_TOKENS, TileRange, tile_range};
