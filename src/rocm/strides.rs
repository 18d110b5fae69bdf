//! From tensors to what the kernels take: addresses and strides, refused where a kernel has no argument for them.

use candle::{Result, bail};

use super::tensor::RocmTensor;
use crate::cache::{CacheLayout, KvStrides};
use crate::gpu::args::Paged;
use crate::gpu::strides::{self, has_dense_tokens};
use crate::op::shapes::check_last_contiguous;
use crate::op::{RowStrides, row_strides};

const GPU: &str = "AMD";

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
        let Some(RowStrides { row, head, .. }) = row_strides(layout) else {
            bail!(
                "{name}: the leading dims of {:?} with strides {:?} are not rows of one stride; the {GPU} kernels need them to be",
                layout.dims(),
                layout.stride()
            )
        };
        let rows = Self { row, head };
        let outer = layout.dims().iter().rev().skip(1).any(|&n| n > 1);
        check_aligned(name, tensor, &[rows.row, rows.head][..if outer { 2 } else { 0 }])?;
        Ok(rows)
    }
}

/// K's or V's strides.
pub(super) fn paged(name: &str, tensor: &RocmTensor, layout: CacheLayout, strides: KvStrides) -> Result<Paged> {
    let args = strides::paged(name, tensor.layout(), layout, strides, GPU)?;
    let given = if has_dense_tokens(layout) { 2 } else { 3 };
    check_aligned(name, tensor, &[strides.page, strides.head, strides.token][..given])?;
    Ok(args)
}

/// The strides of per-token or block scales.
pub(super) fn paged_scale(name: &str, tensor: &RocmTensor) -> Result<Paged> {
    check_last_contiguous(name, tensor.layout())?;
    Ok(strides::paged_scale(tensor.layout()))
}

/// The stride of a block table's rows.
pub(super) fn table_row(tensor: &RocmTensor) -> Result<i64> {
    strides::table_row(tensor.layout(), GPU)
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
