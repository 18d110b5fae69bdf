//! [`RocmPlan`]: a decode plan in device memory, made there or uploaded.

use candle::{DType, Result, bail};

use super::device::RocmDevice;
use super::launch::Launch;
use super::module::KernelId;
use super::pinned::Upload;
use super::specialize;
use super::tensor::RocmTensor;
use crate::gpu::args::PlanArgs;
use crate::gpu::bytes::as_bytes;
use crate::gpu::launch;
use crate::gpu::plan_shape::PlanShape;
use crate::plan::{DecodePlan, HostPlan, PADDING, PlannerBlock, batch_bucket};
use crate::registry::Tasks;

/// A plan in device memory. Cloning shares it.
///
/// A loop makes one for its batch's shape and refreshes it each step from the lengths on the device: nothing is read back, and
/// both the refresh and the calls that follow it can be captured in a graph.
#[derive(Clone, Debug)]
pub struct RocmPlan {
    work: RocmTensor,
    reduce: RocmTensor,
    /// What it was made for, where it was made on the device.
    shape: Option<PlanShape>,
}

impl RocmPlan {
    /// Room for the plans of batches of `shape`; until [`RocmPlan::refresh`] it holds no task, and calls with it give zeros.
    ///
    /// # Errors
    /// Sizes of 0, more rows than a planner block has LDS for (plan such a batch on the host), no memory.
    pub fn new(shape: PlanShape, device: &RocmDevice) -> Result<Self> {
        PlannerBlock::new(shape.rows(), device.arch())?;
        let plan = HostPlan { work: vec![PADDING; shape.capacity(device.arch(), None)?], reduce: vec![[0, 0]; shape.rows()] };
        Ok(Self { shape: Some(shape), ..Self::from_host(&plan, device)? })
    }

    /// The records of `host` on `device`.
    ///
    /// # Errors
    /// Records that name rows or slots that are not there; no memory, a failed copy.
    pub fn from_host(host: &HostPlan, device: &RocmDevice) -> Result<Self> {
        check_records(host)?;
        let upload = device.upload(&[as_bytes(host.work.as_flattened()), as_bytes(host.reduce.as_flattened())])?;
        Self::from_upload(&upload, 0, host)
    }

    /// The plan whose work and reduce records are parts `part` and `part + 1` of an upload.
    pub(super) fn from_upload(upload: &Upload, part: usize, host: &HostPlan) -> Result<Self> {
        let work = upload.tensor(part, (host.work.len(), 4), DType::I32)?;
        let reduce = upload.tensor(part + 1, (host.reduce.len(), 2), DType::I32)?;
        Ok(Self { work, reduce, shape: None })
    }

    /// Room for a plan of `shape`, for a planner that is to run before anything reads it.
    pub(super) fn uninitialised(shape: PlanShape, device: &RocmDevice) -> Result<Self> {
        let work = RocmTensor::empty((shape.capacity(device.arch(), None)?, 4), DType::I32, device)?;
        let reduce = RocmTensor::empty((shape.rows(), 2), DType::I32, device)?;
        Ok(Self { work, reduce, shape: Some(shape) })
    }

    /// Plans on the device for these lengths. Enqueued; can be captured.
    ///
    /// `context_lens`: I32 or U32 `[batch]` (`[batch, kv_heads]` with per-head tables); `query_start`: I32 or U32 `[batch + 1]` where the shape
    /// is ragged.
    ///
    /// # Errors
    /// Tensors that do not go with the shape; a plan that was made on the host.
    pub fn refresh(&self, context_lens: &RocmTensor, query_start: Option<&RocmTensor>) -> Result<()> {
        self.planner(context_lens, query_start)?.run()
    }

