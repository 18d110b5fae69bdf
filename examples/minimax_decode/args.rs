//! The command line.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use candle::{DType, Device};
use candle_paged_attn::cache::Placement;
use candle_paged_attn::registry::Arch;
#[cfg(feature = "rocm")]
use candle_paged_attn::rocm::RocmDevice;
use clap::{Parser, ValueEnum};

use super::kv::KvKind;
use super::sampling::Sampling;

/// Tokens of a verify step unless told otherwise, and at most.
const DEFAULT_MTP_ROWS: usize = 4;
const MOST_MTP_ROWS: usize = 16;

/// Decodes MiniMax-M3 with paged attention.
///
/// Without arguments: writes a small random model of the same architecture as a sharded checkpoint, loads it back, decodes a batch of
/// sequences token by token and again with multi-token verify, and checks that both give the same tokens.
#[derive(Clone, Debug, Parser)]
#[command(name = "minimax_decode")]
pub struct Args {
    /// Checkpoint folder: config.json and model.safetensors or its shards with their index [default: a small random model]
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    /// Compares with recorded logits and greedy tokens (prompt.i, prefill_logits.i, decode_logits.i, greedy.i) and exits with 1 where
    /// they differ: for K and V in F32, which --backend rocm does not have; a narrower cache differs by its rounding
    #[arg(long, value_name = "FILE", requires = "model", conflicts_with_all = ["batch", "requests", "context", "steps", "seed", "temperature", "top_p", "top_k"])]
    pub check: Option<PathBuf>,

    /// No model: the attention call alone on a workload of benches/workloads.json, over 1 GiB of caches in turn
    #[arg(long, conflicts_with_all = ["model", "check", "dtype", "rope", "batch", "requests", "context", "steps", "mtp", "chunk", "page_size", "temperature", "top_p", "top_k"])]
    pub attention_only: bool,

    /// Workload for --attention-only, such as minimax20/decode-b4-q1-ctx8192-bf16 (an unknown one gets the list)
    #[arg(long, value_name = "FAMILY/NAME", requires = "attention_only")]
    pub shape: Option<String>,

    /// How K and V are stored [default: as computed, bf16 with --backend rocm; the workload's own with --attention-only]
    #[arg(long, value_enum)]
    pub kv: Option<KvKind>,

    /// What the model computes in
    #[arg(long, value_enum, default_value_t = ComputeType::F32)]
    pub dtype: ComputeType,

    /// What RoPE's frequencies are rounded to [default: f32; with --check the checkpoint's own dtype, since a recording of a PyTorch
    /// model that was cast to bfloat16 has them rounded, whatever it computes in]
    #[arg(long, value_enum)]
    pub rope: Option<ComputeType>,

    /// What attends: cpu; cuda, on which the whole model runs; rocm, an AMD GPU that holds the KV cache while the model runs on the CPU. The
    /// last two take a build with that backend. cuda compiles its attention kernels before the first request; the time that rocm takes to compile
    /// them at their first use counts in the speeds
    #[arg(long, value_enum, default_value_t = Backend::Cpu)]
    pub backend: Backend,

    /// Sequences that run at a time
    #[arg(long, default_value_t = 4)]
    pub batch: usize,

    /// Sequences in all; those past the batch join as others leave [default: half as many again as the batch]
    #[arg(long)]
    pub requests: Option<usize>,

    /// Prompt tokens of a sequence
    #[arg(long, default_value_t = 700)]
    pub context: usize,

    /// New tokens of a sequence
    #[arg(long, default_value_t = 64)]
    pub steps: usize,

    /// Tokens of a verify step: the last one and its drafts. 1 leaves the second, verifying run out [default: 4 or the chunk if less,
    /// with --check 1]
    #[arg(long, value_name = "N")]
    pub mtp: Option<usize>,

    /// Rows of a step: decoding sequences first, prompt chunks in what is left
    #[arg(long, default_value_t = 512)]
    pub chunk: usize,

    /// Tokens of a page [default: the model's block size, which sparse layers require]
    #[arg(long)]
    pub page_size: Option<usize>,

    /// Gives the random model the released one's heads: 64 of 128 channels on 4 KV heads, sparse layers that attend 16 blocks of 128
    #[arg(long, conflicts_with_all = ["model", "attention_only"])]
    pub real_heads: bool,

    /// Makes the attention calls of one decode step again, each by itself from an idle device with cold caches, and prints how they compare
    #[arg(long, conflicts_with_all = ["check", "attention_only"])]
    pub compare_attention: bool,

    /// Seed of the random model, the prompts and the draws
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,

