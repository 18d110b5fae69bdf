//! New tokens into their pages on the device.

use std::sync::Arc;

use candle::backend::BackendDevice;
use candle::cuda_backend::cudarc::driver::CudaStream;
use candle::{CpuStorage, CudaStorage, DType, InplaceOp1, Layout, Result, Tensor, bail};

use super::decode::Operand;
use super::device::Gpu;
use super::launch::Kernel;
use super::memory::{Reads, cuda_storage, meta, write_address};
use super::specialize::WriteKey;
use super::strides::{paged, paged_scale};
use super::workspace::{self, Own, Workspace, is_capturing};
use crate::cache::{
    CacheDims, CacheLayout, LayerCache, LayerForm, ScaleForm, Side, check_apart, check_as_many, check_new_tokens, checked_slots,
    last_writes,
};
use crate::gpu::args::{Paged, WriteArgs};
use crate::gpu::bytes::as_bytes;
use crate::gpu::launch;
use crate::gpu::plan_shape::clamp;
use crate::op::locks::storage_address;
use crate::op::row_strides;
use crate::registry::ScaleMode;

const OP: &str = "reshape_and_cache";

/// A write that was checked: nothing but its launch can fail.
pub(crate) struct CacheWrite<'a> {
    k: Operand<'a>,
    v: Operand<'a>,
    slots: Slots<'a>,
    form: LayerForm<'a>,
    layout: CacheLayout,
    scales: ScaleMode,
    kernel: Kernel,
    stream: Arc<CudaStream>,
}

/// A slot for each token.
enum Slots<'a> {
    /// No slot twice.
    Host(Vec<i64>),
    Device(&'a Tensor),
}

impl<'a> CacheWrite<'a> {
    /// Checks what [`crate::cache::reshape_and_cache`] checks, and finds the kernel; slots on the device are read back where `validate` says so.
    pub fn new(
        k: Operand<'a>,
        v: Operand<'a>,
        slot_mapping: &'a Tensor,
        cache: &'a LayerCache,
        layout: CacheLayout,
        validate: bool,
    ) -> Result<Self> {
        let form = LayerForm::of(OP, cache, layout)?;
        let (stream, gpu) = (k.0.device.cuda_stream(), Gpu::of(&k.0.device)?);
        let place = k.0.device.location();
        for (name, other) in [("v", v.0.device.location()), ("key_cache", cache.key.device().location())] {
            if other != place {
                bail!("{name}: on {other:?}, but k is on {place:?}")
            }
        }
        check_apart(&form, [k.0, v.0])?;
        let (k_meta, v_meta) = (meta("k", k.0, k.1)?, meta("v", v.0, v.1)?);
        let tokens = check_new_tokens("k", k_meta, form.dims)?;
        check_as_many(tokens, check_new_tokens("v", v_meta, form.dims)?)?;
        let slots = Slots::new(slot_mapping, tokens, form.dims, validate && !is_capturing(&stream)?)?;
        if matches!(slots, Slots::Host(_)) && is_capturing(&stream)? {
            bail!("slot_mapping: on the CPU, from where a graph cannot take it; keep it on the device")
        }
        for (side, name) in [(&form.key, "key_cache"), (&form.value, "value_cache")] {
            paged(name, side.cache.layout(), layout, side.strides)?;
        }
        let scales = form.scale_mode();
        let CacheDims { page_size, head_dim, .. } = form.dims;
        let key = WriteKey { arch: gpu.arch.name, head_dim, page_size, dtype: k_meta.dtype, kv_dtype: form.dtype, scales, layout };
        let kernel = gpu.writer(&stream, key, v_meta.dtype, matches!(slots, Slots::Device(_)) && tokens > 1)?;
        Ok(Self { k, v, slots, form, layout, scales, kernel, stream })
    }

    /// Enqueues the write.
    pub fn run(&self) -> Result<()> {
        if self.k.1.dims()[0] == 0 {
            return Ok(());
        }
        workspace::with(&self.stream, |workspace| self.run_in(workspace))
    }

