//! The kernels that a program's calls will need, known without a GPU.

use std::collections::{BTreeSet, HashMap};

use candle::{DType, Layout, Result, bail};

use super::decided::{Decided, Plan, plan_on_device};
use super::specialize::{self, ReducerCut, WriteKey};
use crate::cache::{CacheDims, CacheLayout, ExpectedCalls, LayerCache, LayerForm, PagedKvCache};
use crate::jit::Specialization;
use crate::op::call::{Call, Described, Meta};
use crate::op::shapes::Shapes;
use crate::options::{DecodeOptions, PlanChoice};
use crate::plan::{PLANNER_THREADS, PlanRequest, batch_bucket, capacity, no_lengths};
use crate::registry::{Arch, KernelKey, Selection};

/// Every kernel that [`PagedKvCache::warm_up`] loads on a GPU of `arch` for a cache like `cache`, which may be on any device: to compile them
/// where there is no GPU.
///
/// # Errors
/// What the calls themselves would refuse.
pub fn expected_kernels(cache: &PagedKvCache, calls: &ExpectedCalls, arch: &Arch) -> Result<Vec<Specialization>> {
    Needed::of(cache.layer(0)?, cache.layout(), calls, arch)?.specializations(arch)
}

/// The kernels that calls need.
pub(super) struct Needed {
    pub tiles: HashMap<KernelKey, Selection>,
    pub reducers: BTreeSet<ReducerCut>,
    /// Rows, one count of each bucket.
    pub planners: BTreeSet<usize>,
    pub write: WriteKey,
    /// Of the calls.
    pub ragged: bool,
    pub per_head: bool,
}

impl Needed {
    /// Of `calls` over a layer like this one.
    pub fn of(layer: &LayerCache, layout: CacheLayout, calls: &ExpectedCalls, arch: &Arch) -> Result<Self> {
        check_sizes(calls)?;
        let form = LayerForm::of("warm_up", layer, layout)?;
        let CacheDims { page_size, head_dim, .. } = form.dims;
        let (dtype, scales) = (calls.dtype, form.scale_mode());
        let write = WriteKey { arch: arch.name, head_dim, page_size, dtype, kv_dtype: form.dtype, scales, layout };
        let (tiles, reducers, planners) = <(HashMap<_, _>, BTreeSet<_>, BTreeSet<_>)>::default();
        let mut needed = Self { tiles, reducers, planners, write, ragged: calls.ragged, per_head: calls.per_head_tables };
        for batch in samples(calls.batch) {
            for query_len in samples(calls.query_len) {
                for max_pages in samples(calls.max_pages) {
                    needed.add(layer, form.dims, &ExpectedCalls { batch, query_len, max_pages, ..*calls }, arch)?;
                }
            }
        }
        // Which batches are planned changes between the samples: a planner for each number of rows that one is compiled for.
        if !needed.planners.is_empty() {
            let heads = if calls.per_head_tables { form.dims.kv_heads } else { 1 };
            let most = batch_bucket(calls.batch.saturating_mul(heads).min(PLANNER_THREADS));
            needed.planners.extend(std::iter::successors(Some(1), |rows| Some(rows * 2)).take_while(|&rows| rows <= most));
        }
        Ok(needed)
    }

    /// Adds those of calls of exactly these sizes.
    fn add(&mut self, layer: &LayerCache, dims: CacheDims, calls: &ExpectedCalls, arch: &Arch) -> Result<()> {
        let CacheDims { kv_heads, head_dim, .. } = dims;
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
            layout: self.write.layout,
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
        let planned = plan_on_device(&shapes, query_len, &call, arch, &PlanChoice::Default)?;
        // A call may ask for no plan.
        let free = plan_on_device(&shapes, query_len, &call, arch, &PlanChoice::Free)?;
        for plan in [planned, free].into_iter().chain(given_plans(&shapes, query_len, calls.window, arch)?) {
            let decided = Decided::new(shapes.clone(), query_len, plan, &call, arch)?;
            if decided.is_split() {
                self.reducers.insert(decided.reducer_cut(arch));
            }
            if decided.is_planned_here() {
                self.planners.insert(batch_bucket(decided.plan_rows()));
            }
            self.tiles.entry(decided.selection.key).or_insert(decided.selection);
        }
        Ok(())
    }

    fn specializations(&self, arch: &Arch) -> Result<Vec<Specialization>> {
        let WriteKey { head_dim, dtype, .. } = self.write;
        let tiles = self.tiles.values().map(specialize::tile);
        let reducers = self.reducers.iter().map(|&cut| specialize::reduce(arch.name, head_dim, dtype, self.ragged, self.per_head, cut));
        let planners = self.planners.iter().map(|&rows| specialize::plan(arch, rows, self.ragged));
        let writers = [false, true].map(|latest| specialize::write_with(&self.write, dtype, latest));
        let mut all = tiles.chain(reducers).chain(planners).chain(writers).collect::<Result<Vec<_>>>()?;
        // Whether a key has one query token or several is nothing to the code.
        all.sort_by(|a, b| (&a.kernel, &a.defines).cmp(&(&b.kernel, &b.defines)));
        all.dedup();
        Ok(all)
    }
}

