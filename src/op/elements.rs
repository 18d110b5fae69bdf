//! Walking the elements of a strided tensor.

use candle::Layout;

/// Storage offsets of a layout's elements in row-major order.
pub(crate) fn offsets(layout: &Layout) -> impl Iterator<Item = usize> + '_ {
    (0..layout.shape().elem_count()).map(|mut index| {
        let mut at = layout.start_offset();
        for (&dim, &stride) in layout.dims().iter().zip(layout.stride()).rev() {
            at += index % dim * stride;
            index /= dim;
        }
        at
    })
}
