//! The kernels' sources, as part of the program.

use crate::registry::ArchName;

/// Embeds files of `kernels/` as (path below `kernels/`, text).
macro_rules! embed {
    ($($path:literal,)*) => { &[$(($path, include_str!(concat!("../../kernels/", $path))),)*] };
}

/// Every file that an AMD kernel may include.
pub(super) const AMD: &[(&str, &str)] = embed! {
    "amd/epilogue.h",
    "amd/gcn.h",
    "amd/gemm.h",
    "amd/lds.h",
    "amd/mxfp4.h",
    "amd/mxfp4_pipeline.h",
    "amd/pages.h",
    "amd/pipeline.h",
    "amd/plan.hip",
    "amd/query.h",
    "amd/reduce.hip",
    "amd/softmax.h",
    "amd/task.h",
    "amd/tile.hip",
    "amd/tile_mxfp4.hip",
    "amd/traits.h",
    "amd/write.hip",
    "common/args.h",
    "common/device.h",
    "common/device_amd.h",
    "common/device_nvidia.h",
    "common/number.h",
    "common/planner.h",
    "common/quant.h",
    "common/records.h",
    "common/reduce.h",
    "common/write.h",
};

/// Every file that an NVIDIA kernel may include.
pub(super) const NVIDIA: &[(&str, &str)] = embed! {
    "common/args.h",
    "common/device.h",
    "common/device_amd.h",
    "common/device_nvidia.h",
    "common/number.h",
    "common/planner.h",
    "common/quant.h",
    "common/records.h",
    "common/reduce.h",
    "common/write.h",
    "nvidia/args.h",
    "nvidia/cluster.cuh",
    "nvidia/direct.cuh",
    "nvidia/epilogue.cuh",
    "nvidia/gemm.cuh",
    "nvidia/helpers.cuh",
    "nvidia/narrow_query.cuh",
    "nvidia/merge.cuh",
    "nvidia/narrow.cuh",
    "nvidia/pages.cuh",
    "nvidia/pipeline.cuh",
    "nvidia/plain.cu",
    "nvidia/plain.cuh",
    "nvidia/plan.cu",
    "nvidia/ptx.cuh",
    "nvidia/reduce.cu",
    "nvidia/reduce.cuh",
    "nvidia/softmax.cuh",
    "nvidia/task.cuh",
    "nvidia/tile.cu",
    "nvidia/tile.cuh",
    "nvidia/traits.cuh",
    "nvidia/wgmma.cuh",
    "nvidia/write.cu",
};

/// The files that kernels for `arch` are made of.
pub(super) fn files(arch: ArchName) -> &'static [(&'static str, &'static str)] {
    if arch.is_cuda() { NVIDIA } else { AMD }
}

/// Files that are compiled; the others are included by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Attention over 16-bit and FP8 caches, on matrix units.
    Tile,
    /// AMD: attention over MXFP4 caches.
    TileMxfp4,
    /// NVIDIA: attention without tensor cores, over any cache.
    Plain,
    /// Merges the partial results of a plan's tasks.
    Reduce,
    /// Makes a plan on the device.
    Plan,
    /// Writes new tokens into their pages.
    Write,
}

impl Source {
    /// Every root.
    pub const ALL: [Self; 6] = [Self::Tile, Self::TileMxfp4, Self::Plain, Self::Reduce, Self::Plan, Self::Write];

    /// Path below `kernels/`; `None` where `arch` has no such kernel.
    pub fn path(self, arch: ArchName) -> Option<&'static str> {
        let [amd, nvidia] = match self {
            Self::Tile => [Some("amd/tile.hip"), Some("nvidia/tile.cu")],
            Self::TileMxfp4 => [Some("amd/tile_mxfp4.hip"), None],
            Self::Plain => [None, Some("nvidia/plain.cu")],
            Self::Reduce => [Some("amd/reduce.hip"), Some("nvidia/reduce.cu")],
            Self::Plan => [Some("amd/plan.hip"), Some("nvidia/plan.cu")],
            Self::Write => [Some("amd/write.hip"), Some("nvidia/write.cu")],
        };
        if arch.is_amd() {
            amd
        } else if arch.is_cuda() {
            nvidia
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn files_of(folder: &str) -> Vec<String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels").join(folder);
        let Ok(entries) = std::fs::read_dir(&path) else { return vec![] };
        let files = entries.map(|entry| entry.unwrap()).filter(|entry| entry.file_type().unwrap().is_file());
        files.map(|entry| format!("{folder}/{}", entry.file_name().to_str().unwrap())).collect()
    }

    /// A header that is not in the table would be missing only where a kernel is compiled.
    #[test]
    fn every_kernel_file_is_embedded() {
        for (folder, table) in [("amd", AMD), ("nvidia", NVIDIA)] {
            let mut on_disk: Vec<_> = [folder, "common"].into_iter().flat_map(files_of).collect();
            let mut embedded: Vec<_> = table.iter().map(|(path, _)| path.to_string()).collect();
            on_disk.sort();
            embedded.sort();
            assert_eq!(embedded, on_disk, "src/jit/sources.rs: the table of kernels/{folder} and kernels/common");
        }
    }
}
