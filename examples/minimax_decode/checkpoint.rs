//! A checkpoint on disk: memory-mapped shards, checked against what the model needs before anything is loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle::safetensors::{Load, MmapedSafetensors};
use candle::{DType, Device, Tensor};
use serde::Deserialize;

use super::config::Config;
use super::tensors::expected;

/// What the released checkpoints put before the language model's own names.
pub const LANGUAGE_PREFIX: &str = "language_model.";

/// Names outside the language model (vision tower, projectors, multi-token-prediction modules) that this example leaves unread.
const UNUSED_PREFIXES: [&str; 4] = ["vision_", "multi_modal_", "patch_merge_", "mtp."];

/// Most problems that one error lists.
const LISTED_PROBLEMS: usize = 8;

/// The mapped shards of a checkpoint that holds exactly the tensors its config asks for.
pub struct Checkpoint {
    shards: Vec<MmapedSafetensors>,
    /// Shard of each tensor of the language model, by its name without the prefix.
    places: BTreeMap<String, usize>,
    prefix: &'static str,
    /// Tensors of the multimodal parts, left unread.
    pub unused: usize,
}

impl Checkpoint {
    /// Maps `DIR/model.safetensors` or the shards of `DIR/model.safetensors.index.json` and checks names, shapes and dtypes.
    pub fn open(dir: &Path, config: &Config) -> Result<Self> {
        let (paths, index) = shard_paths(dir)?;
        let mut shards = vec![];
        let mut found = BTreeMap::new();
        for path in &paths {
            // SAFETY: the files are only read; as with every mapped file, no one may truncate them while the example runs.
            let shard = unsafe { MmapedSafetensors::new(path) }.with_context(|| format!("cannot read {}", path.display()))?;
            for (name, _) in shard.tensors() {
                if let Some(other) = found.insert(name.clone(), shards.len()) {
                    bail!("tensor {name} is in both {} and {}", paths[other].display(), path.display());
                }
            }
            shards.push(shard);
        }
        if let Some(index) = index {
            index.check(&paths, &found)?;
        }
        let prefix = if found.keys().any(|name| name.starts_with(LANGUAGE_PREFIX)) { LANGUAGE_PREFIX } else { "" };
        let (places, unused) = split_unused(found, prefix)?;
        let checkpoint = Self { shards, places, prefix, unused };
        checkpoint.check(config)?;
        Ok(checkpoint)
    }

    /// Loads one tensor as `dtype` on `device`.
    pub fn load(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(&shard) = self.places.get(name) else { bail!("checkpoint: no tensor {}{name}", self.prefix) };
        let tensor = self.shards[shard].get(&format!("{}{name}", self.prefix))?.load(device)?;
        Ok(tensor.to_dtype(dtype)?)
    }

    /// Names every tensor that is missing, misshapen, of another dtype, or not of this model.
    fn check(&self, config: &Config) -> Result<()> {
        let prefix = self.prefix;
        let mut problems = vec![];
        let mut known = BTreeSet::new();
        for spec in expected(config) {
            match self.places.get(&spec.name) {
                None => problems.push(format!("missing tensor {prefix}{}", spec.name)),
                Some(&shard) => {
                    let view = self.shards[shard].get(&format!("{prefix}{}", spec.name))?;
                    if view.shape() != spec.shape {
                        problems.push(format!("tensor {prefix}{} has shape {:?}, expected {:?}", spec.name, view.shape(), spec.shape));
                    }
                    let dtype = DType::try_from(view.dtype());
                    if !matches!(dtype, Ok(DType::BF16 | DType::F32)) {
                        problems.push(format!("tensor {prefix}{} is {:?}, expected BF16 or F32", spec.name, view.dtype()));
                    }
                }
            }
            known.insert(spec.name);
        }
        let extra = self.places.keys().filter(|name| !known.contains(*name));
        problems.extend(extra.map(|name| format!("extra tensor {prefix}{name}")));
        if problems.is_empty() {
            return Ok(());
        }
        let more = problems.len().saturating_sub(LISTED_PROBLEMS);
        let mut text = problems[..problems.len() - more].join("\n  ");
        if more > 0 {
            text += &format!("\n  and {more} more");
        }
        bail!("the checkpoint does not fit its config:\n  {text}")
    }
}

/// Cuts `prefix` off the language model's names and counts the tensors of the other known parts.
fn split_unused(found: BTreeMap<String, usize>, prefix: &str) -> Result<(BTreeMap<String, usize>, usize)> {
    let mut places = BTreeMap::new();
    let mut unused = 0;
    for (name, shard) in found {
        let inner = name.strip_prefix(prefix);
        let part = inner.unwrap_or(&name);
        let part = part.strip_prefix("model.").unwrap_or(part);
        if UNUSED_PREFIXES.iter().any(|unused| part.starts_with(unused)) {
            unused += 1;
        } else if let Some(inner) = inner {
            places.insert(inner.to_string(), shard);
        } else {
            bail!("the checkpoint does not fit its config:\n  extra tensor {name}");
        }
    }
    Ok((places, unused))
}

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// The index and the shards must agree on every tensor's place.
    fn check(&self, paths: &[PathBuf], found: &BTreeMap<String, usize>) -> Result<()> {
        for (name, file) in &self.weight_map {
            let holder = found.get(name).map(|&shard| &paths[shard]);
            ensure!(
                holder.is_some_and(|path| path.ends_with(file)),
                "missing tensor {name}: model.safetensors.index.json places it in {file}, which does not hold it"
            );
        }
        if let Some((name, &shard)) = found.iter().find(|(name, _)| !self.weight_map.contains_key(*name)) {
            bail!("extra tensor {name}: in {}, but not in model.safetensors.index.json", paths[shard].display());
        }
        Ok(())
    }
}

fn shard_paths(dir: &Path) -> Result<(Vec<PathBuf>, Option<ShardIndex>)> {
    let index_path = dir.join("model.safetensors.index.json");
    let single = dir.join("model.safetensors");
    if !index_path.exists() {
        ensure!(single.exists(), "{}: neither model.safetensors nor model.safetensors.index.json", dir.display());
        return Ok((vec![single], None));
    }
    let text = std::fs::read_to_string(&index_path).with_context(|| format!("cannot read {}", index_path.display()))?;
    let index: ShardIndex = serde_json::from_str(&text).with_context(|| format!("{}: not a shard index", index_path.display()))?;
    let files: BTreeSet<&String> = index.weight_map.values().collect();
    for file in &files {
        let plain = Path::new(file).file_name().is_some_and(|name| name == file.as_str());
        ensure!(plain, "{}: shard {file:?} is not a plain file name", index_path.display());
    }
    let paths = files.into_iter().map(|file| dir.join(file)).collect();
    Ok((paths, Some(index)))
}
