//! Calls on the GPU into case files.

use candle::backend::BackendStorage;
use candle::cuda_backend::cudarc::driver::CudaStream;
use candle::{Device, Result};

use super::decode::Operand;
use super::workspace::is_capturing;
use crate::case;
use crate::op::PagedDecode;

/// Records a call where `CANDLE_PAGED_ATTN_RECORD` asks for it: everything that it depends on is read back. What a graph captures is not recorded.
pub(super) fn maybe_record(op: &PagedDecode, operands: [Operand<'_>; 3], stream: &CudaStream) -> Result<()> {
    if !case::is_recording() || is_capturing(stream)? {
        return Ok(());
    }
    let cpu = &Device::Cpu;
    let [q, key, value] = operands.map(|(storage, layout)| Ok::<_, candle::Error>((storage.to_cpu_storage()?, layout)));
    let (q, key, value) = (q?, key?, value?);
    let options = case::options_on(&op.options, cpu)?;
    let (block_tables, context_lens) = (op.block_tables.to_device(cpu)?, op.context_lens.to_device(cpu)?);
    case::maybe_record((&q.0, q.1), (&key.0, key.1), (&value.0, value.1), &block_tables, &context_lens, &options)
}
