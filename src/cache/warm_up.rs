//! [`ExpectedCalls`]: what a program will ask of a cache, so that its kernels can be compiled before the first request.

use candle::{DType, Result};

use super::PagedKvCache;

/// The calls that a program will make over a cache with tables on its device. A size is the most that one will have; smaller ones are
/// expected too.
#[derive(Clone, Copy, Debug)]
pub struct ExpectedCalls {
    /// Query heads.
    pub q_heads: usize,
    /// Dtype of q, k and v.
    pub dtype: DType,
    /// Sequences of a call.
    pub batch: usize,
    /// New tokens of a sequence.
    pub query_len: usize,
    /// Columns of the block tables.
    pub max_pages: usize,
    /// Whether calls have a `query_start` (all or none do). [`crate::AppendAndAttend`] over a pool's batch always has one.
    pub ragged: bool,
    /// Whether every KV head has tables of its own.
    pub per_head_tables: bool,
    /// As in [`DecodeOptions`](crate::DecodeOptions).
    pub window: Option<usize>,
    /// As in [`DecodeOptions`](crate::DecodeOptions).
    pub softcap: Option<f32>,
    /// As in [`DecodeOptions`](crate::DecodeOptions).
    pub softmax_scale: Option<f32>,
}

impl ExpectedCalls {
    /// Plain decode of one sequence of one page, which the other fields extend.
    pub fn new(q_heads: usize, dtype: DType) -> Self {
        Self {
            q_heads,
            dtype,
            batch: 1,
            query_len: 1,
            max_pages: 1,
            ragged: false,
            per_head_tables: false,
            window: None,
            softcap: None,
            softmax_scale: None,
        }
    }
}

impl PagedKvCache {
    /// Compiles (or finds in the cache of compiled kernels) and loads what `calls` will run on a CUDA device: tiles, reducers, planners, cache writes;
    /// those of calls that are given a plan, too, where that has the slots of a [`PlanRequest`](crate::plan::PlanRequest) without limits of its own.
    /// Gives how many kernels that are. Elsewhere nothing is done: a CPU compiles nothing, an AMD GPU's kernels are compiled at their first use.
    ///
    /// # Errors
    /// What the calls themselves would refuse, a kernel that does not compile.
    pub fn warm_up(&self, calls: &ExpectedCalls) -> Result<usize> {
        #[cfg(feature = "cuda")]
        if let Ok(layer) = self.layer(0)
            && layer.key.device().is_cuda()
        {
            return crate::cuda::warm_up(layer, self.layout(), calls);
        }
        let _ = calls;
        Ok(0)
    }
}