    fn run_in(&self, workspace: &mut Workspace) -> Result<()> {
        let (stream, mut own) = (&self.stream, Own::default());
        let slots_storage;
        let mut reads = Reads::new(stream);
        let slots = match &self.slots {
            Slots::Host(slots) => {
                let bytes = as_bytes(slots);
                let at = workspace.room(bytes.len(), &mut own, stream)?;
                workspace::upload(at, bytes, stream)?;
                at
            }
            Slots::Device(slots) => {
                slots_storage = slots.storage_and_layout().0;
                reads.address(cuda_storage("slot_mapping", &slots_storage, &self.k.0.device)?, slots.layout())
            }
        };
        let one = |scale: &ScaleForm<'_>, workspace: &mut Workspace, own: &mut Own| match (self.scales, scale) {
            (ScaleMode::None, _) => Ok(0),
            (_, ScaleForm::Factor(factor)) => workspace.scalar(*factor, own, stream),
            (_, ScaleForm::OnDevice(tensor)) => self.read_address(tensor),
            (_, ScaleForm::PerToken(_) | ScaleForm::Block(_)) => Ok(0),
        };
        let factors = [one(&self.form.key.scale, workspace, &mut own)?, one(&self.form.value.scale, workspace, &mut own)?];
        let operands = [reads.address(self.k.0, self.k.1), reads.address(self.v.0, self.v.1), slots];
        let written: Vec<&Tensor> = self.form.tensors().map(|(_, tensor)| tensor).collect();
        let (storages, homes) = distinct(&written);
        writing(&storages, vec![], stream, &|bases| {
            let address = |(tensor, &home): (&&Tensor, &usize)| {
                bases[home] + (tensor.layout().start_offset() * tensor.dtype().size_in_bytes()) as u64
            };
            let addresses: Vec<u64> = written.iter().zip(&homes).map(address).collect();
            self.launch(operands, factors, &addresses)
        })
    }

    /// The address of a factor that is on the device. Its writers are waited for on the device, its readers from here on are not tracked: a factor stays.
    fn read_address(&self, tensor: &Tensor) -> Result<u64> {
        let (storage, layout) = tensor.storage_and_layout();
        let storage = cuda_storage("k_scale", &storage, &self.k.0.device)?;
        Ok(Reads::new(&self.stream).address(storage, layout))
    }

    /// `written`: where the form's tensors begin, in their order.
    fn launch(&self, [k, v, slots]: [u64; 3], [k_factor, v_factor]: [u64; 2], written: &[u64]) -> Result<()> {
        let mut written = written.iter().copied();
        let mut next = || written.next().unwrap_or(0);
        let (key_address, value_address) = (next(), next());
        let mut scale = |side: &Side<'_>, factor: u64| match side.scale.paged() {
            Some(scales) => (next(), paged_scale(scales.layout())),
            None => (factor, Paged::default()),
        };
        let strides = |name: &str, side: &Side<'_>| paged(name, side.cache.layout(), self.layout, side.strides);
        let Self { form: LayerForm { dims, key, value, .. }, .. } = self;
        let ((k_scale, k_scale_stride), (v_scale, v_scale_stride)) = (scale(key, k_factor), scale(value, v_factor));
        let ([k_row, k_head], [v_row, v_head]) = (rows(self.k.1), rows(self.v.1));
        let tokens = self.k.1.dims()[0];
        let args = WriteArgs {
            k,
            v,
            slots,
            key: key_address,
            value: value_address,
            k_scale,
            v_scale,
            k_row,
            k_head,
            v_row,
            v_head,
            key_stride: strides("key_cache", key)?,
            value_stride: strides("value_cache", value)?,
            k_scale_stride,
            v_scale_stride,
            tokens: clamp(tokens),
            kv_heads: clamp(dims.kv_heads),
            pages: clamp(dims.pages),
        };
        // SAFETY: k, v and the slots were checked against the sizes given; the kernel skips slots past the cache, and writes the cache's tensors alone, which
        // are locked for it.
        unsafe { self.kernel.launch(&self.stream, launch::writer(tokens, dims.kv_heads), false, &args) }
    }
}

impl<'a> Slots<'a> {
    fn new(slot_mapping: &'a Tensor, tokens: usize, dims: CacheDims, validate: bool) -> Result<Self> {
        if slot_mapping.device().is_cpu() {
            return checked_slots(slot_mapping, tokens, dims).map(last_writes).map(Self::Host);
        }
        if slot_mapping.dtype() != DType::I64 || slot_mapping.dims() != [tokens] || !slot_mapping.is_contiguous() {
            let (shape, dtype, strides) = (slot_mapping.dims(), slot_mapping.dtype(), slot_mapping.stride());
            bail!("slot_mapping: I64 [{tokens}] contiguous (one slot a token of k), got {dtype:?} {shape:?} with strides {strides:?}")
        }
        if validate {
            checked_slots(&slot_mapping.to_device(&candle::Device::Cpu)?, tokens, dims)?;
        }
        Ok(Self::Device(slot_mapping))
    }
}

/// Strides between tokens and between heads.
fn rows(layout: &Layout) -> [i64; 2] {
    row_strides(layout).map_or([0; 2], |strides| [strides.row as i64, strides.head as i64])
}

/// One tensor of each storage, and which of them each tensor's storage is.
fn distinct<'a>(tensors: &[&'a Tensor]) -> (Vec<&'a Tensor>, Vec<usize>) {
    let mut distinct: Vec<&Tensor> = vec![];
    let home = |&tensor: &&'a Tensor| {
        let address = storage_address(tensor);
        let known = distinct.iter().position(|other| storage_address(other) == address);
        known.unwrap_or_else(|| {
            distinct.push(tensor);
            distinct.len() - 1
        })
    };
    let homes = tensors.iter().map(home).collect();
    (distinct, homes)
}

/// Calls `f` with where the storages of `tensors` begin, after `bases`, all locked for writing.
fn writing(tensors: &[&Tensor], bases: Vec<u64>, stream: &CudaStream, f: &dyn Fn(&[u64]) -> Result<()>) -> Result<()> {
    match tensors.split_first() {
        Some((first, rest)) => first.inplace_op1(&Writing { rest, bases, stream, f }),
        None => f(&bases),
    }
}

/// One storage's turn in [`writing`].
struct Writing<'a> {
    rest: &'a [&'a Tensor],
    bases: Vec<u64>,
    stream: &'a CudaStream,
    f: &'a dyn Fn(&[u64]) -> Result<()>,
}

impl InplaceOp1 for Writing<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("{OP}: a cache tensor moved to the CPU")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let (base, _guard) = write_address(storage, &Layout::contiguous(0), self.stream);
        writing(self.rest, [&*self.bases, &[base]].concat(), self.stream, self.f)
    }
}
