//! The shapes that benches, tables and examples share: `benches/workloads.json`.

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::mersenne::MersenneTwister;

const JSON: &str = include_str!("../../../benches/workloads.json");

/// What a workload stores in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kv {
    Bf16,
    /// E4M3.
    Fp8,
    Mxfp4,
}

/// Granularity of a workload's FP8 scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fp8Scale {
    Scalar,
    /// One F32 per (page, KV head, token).
    PerToken,
}

/// Microseconds of one call before and after the change that the shapes were drawn from, on an MI355X: a reference, not measured here.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mi355xUs {
    pub before: f64,
    pub after: f64,
}

/// One shape.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    pub name: String,
    /// Sequences.
    pub batch: usize,
    /// New tokens of each sequence.
    pub query_len: usize,
    pub num_q_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub page_size: usize,
    /// Tokens that a row of the block table has lanes for; those past the context are padding, not cache.
    pub table_tokens: usize,
    /// Tokens of every sequence, where they are the same.
    pub context: Option<usize>,
    /// Inclusive range that the lengths are drawn from, uniformly, with `seed`.
    pub context_uniform: Option<[usize; 2]>,
    pub seed: Option<u32>,
    pub kv: Kv,
    pub fp8_scale: Option<Fp8Scale>,
    pub max_partitions: Option<usize>,
    #[serde(default)]
    pub plan_free: bool,
    #[serde(default)]
    pub max_context_hint: bool,
    #[serde(default)]
    pub strided_output: bool,
    pub mi355x_us: Option<Mi355xUs>,
}

/// Shapes of one origin.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    pub name: &'static str,
    pub workloads: Vec<Workload>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    minimax20: Vec<Workload>,
    large16: Vec<Workload>,
    random24: Vec<Workload>,
    review: Vec<Workload>,
}

/// The four families, each workload checked.
pub fn families() -> Result<[Family; 4]> {
    let File { minimax20, large16, random24, review } = serde_json::from_str(JSON).context("benches/workloads.json")?;
    let families = [("minimax20", minimax20), ("large16", large16), ("random24", random24), ("review", review)]
        .map(|(name, workloads)| Family { name, workloads });
    for family in &families {
        for workload in &family.workloads {
            workload.check().with_context(|| format!("{}/{}", family.name, workload.name))?;
        }
    }
    Ok(families)
}

/// The workload called `FAMILY/NAME`. Errors list what there is.
pub fn find(path: &str) -> Result<Workload> {
    let families = families()?;
    let (family, name) = path.split_once('/').unwrap_or((path, ""));
    let Some(family) = families.iter().find(|f| f.name == family) else {
        let names = families.each_ref().map(Family::names).join("\n  ");
        bail!("shape {path:?}: not a FAMILY/NAME of benches/workloads.json, which has\n  {names}")
    };
    match family.workloads.iter().find(|w| w.name == name) {
        Some(workload) => Ok(workload.clone()),
        None => bail!("shape {path:?}: not a FAMILY/NAME of benches/workloads.json; {} has\n  {}", family.name, family.names()),
    }
}

impl Family {
    /// The names of its workloads, in one line.
    fn names(&self) -> String {
        let names: Vec<_> = self.workloads.iter().map(|w| format!("{}/{}", self.name, w.name)).collect();
        names.join(" ")
    }
}

impl Workload {
    fn check(&self) -> Result<()> {
        match (self.context, self.context_uniform, self.seed) {
            (Some(_), None, None) => {}
            (None, Some([low, high]), Some(_)) if low <= high => {}
            _ => bail!("expected context, or context_uniform [low, high] with seed"),
        }
        if matches!(self.kv, Kv::Fp8) != self.fp8_scale.is_some() {
            bail!("fp8_scale goes with kv fp8, and only with it")
        }
        let longest = self.context.or(self.context_uniform.map(|[_, high]| high));
        if longest.is_some_and(|tokens| tokens > self.table_tokens) {
            bail!("table_tokens {} is less than the longest context", self.table_tokens)
        }
        Ok(())
    }

