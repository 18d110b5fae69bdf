//! Merging attention over disjoint parts of a context.

use candle::{CpuStorage, DType, Device, Result, Tensor, bail};

use super::cpu::read_f32;
use super::shapes::check_query_dtype;

/// Merges attention results over disjoint parts of a context (cascade attention, context parallelism) by their log-sum-exps:
/// `out = sum_i exp(lse_i - lse) * out_i` with `lse = ln(sum_i exp(lse_i))`.
///
/// `outs`: tensors of one shape `[..., head_dim]` and dtype (F32, F16 or BF16); `lses`: F32 of that shape without the last dim (natural log,
/// `-inf` where the part attended nothing; that part's `out` is then ignored, NaN included). Gives the merged out in the same dtype
/// and its LSE. Where no part attended anything: 0 and `-inf`. Give sinks to one part only.
///
/// # Errors
/// No parts, or parts whose shapes, dtypes or devices differ; a device other than the CPU.
///
/// Source: the merge of partial softmaxes in Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021), section 3.
pub fn merge_attention_states(outs: &[Tensor], lses: &[Tensor]) -> Result<(Tensor, Tensor)> {
    let Some(first) = outs.first() else { bail!("outs: no parts to merge") };
    if outs.len() != lses.len() {
        bail!("lses: {} for {} outs", lses.len(), outs.len())
    }
    check_parts(first, outs, lses)?;
    let dim = first.dims().last().copied().unwrap_or(0);
    let states = outs.iter().map(values).collect::<Result<Vec<_>>>()?;
    let logs = lses.iter().map(|lse| read_f32("lses", lse)).collect::<Result<Vec<_>>>()?;
    let rows = lses[0].elem_count();
    let mut out = vec![0f32; rows * dim];
    let mut lse = vec![f32::NEG_INFINITY; rows];
    for row in 0..rows {
        let at = row * dim..(row + 1) * dim;
        let parts = states.iter().zip(&logs).map(|(state, log)| (&state[at.clone()], log[row]));
        lse[row] = merge_row(parts, &mut out[at.clone()]);
    }
    let out = Tensor::from_vec(out, first.shape(), &Device::Cpu)?.to_dtype(first.dtype())?;
    Ok((out, Tensor::from_vec(lse, lses[0].shape(), &Device::Cpu)?))
}

/// Merges one row into `out` (zeros on entry); gives its LSE.
fn merge_row<'a>(parts: impl Iterator<Item = (&'a [f32], f32)> + Clone, out: &mut [f32]) -> f32 {
    let max = parts.clone().map(|(_, lse)| lse).fold(f32::NEG_INFINITY, |a, b| if b.is_nan() || b > a { b } else { a });
    if max == f32::NEG_INFINITY {
        return max;
    }
    let sum: f32 = parts.clone().map(|(_, lse)| (lse - max).exp()).sum();
    for (state, lse) in parts.filter(|(_, lse)| *lse != f32::NEG_INFINITY) {
        let weight = (lse - max).exp() / sum;
        for (o, s) in out.iter_mut().zip(state) {
            *o += weight * s;
        }
    }
    max + sum.ln()
}

fn check_parts(first: &Tensor, outs: &[Tensor], lses: &[Tensor]) -> Result<()> {
    check_query_dtype("outs", first.dtype())?;
    if first.rank() == 0 {
        bail!("outs: a scalar has no head_dim")
    }
    let rows = &first.dims()[..first.rank() - 1];
    for (part, (out, lse)) in outs.iter().zip(lses).enumerate() {
        if out.shape() != first.shape() || out.dtype() != first.dtype() {
            bail!("outs: part {part} is {:?} {:?}, part 0 {:?} {:?}", out.dtype(), out.dims(), first.dtype(), first.dims())
        }
        if lse.dtype() != DType::F32 || lse.dims() != rows {
            bail!("lses: part {part} is {:?} {:?}, expected F32 {rows:?}", lse.dtype(), lse.dims())
        }
        for (name, tensor) in [("outs", out), ("lses", lse)] {
            if !tensor.device().is_cpu() {
                bail!("{name}: part {part} is on {:?}; there is no merge kernel for that device in this build", tensor.device().location())
            }
        }
    }
    Ok(())
}

/// A tensor's elements in F32.
fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    let tensor = tensor.to_dtype(DType::F32)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match super::host::cpu_storage("outs", &storage)? {
        CpuStorage::F32(data) => Ok(data[layout.start_offset()..][..layout.shape().elem_count()].to_vec()),
        _ => bail!("outs: dtype {:?}", tensor.dtype()),
    }
}
