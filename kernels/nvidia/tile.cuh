// The tile kernel: a CTA for a (slot, KV head, block of query rows).
#pragma once

#include "epilogue.cuh"

namespace pa {

// The task of this CTA; false where its slot is padding.
template <class T>
__device__ __forceinline__ bool read_task(Task& task, const TileParams& p) {
    task.slot = blockIdx.x;
    const WorkInfo work = static_cast<const WorkInfo*>(p.work_info)[task.slot];
    if (work.row < 0) return false;
    const bool per_head = p.heads_per_row > 1;
    task.table_row = work.row;
    task.sequence = per_head ? work.row / p.heads_per_row : work.row;
    task.head = per_head ? work.row % p.heads_per_row : blockIdx.y;
    task.query_first = p.query_start ? p.query_start[task.sequence] : task.sequence * p.query_len;
    task.query_len = p.query_start ? p.query_start[task.sequence + 1] - task.query_first : p.query_len;
    task.rows = task.query_len * p.group;
    task.first_row = blockIdx.z * T::ROWS;
    if (task.first_row >= task.rows) return false;
    task.context = int(p.context_lens[task.table_row]);
    task.first_token = 0;
    if constexpr (T::Opt::WINDOW) task.first_token = max(task.context - task.query_len - p.window + 1, 0);
    task.begin = max(work.first_tile * T::TILE_TOKENS, task.first_token / T::CHUNK * T::CHUNK);
    task.table_end = int(min(i64(work.end_tile) * T::TILE_TOKENS, i64(p.max_pages) * T::PAGE_SIZE));
    task.end = int(min(i64(work.end_tile) * T::TILE_TOKENS, i64(task.context)));
    return true;
}

// While the kernel before this one drains: brings the task's records, page ids and first chunks into the L2. These are hints. Nothing read here
// is used for anything else, since that kernel may be about to change it; every address is clamped to its tensor.
template <class T>
__device__ __forceinline__ void prefetch_task(const TileParams& p, int group, int thread) {
    const int4 work = load_l2(static_cast<const int4*>(p.work_info) + blockIdx.x);
    const int row = work.x;
    if (u32(row) >= u32(p.plan_rows)) return;
    prefetch_l2(p.context_lens + row);
    prefetch_l2(static_cast<const ReduceInfo*>(p.reduce_info) + row);
    const bool per_head = p.heads_per_row > 1;
    const int head = per_head ? row % p.heads_per_row : blockIdx.y;
    constexpr int ROW_LINES = (T::ROW_BYTES + 127) / 128, LINES = T::CHUNK * ROW_LINES;
    constexpr int CHUNKS = T::PREFETCH_CHUNKS;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
        for (int line = thread; line < LINES; line += T::GROUP_THREADS) {
            const i64 token = i64(work.y) * T::TILE_TOKENS + (group + chunk * T::GROUPS) * T::CHUNK + line / ROW_LINES;
            if (token >= i64(work.z) * T::TILE_TOKENS || token >= i64(p.max_pages) * T::PAGE_SIZE || token < 0) continue;
            const u32 page = min(load_l2(p.tables + row * p.table_stride + token / T::PAGE_SIZE), u32(p.num_pages - 1));
            const i64 in_page = token % T::PAGE_SIZE, at = line % ROW_LINES * 128;
            prefetch_l2(static_cast<const u8*>(p.k) + page * p.k_page_stride + head * p.k_head_stride + in_page * p.k_token_stride + at);
            prefetch_l2(static_cast<const u8*>(p.v) + page * p.v_page_stride + head * p.v_head_stride + in_page * p.v_token_stride + at);
        }
    }
}

template <class T>
__global__ void __launch_bounds__(T::THREADS, T::MIN_CTAS) tile_kernel(const __grid_constant__ TileParams p) {
    extern __shared__ __align__(128) u8 smem[];
    launch_next_kernel();
    if constexpr (T::PREFETCH_CHUNKS > 0) prefetch_task<T>(p, threadIdx.x / T::GROUP_THREADS, threadIdx.x % T::GROUP_THREADS);
    wait_for_previous_kernel();
    Task task;
    if (!read_task<T>(task, p)) return;
    const bool direct = static_cast<const ReduceInfo*>(p.reduce_info)[task.table_row].count == 1;
    const int warp = threadIdx.x / 32, group = warp / T::ROW_WARPS;
    const int row = warp % T::ROW_WARPS * T::M_TILES * 16;
    State<T> state;
    walk<T>(state, p, task, smem_address(smem) + group * T::STAGES * T::STAGE_BYTES, group, task.first_row + row,
            threadIdx.x % T::GROUP_THREADS);
    copies_wait<0>();
    __syncthreads();
    float* merge = reinterpret_cast<float*>(smem);
    publish_state<T>(state, merge, group, row, threadIdx.x % 32);
    __syncthreads();
    store_rows<T>(p, task, merge, direct, threadIdx.x);
}

}  // namespace pa
