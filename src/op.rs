//! The op: [`PagedDecode`] and the free functions around it.

pub(crate) mod call;
mod cpu;
pub(crate) mod decide;
pub(crate) mod elements;
pub(crate) mod host;
pub(crate) mod locks;
mod merge;
pub(crate) mod shapes;

use candle::op::BackpropOp;
use candle::{CpuStorage, CudaStorage, CustomOp3, InplaceOp2, Layout, MetalStorage, Result, Shape, Storage, Tensor, bail};

use call::Described;
pub(crate) use cpu::Operand;
#[cfg(any(feature = "rocm", feature = "cuda"))]
pub(crate) use cpu::{RowStrides, row_strides};
use host::cpu_storage;
use locks::{Locks, storage_address};
pub use merge::merge_attention_states;

use crate::options::DecodeOptions;
use crate::registry::Selection;

/// Paged-attention decode as a candle op over (q, key_cache, value_cache).
///
/// Shapes, for `B` sequences, `Q` new tokens each, `Hq` query and `Hkv` KV heads of `D` channels:
/// - q: F32, F16 or BF16 `[B*Q, Hq, D]` or `[B, Q, Hq, D]`, last dim contiguous. The output has q's shape and dtype.
/// - key_cache, value_cache: see [`crate::cache::CacheLayout`]; F32, F16, BF16, F8E4M3, or U8 for MXFP4; pages may be strided views.
/// - `block_tables`: U32 or I32 `[B, max_pages]`, or `[B, Hkv, max_pages]` when every KV head attends its own pages. Lanes past the context, and
///   lanes wholly before a sliding window, are never read: -1 is fine there.
/// - `context_lens`: U32 or I32 `[B]` (`[B, Hkv]` with per-head tables): tokens in the cache, the Q new ones included. `<= 0` is an empty sequence.
///
/// Query i of a sequence sits at position `context - Q + i` and attends the positions up to its own. Rows that attend nothing give 0.
/// A NaN or infinity in K of a token that only some queries of a sequence attend stays out of the others' rows. So it does in V on the CPU and with
/// NVIDIA's kernel without tensor cores; tensor and matrix cores multiply V by the others' zero weights, too, which makes NaN of it.
/// The same inputs, plan and backend give bit-identical output whatever the number of threads.
///
/// Accuracy on the CPU: F32 arithmetic, except that with a BF16, FP8 or MXFP4 cache and a BF16 or F16 q, CPUs with BF16 products round the softmax
/// weights to BF16 (sums stay F32). [`explain_call`] says which applies. Weighted values are summed before they are divided by the weights' sum, so
/// values above about 3e38 / context overflow.
///
/// Accuracy on NVIDIA GPUs, relative L2 of a row from float64, the worst seen on an H200: 2.3e-3 with BF16 caches, 1.8e-3 with F16, 3.9e-3 with FP8 (queries
/// and weights are not quantized); F32 caches and what else the plain tile computes as on the CPU. The LSE is within 1e-5, of FP8 verify within 1.6e-3.
///
/// # Errors
/// Every wrong argument is an error that names it, the offending index and the values; nothing is computed. So is a device without a kernel. Tables,
/// lengths and `query_start` that live on a GPU are checked in debug builds or with [`DecodeOptions::validate`] only: otherwise page ids are clamped to
/// the cache, so that wrong ones give wrong rows and no error.
///
/// # Source
/// Flash decoding: online softmax over tiles (Milakov and Gimelshein, 2018; Dao et al., 2022), split along the context with partial results
/// merged by their log-sum-exps; paging as in Kwon et al., 2023.
#[derive(Clone, Debug)]
pub struct PagedDecode {
    /// U32 or I32 `[B, max_pages]` or `[B, Hkv, max_pages]`.
    pub block_tables: Tensor,
    /// U32 or I32 `[B]` or `[B, Hkv]`.
    pub context_lens: Tensor,
    /// Everything optional.
    pub options: DecodeOptions,
}

impl PagedDecode {
    /// The op with these tables, lengths and options.
    pub fn new(block_tables: &Tensor, context_lens: &Tensor, options: &DecodeOptions) -> Self {
        Self { block_tables: block_tables.clone(), context_lens: context_lens.clone(), options: options.clone() }
    }
}

/// What the planner and the registry decided for a call.
#[derive(Clone, Debug)]
pub struct CallSummary {
    /// The kernel and why.
    pub selection: Selection,
    /// Tasks in the plan, over all sequences (each runs once per KV head, unless tables are per head).
    pub tasks: usize,
}

