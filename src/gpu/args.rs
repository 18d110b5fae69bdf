//! The kernels' arguments: `kernels/common/args.h` and `kernels/nvidia/args.h`, field for field. Pointers are device addresses, 0 for none.

/// Strides of K, V or their scales: page, head, token.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Paged {
    pub page: i64,
    pub head: i64,
    pub token: i64,
}

/// The arguments of AMD's tiles, the leading ones and `TileArgs`.
#[cfg(feature = "rocm")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TileArgs {
    pub work: u64,
    pub block_tables: u64,
    pub q: u64,
    pub max_pages: u32,
    pub plan_rows: u32,
    pub q_row: u32,
    pub q_head: u32,
    pub statistics: u64,
    pub key: u64,
    pub value: u64,
    pub k_scale: u64,
    pub v_scale: u64,
    pub context_lens: u64,
    pub query_start: u64,
    pub out: u64,
    pub lse: u64,
    pub table_row: i64,
    pub key_stride: Paged,
    pub value_stride: Paged,
    pub k_scale_stride: Paged,
    pub v_scale_stride: Paged,
    pub out_row: i64,
    pub out_head: i64,
    pub scale_log2: f32,
    pub softcap: f32,
    pub window: i32,
    pub query_len: i32,
    pub kv_heads: i32,
    pub pages: i32,
    pub rows: i32,
    pub q_rows: i32,
}

/// The arguments of NVIDIA's tiles.
#[cfg(feature = "cuda")]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CudaTileArgs {
    pub work: u64,
    pub reduce: u64,
    pub block_tables: u64,
    pub context_lens: u64,
    pub query_start: u64,
    pub q: u64,
    pub key: u64,
    pub value: u64,
    pub k_scale: u64,
    pub v_scale: u64,
    pub sinks: u64,
    pub out: u64,
    pub lse: u64,
    pub partial: u64,
    pub statistics: u64,
    pub table_row: i64,
    pub q_row: i64,
    pub q_head: i64,
    pub out_row: i64,
    pub out_head: i64,
    pub key_stride: Paged,
    pub value_stride: Paged,
    pub k_scale_stride: Paged,
    pub v_scale_stride: Paged,
    pub scale_log2: f32,
    pub softcap: f32,
    pub window: i32,
    pub query_len: i32,
    pub kv_heads: i32,
    pub pages: i32,
    pub max_pages: i32,
    pub plan_rows: i32,
    pub rows: i32,
    pub q_rows: i32,
    pub q_sequence: i64,
    pub out_sequence: i64,
    pub settled: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReduceArgs {
    pub reduce: u64,
    pub partial: u64,
    pub statistics: u64,
    pub sinks: u64,
    pub query_start: u64,
    pub out: u64,
    pub lse: u64,
    pub out_row: i64,
    pub out_head: i64,
    pub query_len: i32,
    pub q_heads: i32,
    pub kv_heads: i32,
    pub rows: i32,
    pub per_head: i32,
    pub q_rows: i32,
    pub out_sequence: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PlanArgs {
    pub context_lens: u64,
    pub query_start: u64,
    pub work: u64,
    pub reduce: u64,
    pub rows: i32,
    pub heads_per_row: i32,
    pub query_len: i32,
    pub window: i32,
    pub capacity: i32,
    pub max_partitions: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WriteArgs {
    pub k: u64,
    pub v: u64,
    pub slots: u64,
    pub key: u64,
    pub value: u64,
    pub k_scale: u64,
    pub v_scale: u64,
    pub k_row: i64,
    pub k_head: i64,
    pub v_row: i64,
    pub v_head: i64,
    pub key_stride: Paged,
    pub value_stride: Paged,
    pub k_scale_stride: Paged,
    pub v_scale_stride: Paged,
    pub tokens: i32,
    pub kv_heads: i32,
    pub pages: i32,
}
