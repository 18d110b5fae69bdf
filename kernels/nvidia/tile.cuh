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
    task.end = int(min(i64(work.end_tile) * T::TILE_TOKENS, i64(task.context)));
    return true;
}

template <class T>
__global__ void __launch_bounds__(T::THREADS, T::MIN_CTAS) tile_kernel(const __grid_constant__ TileParams p) {
    extern __shared__ __align__(128) u8 smem[];
    wait_for_previous_kernel();
    launch_next_kernel();
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