/// Refuses sizes that no call has.
fn check_sizes(calls: &ExpectedCalls) -> Result<()> {
    let most = i32::MAX as usize;
    let ExpectedCalls { q_heads, batch, query_len, max_pages, .. } = *calls;
    for (name, size) in [("q_heads", q_heads), ("batch", batch), ("query_len", query_len), ("max_pages", max_pages)] {
        if !(1..=most).contains(&size) {
            bail!("warm_up: {name} {size} is not from 1 to {most}")
        }
    }
    match batch.checked_mul(query_len).and_then(|rows| rows.checked_mul(q_heads)) {
        Some(rows) if rows <= most => Ok(()),
        _ => bail!("warm_up: {batch} sequences of {query_len} tokens with {q_heads} query heads are more than {most} rows"),
    }
}

/// Every size to 16, then ever larger steps to `most`: what is decided changes at a size and then stays.
fn samples(most: usize) -> Vec<usize> {
    let step = |&size: &usize| (size < most).then(|| (size + (size / 8).max(1)).min(most));
    std::iter::successors((most > 0).then_some(1), step).collect()
}

/// Plans that callers make for such a call themselves, with the longest context in mind or without.
fn given_plans(shapes: &Shapes, query_len: usize, window: Option<usize>, arch: &Arch) -> Result<Vec<Plan>> {
    let (context_lens, query_lens) = (no_lengths(shapes.plan_rows()), [query_len]);
    let mut plans = vec![];
    for max_context_len in [None, Some(shapes.table_tokens())] {
        let request = PlanRequest { window, max_context_len, ..PlanRequest::new(&context_lens, &query_lens, shapes.heads_of_a_row()) };
        let capacity = capacity(&request, arch)?;
        // From one tile a task to any number, the cuts of a block change past one, 8, 16 and 32.
        plans.extend([1, 8, 16, 32, usize::MAX].map(|task_tiles| Plan::Device { capacity, made: true, task_tiles }));
    }
    Ok(plans)
}

#[cfg(test)]
mod tests {
    use candle::{DType, Device, Result};

    use super::{expected_kernels, samples};
    use crate::cache::{CacheConfig, CacheDims, ExpectedCalls, KvDtype, PagedKvCache, Quantization};
    use crate::jit::Source;
    use crate::registry::Arch;

    fn cache() -> Result<PagedKvCache> {
        let dims = CacheDims { pages: 4, kv_heads: 4, page_size: 16, head_dim: 128 };
        PagedKvCache::new(
            CacheConfig { layers: 1, dims, dtype: KvDtype::Bf16, layout: None, quantization: Quantization::None },
            &Device::Cpu,
        )
    }

    /// Of these calls 65 and 66 sequences are planned for up to 128 rows, those with more, and the samples, are not.
    #[test]
    fn planners_of_all_sizes_are_expected() -> Result<()> {
        let cache = cache()?;
        let calls = ExpectedCalls { batch: 100, max_pages: 128, ..ExpectedCalls::new(64, DType::BF16) };
        let kernels = expected_kernels(&cache, &calls, &Arch::sm90())?;
        let planners = kernels.iter().filter(|kernel| kernel.source == Source::Plan).count();
        assert_eq!(planners, 8, "of 1, 2, 4 to 128 rows");
        Ok(())
    }

    #[test]
    fn sizes_that_no_call_has_are_refused() -> Result<()> {
        let cache = cache()?;
        let calls = ExpectedCalls::new(64, DType::BF16);
        for size in [0, usize::MAX] {
            for (name, calls) in [
                ("q_heads", ExpectedCalls { q_heads: size, ..calls }),
                ("batch", ExpectedCalls { batch: size, ..calls }),
                ("query_len", ExpectedCalls { query_len: size, ..calls }),
                ("max_pages", ExpectedCalls { max_pages: size, ..calls }),
            ] {
                let error = expected_kernels(&cache, &calls, &Arch::sm90()).unwrap_err().to_string();
                assert!(error.contains(&format!("{name} {size}")), "{error}");
            }
        }
        let many = ExpectedCalls { batch: 1 << 20, query_len: 1 << 20, ..calls };
        let error = expected_kernels(&cache, &many, &Arch::sm90()).unwrap_err().to_string();
        assert!(error.contains("rows"), "{error}");
        Ok(())
    }

    #[test]
    fn samples_begin_dense_and_end_at_the_most() {
        assert!(samples(0).is_empty());
        assert_eq!(samples(5), [1, 2, 3, 4, 5]);
        let many = samples(512);
        assert!(many[..16].iter().copied().eq(1..=16) && many.last() == Some(&512), "{many:?}");
        assert!(many.len() < 64);
    }
}