    /// Draw among the fewest tokens that hold this much probability
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f32,

    /// Draw among this many tokens at most; 0 is no limit
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,

    /// One line of JSON on stdout in place of the text
    #[arg(long)]
    pub json: bool,
}

/// The dtype of weights and activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ComputeType {
    F32,
    Bf16,
}

impl ComputeType {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    Cpu,
    Cuda,
    Rocm,
}

impl Args {
    pub fn dtype(&self) -> DType {
        self.dtype.dtype()
    }

    /// Of RoPE's frequencies, for a checkpoint in bfloat16 or not.
    pub fn rope_dtype(&self, bf16_checkpoint: bool) -> DType {
        match self.rope {
            Some(dtype) => dtype.dtype(),
            None if self.check.is_some() && bf16_checkpoint => DType::BF16,
            None => DType::F32,
        }
    }

    /// Rows of a verify step: as given, else what fits a step.
    pub fn mtp_rows(&self) -> usize {
        self.mtp.unwrap_or(DEFAULT_MTP_ROWS.min(self.chunk))
    }

    /// Sequences in all.
    pub fn request_count(&self) -> usize {
        self.requests.unwrap_or(self.batch.saturating_add(self.batch / 2))
    }

    pub fn kv(&self) -> KvKind {
        // AMD's kernels read no F32 cache.
        let computed = if self.backend == Backend::Rocm { KvKind::Bf16 } else { KvKind::of(self.dtype()) };
        self.kv.unwrap_or(computed)
    }

    pub fn sampling(&self) -> Sampling {
        Sampling { temperature: self.temperature, top_p: self.top_p, top_k: self.top_k, seed: self.seed }
    }

    /// Refuses sizes that nothing can run with.
    pub fn check_sizes(&self) -> Result<()> {
        let sizes = [("batch", self.batch), ("context", self.context), ("steps", self.steps), ("requests", self.requests.unwrap_or(1))];
        for (name, size) in sizes {
            ensure!(size > 0, "--{name}: must be at least 1");
        }
        ensure!(self.chunk > 0 && self.chunk <= 512, "--chunk: {} is not from 1 to 512", self.chunk);
        let mtp = self.mtp.unwrap_or(1);
        ensure!((1..=MOST_MTP_ROWS).contains(&mtp), "--mtp: {mtp} is not from 1 to {MOST_MTP_ROWS}");
        ensure!(mtp <= self.chunk, "--mtp: {mtp} is more than --chunk {}, the rows of a step", self.chunk);
        self.sampling().check()
    }
}

/// Where a model runs, and where its KV cache is.
#[derive(Clone, Debug)]
pub struct Devices {
    pub model: Device,
    /// An AMD GPU, which candle has no tensors for.
    #[cfg(feature = "rocm")]
    pub rocm: Option<RocmDevice>,
}

impl From<&Device> for Devices {
    fn from(model: &Device) -> Self {
        Self {
            model: model.clone(),
            #[cfg(feature = "rocm")]
            rocm: None,
        }
    }
}

impl Devices {
    /// What attends, as its maker calls it.
    pub fn name(&self) -> Result<String> {
        #[cfg(feature = "rocm")]
        if let Some(rocm) = &self.rocm {
            return Ok(rocm.name().to_string());
        }
        #[cfg(feature = "cuda")]
        if let Device::Cuda(device) = &self.model {
            let arch = candle_paged_attn::cuda::arch_of(&self.model)?;
            return Ok(format!("{} ({arch})", device.cuda_stream().context().name()?));
        }
        Ok(Arch::host()?.to_string())
    }

    /// Where the KV cache is.
    pub fn cache(&self) -> Placement<'_> {
        #[cfg(feature = "rocm")]
        if let Some(rocm) = &self.rocm {
            return rocm.into();
        }
        (&self.model).into()
    }
}

impl Backend {
    pub fn devices(self) -> Result<Devices> {
        match self {
            Self::Cpu => Ok((&Device::Cpu).into()),
            Self::Cuda if candle::utils::cuda_is_available() => Ok((&Device::new_cuda(0).context("--backend cuda")?).into()),
            Self::Cuda => bail!("--backend cuda: this binary is built without the feature `cuda`"),
            #[cfg(feature = "rocm")]
            Self::Rocm => Ok(Devices { model: Device::Cpu, rocm: Some(RocmDevice::new(0)?) }),
            #[cfg(not(feature = "rocm"))]
            Self::Rocm => bail!("--backend rocm: this binary is built without ROCm (--features rocm)"),
        }
    }
}
