//! Whether two views of one storage have an element in common.

use candle::Layout;

/// Whether two layouts of one storage, each with no element twice, overlap. Exact where they have the same strides (K and V of one
/// `[pages, 2, ..]` tensor); otherwise true only where one has every element of a range in which the other has its first or last.
pub(super) fn overlap(a: &Layout, b: &Layout) -> bool {
    if a.shape().elem_count() == 0 || b.shape().elem_count() == 0 {
        return false;
    }
    let (axes, other_axes) = (merged_axes(a), merged_axes(b));
    let (start, other_start) = (a.start_offset(), b.start_offset());
    if axes == other_axes {
        return reaches(start.abs_diff(other_start) as i128, &axes);
    }
    let end = |start: usize, axes: &[(usize, usize)]| axes.iter().fold(start, |end, (stride, size)| end + stride * (size - 1));
    let (last, other_last) = (end(start, &axes), end(other_start, &other_axes));
    let dense = |axes: &[(usize, usize)]| matches!(axes, [] | [(1, _)]);
    let within = |range: std::ops::RangeInclusive<usize>, a, b| range.contains(&a) || range.contains(&b);
    dense(&axes) && within(start..=last, other_start, other_last) || dense(&other_axes) && within(other_start..=other_last, start, last)
}

/// (stride, size) of the axes with more than one element, outermost first, neighbours that continue each other taken as one.
fn merged_axes(layout: &Layout) -> Vec<(usize, usize)> {
    let mut axes: Vec<_> = layout.stride().iter().copied().zip(layout.dims().iter().copied()).filter(|&(_, size)| size > 1).collect();
    axes.sort_unstable();
    let mut merged: Vec<(usize, usize)> = Vec::new();
    for (stride, size) in axes {
        match merged.last_mut() {
            Some((inner, count)) if *inner * *count == stride => *count *= size,
            _ => merged.push((stride, size)),
        }
    }
    merged.reverse();
    merged
}

/// Whether `distance` is a difference of two elements' offsets: a sum of one multiple of each stride, of a magnitude below its size. An
/// axis' stride passes the span of all inner ones, so only the two multiples next to the distance can do.
fn reaches(distance: i128, axes: &[(usize, usize)]) -> bool {
    let Some((&(stride, size), inner)) = axes.split_first() else { return distance == 0 };
    let (stride, size) = (stride as i128, size as i128);
    let below = distance.div_euclid(stride);
    [below, below + 1].into_iter().any(|steps| steps.abs() < size && reaches(distance - steps * stride, inner))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use candle::{DType, Device, Result, Tensor};

    use super::*;

    fn elements(layout: &Layout) -> HashSet<usize> {
        crate::op::elements::offsets(layout).collect()
    }

    #[test]
    fn views_of_the_same_strides_are_told_exactly() -> Result<()> {
        let tensor = Tensor::zeros((4, 3, 6, 5), DType::F32, &Device::Cpu)?;
        let mut both = [0, 0];
        for (page, side, row, dim) in
            (0..3).flat_map(|p| (0..2).flat_map(move |s| (0..4).flat_map(move |r| (0..3).map(move |d| (p, s, r, d)))))
        {
            let view = |p, s, r, d| tensor.narrow(0, p, 2)?.narrow(1, s, 1)?.narrow(2, r, 3)?.narrow(3, d, 2);
            let (a, b) = (view(1, 1, 1, 1)?, view(page, side, row, dim)?);
            let want = !elements(a.layout()).is_disjoint(&elements(b.layout()));
            assert_eq!(overlap(a.layout(), b.layout()), want, "{page} {side} {row} {dim}");
            both[usize::from(want)] += 1;
        }
        assert!(both.iter().all(|&n| n > 3), "{both:?}");
        Ok(())
    }
}
