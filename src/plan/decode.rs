//! A plan as tensors.

use std::sync::Arc;

use candle::{DType, Device, Result, Tensor, bail};

use super::{HostPlan, PlanRequest, capacity};
use crate::registry::Arch;

/// A plan as the kernels take it: I32 tensors on a device, with the host records where they were made on the host.
#[derive(Clone, Debug)]
pub struct DecodePlan {
    work_info: Tensor,
    reduce_info: Tensor,
    host: Option<Arc<HostPlan>>,
    #[cfg_attr(not(feature = "nvrtc"), expect(dead_code, reason = "CUDA calls alone look at it"))]
    limits: Limits,
}

/// What the plan was made for, and records that are written over its own keep to.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(not(feature = "nvrtc"), expect(dead_code, reason = "CUDA calls alone look at them"))]
struct Limits {
    max_partitions: Option<usize>,
    workgroup_budget: Option<usize>,
    max_context_len: Option<usize>,
}

impl DecodePlan {
    /// Plans on the host and copies the records to `device`.
    ///
    /// # Errors
    /// What [`HostPlan::new`] refuses, or a failed copy.
    pub fn new(request: &PlanRequest<'_>, arch: &Arch, device: &Device) -> Result<Self> {
        let PlanRequest { max_partitions, workgroup_budget, max_context_len, .. } = *request;
        let limits = Limits { max_partitions, workgroup_budget, max_context_len };
        Ok(Self { limits, ..Self::from_host(HostPlan::new(request, arch)?, device)? })
    }

    /// Copies the records of `host` to `device`.
    ///
    /// # Errors
    /// A failed copy.
    pub fn from_host(host: HostPlan, device: &Device) -> Result<Self> {
        let work_info = Tensor::from_slice(host.work.as_flattened(), (host.work.len(), 4), device)?;
        let reduce_info = Tensor::from_slice(host.reduce.as_flattened(), (host.reduce.len(), 2), device)?;
        Ok(Self { work_info, reduce_info, host: Some(Arc::new(host)), limits: Limits::default() })
    }

    /// A plan whose records live in tensors: `work_info` I32 `[capacity, 4]` and `reduce_info` I32 `[rows, 2]`, as a device planner
    /// leaves them.
    ///
    /// # Errors
    /// Another dtype or shape, or tensors on different devices. The records are not read here; [`HostPlan::check_covers`] does that.
    pub fn from_tensors(work_info: Tensor, reduce_info: Tensor) -> Result<Self> {
        for (name, tensor, fields) in [("work_info", &work_info, 4), ("reduce_info", &reduce_info, 2)] {
            if tensor.dtype() != DType::I32 || tensor.rank() != 2 || tensor.dims()[1] != fields {
                bail!("{name} must be I32 [n, {fields}], got {:?} {:?}", tensor.dtype(), tensor.dims())
            }
        }
        if !work_info.device().same_device(reduce_info.device()) {
            bail!("work_info is on {:?}, reduce_info on {:?}", work_info.device().location(), reduce_info.device().location())
        }
        Ok(Self { work_info, reduce_info, host: None, limits: Limits::default() })
    }

    /// The plan for new lengths of the same batch, on the same device and in tensors of the same shapes: scratch sized from
    /// [`DecodePlan::capacity`] goes on serving.
    ///
    /// # Errors
    /// `request` has another number of rows, or its limits (`max_context_len` among them), query lengths or arch give another capacity; what [`HostPlan::new`] refuses.
    pub fn refreshed(&self, request: &PlanRequest<'_>, arch: &Arch) -> Result<Self> {
        if request.rows() != self.rows() {
            bail!("a plan of {} rows cannot be refreshed for context_lens of {} rows", self.rows(), request.rows())
        }
        let capacity = capacity(request, arch)?;
        if capacity != self.capacity() {
            bail!(
                "a plan of {} slots cannot be refreshed for a request of {capacity} slots: query_lens, kv_heads, window, max_partitions, \
                 workgroup_budget, max_context_len and arch must stay as they were",
                self.capacity()
            )
        }
        Self::new(request, arch, self.work_info.device())
    }

    /// I32 `[capacity, 4]`.
    pub fn work_info(&self) -> &Tensor {
        &self.work_info
    }

    /// I32 `[rows, 2]`.
    pub fn reduce_info(&self) -> &Tensor {
        &self.reduce_info
    }

    /// Slots of the plan.
    pub fn capacity(&self) -> usize {
        self.work_info.dims()[0]
    }

    /// Plan rows.
    pub fn rows(&self) -> usize {
        self.reduce_info.dims()[0]
    }

    /// Whether it was made so that no row has several tasks.
    #[cfg(feature = "nvrtc")]
    pub(crate) fn is_one_task_a_row(&self) -> bool {
        self.limits.max_partitions == Some(1)
    }

    /// Most tokens of a row, where the request said so and left open how rows are split.
    #[cfg(feature = "nvrtc")]
    pub(crate) fn most_tokens_split_freely(&self) -> Option<usize> {
        let Limits { max_partitions, workgroup_budget, max_context_len } = self.limits;
        max_context_len.filter(|_| max_partitions.is_none() && workgroup_budget.is_none())
    }

    /// The host records, where they were made on the host: nothing is read back.
    #[cfg(feature = "nvrtc")]
    pub(crate) fn made_on_host(&self) -> Option<&Arc<HostPlan>> {
        self.host.as_ref()
    }

    /// The host records, read back from the device where they were not made here.
    ///
    /// # Errors
    /// A failed copy.
    pub fn host(&self) -> Result<Arc<HostPlan>> {
        match &self.host {
            Some(host) => Ok(host.clone()),
            None => Ok(Arc::new(HostPlan { work: read_records(&self.work_info)?, reduce: read_records(&self.reduce_info)? })),
        }
    }
}

/// The rows of an I32 `[n, N]` tensor.
fn read_records<const N: usize>(tensor: &Tensor) -> Result<Vec<[i32; N]>> {
    let mut records = vec![[0; N]; tensor.dims()[0]];
    for (record, row) in records.iter_mut().zip(tensor.to_vec2::<i32>()?) {
        record.copy_from_slice(&row);
    }
    Ok(records)
}
