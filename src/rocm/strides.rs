//! From tensors to what the kernels take: addresses and strides, refused where a kernel has no argument for them.

use candle::{Result, bail};

use super::tensor::RocmTensor;
use crate::cache::{CacheLayout, KvStrides};
use crate::gpu::args::Paged;
use crate::op::shapes::check_last_contiguous;

/// Bytes of the kernels' widest loads and stores.
const ALIGNMENT: u64 = 16;

/// q's or out's strides between rows and between heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub row: usize,
    pub head: usize,
}

impl Rows {
    /// Of q or out, `name`.
    pub fn of(name: &str, tensor: &RocmTensor) -> Result<Self> {
        let layout = tensor.layout();
        let Some(strides) = crate::op::row_strides(layout) else {
            bail!(
                "{name}: the leading dims of {:?} with strides {:?} are not rows of one stride; the AMD kernels need them to be",
                layout.dims(),
                layout.stride()
            )
        };
        let rows = Self { row: strides.row, head: strides.head };
        let outer = layout.dims().iter().rev().skip(1).any(|&n| n > 1);
        check_aligned(name, tensor, &[rows.row, rows.head][..if outer { 2 } else { 0 }])?;
        Ok(rows)
    }
}

/// K's or V's strides. What lies inside a page's head is dense, but for the tokens of an Nhd or Hnd cache.
pub(super) fn paged(name: &str, tensor: &RocmTensor, layout: CacheLayout, strides: KvStrides) -> Result<Paged> {
    let own = tensor.layout();
    let dense_tokens = matches!(layout, CacheLayout::Vllm | CacheLayout::Shuffled);
    if dense_tokens && !is_dense(&own.dims()[2..], &own.stride()[2..]) {
        bail!(
            "{name}: within a page and head a {} cache is contiguous for the AMD kernels, got {:?} with strides {:?}",
            layout.name(),
            own.dims(),
            own.stride()
        )
    }
    check_aligned(name, tensor, &[strides.page, strides.head, strides.token][..if dense_tokens { 2 } else { 3 }])?;
    Ok(Paged { page: strides.page as i64, head: strides.head as i64, token: strides.token as i64 })
}

/// The strides of per-token or block scales.
pub(super) fn paged_scale(name: &str, tensor: &RocmTensor) -> Result<Paged> {
    let strides = KvStrides::of_scale(tensor.layout());
    check_last_contiguous(name, tensor.layout())?;
    Ok(Paged { page: strides.page as i64, head: strides.head as i64, token: strides.token as i64 })
}

/// Block tables: lanes contiguous, rows `stride` apart, of per-head tables also from a sequence's last head to the next's first.
pub(super) fn table_row(tensor: &RocmTensor) -> Result<i64> {
    let (dims, stride) = (tensor.dims(), tensor.stride());
    let lanes_apart = stride[stride.len() - 1] != 1 && dims[dims.len() - 1] > 1;
    match dims.len() {
        _ if lanes_apart => {
            bail!("block_tables: the lanes of {dims:?} with strides {stride:?} are strided; the AMD kernels read contiguous ones")
        }
        3 if dims[0] > 1 && dims[1] > 1 && stride[0] != dims[1] * stride[1] => {
            bail!(
                "block_tables: sequences and heads of {dims:?} with strides {stride:?} are not rows of one stride; the AMD kernels need them to be"
            )
        }
        3 if dims[1] <= 1 => Ok(stride[0] as i64),
        3 => Ok(stride[1] as i64),
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

/// Refuses a tensor whose start or strides (in elements) keep 16-byte loads from being aligned.
fn check_aligned(name: &str, tensor: &RocmTensor, strides: &[usize]) -> Result<()> {
    let size = tensor.dtype().size_in_bytes() as u64;
    let aligned = |elements: usize| (elements as u64).wrapping_mul(size).is_multiple_of(ALIGNMENT);
    if tensor.elem_count() == 0 || aligned(tensor.layout().start_offset()) && strides.iter().all(|&stride| aligned(stride)) {
        return Ok(());
    }
    bail!(
        "{name}: {:?} {:?} with strides {:?} from element {} on is not aligned to 16 bytes, as the AMD kernels need",
        tensor.dtype(),
        tensor.dims(),
        tensor.stride(),
        tensor.layout().start_offset()
    )
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
