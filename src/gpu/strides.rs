//! From layouts to the strides that kernels take, refused where a kernel has no argument for them. `gpu` is whose kernels an error speaks of.

use candle::{Layout, Result, bail};

use super::args::Paged;
use crate::cache::{CacheLayout, KvStrides};

/// K's or V's strides. What lies inside a page's head is dense, but for the tokens of an Nhd or Hnd cache.
pub(crate) fn paged(name: &str, own: &Layout, layout: CacheLayout, strides: KvStrides, gpu: &str) -> Result<Paged> {
    if has_dense_tokens(layout) && !is_dense(&own.dims()[2..], &own.stride()[2..]) {
        bail!(
            "{name}: within a page and head a {} cache is contiguous for the {gpu} kernels, got {:?} with strides {:?}",
            layout.name(),
            own.dims(),
            own.stride()
        )
    }
    Ok(strides.into())
}

/// Whether the tokens of a page's head lie together, so that their stride is no argument.
pub(crate) fn has_dense_tokens(layout: CacheLayout) -> bool {
    matches!(layout, CacheLayout::Vllm | CacheLayout::Shuffled)
}

/// The strides of per-token or block scales.
pub(crate) fn paged_scale(layout: &Layout) -> Paged {
    KvStrides::of_scale(layout).into()
}

impl From<KvStrides> for Paged {
    fn from(strides: KvStrides) -> Self {
        Self { page: strides.page as i64, head: strides.head as i64, token: strides.token as i64 }
    }
}

/// Block tables: lanes contiguous, rows `stride` apart, of per-head tables also from a sequence's last head to the next's first.
pub(crate) fn table_row(layout: &Layout, gpu: &str) -> Result<i64> {
    let (dims, stride) = (layout.dims(), layout.stride());
    if stride[stride.len() - 1] != 1 && dims[dims.len() - 1] > 1 {
        bail!("block_tables: the lanes of {dims:?} with strides {stride:?} are strided; the {gpu} kernels read contiguous ones")
    }
    match dims.len() {
        3 if dims[0] > 1 && dims[1] > 1 && stride[0] != dims[1] * stride[1] => {
            bail!(
                "block_tables: sequences and heads of {dims:?} with strides {stride:?} are not rows of one stride; the {gpu} kernels need them to be"
            )
        }
        3 if dims[1] > 1 => Ok(stride[1] as i64),
        _ => Ok(stride[0] as i64),
    }
}

fn is_dense(dims: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    dims.iter().zip(strides).rev().all(|(&n, &stride)| {
        let dense = n == 1 || stride == expected;
        expected *= n;
        dense
    })
}

#[cfg(test)]
mod tests {
    use super::is_dense;

    #[test]
    fn dense_is_contiguous_but_for_dims_of_one() {
        assert!(is_dense(&[16, 128, 8], &[1024, 8, 1]));
        assert!(is_dense(&[1, 128, 8], &[7, 8, 1]));
        assert!(!is_dense(&[16, 128, 8], &[2048, 8, 1]));
        assert!(!is_dense(&[16, 8], &[1, 16]));
    }
}
