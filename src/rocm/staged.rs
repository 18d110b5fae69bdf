//! Calls over candle's CPU tensors on an AMD GPU: everything is copied there, and the output back.

use std::borrow::Cow;

use candle::{CpuStorage, DType, Result, Tensor, bail};

use super::decode::{Decided, Decode, RocmOptions, Tensors};
use super::device::RocmDevice;
use super::host::{cpu, tensor_bytes};
use super::pages::{NewTokens, RocmPages, is_fnuz};
use super::plan::RocmPlan;
use super::specialize;
use super::tensor::RocmTensor;
use crate::append::AppendAndAttend;
use crate::cache::{CacheLayout, KvDtype, LayerCache, check_bounds, layer_of};
use crate::case;
use crate::gpu::bytes::{as_bytes, contiguous_bytes};
use crate::op::call::{Call, Described, Meta, options_meta};
use crate::op::decide::{Prepared, longest};
use crate::op::locks::Locks;
use crate::op::{CallSummary, Operand, PagedDecode, with_cache};
use crate::options::{DecodeOptions, KvScale, PlanChoice};
use crate::quant::fp8::{FNUZ_SCALE_FACTOR, ocp_to_fnuz};

/// [`crate::paged_decode_with_lse`] on `device` for tensors on the CPU: the output and its log-sum-exps, on the CPU.
///
/// All of K and V is copied for the call, FP8 values to the device's encoding exactly (but NaN, every finite value is kept), so this is for tests and for
/// replaying recorded calls; to serve a model, keep the cache on the device ([`crate::cache::PagedKvCache`]). Waits for the device once.
///
/// # Errors
/// Those of [`crate::paged_decode_with_lse`] and of [`super::decode`]; nothing is launched on one.
pub fn paged_decode(
    device: &RocmDevice,
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<(Tensor, Tensor)> {
    let op = PagedDecode::new(block_tables, context_lens, options);
    with_operands([("q", q), ("key_cache", key_cache), ("value_cache", value_cache)], |[q, key, value]| {
        case::check_recorder()?;
        let cache = CacheMeta::new([key, value].map(|(storage, layout)| Meta::of(storage, layout)), options);
        let prepared = prepare(&op, q, &cache, device)?;
        case::maybe_record(q, key, value, block_tables, context_lens, options)?;
        let layer = upload_layer(key_cache, value_cache, options, device)?;
        let staged = Staged::new(&op, &prepared, q, None, device)?;
        let lse = RocmTensor::empty((prepared.shapes.rows, prepared.shapes.q_heads), DType::F32, device)?;
        staged.decode(&layer, options.layout, &prepared, Some(&lse))?.run()?;
        Ok((staged.out.to_tensor()?, lse.to_tensor()?))
    })
}

/// What the planner and the registry decide for a call of [`paged_decode`]; nothing is computed.
pub fn explain_call(
    device: &RocmDevice,
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<CallSummary> {
    let op = PagedDecode::new(block_tables, context_lens, options);
    with_operands([("q", q), ("key_cache", key_cache), ("value_cache", value_cache)], |[q, key, value]| {
        let cache = CacheMeta::new([key, value].map(|(storage, layout)| Meta::of(storage, layout)), options);
        Ok(prepare(&op, q, &cache, device)?.summary())
    })
}

impl RocmPages {
    /// Writes k and v to a layer and attends: [`AppendAndAttend`] on this device. Every error but a failed launch comes before the cache changes.
    pub(crate) fn append_and_attend(&self, op: &AppendAndAttend<'_>, q: Operand<'_>, k: Operand<'_>, v: Operand<'_>) -> Result<CpuStorage> {
        let device = self.device();
        let layer = layer_of(self.layers(), op.layer)?;
        case::check_recorder()?;
        if case::is_recording() && is_fnuz(device) && KvDtype::of(layer.key.dtype())? == KvDtype::Fp8 {
            bail!("CANDLE_PAGED_ATTN_RECORD: {} stores FP8 as FNUZ, which case files have no dtype for", device.name())
        }
        let decode = PagedDecode::new(&op.block_tables, &op.context_lens, &op.options);
        let prepared = prepare(&decode, q, &CacheMeta::of(layer, self.layout()), device)?;
        let tokens = NewTokens::new(k, v, &op.slot_mapping, self.dims())?;
        let staged = Staged::new(&decode, &prepared, q, Some(&tokens), device)?;
        let write = self.writer(layer, &tokens, &staged.upload, staged.tokens)?;
        let decode = staged.decode(layer, self.layout(), &prepared, None)?;
        write.run()?;
        if case::is_recording() {
            self.record(&PagedDecode::new(&op.block_tables, &op.context_lens, &op.options), q, layer)?;
        }
        decode.run()?;
        out_storage(&staged.out.to_tensor()?)
    }
}

impl RocmPages {
    /// [`AppendAndAttend::explain`].
    pub(crate) fn explain(&self, op: &AppendAndAttend<'_>, q: &Tensor) -> Result<CallSummary> {
        let layer = layer_of(self.layers(), op.layer)?;
        let decode = PagedDecode::new(&op.block_tables, &op.context_lens, &op.options);
        let (storage, layout) = q.storage_and_layout();
        let prepared = prepare(&decode, (cpu("q", &storage)?, layout), &CacheMeta::of(layer, self.layout()), self.device())?;
        Ok(prepared.summary())
    }

    /// Records a call over what `layer` holds now, which is read back for that.
    fn record(&self, op: &PagedDecode, q: Operand<'_>, layer: &LayerCache<RocmTensor>) -> Result<()> {
        let scale = |scale: &KvScale<RocmTensor>| match scale {
            KvScale::None => Ok(KvScale::None),
            KvScale::Scalar(factor) => Ok(KvScale::Scalar(*factor)),
            KvScale::Tensor(tensor) => tensor.to_tensor().map(KvScale::Tensor),
        };
        let options =
            DecodeOptions { layout: self.layout(), k_scale: scale(&layer.k_scale)?, v_scale: scale(&layer.v_scale)?, ..op.options.clone() };
        let (key, value) = (layer.key.to_tensor()?, layer.value.to_tensor()?);
        with_cache(&key, &value, |key, value| case::maybe_record(q, key, value, &op.block_tables, &op.context_lens, &options))
    }
}

/// The CPU storage of a fresh tensor.
fn out_storage(tensor: &Tensor) -> Result<CpuStorage> {
    let (storage, _) = tensor.storage_and_layout();
    Ok(cpu("out", &storage)?.clone())
}

/// Runs `f` on the CPU storages of three tensors.
fn with_operands<T>(tensors: [(&str, &Tensor); 3], f: impl FnOnce([Operand<'_>; 3]) -> Result<T>) -> Result<T> {
    let locks = Locks::new(tensors.map(|(_, tensor)| tensor));
    let operand = |i: usize| -> Result<Operand<'_>> { Ok((cpu(tensors[i].0, locks.get(i))?, tensors[i].1.layout())) };
    f([operand(0)?, operand(1)?, operand(2)?])
}

/// A layer's tensors as decisions see them, wherever they are.
struct CacheMeta<'a> {
    key: Meta<'a>,
    value: Meta<'a>,
    k_scale: KvScale<Meta<'a>>,
    v_scale: KvScale<Meta<'a>>,
    layout: CacheLayout,
}

impl<'a> CacheMeta<'a> {
    fn of(layer: &'a LayerCache<RocmTensor>, layout: CacheLayout) -> Self {
        Self {
            key: layer.key.meta(),
            value: layer.value.meta(),
            k_scale: layer.k_scale.map(RocmTensor::meta),
            v_scale: layer.v_scale.map(RocmTensor::meta),
            layout,
        }
    }

    fn new([key, value]: [Meta<'a>; 2], options: &'a DecodeOptions) -> Self {
        Self { key, value, k_scale: options.k_scale.map(Tensor::meta), v_scale: options.v_scale.map(Tensor::meta), layout: options.layout }
    }
}

/// Decides a call whose tables are on the host.
fn prepare(op: &PagedDecode, q: Operand<'_>, cache: &CacheMeta<'_>, device: &RocmDevice) -> Result<Prepared> {
    let call = Call {
        q: Meta::of(q.0, q.1),
        key: cache.key,
        value: cache.value,
        // Contiguous on the device, as q is there.
        out: None,
        block_tables: op.block_tables.meta(),
        context_lens: op.context_lens.meta(),
        options: DecodeOptions { k_scale: cache.k_scale, v_scale: cache.v_scale, layout: cache.layout, ..options_meta(&op.options) },
    };
    let prepared = Prepared::new(&call, &op.host_tables(), op.given_plan()?, device.arch(), specialize::select)?;
    check_bounds("q", q.0, q.1)?;
    Ok(prepared)
}

/// A call's small tensors on the device, uploaded as one.
struct Staged {
    upload: super::pinned::Upload,
    q: RocmTensor,
    block_tables: RocmTensor,
    context_lens: RocmTensor,
    out: RocmTensor,
    options: RocmOptions,
    /// The first part of the new tokens.
    tokens: usize,
}

impl Staged {
    fn new(op: &PagedDecode, prepared: &Prepared, q: Operand<'_>, tokens: Option<&NewTokens<'_>>, device: &RocmDevice) -> Result<Self> {
        let (options, plan) = (&op.options, &prepared.plan);
        let small = |name, tensor: &Tensor| tensor_bytes(name, tensor).map(Cow::Owned);
        let mut parts: Vec<Cow<'_, [u8]>> =
            vec![contiguous_bytes(q)?, small("block_tables", &op.block_tables)?, small("context_lens", &op.context_lens)?];
        let mut add = |bytes: Cow<'_, [u8]>| {
            parts.push(Cow::Owned(bytes.into_owned()));
            parts.len() - 1
        };
        let query_start = options.query_start.as_ref().map(|t| small("query_start", t)).transpose()?.map(&mut add);
        let sinks = options.sinks.as_ref().map(|t| small("sinks", t)).transpose()?.map(&mut add);
        let plan_part = (!plan.is_one_task_a_row()).then(|| {
            let work = add(Cow::Borrowed(as_bytes(plan.work.as_flattened())));
            add(Cow::Borrowed(as_bytes(plan.reduce.as_flattened())));
            work
        });
        let first_token = parts.len();
        parts.extend(tokens.iter().flat_map(|tokens| tokens.parts()).map(Cow::Borrowed));
        let upload = device.upload(&parts.iter().map(|part| &**part).collect::<Vec<_>>())?;
        let tensor = |part: usize, like: &Tensor| upload.tensor(part, like.shape(), like.dtype());
        let part_of =
            |part: Option<usize>, like: &Option<Tensor>| part.zip(like.as_ref()).map(|(part, like)| tensor(part, like)).transpose();
        let (q_shape, q_dtype) = (q.1.shape(), candle::backend::BackendStorage::dtype(q.0));
        Ok(Self {
            q: upload.tensor(0, q_shape, q_dtype)?,
            block_tables: tensor(1, &op.block_tables)?,
            context_lens: tensor(2, &op.context_lens)?,
            out: RocmTensor::empty(q_shape, q_dtype, device)?,
            options: RocmOptions {
                softmax_scale: options.softmax_scale,
                window: options.window,
                softcap: options.softcap,
                sinks: part_of(sinks, &options.sinks)?,
                query_start: part_of(query_start, &options.query_start)?,
                max_partitions: options.max_partitions,
                plan: match plan_part {
                    Some(part) => PlanChoice::Given(RocmPlan::from_upload(&upload, part, plan)?),
                    None => PlanChoice::Free,
                },
                ..RocmOptions::default()
            },
            upload,
            tokens: first_token,
        })
    }

    /// The launches over `layer`, to be run while `self` is alive.
    fn decode(&self, layer: &LayerCache<RocmTensor>, layout: CacheLayout, prepared: &Prepared, lse: Option<&RocmTensor>) -> Result<Decode> {
        let options = RocmOptions { layout, k_scale: layer.k_scale.clone(), v_scale: layer.v_scale.clone(), ..self.options.clone() };
        let tensors = Tensors {
            q: &self.q,
            key: &layer.key,
            value: &layer.value,
            block_tables: &self.block_tables,
            context_lens: &self.context_lens,
            out: &self.out,
            lse,
        };
        let Prepared { shapes, rows, selection, .. } = prepared;
        let decided = Decided { shapes: shapes.clone(), query_len: longest(rows), selection: selection.clone() };
        let plan = match &options.plan {
            PlanChoice::Given(plan) => Some(plan),
            PlanChoice::Default | PlanChoice::Free => None,
        };
        Decode::of(&tensors, &options, &decided, plan)
    }
}

/// K, V and their scales on the device, in its own FP8.
fn upload_layer(key: &Tensor, value: &Tensor, options: &DecodeOptions, device: &RocmDevice) -> Result<LayerCache<RocmTensor>> {
    let fnuz = is_fnuz(device) && KvDtype::of(key.dtype())? == KvDtype::Fp8;
    let cache = |name, tensor: &Tensor| -> Result<RocmTensor> {
        if !fnuz {
            return RocmTensor::from_tensor(tensor, device);
        }
        let codes: Vec<u8> = tensor_bytes(name, tensor)?.into_iter().map(ocp_to_fnuz).collect();
        device.upload(&[&codes])?.tensor(0, tensor.shape(), tensor.dtype())
    };
    let factor = if fnuz { FNUZ_SCALE_FACTOR } else { 1.0 };
    let scale = |scale: &KvScale| -> Result<KvScale<RocmTensor>> {
        Ok(match scale {
            KvScale::None if fnuz => KvScale::Scalar(factor),
            KvScale::None => KvScale::None,
            KvScale::Scalar(value) => KvScale::Scalar(value * factor),
            KvScale::Tensor(tensor) if fnuz => KvScale::Tensor(RocmTensor::from_tensor(&(tensor * f64::from(factor))?, device)?),
            KvScale::Tensor(tensor) => KvScale::Tensor(RocmTensor::from_tensor(tensor, device)?),
        })
    };
    Ok(LayerCache {
        key: cache("key_cache", key)?,
        value: cache("value_cache", value)?,
        k_scale: scale(&options.k_scale)?,
        v_scale: scale(&options.v_scale)?,
    })
}
