//! [`copy_pages`]: whole pages to other pages of the same layer.

use candle::{CpuStorage, InplaceOp1, Layout, Result, bail};

use super::form::LayerForm;
use super::{CacheLayout, LayerCache};

const OP: &str = "copy_pages";

/// Copies page `src` to page `dst` for each pair, K, V and the scales that have pages, bytes as they are.
///
/// Pairs are carried out in order, one after the other: a page written by an earlier pair is what a later pair reads. All page ids are
/// checked before the first copy. On a CUDA device the copies are enqueued.
pub fn copy_pages(cache: &LayerCache, layout: CacheLayout, pairs: &[(u32, u32)]) -> Result<()> {
    let form = LayerForm::of(OP, cache, layout)?;
    check_pairs(pairs, form.dims.pages)?;
    form.tensors().try_for_each(|(_, tensor)| tensor.inplace_op1(&CopyPages { pairs }))
}

/// Refuses page ids past a cache of `limit` pages.
pub(crate) fn check_pairs(pairs: &[(u32, u32)], limit: usize) -> Result<()> {
    match pairs.iter().enumerate().find(|&(_, &(src, dst))| src as usize >= limit || dst as usize >= limit) {
        Some((at, (src, dst))) => bail!("pairs: ({src}, {dst}) at index {at} in a cache of {limit} pages"),
        None => Ok(()),
    }
}

/// What of a tensor's page 0 is contiguous.
pub(crate) struct PageRuns {
    /// Elements of a run.
    pub len: usize,
    /// Where each starts in the storage.
    pub offsets: Vec<usize>,
}

struct CopyPages<'a> {
    pairs: &'a [(u32, u32)],
}

impl CopyPages<'_> {
    fn run<T: Copy>(&self, data: &mut [T], layout: &Layout) {
        let PageRuns { len, offsets } = page_runs(layout);
        let page = layout.stride()[0];
        for &(src, dst) in self.pairs {
            for &offset in &offsets {
                let from = src as usize * page + offset;
                data.copy_within(from..from + len, dst as usize * page + offset);
            }
        }
    }
}

/// The contiguous runs of page 0, in the order of its elements.
pub(crate) fn page_runs(layout: &Layout) -> PageRuns {
    let (dims, strides) = (&layout.dims()[1..], &layout.stride()[1..]);
    let (mut run, mut outer) = (1, dims.len());
    while outer > 0 && (strides[outer - 1] == run || dims[outer - 1] == 1) {
        run *= dims[outer - 1];
        outer -= 1;
    }
    let offsets = dims[..outer].iter().zip(strides).fold(vec![layout.start_offset()], |starts, (&size, &stride)| {
        starts.iter().flat_map(|start| (0..size).map(move |i| start + i * stride)).collect()
    });
    PageRuns { len: run, offsets }
}

impl InplaceOp1 for CopyPages<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match storage {
            CpuStorage::U8(data) => self.run(data, layout),
            CpuStorage::F8E4M3(data) => self.run(data, layout),
            CpuStorage::F16(data) => self.run(data, layout),
            CpuStorage::BF16(data) => self.run(data, layout),
            CpuStorage::F32(data) => self.run(data, layout),
            other => bail!("{OP}: {:?} is not a KV dtype", candle::backend::BackendStorage::dtype(other)),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle::CudaStorage, layout: &Layout) -> Result<()> {
        crate::cuda::copy_pages(storage, layout, self.pairs)
    }
}