impl CustomOp3 for PagedDecode {
    fn name(&self) -> &'static str {
        "paged-decode"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        key: &CpuStorage,
        key_layout: &Layout,
        value: &CpuStorage,
        value_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (q, key, value) = ((q, q_layout), (key, key_layout), (value, value_layout));
        let out = self.attend_new(&self.prepare(q, key, value, None)?, q, key, value, None)?;
        Ok((out, q_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        key: &CudaStorage,
        key_layout: &Layout,
        value: &CudaStorage,
        value_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (out, _) = crate::cuda::attend_new(self, (q, q_layout), (key, key_layout), (value, value_layout), false)?;
        Ok((out, q_layout.shape().clone()))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        no_kernel("paged-decode", "CUDA")
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        no_kernel("paged-decode", "Metal")
    }
}

/// The error of a device that this build has no kernel for.
pub(crate) fn no_kernel<T>(op: &str, device: &str) -> Result<T> {
    bail!("{op}: this build has no {device} kernel; build with the feature of a GPU (`cuda`), or move q and the cache to the CPU")
}

/// Attention of the new tokens `q` over a paged cache: see [`PagedDecode`] for shapes and errors.
///
/// ```
/// use candle::{DType, Device, Result, Tensor};
/// use candle_paged_attn::{DecodeOptions, paged_decode};
/// # fn main() -> Result<()> {
/// let device = Device::Cpu;
/// // 2 sequences, 8 query and 2 KV heads of 64 channels, a cache of 10 pages of 16 tokens.
/// let q = Tensor::randn(0f32, 1., (2, 8, 64), &device)?;
/// let key_cache = Tensor::randn(0f32, 1., (10, 16, 2, 64), &device)?;
/// let value_cache = Tensor::randn(0f32, 1., (10, 16, 2, 64), &device)?;
/// let block_tables = Tensor::new(&[[7u32, 2, 9], [4, 0, 0]], &device)?;
/// let context_lens = Tensor::new(&[40u32, 5], &device)?;
/// let out = paged_decode(&q, &key_cache, &value_cache, &block_tables, &context_lens, &DecodeOptions::default())?;
/// assert_eq!(out.dims(), [2, 8, 64]);
/// # Ok(())
/// # }
/// ```
pub fn paged_decode(
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<Tensor> {
    let op = PagedDecode::new(block_tables, context_lens, options);
    q.apply_op3_no_bwd(key_cache, value_cache, &op)
}

/// [`paged_decode`] with the log-sum-exp of each row and head: F32 `[B*Q, Hq]`, natural log, sinks included, `-inf` where nothing is attended.
pub fn paged_decode_with_lse(
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<(Tensor, Tensor)> {
    let op = PagedDecode::new(block_tables, context_lens, options);
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        let (out, lse) = with_cuda_operands(q, key_cache, value_cache, |q, key, value| crate::cuda::attend_new(&op, q, key, value, true))?;
        let tensor = |storage, shape: candle::Shape| Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false);
        let Some(lse) = lse else { bail!("paged-decode: no LSE came back") };
        let q_heads = q.dims()[q.rank() - 2];
        let rows = q.elem_count() / (q_heads * q.dims()[q.rank() - 1]);
        return Ok((tensor(out, q.shape().clone()), tensor(lse, (rows, q_heads).into())));
    }
    let (out, lse) = with_operands(q, key_cache, value_cache, |q, key, value| {
        let call = op.prepare(q, key, value, None)?;
        let mut lse = call.empty_lse()?;
        Ok((op.attend_new(&call, q, key, value, Some(&mut lse))?, lse))
    })?;
    let out = Tensor::from_storage(Storage::Cpu(out), q.shape().clone(), BackpropOp::none(), false);
    let q_heads = q.dims()[q.rank() - 2];
    Ok((out, Tensor::from_vec(lse, (q.elem_count() / (q_heads * q.dims()[q.rank() - 1]), q_heads), q.device())?))
}

/// [`paged_decode`] into `out`: a tensor or view of q's shape and dtype whose last dim is contiguous; its other elements keep their values.
///
/// # Errors
/// As [`paged_decode`]; also where `out`'s shape or dtype is not q's, or `out` shares storage with an argument.
pub fn paged_decode_into(
    out: &Tensor,
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<()> {
    shapes::check_output(out.meta(), q.meta())?;
    let scales = [("k_scale", &options.k_scale), ("v_scale", &options.v_scale)];
    let scales = scales.iter().filter_map(|(name, scale)| scale.tensor().map(|t| (*name, t)));
    let others = [("q", q), ("key_cache", key_cache), ("value_cache", value_cache)];
    for (name, tensor) in others.into_iter().chain(scales).chain(options.sinks.iter().map(|t| ("sinks", t))) {
        if storage_address(out) == storage_address(tensor) {
            bail!("out: shares its storage with {name}")
        }
    }
    let op = PagedDecode::new(block_tables, context_lens, options);
    out.inplace_op2(q, &Into { op: &op, key_cache, value_cache })
}

/// What the planner and the registry decide for a call; nothing is computed.
pub fn explain_call(
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<CallSummary> {
    explain(&PagedDecode::new(block_tables, context_lens, options), q, key_cache, value_cache)
}

/// [`explain_call`] of an op.
pub(crate) fn explain(op: &PagedDecode, q: &Tensor, key_cache: &Tensor, value_cache: &Tensor) -> Result<CallSummary> {
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        return with_cuda_operands(q, key_cache, value_cache, |q, key, value| crate::cuda::explain(op, q, key, value));
    }
    with_operands(q, key_cache, value_cache, |q, key, value| Ok(op.prepare(q, key, value, None)?.summary()))
}

/// The in-place form of [`PagedDecode`]: writes to an output the caller owns.
struct Into<'a> {
    op: &'a PagedDecode,
    key_cache: &'a Tensor,
    value_cache: &'a Tensor,
}

impl InplaceOp2 for Into<'_> {
    fn name(&self) -> &'static str {
        "paged-decode-into"
    }

    fn cpu_fwd(&self, out: &mut CpuStorage, out_layout: &Layout, q: &CpuStorage, q_layout: &Layout) -> Result<()> {
        let q = (q, q_layout);
        with_cache(self.key_cache, self.value_cache, |key, value| {
            let call = self.op.prepare(q, key, value, Some((out, out_layout)))?;
            self.op.attend(&call, q, key, value, (out, out_layout), None)
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, out: &mut CudaStorage, out_layout: &Layout, q: &CudaStorage, q_layout: &Layout) -> Result<()> {
        let locks = Locks::new([self.key_cache, self.value_cache]);
        let key = (cuda_storage("key_cache", locks.get(0))?, self.key_cache.layout());
        let value = (cuda_storage("value_cache", locks.get(1))?, self.value_cache.layout());
        crate::cuda::attend_into(self.op, (out, out_layout), (q, q_layout), key, value)
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<()> {
        no_kernel("paged-decode-into", "CUDA")
    }

    fn metal_fwd(&self, _: &mut MetalStorage, _: &Layout, _: &MetalStorage, _: &Layout) -> Result<()> {
        no_kernel("paged-decode-into", "Metal")
    }
}

/// Runs `f` on the CPU storages of K and V, locked for reading: once where they are one.
pub(crate) fn with_cache<T>(key: &Tensor, value: &Tensor, f: impl FnOnce(Operand<'_>, Operand<'_>) -> Result<T>) -> Result<T> {
    let locks = Locks::new([key, value]);
    f((cpu_storage("key_cache", locks.get(0))?, key.layout()), (cpu_storage("value_cache", locks.get(1))?, value.layout()))
}

/// The CUDA storage of `tensor`; an error naming it where it lives elsewhere.
#[cfg(feature = "cuda")]
pub(crate) fn cuda_storage<'a>(name: &str, storage: &'a Storage) -> Result<&'a CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        other => bail!("{name}: on {:?}, but q is on a CUDA device", other.device().location()),
    }
}

