//! FP8 attention in float64 with the quantization and the tile order of the AMD tile: what it should give but for the rounding of sums.
//!
//! - Q: a row (query token, head) times `MAX / absmax`, rounded to FP8; the products are multiplied by `absmax / MAX`, in F32 as the kernel does.
//! - Scores tile by tile of 256 tokens, against the row's running maximum `m`.
//! - P: `2^(s - m) * 2^k`, with per-token scales times `v_scale / largest v_scale of the tile's own tokens`, rounded to FP8.
//! - The row's sum is over P before rounding and without the scale.

use candle::{Result, Tensor};
use candle_paged_attn::plan::TileRange;
use candle_paged_attn::quant::fp8;
use candle_paged_attn::{DecodeOptions, KvScale};

use crate::reference::{Expected, Side, Values, floats, integers, values};

const TILE: usize = 256;

/// An FP8 encoding as the kernel uses it.
#[derive(Clone, Copy, Debug)]
pub struct Fp8 {
    /// FNUZ: gfx942.
    pub fnuz: bool,
    /// Tile groups that take a task's tiles in turn, each with a running maximum of its own.
    pub groups: usize,
}

impl Fp8 {
    fn max(self) -> f32 {
        if self.fnuz { fp8::E4M3_FNUZ_MAX } else { fp8::E4M3_MAX }
    }

    /// What P is multiplied by: the power of two at the top of the format.
    fn p_factor(self) -> f64 {
        if self.fnuz { 128.0 } else { 256.0 }
    }

    fn round(self, x: f32) -> f64 {
        let nearest = if self.fnuz { fp8::decode_e4m3_fnuz(fp8::encode_e4m3_fnuz(x)) } else { fp8::decode_e4m3(fp8::encode_e4m3(x)) };
        f64::from(nearest)
    }
}

/// Scales of stored elements: one factor, or one a (page, head, token).
struct Factors {
    each: Option<Vec<f64>>,
    all: f64,
    heads: usize,
    tokens: usize,
}

impl Factors {
    fn new(scale: &KvScale, [_, heads, tokens, _]: [usize; 4]) -> Result<Self> {
        let (each, all) = match scale {
            KvScale::None => (None, 1.0),
            KvScale::Scalar(s) => (None, f64::from(*s)),
            KvScale::Tensor(t) if t.elem_count() == 1 => (None, floats(t)?[0]),
            KvScale::Tensor(t) => (Some(floats(t)?), 1.0),
        };
        Ok(Self { each, all, heads, tokens })
    }

    fn at(&self, (page, head, token): (usize, usize, usize)) -> f64 {
        self.each.as_ref().map_or(1.0, |each| each[(page * self.heads + head) * self.tokens + token])
    }
}

/// One call's operands.
struct Operands {
    keys: Values,
    values: Values,
    k_scale: Factors,
    v_scale: Factors,
    format: Fp8,
    scale: f64,
    softcap: Option<f64>,
}

/// The (sequence, KV head)'s tokens as the row needs them: where each lies, and which are the call's.
struct Tokens<'a> {
    place: &'a dyn Fn(usize) -> (usize, usize, usize),
    owned: std::ops::Range<usize>,
    attended: std::ops::Range<usize>,
}

/// A row's running state.
struct Row {
    maximum: f64,
    sum: f64,
    out: Vec<f64>,
}

/// The answer of the quantized kernel to a call whose plan row `r` runs the tasks `tasks[r]`. `format` is the cache's (an OCP cache moved to
/// FNUZ with twice the scales has the same values, so that the call itself may be given as it is).
pub fn attention(
    q: &Tensor,
    caches: (&Tensor, &Tensor),
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
    (tasks, format): (&[Vec<TileRange>], Fp8),
) -> Result<Expected> {
    let keys = values(caches.0, options.layout, Side::Key, &KvScale::None)?;
    let vals = values(caches.1, options.layout, Side::Value, &KvScale::None)?;
    let [_, kv_heads, page_size, d] = keys.dims;
    let (rows, q_heads) = (q.dims()[0], q.dims()[1]);
    let group = q_heads / kv_heads;
    let queries = floats(q)?;
    let (tables, lens) = (integers(block_tables)?, integers(context_lens)?);
    let batch = block_tables.dims()[0];
    let table_heads = if block_tables.rank() == 3 { kv_heads } else { 1 };
    let max_pages = block_tables.dims()[block_tables.rank() - 1];
    let starts = match &options.query_start {
        Some(t) => integers(t)?,
        None => (0..=batch).map(|b| (b * (rows / batch.max(1))) as i64).collect(),
    };
    let operands = Operands {
        k_scale: Factors::new(&options.k_scale, keys.dims)?,
        v_scale: Factors::new(&options.v_scale, keys.dims)?,
        keys,
        values: vals,
        format,
        scale: options.softmax_scale.map_or(1.0 / (d as f64).sqrt(), f64::from),
        softcap: options.softcap.map(f64::from),
    };
    let sinks = options.sinks.as_ref().map(floats).transpose()?;
    let mut expected = Expected { out: vec![0.0; rows * q_heads * d], lse: vec![f64::NEG_INFINITY; rows * q_heads], q_heads, head_dim: d };
    for b in 0..batch {
        let count = (starts[b + 1] - starts[b]) as usize;
        for i in 0..count {
            for h in 0..q_heads {
                let lane = b * table_heads + if table_heads > 1 { h / group } else { 0 };
                let position = lens[lane] - count as i64 + i as i64;
                if position < 0 {
                    continue;
                }
                let window = options.window.and_then(|w| i64::try_from(w).ok()).unwrap_or(i64::MAX);
                let first = |position: i64| position.saturating_sub(window).saturating_add(1).max(0) as usize;
                let tokens = Tokens {
                    place: &|t| (tables[lane * max_pages + t / page_size] as usize, h / group, t % page_size),
                    owned: first(lens[lane] - count as i64)..lens[lane] as usize,
                    attended: first(position)..position as usize + 1,
                };
                let at = (starts[b] as usize + i) * q_heads + h;
                let query = &queries[at * d..][..d];
                let groups = tasks[lane].iter().flat_map(|task| (0..format.groups).map(|group| (*task, group)));
                let parts: Vec<Row> = groups.map(|(task, group)| operands.task(query, &tokens, task, group)).collect();
                expected.lse[at] = merge(&parts, sinks.as_ref().map(|s| s[h]), &mut expected.out[at * d..][..d]);
            }
        }
    }
    Ok(expected)
}

