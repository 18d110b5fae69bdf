//! A call as everything that decides sees it: dtypes, shapes, strides and numbers, whatever device the tensors are on.

use candle::backend::BackendStorage;
use candle::{CpuStorage, DType, Layout, Result, Tensor, bail};

use crate::options::{DecodeOptions, PlanChoice};

/// A tensor without its contents.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meta<'a> {
    pub dtype: DType,
    pub layout: &'a Layout,
}

/// A tensor of any device.
pub(crate) trait Described {
    fn meta(&self) -> Meta<'_>;
}

impl Described for Tensor {
    fn meta(&self) -> Meta<'_> {
        Meta { dtype: self.dtype(), layout: self.layout() }
    }
}

impl<'a> Meta<'a> {
    /// Of a tensor whose storage is `storage`.
    pub fn of(storage: &CpuStorage, layout: &'a Layout) -> Self {
        Self { dtype: BackendStorage::dtype(storage), layout }
    }

    pub fn dims(&self) -> &'a [usize] {
        self.layout.dims()
    }

    /// Refuses a layout that reaches past a storage of `elements`.
    pub fn check_bounds(&self, name: &str, elements: usize) -> Result<()> {
        let (dims, stride) = (self.layout.dims(), self.layout.stride());
        if dims.contains(&0) {
            return Ok(());
        }
        let last = stride
            .iter()
            .zip(dims)
            .try_fold(self.layout.start_offset(), |at, (stride, size)| at.checked_add(stride.checked_mul(size - 1)?));
        match last {
            Some(last) if last < elements => Ok(()),
            _ => bail!("{name}: {dims:?} with strides {stride:?} reaches past its storage of {elements} elements"),
        }
    }
}

/// The arguments of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a> {
    pub q: Meta<'a>,
    pub key: Meta<'a>,
    pub value: Meta<'a>,
    /// The output's layout, where it is given.
    pub out: Option<&'a Layout>,
    pub block_tables: Meta<'a>,
    pub context_lens: Meta<'a>,
    pub options: DecodeOptions<Meta<'a>, ()>,
}

/// `options` without the contents of their tensors.
pub(crate) fn options_meta<T: Described, P>(options: &DecodeOptions<T, P>) -> DecodeOptions<Meta<'_>, ()> {
    DecodeOptions {
        softmax_scale: options.softmax_scale,
        window: options.window,
        softcap: options.softcap,
        sinks: options.sinks.as_ref().map(T::meta),
        k_scale: options.k_scale.map(T::meta),
        v_scale: options.v_scale.map(T::meta),
        layout: options.layout,
        query_start: options.query_start.as_ref().map(T::meta),
        max_query_len: options.max_query_len,
        plan: match options.plan {
            PlanChoice::Default => PlanChoice::Default,
            PlanChoice::Free => PlanChoice::Free,
            PlanChoice::Given(_) => PlanChoice::Given(()),
        },
        max_partitions: options.max_partitions,
        workgroup_budget: options.workgroup_budget,
        validate: options.validate,
        tables_settled: options.tables_settled,
    }
}
