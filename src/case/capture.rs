//! A call as a [`Case`] of its own tensors: views made contiguous, and of the caches only the pages that the call reads.

use std::ops::Range;

use candle::backend::{BackendDevice, BackendStorage};
use candle::cpu_backend::CpuDevice;
use candle::op::BackpropOp;
use candle::{CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};

use super::Case;
use crate::cache::KvDtype;
use crate::op::Operand;
use crate::op::locks::Locks;
use crate::options::{DecodeOptions, KvScale};
use crate::plan::first_token;

impl Case {
    /// The call that [`crate::paged_decode`] would make of these arguments, on the CPU.
    ///
    /// Strided tensors become contiguous. Only the pages that the call reads are kept, renumbered in their old order; lanes of
    /// the block tables that the call does not read become -1 (`u32::MAX` in a U32 table). The output of the case is
    /// bit-identical to the call's. Where the tables, lengths and caches contradict each other, everything is kept as it is.
    ///
    /// Errors: a tensor that cannot be copied.
    pub fn capture(
        q: &Tensor,
        key_cache: &Tensor,
        value_cache: &Tensor,
        block_tables: &Tensor,
        context_lens: &Tensor,
        options: &DecodeOptions,
    ) -> Result<Self> {
        let tensors = [q, key_cache, value_cache].map(|t| t.to_device(&Device::Cpu));
        let [q, key, value] = tensors;
        let (q, key, value) = (q?, key?, value?);
        let locks = Locks::new([&q, &key, &value]);
        let operands = ((cpu(locks.get(0))?, q.layout()), (cpu(locks.get(1))?, key.layout()), (cpu(locks.get(2))?, value.layout()));
        capture(operands.0, operands.1, operands.2, block_tables, context_lens, options)
    }
}

/// [`Case::capture`] of operands.
pub(super) fn capture(
    q: Operand<'_>,
    key: Operand<'_>,
    value: Operand<'_>,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<Case> {
    let tables = contiguous(block_tables)?;
    let lens = contiguous(context_lens)?;
    let query_start = options.query_start.as_ref().map(contiguous).transpose()?;
    let pages = Pages::used(q.1, key, value, &tables, &lens, query_start.as_ref(), options);
    let gather = |scale: &KvScale| match scale {
        KvScale::Tensor(t) => Ok(KvScale::Tensor(pages.of_scale(t)?)),
        other => Ok::<_, candle::Error>(other.clone()),
    };
    Ok(Case {
        q: gathered(q, None)?,
        key_cache: gathered(key, pages.kept.as_deref())?,
        value_cache: gathered(value, pages.kept.as_deref())?,
        block_tables: pages.renumbered(&tables)?,
        context_lens: lens,
        options: DecodeOptions {
            sinks: options.sinks.as_ref().map(contiguous).transpose()?,
            k_scale: gather(&options.k_scale)?,
            v_scale: gather(&options.v_scale)?,
            query_start,
            ..options.clone()
        },
        expected: None,
    })
}

/// Which pages of the caches a call reads.
struct Pages {
    /// Pages of the cache as it is.
    total: usize,
    /// The pages kept, ascending. `None`: all.
    kept: Option<Vec<usize>>,
    /// The lanes read of each row of the block tables; empty where all pages are kept.
    lanes: Vec<Range<usize>>,
}

impl Pages {
    fn used(
        q: &Layout,
        key: Operand<'_>,
        value: Operand<'_>,
        tables: &Tensor,
        lens: &Tensor,
        query_start: Option<&Tensor>,
        options: &DecodeOptions,
    ) -> Self {
        let total = key.1.dims().first().copied().unwrap_or(0);
        let same_pages = value.1.dims().first() == Some(&total);
        let found = lanes_read(q, key, tables, lens, query_start, options).filter(|_| same_pages && total > 0);
        match found.and_then(|lanes| Some((pages_in(&lanes, tables, total)?, lanes))) {
            Some((kept, lanes)) => Self { total, kept: Some(kept), lanes },
            None => Self { total, kept: None, lanes: vec![] },
        }
    }

    /// The scales of the kept pages; a scale that is not per page stays as it is.
    fn of_scale(&self, scale: &Tensor) -> Result<Tensor> {
        let scale = scale.to_device(&Device::Cpu)?;
        let per_page = scale.rank() >= 3 && scale.dims()[0] == self.total;
        let (storage, layout) = scale.storage_and_layout();
        gathered((cpu(&storage)?, layout), self.kept.as_deref().filter(|_| per_page))
    }

