//! A shape, as options and in JSON.

use anyhow::{Result, bail};
use candle_paged_attn::cache::CacheLayout;
use candle_paged_attn::registry::{Arch, preferred_layout};
use clap::Args;
use serde::Deserialize;
use testkit::workloads::{Fp8Scale, Kv, Workload};

use crate::options::{KvArg, LayoutArg, QueryArg, ScalesArg};

/// More than any size of a shape, and few enough that no product overflows.
const MOST: usize = 1 << 16;
/// Tokens of a context.
const MOST_TOKENS: usize = 1 << 24;
/// Plan rows, of which any block of a planner holds fewer.
const MOST_ROWS: usize = 1 << 20;

/// What kernels are specialized on, as a model and an engine know it. Fields are options, and the JSON file's names.
#[derive(Args, Clone, Debug, PartialEq, Deserialize)]
#[group(multiple = true)]
#[serde(deny_unknown_fields, default)]
pub struct Shape {
    /// Query heads (of this GPU's share). Only their number a KV head counts
    #[arg(long, default_value_t = 16)]
    pub q_heads: usize,
    /// KV heads
    #[arg(long, default_value_t = 1)]
    pub kv_heads: usize,
    /// Channels of a head
    #[arg(long, default_value_t = 128)]
    pub head_dim: usize,
    /// Tokens of a page
    #[arg(long, default_value_t = 128)]
    pub page_size: usize,
    /// Dtypes of the cache, with commas
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["bf16"])]
    pub kv: Vec<KvArg>,
    /// Scales of FP8 caches
    #[arg(long, value_enum, default_value = "scalar")]
    pub scales: ScalesArg,
    /// The cache's layout [default: the GPU's own: shuffled on AMD, hnd for mxfp4; nhd on NVIDIA]
    #[arg(long, value_enum)]
    pub layout: Option<LayoutArg>,
    /// Dtype of q, k, v and the output
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: QueryArg,
    /// New tokens a sequence: 1 decodes, 4 verifies three drafted tokens, 512 is a chunk of a prompt. With commas
    #[arg(long, value_delimiter = ',', default_values_t = [1])]
    pub query_lens: Vec<usize>,
    /// Most sequences of a call: planners come in powers of two up to it
    #[arg(long, default_value_t = 256)]
    pub max_batch: usize,
    /// Most tokens of a sequence: on NVIDIA GPUs what decides is the width of the block tables
    #[arg(long, default_value_t = 1 << 17)]
    pub max_context: usize,
    /// Only batches whose sequences all have the same number of new tokens
    #[arg(long)]
    pub even: bool,
    /// A sliding window
    #[arg(long)]
    pub window: bool,
    /// Capped scores
    #[arg(long)]
    pub softcap: bool,
    /// A block table for every KV head
    #[arg(long)]
    pub per_head_tables: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            q_heads: 16,
            kv_heads: 1,
            head_dim: 128,
            page_size: 128,
            kv: vec![KvArg::Bf16],
            scales: ScalesArg::Scalar,
            layout: None,
            dtype: QueryArg::Bf16,
            query_lens: vec![1],
            max_batch: 256,
            max_context: 1 << 17,
            even: false,
            window: false,
            softcap: false,
            per_head_tables: false,
        }
    }
}

impl From<&Workload> for Shape {
    fn from(workload: &Workload) -> Self {
        Self {
            q_heads: workload.num_q_heads,
            kv_heads: workload.num_kv_heads,
            head_dim: workload.head_dim,
            page_size: workload.page_size,
            kv: vec![match workload.kv {
                Kv::Bf16 => KvArg::Bf16,
                Kv::Fp8 => KvArg::Fp8,
                Kv::Mxfp4 => KvArg::Mxfp4,
            }],
            scales: if workload.fp8_scale == Some(Fp8Scale::PerToken) { ScalesArg::PerToken } else { ScalesArg::Scalar },
            query_lens: vec![workload.query_len],
            max_batch: workload.batch,
            max_context: workload.contexts().into_iter().max().unwrap_or(1),
            even: true,
            ..Self::default()
        }
    }
}

impl Shape {
    pub fn check(&self) -> Result<()> {
        let sizes = [("q_heads", self.q_heads), ("kv_heads", self.kv_heads), ("head_dim", self.head_dim), ("page_size", self.page_size)];
        let query_lens = self.query_lens.iter().map(|&len| ("query_lens", len));
        for (name, size) in sizes.into_iter().chain([("max_batch", self.max_batch)]).chain(query_lens) {
            if !(1..=MOST).contains(&size) {
                bail!("{name}: {size} is not from 1 to {MOST}")
            }
        }
        if !(1..=MOST_TOKENS).contains(&self.max_context) {
            bail!("max_context: {} is not from 1 to {MOST_TOKENS}", self.max_context)
        }
        if self.max_batch * self.rows_a_sequence() > MOST_ROWS {
            bail!("max_batch: {} sequences of {} tables each are more than {MOST_ROWS} plan rows", self.max_batch, self.kv_heads)
        }
        if self.kv.is_empty() || self.query_lens.is_empty() {
            bail!("kv and query_lens: at least one each")
        }
        Ok(())
    }

    /// Plan rows.
    pub fn rows_a_sequence(&self) -> usize {
        if self.per_head_tables { self.kv_heads } else { 1 }
    }

    pub fn raggedness(&self) -> impl Iterator<Item = bool> + use<> {
        [false, true].into_iter().take(if self.even { 1 } else { 2 })
    }

    pub fn layout(&self, kv: KvArg, arch: &Arch) -> CacheLayout {
        self.layout.map_or_else(|| preferred_layout(arch, kv.into()), CacheLayout::from)
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};

    use super::*;

    #[test]
    fn options_and_json_have_the_same_defaults() {
        let command = Shape::augment_args(Command::new("test"));
        let of_options = Shape::from_arg_matches(&command.get_matches_from(["test"])).unwrap();
        let of_json: Shape = serde_json::from_str("{}").unwrap();
        assert_eq!((&of_options, &of_json), (&Shape::default(), &Shape::default()));
        assert!(serde_json::from_str::<Shape>(r#"{"heads": 1}"#).is_err());
    }
}
