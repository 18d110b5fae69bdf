//! Compiling a program's kernels before its first request.

use std::collections::{HashMap, HashSet};

use candle::{DType, Layout, Result};
use rayon::prelude::*;

use super::decided::{Decided, Plan, plan_on_device};
use super::device::Gpu;
use super::specialize::{ReducerCut, WriteKey};
use super::write::scale_mode;
use crate::cache::{CacheDims, CacheLayout, ExpectedCalls, KvDtype, LayerCache, LayerForm};
use crate::op::call::{Call, Described, Meta};
use crate::op::shapes::Shapes;
use crate::options::{DecodeOptions, PlanChoice};
use crate::plan::{PlanRequest, capacity};
use crate::registry::{KernelKey, Selection};

/// Loads every kernel that `calls` over a layer like this one run; gives how many.
pub(crate) fn warm_up(layer: &LayerCache, layout: CacheLayout, calls: &ExpectedCalls) -> Result<usize> {
    let candle::Device::Cuda(device) = layer.key.device() else { candle::bail!("warm_up: the cache is not on a CUDA device") };
    let (gpu, stream) = (Gpu::of(device)?, device.cuda_stream());
    let mut needed = Needed::default();
    for batch in samples(calls.batch) {
        for query_len in samples(calls.query_len) {
            for max_pages in samples(calls.max_pages) {
                needed.add(layer, layout, &ExpectedCalls { batch, query_len, max_pages, ..*calls }, &gpu)?;
            }
        }
    }
    let form = LayerForm::of("warm_up", layer, layout)?;
    let CacheDims { page_size, head_dim, .. } = form.dims;
    let (dtype, scales) = (calls.dtype, scale_mode(&form));
    let write = WriteKey { arch: gpu.arch.name, head_dim, page_size, dtype, kv_dtype: form.dtype, scales, layout };
    let mut loads: Vec<Box<dyn Fn() -> Result<()> + Send + Sync + '_>> = vec![];
    for selection in needed.tiles.values() {
        loads.push(Box::new(|| gpu.tile(&stream, selection).map(drop)));
    }
    for &cut in &needed.reducers {
        let kernel = |cut| gpu.reducer(&stream, head_dim, dtype, calls.ragged, calls.per_head_tables, cut).map(drop);
        loads.push(Box::new(move || kernel(cut)));
    }
    for &rows in &needed.planners {
        let kernel = |rows| gpu.planner(&stream, rows, calls.ragged).map(drop);
        loads.push(Box::new(move || kernel(rows)));
    }
    for latest in [false, true] {
        let kernel = |latest| gpu.writer(&stream, write, dtype, latest).map(drop);
        loads.push(Box::new(move || kernel(latest)));
    }
    loads.par_iter().try_for_each(|load| load())?;
    Ok(loads.len())
}

/// Every size to 16, then ever larger steps to `most`: what is decided changes at a size and then stays.
fn samples(most: usize) -> Vec<usize> {
    let step = |&size: &usize| (size < most).then(|| (size + (size / 8).max(1)).min(most));
    std::iter::successors((most > 0).then_some(1), step).collect()
}

/// The kernels found so far.
#[derive(Default)]
struct Needed {
    tiles: HashMap<KernelKey, Selection>,
    reducers: HashSet<ReducerCut>,
    /// Rows, one count of each bucket.
    planners: HashSet<usize>,
}

impl Needed {
    /// Adds those of calls of exactly these sizes.
    fn add(&mut self, layer: &LayerCache, layout: CacheLayout, calls: &ExpectedCalls, gpu: &Gpu) -> Result<()> {
        let CacheDims { kv_heads, head_dim, .. } = layout.dims_of_key(layer.key.dims(), KvDtype::of(layer.key.dtype())?)?;
        let ExpectedCalls { batch, query_len, max_pages, .. } = *calls;
        let q = Layout::contiguous((batch * query_len, calls.q_heads, head_dim));
        let (tables, lens) = match calls.per_head_tables {
            true => (Layout::contiguous((batch, kv_heads, max_pages)), Layout::contiguous((batch, kv_heads))),
            false => (Layout::contiguous((batch, max_pages)), Layout::contiguous(batch)),
        };
        let starts = Layout::contiguous(batch + 1);
        let of = |dtype, layout| Meta { dtype, layout };
        let options = DecodeOptions {
            softmax_scale: calls.softmax_scale,
            window: calls.window,
            softcap: calls.softcap,
            k_scale: layer.k_scale.map(Described::meta),
            v_scale: layer.v_scale.map(Described::meta),
            layout,
            query_start: calls.ragged.then(|| of(DType::U32, &starts)),
            ..DecodeOptions::default()
        };
        let call = Call {
            q: of(calls.dtype, &q),
            key: layer.key.meta(),
            value: layer.value.meta(),
            out: None,
            block_tables: of(DType::U32, &tables),
            context_lens: of(DType::U32, &lens),
            options,
        };
        let shapes = Shapes::new(&call)?;
        let planned = plan_on_device(&shapes, query_len, &call, gpu, &PlanChoice::Default)?;
        // A call may ask for no plan.
        let free = plan_on_device(&shapes, query_len, &call, gpu, &PlanChoice::Free)?;
        for plan in [planned, free].into_iter().chain(given_plans(&shapes, query_len, calls.window, gpu)?) {
            let decided = Decided::new(shapes.clone(), query_len, plan, &call, gpu)?;
            if decided.is_split() {
                self.reducers.insert(decided.reducer_cut(gpu));
            }
            if decided.is_planned_here() {
                self.planners.insert(crate::plan::batch_bucket(decided.plan_rows()));
            }
            self.tiles.entry(decided.selection.key).or_insert(decided.selection);
        }
        Ok(())
    }
}

/// Plans that callers make for such a call themselves, with the longest context in mind or without.
fn given_plans(shapes: &Shapes, query_len: usize, window: Option<usize>, gpu: &Gpu) -> Result<Vec<Plan>> {
    let (rows, kv_heads) = if shapes.per_head { (shapes.batch * shapes.dims.kv_heads, 1) } else { (shapes.batch, shapes.dims.kv_heads) };
    // The lengths play no part.
    let (context_lens, query_lens) = (vec![0; rows], [query_len]);
    let mut plans = vec![];
    for max_context_len in [None, Some(shapes.table_tokens())] {
        let request = PlanRequest { window, max_context_len, ..PlanRequest::new(&context_lens, &query_lens, kv_heads) };
        let capacity = capacity(&request, &gpu.arch)?;
        // From one tile a task to any number, the cuts of a block change past one and past 16.
        plans.extend([1, 16, usize::MAX].map(|task_tiles| Plan::Device { capacity, made: true, task_tiles }));
    }
    Ok(plans)
}

#[cfg(test)]
mod tests {
    use super::samples;

    #[test]
    fn samples_begin_dense_and_end_at_the_most() {
        assert!(samples(0).is_empty());
        assert_eq!(samples(5), [1, 2, 3, 4, 5]);
        let many = samples(512);
        assert!(many[..16].iter().copied().eq(1..=16) && many.last() == Some(&512), "{many:?}");
        assert!(many.len() < 64);
    }
}
