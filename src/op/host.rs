//! Small tensors read on the host, and the checks that need their contents.

use candle::{CpuStorage, Layout, Result, Storage, Tensor, bail};

use super::elements::offsets;
use super::shapes::Shapes;
use crate::cache::check_bounds;
use crate::cpu::{Ids, PageTable, Row};
use crate::plan::first_token;

/// The CPU storage of `tensor`; an error naming it where it lives elsewhere.
pub(crate) fn cpu_storage<'a>(name: &str, storage: &'a Storage) -> Result<&'a CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        other => bail!("{name}: on {:?}, but q is on the CPU", other.device().location()),
    }
}

/// Every element of a small U32 or I32 tensor, in row-major order.
fn read_integers(name: &str, tensor: &Tensor) -> Result<Vec<i64>> {
    let (storage, layout) = tensor.storage_and_layout();
    let storage = cpu_storage(name, &storage)?;
    check_bounds(name, storage, layout)?;
    let read = |get: &dyn Fn(usize) -> i64| offsets(layout).map(get).collect();
    match storage {
        CpuStorage::U32(data) => Ok(read(&|i| i64::from(data[i]))),
        CpuStorage::I32(data) => Ok(read(&|i| i64::from(data[i]))),
        _ => bail!("{name}: dtype {:?} is not U32 or I32", tensor.dtype()),
    }
}

/// The plan rows of a call: each sequence's (or each of its KV heads') new tokens and context.
pub(crate) fn rows(shapes: &Shapes, context_lens: &Tensor, query_start: Option<&Tensor>) -> Result<Vec<Row>> {
    let starts = query_starts(shapes, query_start)?;
    let heads = shapes.rows_of_a_sequence();
    let lens = read_integers("context_lens", context_lens)?;
    lens.iter()
        .enumerate()
        .map(|(row, &len)| {
            let sequence = row / heads;
            let context_len = check_length(shapes, row, len)?;
            Ok(Row { query_start: starts[sequence], query_len: starts[sequence + 1] - starts[sequence], context_len })
        })
        .collect()
}

/// First query row of each sequence, and the end.
fn query_starts(shapes: &Shapes, query_start: Option<&Tensor>) -> Result<Vec<usize>> {
    let (batch, rows) = (shapes.batch, shapes.rows);
    let Some(tensor) = query_start else {
        let len = rows.checked_div(batch).unwrap_or(0);
        return Ok((0..=batch).map(|s| s * len).collect());
    };
    let starts = read_integers("query_start", tensor)?;
    if starts[0] != 0 {
        bail!("query_start: starts at {}, not 0", starts[0])
    }
    if let Some(s) = (0..batch).find(|&s| starts[s + 1] < starts[s]) {
        bail!("query_start: sequence {s} starts at {} and ends at {}", starts[s], starts[s + 1])
    }
    if starts[batch] != rows as i64 {
        bail!("query_start: ends at {}, but q has {rows} rows", starts[batch])
    }
    Ok(starts.into_iter().map(|s| s as usize).collect())
}

/// The context length of a plan row, 0 for none; an error where its table is too short.
fn check_length(shapes: &Shapes, row: usize, len: i64) -> Result<usize> {
    let tokens = shapes.max_pages.saturating_mul(shapes.dims.page_size).min(i32::MAX as usize);
    match usize::try_from(len) {
        Err(_) => Ok(0),
        Ok(len) if len <= tokens => Ok(len),
        Ok(len) => bail!(
            "context_lens: {} has {len} tokens, but block_tables hold {} pages of {} a row ({tokens} tokens)",
            row_name(shapes, row),
            shapes.max_pages,
            shapes.dims.page_size
        ),
    }
}

fn row_name(shapes: &Shapes, row: usize) -> String {
    match shapes.per_head {
        true => format!("sequence {}, KV head {}", row / shapes.dims.kv_heads, row % shapes.dims.kv_heads),
        false => format!("sequence {row}"),
    }
}

/// The block tables as the kernels read them.
pub(crate) fn page_table<'a>(shapes: &Shapes, storage: &'a CpuStorage, layout: &Layout) -> Result<PageTable<'a>> {
    let ids = match storage {
        CpuStorage::U32(ids) => Ids::U32(ids),
        CpuStorage::I32(ids) => Ids::I32(ids),
        other => bail!("block_tables: dtype {:?} is not U32 or I32", candle::backend::BackendStorage::dtype(other)),
    };
    check_bounds("block_tables", storage, layout)?;
    let s = layout.stride();
    let (head_stride, column_stride) = if shapes.per_head { (s[1], s[2]) } else { (0, s[1]) };
    Ok(PageTable { ids, start: layout.start_offset(), sequence_stride: s[0], head_stride, column_stride })
}

/// Checks every page id that will be read: those with tokens of the context that a query's window reaches.
pub(crate) fn check_pages(shapes: &Shapes, rows: &[Row], table: &PageTable<'_>, window: Option<usize>) -> Result<()> {
    let page_size = shapes.dims.page_size;
    let heads = shapes.rows_of_a_sequence();
    for (row, r) in rows.iter().enumerate().filter(|(_, r)| r.query_len > 0) {
        for column in first_token(r.context_len, r.query_len, window) / page_size..r.context_len.div_ceil(page_size) {
            let page = table.page(row / heads, row % heads, column);
            if page < 0 || page >= shapes.dims.pages as i64 {
                bail!(
                    "block_tables: page id {page} of {} (column {column}) in a cache of {} pages",
                    row_name(shapes, row),
                    shapes.dims.pages
                )
            }
        }
    }
    Ok(())
}
