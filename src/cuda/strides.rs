//! From tensors to the strides the kernels take, refused where a kernel has no argument for them.

use candle::{Layout, Result, bail};

use crate::cache::{CacheLayout, KvStrides};
use crate::gpu::args::Paged;
use crate::op::call::Meta;
use crate::op::row_strides;

/// q's or out's strides between rows and between heads.
pub(super) fn rows(name: &str, layout: &Layout) -> Result<[usize; 2]> {
    match row_strides(layout) {
        Some(strides) => Ok([strides.row, strides.head]),
        None => bail!(
            "{name}: the leading dims of {:?} with strides {:?} are not rows of one stride; the CUDA kernels need them to be",
            layout.dims(),
            layout.stride()
        ),
    }
}

/// K's or V's strides. What lies inside a page's head is dense, but for the tokens of an Nhd or Hnd cache.
pub(super) fn paged(name: &str, own: &Layout, layout: CacheLayout, strides: KvStrides) -> Result<Paged> {
    let dense_tokens = matches!(layout, CacheLayout::Vllm | CacheLayout::Shuffled);
    if dense_tokens && !is_dense(&own.dims()[2..], &own.stride()[2..]) {
        bail!(
            "{name}: within a page and head a {} cache is contiguous for the CUDA kernels, got {:?} with strides {:?}",
            layout.name(),
            own.dims(),
            own.stride()
        )
    }
    Ok(stride_args(strides))
}

/// The strides of per-token or block scales.
pub(super) fn paged_scale(layout: &Layout) -> Paged {
    stride_args(KvStrides::of_scale(layout))
}

fn stride_args(strides: KvStrides) -> Paged {
    Paged { page: strides.page as i64, head: strides.head as i64, token: strides.token as i64 }
}

/// Block tables: lanes contiguous, rows `stride` apart, of per-head tables also from a sequence's last head to the next's first.
pub(super) fn table_row(layout: &Layout) -> Result<i64> {
    let (dims, stride) = (layout.dims(), layout.stride());
    if stride[stride.len() - 1] != 1 && dims[dims.len() - 1] > 1 {
        bail!("block_tables: the lanes of {dims:?} with strides {stride:?} are strided; the CUDA kernels read contiguous ones")
    }
    match dims.len() {
        3 if dims[0] > 1 && dims[1] > 1 && stride[0] != dims[1] * stride[1] => {
            bail!(
                "block_tables: sequences and heads of {dims:?} with strides {stride:?} are not rows of one stride; the CUDA kernels need them to be"
            )
        }
        3 if dims[1] > 1 => Ok(stride[1] as i64),
        _ => Ok(stride[0] as i64),
    }
}

/// Whether a tensor starts at, and its `strides` step by, multiples of `bytes`.
pub(super) fn is_aligned(address: u64, meta: &Meta<'_>, strides: &[i64], bytes: u64) -> bool {
    let size = meta.dtype.size_in_bytes() as u64;
    address.is_multiple_of(bytes) && strides.iter().all(|&stride| (stride as u64).wrapping_mul(size).is_multiple_of(bytes))
}

fn is_dense(dims: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    dims.iter().zip(strides).rev().all(|(&n, &stride)| {
        let dense = n == 1 || stride == expected;
        expected *= n;
        dense
    })
}
