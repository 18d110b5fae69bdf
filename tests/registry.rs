//! The registry: every flag's condition at its boundaries, limits and their errors, and a snapshot of the whole decision.

#[path = "registry/conditions.rs"]
mod conditions;
#[path = "registry/limits.rs"]
mod limits;
#[path = "registry/snapshot.rs"]
mod snapshot;
