//! Loading a program's kernels before its first request.

use candle::Result;
use rayon::prelude::*;

use super::device::Gpu;
use super::expected::Needed;
use crate::cache::{CacheLayout, ExpectedCalls, LayerCache};

/// Loads every kernel that `calls` over a layer like this one run; gives how many.
pub(crate) fn warm_up(layer: &LayerCache, layout: CacheLayout, calls: &ExpectedCalls) -> Result<usize> {
    let candle::Device::Cuda(device) = layer.key.device() else { candle::bail!("warm_up: the cache is not on a CUDA device") };
    let (gpu, stream) = (Gpu::of(device)?, device.cuda_stream());
    let Needed { tiles, reducers, planners, write, ragged, per_head } = Needed::of(layer, layout, calls, &gpu.arch)?;
    let mut loads: Vec<Box<dyn Fn() -> Result<()> + Send + Sync + '_>> = vec![];
    for selection in tiles.values() {
        loads.push(Box::new(|| gpu.tile(&stream, selection).map(drop)));
    }
    for &cut in &reducers {
        let kernel = |cut| gpu.reducer(&stream, write.head_dim, write.dtype, ragged, per_head, cut).map(drop);
        loads.push(Box::new(move || kernel(cut)));
    }
    for &rows in &planners {
        let kernel = |rows| gpu.planner(&stream, rows, ragged).map(drop);
        loads.push(Box::new(move || kernel(rows)));
    }
    for latest in [false, true] {
        let kernel = |latest| gpu.writer(&stream, write, write.dtype, latest).map(drop);
        loads.push(Box::new(move || kernel(latest)));
    }
    loads.par_iter().try_for_each(|load| load())?;
    Ok(loads.len())
}