    /// The block tables in terms of the kept pages.
    fn renumbered(&self, tables: &Tensor) -> Result<Tensor> {
        let Some(kept) = &self.kept else { return Ok(tables.clone()) };
        let width = tables.dims().last().copied().unwrap_or(0);
        let mut ids = vec![-1i64; tables.elem_count()];
        for (row, (lanes, old)) in self.lanes.iter().zip(page_ids(tables)?.chunks(width.max(1))).enumerate() {
            for lane in lanes.clone() {
                let new = kept.binary_search_by(|&page| (page as i64).cmp(&old[lane]));
                ids[row * width + lane] = new.map_or(-1, |page| page as i64);
            }
        }
        let shape = tables.shape().clone();
        match tables.dtype() {
            DType::U32 => Tensor::from_vec(ids.iter().map(|&id| id as u32).collect::<Vec<_>>(), shape, &Device::Cpu),
            _ => Tensor::from_vec(ids.iter().map(|&id| id as i32).collect::<Vec<_>>(), shape, &Device::Cpu),
        }
    }
}

/// The lanes of each table row that the call reads: from the page of the first position in reach of the window to that of the last
/// token; none where a sequence has no new rows. `None` where the arguments contradict each other.
fn lanes_read(
    q: &Layout,
    key: Operand<'_>,
    tables: &Tensor,
    lens: &Tensor,
    query_start: Option<&Tensor>,
    options: &DecodeOptions,
) -> Option<Vec<Range<usize>>> {
    let dtype = KvDtype::of(key.0.dtype()).ok()?;
    let page_size = options.layout.dims_of_key(key.1.dims(), dtype).ok()?.page_size;
    let (table_rows, width) = match *tables.dims() {
        [batch, width] => (batch, width),
        [batch, heads, width] => (batch.checked_mul(heads)?, width),
        _ => return None,
    };
    let batch = tables.dims()[0];
    let lens = lens.to_dtype(DType::I64).ok()?.flatten_all().ok()?.to_vec1::<i64>().ok()?;
    if page_size == 0 || lens.len() != table_rows {
        return None;
    }
    let query_lens = query_lens(q, batch, query_start)?;
    let heads = table_rows.checked_div(batch).unwrap_or(1);
    let lanes = lens.iter().enumerate().map(|(row, &context)| {
        let query_len = query_lens[row / heads];
        let context = if query_len == 0 { 0 } else { usize::try_from(context).unwrap_or(0) };
        let lanes = first_token(context, query_len, options.window) / page_size..context.div_ceil(page_size);
        (lanes.end <= width).then_some(lanes)
    });
    lanes.collect()
}

/// New tokens of each sequence.
fn query_lens(q: &Layout, batch: usize, query_start: Option<&Tensor>) -> Option<Vec<usize>> {
    let Some(query_start) = query_start else {
        let rows = q.dims()[..q.dims().len().checked_sub(2)?].iter().product::<usize>();
        return Some(vec![rows.checked_div(batch).unwrap_or(0); batch]);
    };
    let starts = query_start.to_dtype(DType::I64).ok()?.to_vec1::<i64>().ok()?;
    let lens: Option<Vec<_>> = starts.windows(2).map(|pair| usize::try_from(pair[1].checked_sub(pair[0])?).ok()).collect();
    lens.filter(|lens| lens.len() == batch)
}

/// The pages in these lanes, ascending, at least one; `None` where a lane holds no page of the cache.
fn pages_in(lanes: &[Range<usize>], tables: &Tensor, total: usize) -> Option<Vec<usize>> {
    let width = tables.dims().last().copied()?;
    let ids = page_ids(tables).ok()?;
    let mut used = vec![false; total];
    for (lanes, row) in lanes.iter().zip(ids.chunks(width.max(1))) {
        for &id in row.get(lanes.clone())? {
            *used.get_mut(usize::try_from(id).ok()?)? = true;
        }
    }
    let kept: Vec<_> = (0..total).filter(|&page| used[page]).collect();
    Some(if kept.is_empty() { vec![0] } else { kept })
}

/// Page ids of a contiguous table.
fn page_ids(tables: &Tensor) -> Result<Vec<i64>> {
    tables.to_dtype(DType::I64)?.flatten_all()?.to_vec1()
}

fn contiguous(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.to_device(&Device::Cpu)?;
    let (storage, layout) = tensor.storage_and_layout();
    gathered((cpu(&storage)?, layout), None)
}

/// A contiguous copy of an operand, or of the given entries of its first dim.
fn gathered((storage, layout): Operand<'_>, kept: Option<&[usize]>) -> Result<Tensor> {
    let mut dims = layout.dims().to_vec();
    if let (Some(first), Some(kept)) = (dims.first_mut(), kept) {
        *first = kept.len();
    }
    let shape = Shape::from(dims);
    let mut copy = CpuDevice.zeros_impl(&shape, storage.dtype())?;
    match kept {
        None if shape.elem_count() > 0 => storage.copy_strided_src(&mut copy, 0, layout)?,
        None => {}
        Some(kept) => {
            let entry = shape.elem_count().checked_div(kept.len()).unwrap_or(0);
            for (at, &page) in kept.iter().enumerate().filter(|_| entry > 0) {
                storage.copy_strided_src(&mut copy, at * entry, &layout.narrow(0, page, 1)?)?;
            }
        }
    }
    Ok(Tensor::from_storage(Storage::Cpu(copy), shape, BackpropOp::none(), false))
}

fn cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!("a tensor copied to the CPU is not there"),
    }
}