    /// The planner's launch.
    pub(super) fn planner(&self, context_lens: &RocmTensor, query_start: Option<&RocmTensor>) -> Result<Launch<PlanArgs>> {
        let device = self.work.device();
        let Some(shape) = &self.shape else { bail!("plan: made on the host, so it is not refreshed on the device: make a new one") };
        let rows = shape.rows();
        check_integers("context_lens", context_lens, rows, device)?;
        if query_start.is_some() != shape.ragged {
            bail!("query_start: the plan's shape is {}ragged", if shape.ragged { "" } else { "not " })
        }
        if let Some(start) = query_start {
            check_integers("query_start", start, shape.batch + 1, device)?;
        }
        let reads = [context_lens.address(), query_start.map_or(0, RocmTensor::address)];
        let args = shape.planner_args(reads, [self.work.address(), self.reduce.address()], self.capacity());
        let id = KernelId::Plan { bucket: batch_bucket(rows), ragged: shape.ragged };
        let kernel = device.kernel_of(id, || specialize::plan(device.arch(), rows, shape.ragged))?;
        // SAFETY: the planner reads `rows` lengths (and starts) and writes as many reduce records and `capacity` work records.
        unsafe { Launch::new(device, kernel, launch::PLAN, args) }
    }

    /// I32 `[capacity, 4]`. The kernels trust it.
    pub(super) fn work_info(&self) -> &RocmTensor {
        &self.work
    }

    /// I32 `[rows, 2]`. The kernels trust it.
    pub(super) fn reduce_info(&self) -> &RocmTensor {
        &self.reduce
    }

    /// Slots of the plan.
    pub fn capacity(&self) -> usize {
        self.work.dims()[0]
    }

    /// What the host knows of its tasks.
    pub(super) fn tasks(&self) -> Tasks {
        let one_a_row = self.shape.is_some_and(|shape| shape.max_partitions == Some(1));
        Tasks { slots: self.capacity(), one_a_row, planned: true, most_tiles: usize::MAX }
    }

    /// Plan rows.
    pub fn rows(&self) -> usize {
        self.reduce.dims()[0]
    }

    /// What it was made for, where it was made on the device.
    pub(super) fn shape(&self) -> Option<&PlanShape> {
        self.shape.as_ref()
    }

    /// The records, read back. Waits for the device.
    ///
    /// # Errors
    /// A failed copy; a graph is being captured.
    pub fn host(&self) -> Result<HostPlan> {
        let plan = DecodePlan::from_tensors(self.work.to_tensor()?, self.reduce.to_tensor()?)?;
        Ok((*plan.host()?).clone())
    }
}

/// Refuses records that would have a kernel reach past the plan's rows or slots.
fn check_records(host: &HostPlan) -> Result<()> {
    let (rows, slots) = (host.reduce.len() as i64, host.work.len() as i64);
    if let Some((slot, record)) = host.work.iter().enumerate().find(|(_, r)| r[0] < -1 || i64::from(r[0]) >= rows || r[1] < 0) {
        bail!("plan slot {slot} holds the task {record:?}, in a plan of {rows} rows")
    }
    let outside = |&[first, count]: &[i32; 2]| first < 0 || count < 0 || i64::from(first) + i64::from(count) > slots;
    if let Some((row, [first, count])) = host.reduce.iter().enumerate().find(|(_, record)| outside(record)) {
        bail!("plan row {row} owns {count} slots from {first}, outside the plan's {slots}")
    }
    if slots < rows {
        bail!("a plan of {rows} rows has {slots} slots, fewer than one a row")
    }
    Ok(())
}

/// Refuses what is not a contiguous I32 or U32 tensor of `elements` on `device`.
pub(super) fn check_integers(name: &str, tensor: &RocmTensor, elements: usize, device: &RocmDevice) -> Result<()> {
    super::decode::check_device(name, tensor, device)?;
    if !matches!(tensor.dtype(), DType::U32 | DType::I32)
        || tensor.layout().shape().elem_count() != elements
        || !tensor.layout().is_contiguous()
    {
        bail!(
            "{name}: expected {elements} contiguous U32 or I32, got {:?} {:?} with strides {:?}",
            tensor.dtype(),
            tensor.dims(),
            tensor.layout().stride()
        )
    }
    Ok(())
}
