//! Whole pages on the device, and from it.

use candle::backend::BackendStorage;
use candle::cuda_backend::cudarc::driver::{CudaStream, sys};
use candle::{CpuStorage, CudaStorage, Device, InplaceOp2, Layout, Result, Tensor, bail};

use super::launch::check;
use super::memory::{Reads, write_address};
use crate::cache::{LayerCache, PageRuns, page_runs};
use crate::options::KvScale;

/// Enqueues the copies of pages (src, dst) of one tensor, in order.
pub(crate) fn copy_pages(storage: &mut CudaStorage, layout: &Layout, pairs: &[(u32, u32)]) -> Result<()> {
    let (stream, size) = (storage.device.cuda_stream(), storage.dtype().size_in_bytes());
    let PageRuns { len, offsets } = page_runs(layout);
    let page = layout.stride()[0];
    let (base, _guard) = write_address(storage, &Layout::contiguous(0), &stream);
    let address = |id: u32, offset: usize| base + ((id as usize * page + offset) * size) as u64;
    for &(src, dst) in pairs.iter().filter(|(src, dst)| src != dst) {
        for &offset in &offsets {
            // SAFETY: a page's run, within the tensor; two pages have no byte in common.
            unsafe { copy(address(dst, offset), address(src, offset), len * size, &stream) }?;
        }
    }
    Ok(())
}

/// `pages` of a layer's tensors, on the CPU in that order. Waits for the device.
pub(crate) fn read_pages(cache: &LayerCache, pages: &[u32]) -> Result<LayerCache> {
    let scale = |scale: &KvScale| match scale {
        KvScale::Tensor(tensor) if tensor.elem_count() > 1 => read(tensor, pages).map(KvScale::Tensor),
        KvScale::Tensor(tensor) => tensor.to_device(&Device::Cpu).map(KvScale::Tensor),
        other => Ok(other.clone()),
    };
    Ok(LayerCache {
        key: read(&cache.key, pages)?,
        value: read(&cache.value, pages)?,
        k_scale: scale(&cache.k_scale)?,
        v_scale: scale(&cache.v_scale)?,
    })
}

fn read(tensor: &Tensor, pages: &[u32]) -> Result<Tensor> {
    let dims: Vec<usize> = [&[pages.len()], &tensor.dims()[1..]].concat();
    let copy = Tensor::zeros(dims, tensor.dtype(), tensor.device())?;
    if copy.elem_count() > 0 {
        copy.inplace_op2(tensor, &Take { pages })?;
    }
    copy.to_device(&Device::Cpu)
}

/// Copies `pages` of the second tensor, in order, to the first, which is contiguous.
struct Take<'a> {
    pages: &'a [u32],
}

impl InplaceOp2 for Take<'_> {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<()> {
        bail!("gather: a cache tensor moved to the CPU")
    }

    fn cuda_fwd(&self, to: &mut CudaStorage, to_layout: &Layout, from: &CudaStorage, layout: &Layout) -> Result<()> {
        let (stream, size) = (from.device.cuda_stream(), from.dtype().size_in_bytes());
        let PageRuns { len, offsets } = page_runs(layout);
        let page = layout.stride()[0];
        let mut reads = Reads::new(&stream);
        let source = reads.address(from, &Layout::contiguous(0));
        let (mut target, _guard) = write_address(to, to_layout, &stream);
        for &id in self.pages {
            for &offset in &offsets {
                let at = source + ((id as usize * page + offset) * size) as u64;
                // SAFETY: a page's run, within the tensor, to the place in the copy that the runs before it have left.
                unsafe { copy(target, at, len * size, &stream) }?;
                target += (len * size) as u64;
            }
        }
        Ok(())
    }
}

/// Enqueues a copy of `bytes` on the device.
///
/// # Safety
/// Both ranges are allocated until the stream has passed this, and apart.
unsafe fn copy(to: u64, from: u64, bytes: usize, stream: &CudaStream) -> Result<()> {
    // SAFETY: the caller's word.
    check(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.cu_stream()) }, format_args!("copying {bytes} bytes of a page"))
}
