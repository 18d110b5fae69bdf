//! Paged attention in float64, one score at a time, sharing no code with the crate under test.

use candle::{CpuStorage, DType, Device, Result, Storage, Tensor, bail};
use candle_paged_attn::cache::CacheLayout;
use candle_paged_attn::{DecodeOptions, KvScale};

/// Attention and log-sum-exp of every (row, query head).
#[derive(Clone, Debug)]
pub struct Expected {
    /// `[rows, q_heads, head_dim]`.
    pub out: Vec<f64>,
    /// `[rows, q_heads]`.
    pub lse: Vec<f64>,
    pub q_heads: usize,
    pub head_dim: usize,
}

/// A cache tensor as values `[pages, kv_heads, page_size, head_dim]`.
pub(crate) struct Values {
    data: Vec<f64>,
    pub(crate) dims: [usize; 4],
}

impl Values {
    pub(crate) fn row(&self, page: usize, head: usize, token: usize) -> &[f64] {
        let [_, heads, tokens, d] = self.dims;
        &self.data[((page * heads + head) * tokens + token) * d..][..d]
    }
}

/// The answer to a call, from its own tensors.
pub fn attention(
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<Expected> {
    let keys = values(key_cache, options.layout, Side::Key, &options.k_scale)?;
    let vals = values(value_cache, options.layout, Side::Value, &options.v_scale)?;
    let [_, kv_heads, page_size, d] = keys.dims;
    let dims = q.dims();
    let q_heads = dims[dims.len() - 2];
    let rows: usize = dims[..dims.len() - 2].iter().product();
    let queries = floats(q)?;
    let tables = integers(block_tables)?;
    let lens = integers(context_lens)?;
    let sinks = options.sinks.as_ref().map(floats).transpose()?;
    let batch = block_tables.dims()[0];
    let per_head = block_tables.rank() == 3;
    let max_pages = block_tables.dims()[block_tables.rank() - 1];
    let starts = match &options.query_start {
        Some(t) => integers(t)?,
        None => (0..=batch).map(|b| (b * (rows / batch.max(1))) as i64).collect(),
    };
    let scale = options.softmax_scale.map_or(1.0 / (d as f64).sqrt(), f64::from);
    let mut expected = Expected { out: vec![0.0; rows * q_heads * d], lse: vec![f64::NEG_INFINITY; rows * q_heads], q_heads, head_dim: d };
    for b in 0..batch {
        let (start, end) = (starts[b] as usize, starts[b + 1] as usize);
        for (i, row) in (start..end).enumerate() {
            for h in 0..q_heads {
                let kv_head = h / (q_heads / kv_heads);
                let lane = if per_head { b * kv_heads + kv_head } else { b };
                let position = lens[lane] - (end - start) as i64 + i as i64;
                let first =
                    options.window.map_or(0, |w| position.saturating_sub(i64::try_from(w).unwrap_or(i64::MAX)).saturating_add(1).max(0));
                let place = |t: i64| {
                    let page = tables[lane * max_pages + t as usize / page_size];
                    (page as usize, kv_head, t as usize % page_size)
                };
                let query = &queries[(row * q_heads + h) * d..][..d];
                let mut scores: Vec<(f64, Option<&[f64]>)> = (first..=position)
                    .map(|t| {
                        let (page, head, token) = place(t);
                        let dot: f64 = keys.row(page, head, token).iter().zip(query).map(|(a, b)| a * b).sum();
                        let score = match options.softcap {
                            Some(c) => f64::from(c) * (dot * scale / f64::from(c)).tanh(),
                            None => dot * scale,
                        };
                        (score, Some(vals.row(page, head, token)))
                    })
                    .collect();
                if scores.is_empty() {
                    continue;
                }
                if let Some(sinks) = &sinks {
                    scores.push((sinks[h], None));
                }
                let at = row * q_heads + h;
                expected.lse[at] = softmax_sum(&scores, &mut expected.out[at * d..(at + 1) * d]);
            }
        }
    }
    Ok(expected)
}

/// Adds the softmax-weighted values to `out`; gives the log-sum-exp.
fn softmax_sum(scores: &[(f64, Option<&[f64]>)], out: &mut [f64]) -> f64 {
    let max = scores.iter().map(|(s, _)| *s).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|(s, _)| (s - max).exp()).sum();
    for (score, value) in scores {
        let p = (score - max).exp() / sum;
        for (o, v) in out.iter_mut().zip(value.unwrap_or(&[])) {
            *o += p * v;
        }
    }
    max + sum.ln()
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Side {
    Key,
    Value,
}

/// Values of a cache tensor, `[pages, kv_heads, page_size, head_dim]`, scales applied.
pub(crate) fn values(cache: &Tensor, layout: CacheLayout, side: Side, scale: &KvScale) -> Result<Values> {
    let canonical = match (layout, side) {
        (CacheLayout::Nhd, _) => cache.permute((0, 2, 1, 3))?,
        (CacheLayout::Hnd, _) => cache.clone(),
        (CacheLayout::Vllm | CacheLayout::Shuffled, Side::Key) => cache.permute((0, 1, 3, 2, 4))?.flatten(3, 4)?,
        (CacheLayout::Vllm, Side::Value) => cache.permute((0, 1, 3, 2))?,
        (CacheLayout::Shuffled, Side::Value) => cache.permute((0, 1, 2, 4, 3))?.flatten(2, 3)?,
    };
    let (pages, heads, tokens, stored) = canonical.dims4()?;
    let mut data = floats(&canonical)?;
    let d = if cache.dtype() == DType::U8 { stored * 2 } else { stored };
    if cache.dtype() == DType::U8 {
        data = data.iter().flat_map(|&byte| [e2m1(byte as u8 & 15), e2m1(byte as u8 >> 4)]).collect();
    }
    match scale {
        KvScale::None => {}
        KvScale::Scalar(s) => data.iter_mut().for_each(|v| *v *= f64::from(*s)),
        KvScale::Tensor(t) => {
            let factors: Vec<f64> = if t.dtype() == DType::U8 { floats(t)?.into_iter().map(e8m0).collect() } else { floats(t)? };
            let each = data.len() / factors.len();
            data.iter_mut().enumerate().for_each(|(i, v)| *v *= factors[i / each]);
        }
    }
    Ok(Values { data, dims: [pages, heads, tokens, d] })
}

/// The value of an E2M1 code.
pub fn e2m1(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn e8m0(code: f64) -> f64 {
    if code == 255.0 { f64::NAN } else { 2f64.powf(code - 127.0) }
}

/// The value of an OCP E4M3 code.
pub fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if code & 128 == 0 { magnitude } else { -magnitude }
}

/// Every element, row-major, as it is stored (FP8 decoded, U8 as numbers).
pub fn floats(tensor: &Tensor) -> Result<Vec<f64>> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    let Storage::Cpu(storage) = &*storage else { bail!("the reference reads CPU tensors") };
    Ok(match storage {
        CpuStorage::F32(v) => v[range].iter().map(|&x| f64::from(x)).collect(),
        CpuStorage::F16(v) => v[range].iter().map(|x| x.to_f64()).collect(),
        CpuStorage::BF16(v) => v[range].iter().map(|x| x.to_f64()).collect(),
        CpuStorage::F8E4M3(v) => v[range].iter().map(|x| e4m3(x.to_bits())).collect(),
        CpuStorage::U8(v) => v[range].iter().map(|&x| f64::from(x)).collect(),
        _ => bail!("the reference does not read {:?}", tensor.dtype()),
    })
}

