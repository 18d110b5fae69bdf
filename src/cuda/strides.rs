//! The strides that the CUDA kernels take, and what is aligned for them.

use candle::{Layout, Result};

use crate::cache::{CacheLayout, KvStrides};
use crate::gpu::args::Paged;
use crate::gpu::strides;
pub(super) use crate::gpu::strides::paged_scale;
use crate::op::call::Meta;

const GPU: &str = "CUDA";

/// q's or out's strides between rows and between heads.
pub(super) fn rows(name: &str, layout: &Layout) -> Result<[usize; 2]> {
    strides::rows(name, layout, GPU)
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
