//! The AMD helper kernels on the simulator: the planner against the host's, the reducer against float64, cache writes against the CPU's.

#[path = "amd_kernels/build.rs"]
mod build;
#[allow(dead_code)] // shared with the tests of the tile
#[path = "amd_tile/compile.rs"]
mod compile;
#[path = "amd_kernels/planner.rs"]
mod planner;
#[path = "amd_kernels/reducer.rs"]
mod reducer;
#[path = "amd_kernels/writes.rs"]
mod writes;

/// gfx1250 has no simulator: its kernels are compiled.
#[test]
fn gfx1250_compiles() {
    require_clang!();
    for min_max in ["0", "1"] {
        build::compile("plan", "gfx1250", &[("PA_BUCKET", "256"), ("PA_TILE", "256"), ("PA_MIN_MAX", min_max), ("PA_RAGGED", "1")]);
    }
    for (head_dim, threads) in [("128", "64"), ("1024", "1024")] {
        let defines = [("PA_HEAD_DIM", head_dim), ("PA_QUERY", "0"), ("PA_RAGGED", "1"), ("PA_THREADS", threads)];
        build::compile("reduce", "gfx1250", &defines);
    }
    for (kv, scales, layout) in [("0", "0", "0"), ("1", "0", "2"), ("2", "1", "1"), ("2", "2", "0"), ("3", "3", "3")] {
        let cache = [("PA_HEAD_DIM", "128"), ("PA_PAGE", "16"), ("PA_KV", kv), ("PA_SCALES", scales), ("PA_LAYOUT", layout)];
        build::compile("write", "gfx1250", &[&cache[..], &[("PA_QUERY", "0")]].concat());
    }
}
