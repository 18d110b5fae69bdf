//! Which split an arch's plans use.

use super::{MinMaxRule, PLANNER_THREADS, ProportionalRule, tile_bound};
use crate::registry::{Arch, ArchName};

/// How slots are shared out among rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// [`MinMaxRule`].
    MinMax,
    /// [`ProportionalRule`].
    Proportional,
}

impl Split {
    /// The split of a batch of `rows` plan rows on `arch`.
    ///
    /// Min-max on gfx942 and gfx950 while the planner block has a thread a row; proportional beyond that, and always on gfx1250. Min-max
    /// for any batch on the CPU, sm80, sm89 and sm90.
    pub fn of(rows: usize, arch: &Arch) -> Self {
        match arch.name {
            ArchName::Gfx942 | ArchName::Gfx950 if rows <= PLANNER_THREADS => Self::MinMax,
            ArchName::Gfx942 | ArchName::Gfx950 | ArchName::Gfx1250 => Self::Proportional,
            ArchName::Cpu(_) | ArchName::Sm80 | ArchName::Sm89 | ArchName::Sm90 => Self::MinMax,
        }
    }

    /// The rule that gives rows of `tiles` tiles each their number of tasks, at most `capacity` in all if that is at least one a nonempty
    /// row.
    pub(super) fn rule(self, tiles: impl Iterator<Item = u32> + Clone, capacity: usize, max_partitions: u32) -> Rule {
        match self {
            Self::MinMax => Rule::MinMax(MinMaxRule { bound: tile_bound(tiles, capacity, max_partitions), max_partitions }),
            Self::Proportional => Rule::Proportional(ProportionalRule::new(tiles, capacity, max_partitions)),
        }
    }
}

/// A [`Split`] with the numbers of one batch.
pub(super) enum Rule {
    MinMax(MinMaxRule),
    Proportional(ProportionalRule),
}

impl Rule {
    /// Tasks of a row of `tiles` tiles.
    pub(super) fn tasks(&self, tiles: u32) -> u32 {
        match self {
            Self::MinMax(rule) => rule.tasks(tiles),
            Self::Proportional(rule) => rule.tasks(tiles),
        }
    }
}
