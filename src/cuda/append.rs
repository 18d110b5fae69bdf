//! [`AppendAndAttend`](crate::AppendAndAttend) over candle's CUDA tensors.

use candle::{CudaStorage, Result};

use super::decode::{Operand, attend_decided, decide};
use super::write::CacheWrite;
use crate::append::{AppendAndAttend, check_apart};
use crate::cache::LayerCache;
use crate::op::cuda_storage;
use crate::op::locks::Locks;

/// Writes k and v to the cache's layer, then attends into fresh contiguous storage. Every error but a failed launch comes before the cache changes.
pub(crate) fn append_and_attend(op: &AppendAndAttend<'_>, q: Operand<'_>, k: Operand<'_>, v: Operand<'_>) -> Result<CudaStorage> {
    let layer = op.cache.layer(op.layer)?;
    check_apart(layer, q.0)?;
    let decode = op.decode(layer);
    let decided = with_cache(layer, |key, value| decide(&decode, q, key, value))?;
    CacheWrite::new(k, v, &op.slot_mapping, layer, op.cache.layout(), op.options.validate)?.run()?;
    with_cache(layer, |key, value| attend_decided(&decode, decided, q, key, value))
}

/// Runs `f` on the storages of a layer's K and V, locked for reading.
fn with_cache<T>(layer: &LayerCache, f: impl FnOnce(Operand<'_>, Operand<'_>) -> Result<T>) -> Result<T> {
    let LayerCache { key, value, .. } = layer;
    let locks = Locks::new([key, value]);
    f((cuda_storage("key_cache", locks.get(0))?, key.layout()), (cuda_storage("value_cache", locks.get(1))?, value.layout()))
}
