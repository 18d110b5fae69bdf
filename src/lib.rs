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

/// The instruction sets of this machine that the CPU kernels are written for, best first. Calls use the first, or the one that the
/// environment variable `CANDLE_PAGED_ATTN_CPU_ISA` names (read once).
pub fn cpu_instruction_sets() -> Vec<registry::CpuIsa> {
    registry::CpuIsa::ALL.into_iter().filter(|isa| cpu::available(*isa)).collect()
}