/// Runs `f` on the CUDA storages of q and the caches.
#[cfg(feature = "cuda")]
fn with_cuda_operands<T>(
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    f: impl FnOnce(crate::cuda::Operand<'_>, crate::cuda::Operand<'_>, crate::cuda::Operand<'_>) -> Result<T>,
) -> Result<T> {
    let locks = Locks::new([q, key_cache, value_cache]);
    f(
        (cuda_storage("q", locks.get(0))?, q.layout()),
        (cuda_storage("key_cache", locks.get(1))?, key_cache.layout()),
        (cuda_storage("value_cache", locks.get(2))?, value_cache.layout()),
    )
}

/// Runs `f` on the CPU storages of q and the caches.
fn with_operands<T>(
    q: &Tensor,
    key_cache: &Tensor,
    value_cache: &Tensor,
    f: impl FnOnce(Operand<'_>, Operand<'_>, Operand<'_>) -> Result<T>,
) -> Result<T> {
    for (name, tensor) in [("q", q), ("key_cache", key_cache), ("value_cache", value_cache)] {
        if !tensor.device().is_cpu() {
            bail!("{name}: on {:?}; this build has no kernel for that device", tensor.device().location())
        }
    }
    let locks = Locks::new([q, key_cache, value_cache]);
    f(
        (cpu_storage("q", locks.get(0))?, q.layout()),
        (cpu_storage("key_cache", locks.get(1))?, key_cache.layout()),
        (cpu_storage("value_cache", locks.get(2))?, value_cache.layout()),
    )
}
