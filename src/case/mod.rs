//! A recorded call: the file a bug report is.
//!
//! [`Case`] is one call of the op with everything it depends on. It is written to and read from a safetensors file
//! ([`Case::write`], [`Case::read`]) and runs again with [`Case::run`]. With `CANDLE_PAGED_ATTN_RECORD=DIR` in the environment
//! the library writes such a file into DIR for each call: a model leaves one file a layer and step, in the order of the calls
//! (`call-PROCESS-NUMBER.safetensors`, the number counted from 0), so record for a step or two.

mod capture;
mod file;
mod record;

#[cfg(any(feature = "rocm", feature = "cuda"))]
pub(crate) use record::is_recording;
pub(crate) use record::{check_recorder, maybe_record};

use candle::{DType, Device, Result, Tensor, bail};

use crate::options::{DecodeOptions, KvScale, PlanChoice};
use crate::paged_decode_with_lse;
use crate::plan::DecodePlan;

/// One call of the op: its arguments, and what it should give where that is known.
///
/// # The file
/// A safetensors file, little-endian like all of them:
///
/// | tensor | dtype |
/// |---|---|
/// | `q` | F32, F16, BF16 |
/// | `key_cache`, `value_cache` | F32, F16, BF16, F8_E4M3, or U8 (MXFP4) |
/// | `block_tables`, `context_lens` | U32, I32 |
/// | `k_scale`, `v_scale` (optional) | F32, one element or `[pages, kv_heads, page_size]` |
/// | `key_block_scale`, `value_block_scale` (MXFP4) | U8 (E8M0) |
/// | `sinks` (optional) | F32 |
/// | `query_start` (optional) | U32, I32 |
/// | `work_info`, `reduce_info` (with plan `given`) | I32 |
/// | `expected` (optional) | F32, F16, BF16 |
///
/// Metadata, each optional: `query_len`, `layout` (nhd, hnd, vllm, shuffled; nhd if absent), `softmax_scale`, `window`, `softcap`,
/// `max_partitions`, `workgroup_budget`, `plan` (`free` or `given`), and `format`, which is ignored.
///
/// # What the output should be
/// A recorded file has no `expected`: it is written before the call runs, so that a call which crashes leaves its file too, and what
/// a call gave is no proof of what it should have given. Where the right output is known, from another backend or a float64 reference,
/// set [`Case::expected`] and [`Case::write`] the case again; whoever replays it then sees the error. To compare two backends without
/// a new file, run the `replay` example with `--out OUT.safetensors` on the one and with `--expect OUT.safetensors` on the other.
#[derive(Clone, Debug)]
pub struct Case {
    /// The new tokens, `[batch*query_len, q_heads, head_dim]` or `[batch, query_len, q_heads, head_dim]`.
    pub q: Tensor,
    /// Keys in `options.layout`.
    pub key_cache: Tensor,
    /// Values in `options.layout`.
    pub value_cache: Tensor,
    /// U32 or I32 `[batch, max_pages]` or `[batch, kv_heads, max_pages]`.
    pub block_tables: Tensor,
    /// U32 or I32 `[batch]` or `[batch, kv_heads]`.
    pub context_lens: Tensor,
    /// Everything else that the call was given.
    pub options: DecodeOptions,
    /// The output that the call should have, in q's shape.
    pub expected: Option<Tensor>,
}

impl Case {
    /// Runs the call where its tensors live: the output in q's shape and dtype, and the LSE F32 `[rows, q_heads]`.
    ///
    /// Errors: those of [`paged_decode_with_lse`].
    pub fn run(&self) -> Result<(Tensor, Tensor)> {
        paged_decode_with_lse(&self.q, &self.key_cache, &self.value_cache, &self.block_tables, &self.context_lens, &self.options)
    }

    /// The same call with every tensor on `device`.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self {
            q: self.q.to_device(device)?,
            key_cache: self.key_cache.to_device(device)?,
            value_cache: self.value_cache.to_device(device)?,
            block_tables: self.block_tables.to_device(device)?,
            context_lens: self.context_lens.to_device(device)?,
            options: options_on(&self.options, device)?,
            expected: self.expected.as_ref().map(|t| t.to_device(device)).transpose()?,
        })
    }

    /// Largest `|out - expected|`; infinite where one of the two is NaN or infinite and the other is something else.
    /// `None`: the case does not say what it expects.
    ///
    /// Errors: `out` is not of the expected shape.
    pub fn max_error(&self, out: &Tensor) -> Result<Option<f32>> {
        let Some(expected) = &self.expected else { return Ok(None) };
        if expected.dims() != out.dims() {
            bail!("expected: shape {:?}, but the output has {:?}", expected.dims(), out.dims())
        }
        let flat = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let (out, expected) = (flat(out)?, flat(expected)?);
        let errors = out.iter().zip(&expected).map(|(&a, &b)| distance(a, b));
        Ok(Some(errors.fold(0.0, f32::max)))
    }
}

/// `options` with every tensor on `device`.
pub(crate) fn options_on(options: &DecodeOptions, device: &Device) -> Result<DecodeOptions> {
    let moved = |tensor: &Option<Tensor>| tensor.as_ref().map(|t| t.to_device(device)).transpose();
    let scale = |scale: &KvScale| match scale {
        KvScale::Tensor(t) => Ok(KvScale::Tensor(t.to_device(device)?)),
        other => Ok::<_, candle::Error>(other.clone()),
    };
    Ok(DecodeOptions {
        sinks: moved(&options.sinks)?,
        k_scale: scale(&options.k_scale)?,
        v_scale: scale(&options.v_scale)?,
        query_start: moved(&options.query_start)?,
        plan: match &options.plan {
            PlanChoice::Given(plan) => {
                let records = (plan.work_info().to_device(device)?, plan.reduce_info().to_device(device)?);
                PlanChoice::Given(DecodePlan::from_tensors(records.0, records.1)?)
            }
            other => other.clone(),
        },
        ..options.clone()
    })
}

/// `|a - b|` that is never NaN: 0 for two NaNs or equal infinities, infinite for anything else that is not finite.
fn distance(a: f32, b: f32) -> f32 {
    if a == b || (a.is_nan() && b.is_nan()) {
        return 0.0;
    }
    let error = (a - b).abs();
    if error.is_nan() { f32::INFINITY } else { error }
}

#[cfg(test)]
mod tests {
    use super::distance;

    #[test]
    fn a_difference_is_never_hidden_by_nan() {
        assert_eq!(distance(1.0, 1.5), 0.5);
        assert_eq!(distance(f32::NAN, f32::NAN), 0.0);
        assert_eq!(distance(f32::INFINITY, f32::INFINITY), 0.0);
        assert_eq!(distance(f32::NAN, 0.0), f32::INFINITY);
        assert_eq!(distance(0.0, f32::NAN), f32::INFINITY);
        assert_eq!(distance(f32::INFINITY, f32::NEG_INFINITY), f32::INFINITY);
    }
}
