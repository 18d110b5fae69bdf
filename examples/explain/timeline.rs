//! When each task runs: workgroups dispatched in slot order to whichever place frees first, a tile taking one unit of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use candle_paged_attn::plan::HostPlan;
use candle_paged_attn::registry::{Arch, ArchName, Selection};

use crate::shape::Shape;

/// One drawing of a plan.
pub struct Panel {
    pub title: String,
    pub timeline: Timeline,
}

/// A workgroup's stay in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stay {
    pub sequence: usize,
    pub start: u64,
    pub end: u64,
}

/// Stays by place. A place is where one workgroup at a time runs.
pub struct Timeline {
    pub places: Vec<Vec<Stay>>,
    /// What a place is.
    pub place: String,
    pub sequences: usize,
}

/// Places of an NVIDIA GPU, and what they are: as many blocks on an SM as its shared memory holds, each with a KiB of its own beside, but no third, for which
/// there are no registers; or the clusters that share a task.
fn blocks_at_once(arch: &Arch, selection: &Selection) -> (usize, String) {
    let each = ((arch.lds_bytes + 1024) / (selection.lds_bytes + 1024)).clamp(1, 2);
    let blocks = arch.compute_units.saturating_mul(each);
    match selection.key.cuda.map_or(1, |cut| cut.cluster) {
        1 if each == 1 => (blocks, "a SM".to_string()),
        1 => (blocks, format!("one of the {each} blocks that a SM has room for")),
        cluster => ((blocks / cluster).max(1), format!("one of the clusters of {cluster} blocks that the GPU has room for")),
    }
}

impl Timeline {
    /// Every (slot, KV head, row group) is a workgroup. An AMD GPU has two places a compute unit, or one where workgroups have eight waves; an NVIDIA one
    /// as many as there is room for, or for the blocks that share a task; a CPU has a place a core of this machine.
    pub fn new(plan: &HostPlan, shape: &Shape, arch: &Arch, selection: &Selection) -> Self {
        let copies = shape.kv_heads.saturating_mul(selection.row_groups);
        let (places, place) = match arch.name {
            ArchName::Cpu(_) => (std::thread::available_parallelism().map_or(1, |cores| cores.get()), "a core of this machine".to_string()),
            _ if selection.flags().dual_group => (arch.compute_units, "a compute unit (two tile groups in each workgroup)".to_string()),
            name if name.is_cuda() => blocks_at_once(arch, selection),
            _ => (arch.compute_units.saturating_mul(2), "one of the two workgroups on a compute unit".to_string()),
        };
        Self { place, ..Self::dispatch(plan, copies, places) }
    }

    fn dispatch(plan: &HostPlan, copies: usize, most_places: usize) -> Self {
        let tasks: Vec<_> = plan.work.iter().filter(|task| task[0] >= 0).collect();
        let workgroups = tasks.iter().flat_map(|task| std::iter::repeat_n(task, copies));
        let mut places: Vec<Vec<Stay>> = vec![vec![]; most_places.min(tasks.len().saturating_mul(copies))];
        let mut free: BinaryHeap<_> = (0..places.len()).map(|place| Reverse((0u64, place))).collect();
        for task in workgroups {
            let Some(Reverse((start, place))) = free.pop() else { break };
            let end = start + u64::from(task[2].abs_diff(task[1]));
            places[place].push(Stay { sequence: task[0] as usize, start, end });
            free.push(Reverse((end, place)));
        }
        Self { places, place: String::new(), sequences: plan.reduce.len() }
    }

    /// When a place is done.
    pub fn ends(&self) -> impl Iterator<Item = u64> + '_ {
        self.places.iter().map(|stays| stays.last().map_or(0, |stay| stay.end))
    }

    /// When the last place is done, in tiles.
    pub fn makespan(&self) -> u64 {
        self.ends().max().unwrap_or(0)
    }

    /// When all places would be done if tiles were shared out evenly.
    pub fn even(&self) -> f64 {
        self.ends().sum::<u64>() as f64 / self.places.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_nvidia_gpu_has_places_for_two_blocks_a_sm_at_most() {
        use candle_paged_attn::cache::{CacheLayout, KvDtype};
        use candle_paged_attn::registry::{Problem, select};

        let arch = Arch::sm90();
        let decode = Problem { layout: CacheLayout::Nhd, kv_dtype: KvDtype::Fp8, ..Problem::default() };
        let places = |p: Problem| blocks_at_once(&arch, &select(&p, &arch).unwrap());
        assert_eq!(places(Problem { batch: 128, capacity: 264, ..decode.clone() }).0, 2 * 132);
        assert_eq!(places(Problem { capacity: 132, ..decode.clone() }), (132, "a SM".to_string()));
        let whole = places(Problem { batch: 1, plan_free: true, task_tiles: 8, ..decode });
        assert_eq!(whole.0, 2 * 132 / 16, "{}", whole.1);
    }

    #[test]
    fn workgroups_go_to_the_place_that_frees_first() {
        let work = vec![[0, 0, 3, 0], [1, 2, 3, 0], [2, 0, 1, 0], [-1, 0, 0, 0]];
        let plan = HostPlan { work, reduce: vec![[0, 1], [1, 1], [2, 1]] };
        let timeline = Timeline::dispatch(&plan, 1, 2);
        let stay = |sequence, start, end| Stay { sequence, start, end };
        assert_eq!(timeline.places, [vec![stay(0, 0, 3)], vec![stay(1, 0, 1), stay(2, 1, 2)]]);
        assert_eq!((timeline.makespan(), timeline.even(), timeline.sequences), (3, 2.5, 3));
        // Each KV head is a workgroup of its own; no more places than workgroups.
        assert_eq!(Timeline::dispatch(&plan, 2, 100).places.len(), 6);
        assert_eq!(Timeline::dispatch(&HostPlan { work: vec![], reduce: vec![] }, 2, 100).makespan(), 0);
    }
}
