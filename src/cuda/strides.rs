//! The strides that the CUDA kernels take, and what is aligned for them.

use candle::{Layout, Result};

use crate::cache::{CacheLayout, KvStrides};
use crate::gpu::args::Paged;
use crate::gpu::strides;
pub(super) use crate::gpu::strides::paged_scale;
use crate::op::call::Meta;
use crate::op::{RowStrides, row_strides};

const GPU: &str = "CUDA";

/// q's or out's strides: between rows, between heads, and what comes to the first for each sequence, whose rows need not follow the last one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowSteps {
    pub row: i64,
    pub head: i64,
    pub sequence: i64,
}

impl RowSteps {
    pub fn of(layout: &Layout) -> Self {
        if let Some(RowStrides { row, head, .. }) = row_strides(layout) {
            return Self { row: row as i64, head: head as i64, sequence: 0 };
        }
        let (rows, stride) = (layout.dims()[1] as i64, layout.stride());
        let (sequence, row, head) = (stride[0] as i64, stride[1] as i64, stride[2] as i64);
        Self { row, head, sequence: sequence - rows * row }
    }

    pub fn all(&self) -> [i64; 3] {
        [self.row, self.head, self.sequence]
    }
}

/// K's or V's strides.
pub(super) fn paged(name: &str, own: &Layout, layout: CacheLayout, strides: KvStrides) -> Result<Paged> {
    strides::paged(name, own, layout, strides, GPU)
}

/// The stride of a block table's rows.
pub(super) fn table_row(layout: &Layout) -> Result<i64> {
    strides::table_row(layout, GPU)
}

/// Whether a tensor starts at, and its `strides` step by, multiples of `bytes`.
pub(super) fn is_aligned(address: u64, meta: &Meta<'_>, strides: &[i64], bytes: u64) -> bool {
    let size = meta.dtype.size_in_bytes() as u64;
    address.is_multiple_of(bytes) && strides.iter().all(|&stride| (stride as u64).wrapping_mul(size).is_multiple_of(bytes))
}