impl Operands {
    fn task(&self, query: &[f64], tokens: &Tokens<'_>, tiles: TileRange, group: usize) -> Row {
        let absmax = query.iter().fold(0f32, |max, &x| max.max((x as f32).abs())).max(2f32.powi(-100));
        let factor = self.format.max() / absmax;
        let inverse = f64::from(absmax / self.format.max());
        let q: Vec<f64> = query.iter().map(|&x| self.format.round(x as f32 * factor)).collect();
        let mut row = Row { maximum: f64::NEG_INFINITY, sum: 0.0, out: vec![0.0; query.len()] };
        for tile in (tiles.first as usize + group..tiles.end as usize).step_by(self.format.groups) {
            let range = |limit: &std::ops::Range<usize>| limit.start.max(tile * TILE)..limit.end.min((tile + 1) * TILE);
            let owned = range(&tokens.owned).map(|t| self.v_scale.at((tokens.place)(t)).abs());
            let largest = owned.fold(2f64.powi(-126), f64::max);
            let scores: Vec<f64> = range(&tokens.attended).map(|t| self.score(&q, inverse, (tokens.place)(t))).collect();
            let maximum = scores.iter().copied().fold(row.maximum, f64::max);
            if maximum == f64::NEG_INFINITY {
                continue;
            }
            let decay = (row.maximum - maximum).exp2();
            row.sum *= decay;
            row.out.iter_mut().for_each(|o| *o *= decay);
            row.maximum = maximum;
            for (t, s) in range(&tokens.attended).zip(scores) {
                let place = (tokens.place)(t);
                let p = (s - maximum).exp2();
                row.sum += p;
                let share = self.v_scale.each.as_ref().map_or(1.0, |_| self.v_scale.at(place) / largest);
                let rounded = self.format.round((p * self.format.p_factor() * share) as f32) / self.format.p_factor();
                let weight = rounded * if self.v_scale.each.is_some() { largest } else { self.v_scale.all };
                row.out.iter_mut().zip(self.values.row(place.0, place.1, place.2)).for_each(|(o, v)| *o += weight * v);
            }
        }
        row
    }

    /// In units of log 2.
    fn score(&self, q: &[f64], inverse: f64, place: (usize, usize, usize)) -> f64 {
        let dot: f64 = self.keys.row(place.0, place.1, place.2).iter().zip(q).map(|(a, b)| a * b).sum();
        let s = dot * inverse * self.k_scale.all * self.k_scale.at(place) * self.scale;
        std::f64::consts::LOG2_E * self.softcap.map_or(s, |c| c * (s / c).tanh())
    }
}

fn merge(parts: &[Row], sink: Option<f64>, out: &mut [f64]) -> f64 {
    let mut maximum = parts.iter().map(|part| part.maximum).fold(f64::NEG_INFINITY, f64::max);
    if maximum == f64::NEG_INFINITY {
        return maximum;
    }
    let sink = sink.map(|s| s * std::f64::consts::LOG2_E);
    maximum = maximum.max(sink.unwrap_or(maximum));
    let mut sum = sink.map_or(0.0, |s| (s - maximum).exp2());
    for part in parts {
        let weight = (part.maximum - maximum).exp2();
        sum += weight * part.sum;
        out.iter_mut().zip(&part.out).for_each(|(o, x)| *o += weight * x);
    }
    out.iter_mut().for_each(|o| *o /= sum);
    (maximum + sum.log2()) * std::f64::consts::LN_2
}
