//! The workloads of `benches/workloads.json`.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;

use super::kv::KvKind;

const WORKLOADS: &str = include_str!("../../benches/workloads.json");

/// One attention call of a workload family.
#[derive(Clone, Debug, Deserialize)]
pub struct Workload {
    pub name: String,
    pub num_q_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub page_size: usize,
    /// Tokens that a block table has lanes for.
    pub table_tokens: usize,
    pub batch: usize,
    pub query_len: usize,
    kv: String,
    fp8_scale: Option<String>,
    context: Option<usize>,
    /// First and last of evenly drawn lengths.
    context_uniform: Option<(usize, usize)>,
    #[serde(default)]
    seed: u64,
    pub max_partitions: Option<usize>,
    #[serde(default)]
    pub plan_free: bool,
}

impl Workload {
    /// The workload called `FAMILY/NAME`.
    pub fn named(shape: &str) -> Result<Self> {
        let families: BTreeMap<String, Vec<Self>> = serde_json::from_str(WORKLOADS).context("benches/workloads.json")?;
        let all = || families.iter().flat_map(|(family, list)| list.iter().map(move |workload| (format!("{family}/{}", workload.name), workload)));
        match all().find(|(name, _)| name == shape) {
            Some((_, workload)) => Ok(workload.clone()),
            None => bail!("--shape: no workload {shape:?}; there are\n  {}", all().map(|(name, _)| name).collect::<Vec<_>>().join("\n  ")),
        }
    }

    /// How the workload stores K and V.
    pub fn kv(&self) -> Result<KvKind> {
        Ok(match (self.kv.as_str(), self.fp8_scale.as_deref()) {
            ("bf16", _) => KvKind::Bf16,
            ("fp8", Some("per_token")) => KvKind::Fp8PerToken,
            ("fp8", _) => KvKind::Fp8,
            ("mxfp4", _) => KvKind::Mxfp4,
            (other, _) => bail!("workload {}: KV dtype {other:?}", self.name),
        })
    }

    /// Tokens of each sequence, the new ones included.
    pub fn contexts(&self) -> Result<Vec<usize>> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        match (self.context, self.context_uniform) {
            (Some(context), _) => Ok(vec![context; self.batch]),
            (None, Some((first, last))) => Ok((0..self.batch).map(|_| rng.random_range(first..=last)).collect()),
            (None, None) => bail!("workload {}: no context", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_workload_reads() {
        let families: BTreeMap<String, Vec<Workload>> = serde_json::from_str(WORKLOADS).unwrap();
        assert!(families.len() >= 4);
        for workload in families.values().flatten() {
            workload.kv().unwrap();
            let most = workload.contexts().unwrap().into_iter().max().unwrap();
            assert!(most <= workload.table_tokens, "{}", workload.name);
        }
        assert!(Workload::named("minimax20/none").unwrap_err().to_string().contains("minimax20/decode-b4-q1-ctx8192-bf16"));
    }
}
