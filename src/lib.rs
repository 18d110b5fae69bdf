//! Paged-attention decode for candle.

mod append;
pub mod cache;
mod case;
mod cpu;
mod op;
mod options;
pub mod plan;
pub mod quant;
pub mod registry;

pub use append::AppendAndAttend;
pub use case::Case;
pub use op::{CallSummary, PagedDecode, explain_call, merge_attention_states, paged_decode, paged_decode_into, paged_decode_with_lse};
pub use options::{DecodeOptions, KvScale, PlanChoice};
