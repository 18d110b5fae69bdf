//! What a kernel costs, from its execution on the simulator: counts, and times predicted from them.
//!
//! - [`Counts`]: instructions by kind, LDS conflicts, bytes by what they are ([`Tag`]), of a traced workgroup; [`Static`]: of a whole binary.
//! - [`waits`]: every `s_waitcnt` with the loads it forced and those it left in flight.
//! - [`timing`]: an in-order estimate of when each wave of a compute unit issues what.
//! - [`bounds`]: the largest of memory, VALU, MFMA and LDS time.
//! - [`constants`]: every number that the two rest on, with its source.
//!
//! **Times are predictions.** No AMD GPU was at hand; [`constants`] says which numbers are documented and which were fitted to published times.

pub mod bounds;
pub mod constants;
pub mod counts;
mod op;
pub mod predict;
mod tag;
pub mod timing;
pub mod waits;

pub use bounds::{Bound, Bounds};
pub use constants::Machine;
pub use counts::{Counts, Static};
pub use predict::{Grid, Predicted, predict};
pub use tag::{Tag, Tags};
pub use timing::{Timing, time};
