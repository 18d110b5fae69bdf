//! Deciding a call over tensors of a GPU.

use candle::cuda_backend::cudarc::driver::CudaStream;
use candle::{Device, Result, Tensor, bail};

use super::decided::Decided;
use super::device::Gpu;
use super::workspace::is_capturing;
use crate::gpu::plan_shape::longest_query;
use crate::op::PagedDecode;
use crate::op::call::Call;
use crate::op::decide::{HostTables, check_contents};
use crate::op::shapes::Shapes;

/// Whether the tables are on the CPU.
pub(super) fn on_host(op: &PagedDecode) -> Result<bool> {
    let host = op.block_tables.device().is_cpu();
    for (name, tensor) in [("context_lens", Some(&op.context_lens)), ("query_start", op.options.query_start.as_ref())] {
        if let Some(tensor) = tensor.filter(|tensor| tensor.device().is_cpu() != host) {
            bail!(
                "{name}: on {:?}, but block_tables are on {:?}; tables and lengths are all on the CPU or all on q's device",
                tensor.device().location(),
                op.block_tables.device().location()
            )
        }
    }
    Ok(host)
}

pub(super) fn decide_on_device(op: &PagedDecode, call: &Call<'_>, gpu: &Gpu, stream: &CudaStream) -> Result<Decided> {
    let options = &op.options;
    let shapes = Shapes::new(call)?;
    let query_len = longest_query(&shapes, options)?;
    if options.validate && !is_capturing(stream)? {
        validate(op, call, gpu, &shapes, query_len)?;
    }
    Decided::by_sizes(op, shapes, query_len, call, &gpu.arch)
}

/// Reads tables, lengths and a given plan back and checks them. Waits for the device.
fn validate(op: &PagedDecode, call: &Call<'_>, gpu: &Gpu, shapes: &Shapes, query_len: usize) -> Result<()> {
    let (block_tables, context_lens) = (to_cpu(&op.block_tables)?, to_cpu(&op.context_lens)?);
    let query_start = op.options.query_start.as_ref().map(to_cpu).transpose()?;
    let tables = HostTables { block_tables: &block_tables, context_lens: &context_lens, query_start: query_start.as_ref() };
    check_contents(shapes, &tables, call, query_len, op.given_plan()?, &gpu.arch)
}

/// A copy of the whole storage behind a tensor, seen through the same strides: copies on the device would need candle's own kernels.
fn to_cpu(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_device(&Device::Cpu)
}