    /// Tokens of each sequence, the new ones included. Random lengths are those of `torch.randint(low, high + 1, (batch,))` with a CPU
    /// generator of this seed, so that they are the lengths the GPU peers were timed on.
    pub fn contexts(&self) -> Vec<usize> {
        match (self.context, self.context_uniform) {
            (None, Some([low, high])) => {
                let mut draws = MersenneTwister::new(self.seed.unwrap_or(0));
                (0..self.batch).map(|_| low + draws.next_u32() as usize % (high - low + 1)).collect()
            }
            (context, _) => vec![context.unwrap_or(0); self.batch],
        }
    }

    /// Pages of each sequence.
    pub fn pages(&self) -> Vec<usize> {
        self.contexts().iter().map(|tokens| tokens.div_ceil(self.page_size)).collect()
    }

    /// Lanes of a row of the block table.
    pub fn table_width(&self) -> usize {
        self.table_tokens.div_ceil(self.page_size)
    }

    /// Query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.num_q_heads / self.num_kv_heads
    }

    /// Bytes of K and V that one call reads, scales left out: `sum(context) * kv_heads * head_dim * 2 * bytes per element`.
    pub fn kv_bytes(&self) -> usize {
        let bits = match self.kv {
            Kv::Bf16 => 16,
            Kv::Fp8 => 8,
            Kv::Mxfp4 => 4,
        };
        self.contexts().iter().sum::<usize>() * self.num_kv_heads * self.head_dim * 2 * bits / 8
    }

    /// Floating-point operations of one call: two for each multiply-add of Q·Kᵀ and of P·V, every row over its whole context.
    pub fn flops(&self) -> usize {
        self.contexts().iter().sum::<usize>() * self.query_len * self.num_q_heads * self.head_dim * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_workload_parses() {
        let counts = families().unwrap().map(|family| (family.name, family.workloads.len()));
        assert_eq!(counts, [("minimax20", 20), ("large16", 18), ("random24", 24), ("review", 13)]);
    }

    #[test]
    fn names_are_unique_within_a_family() {
        for family in families().unwrap() {
            let mut names: Vec<_> = family.workloads.iter().map(|w| &w.name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), family.workloads.len(), "{}", family.name);
        }
    }

    #[test]
    fn look_up_by_family_and_name() {
        let workload = find("minimax20/decode-b4-q1-ctx8192-bf16").unwrap();
        assert_eq!(workload.contexts(), [8192; 4]);
        assert_eq!(workload.kv_bytes(), 4 * 8192 * 128 * 2 * 2);
        let error = |path| find(path).unwrap_err().to_string();
        assert!(error("minimax20").contains("FAMILY/NAME") && error("minimax20").contains("minimax20/decode-b4-q1-ctx8192-bf16"));
        assert!(error("minimax21/x").contains("minimax20/") && error("").contains("review/R7"));
        assert!(error("review/x").contains("review/R7") && !error("review/x").contains("minimax20"));
    }

    /// The H200 peers' table gives 4.409385607902133 TB/s and, per workload, KV bytes over that rate in microseconds to two decimals.
    #[test]
    fn random_lengths_are_the_ones_the_peers_were_timed_on() {
        let published = [
            ("random24/random-b64-q1-1024-8192-bf16", 36.65),
            ("random24/random-b256-q1-1024-32768-bf16", 487.12),
            ("random24/random-b128-q1-128-2048-fp8", 8.3),
            ("random24/random-b256-q4-1024-8192-fp8", 67.22),
            ("review/P1", 32.54),
            ("review/P2", 77.06),
        ];
        for (name, limit_us) in published {
            let bytes = find(name).unwrap().kv_bytes();
            assert!((bytes as f64 / 4.409385607902133e6 - limit_us).abs() < 0.0051, "{name}");
        }
    }
}
