//! The kernels' sources, as part of the program.

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

/// Files that are compiled; the others are included by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Attention over 16-bit and FP8 caches.
    Tile,
    /// Attention over MXFP4 caches.
    TileMxfp4,
    /// Merges the partial results of a plan's tasks.
    Reduce,
    /// Makes a plan on the device.
    Plan,
    /// Writes new tokens into their pages.
    Write,
}

impl Source {
    /// Every root.
    pub const ALL: [Self; 5] = [Self::Tile, Self::TileMxfp4, Self::Reduce, Self::Plan, Self::Write];

    /// Path below `kernels/`.
    pub fn path(self) -> &'static str {
        match self {
            Self::Tile => "amd/tile.hip",
            Self::TileMxfp4 => "amd/tile_mxfp4.hip",
            Self::Reduce => "amd/reduce.hip",
            Self::Plan => "amd/plan.hip",
            Self::Write => "amd/write.hip",
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
        entries.map(|entry| format!("{folder}/{}", entry.unwrap().file_name().to_str().unwrap())).collect()
    }

    /// A header that is not in the table would be missing only where a kernel is compiled.
    #[test]
    fn every_kernel_file_is_embedded() {
        let mut on_disk: Vec<_> = ["amd", "common"].into_iter().flat_map(files_of).collect();
        let mut embedded: Vec<_> = AMD.iter().map(|(path, _)| path.to_string()).collect();
        on_disk.sort();
        embedded.sort();
        assert_eq!(embedded, on_disk, "src/jit/sources.rs: the table AMD against kernels/amd and kernels/common");
    }
}