pub(crate) fn integers(tensor: &Tensor) -> Result<Vec<i64>> {
    let tensor = tensor.to_device(&Device::Cpu)?.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::U32 => tensor.to_vec1::<u32>()?.into_iter().map(i64::from).collect(),
        _ => tensor.to_vec1::<i32>()?.into_iter().map(i64::from).collect(),
    })
}

/// How much further than a row one head of it may be off: a head's few channels may cancel to next to nothing where the row's do not.
const HEAD_SLACK: f64 = 4.0;

impl Expected {
    /// Compares `out` and `lse`. An error names the first row whose relative L2 is above `tolerance`, the first (row, head) above four times
    /// that, nonzero where nothing is attended, or whose LSE is off by more than `lse_tolerance * (1 + |lse|)`. Gives the worst row's error.
    pub fn compare(&self, out: &Tensor, lse: Option<&Tensor>, tolerance: f64, lse_tolerance: f64) -> Result<f64> {
        let got = floats(out)?;
        if got.len() != self.out.len() {
            bail!("{} elements, expected {}", got.len(), self.out.len())
        }
        // An F16 output cannot be nearer than half its smallest subnormal (sinks can make outputs that small).
        let floor = if out.dtype() == DType::F16 { 2f64.powi(-25) } else { 0.0 };
        let d = self.head_dim;
        for (at, (got, want)) in got.chunks(d).zip(self.out.chunks(d)).enumerate() {
            if self.lse[at] == f64::NEG_INFINITY && got.iter().any(|&g| g != 0.0) {
                bail!("vector {at} attends nothing but is {:?}", &got[..d.min(4)])
            }
            let error = relative_l2(got, want, floor);
            if error.is_nan() || error > tolerance * HEAD_SLACK {
                bail!(
                    "vector {at}: relative L2 {error:.3e} above {:.1e} (got {:?}, want {:?})",
                    tolerance * HEAD_SLACK,
                    &got[..4],
                    &want[..4]
                )
            }
        }
        let row = self.q_heads * d;
        let mut worst = 0f64;
        for (at, (got, want)) in got.chunks(row).zip(self.out.chunks(row)).enumerate() {
            let error = relative_l2(got, want, floor);
            if error.is_nan() || error > tolerance {
                bail!("row {at}: relative L2 {error:.3e} above {tolerance:.1e}")
            }
            worst = worst.max(error);
        }
        if let Some(lse) = lse {
            self.compare_lse(&floats(lse)?, lse_tolerance)?;
        }
        Ok(worst)
    }

    fn compare_lse(&self, got: &[f64], tolerance: f64) -> Result<()> {
        if got.len() != self.lse.len() {
            bail!("{} LSEs, expected {}", got.len(), self.lse.len())
        }
        for (at, (g, w)) in got.iter().zip(&self.lse).enumerate() {
            // Beside -inf every difference is within tolerance.
            let same = g == w || w.is_finite() && (g - w).abs() <= tolerance * (1.0 + w.abs());
            if !same {
                bail!("vector {at}: LSE {g}, expected {w}")
            }
        }
        Ok(())
    }
}

/// `|got - want| / |want|`, less what `floor` an element explains.
pub fn relative_l2(got: &[f64], want: &[f64], floor: f64) -> f64 {
    let norm = want.iter().map(|w| w * w).sum::<f64>().sqrt();
    let error = got.iter().zip(want).map(|(g, w)| (g - w) * (g - w)).sum::<f64>().sqrt();
    let floor = floor * (want.len() as f64).sqrt();
    if error <= floor { 0.0 } else { (error - floor) / norm.max(1e-30) }
}
