// The tile kernel: a CTA for a (slot, KV head, block of query rows).
#pragma once

#include "reduce.cuh"

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

// Zeros and -inf for a plan row without a task: the CTA in the slot of its number writes them.
template <class T>
__device__ __forceinline__ void clear_row(const TileParams& p, int row, int thread) {
    const bool per_head = p.heads_per_row > 1;
    const int sequence = per_head ? row / p.heads_per_row : row, kv_head = per_head ? row % p.heads_per_row : blockIdx.y;
    const int query_first = p.query_start ? p.query_start[sequence] : sequence * p.query_len;
    const int query_len = p.query_start ? p.query_start[sequence + 1] - query_first : p.query_len;
    constexpr int PIECES = T::HEAD_DIM / 4;
    for (i64 item = thread + i64(blockIdx.z) * T::THREADS; item < i64(query_len) * p.group * PIECES; item += i64(gridDim.z) * T::THREADS) {
        const int local = int(item / PIECES), channel = int(item % PIECES) * 4;
        const int query = query_first + local / p.group, head = kv_head * p.group + local % p.group;
        store4<typename T::Query>(p.out, query * p.out_token_stride + head * p.out_head_stride + channel, {0.0f, 0.0f, 0.0f, 0.0f});
        if (p.lse && channel == 0) p.lse[i64(query) * p.kv_heads * p.group + head] = neg_inf();
    }
}

template <class T>
__global__ void __launch_bounds__(T::THREADS, T::MIN_CTAS) tile_kernel(const __grid_constant__ TileParams p) {
    extern __shared__ __align__(1024) u8 smem[];
    float* merge = reinterpret_cast<float*>(smem);
    const int thread = threadIdx.x, warp = thread / 32;
    wait_for_previous_kernel();
    const ReduceInfo* reduce = static_cast<const ReduceInfo*>(p.reduce_info);
    const bool clears = int(blockIdx.x) < p.plan_rows && reduce[blockIdx.x].count == 0;
    Task task;
    const bool active = read_task<T>(task, p);
    ReduceInfo info = {0, 0};
    if (active) {
        info = reduce[task.table_row];
        const int group = warp / T::ROW_WARPS, row = warp % T::ROW_WARPS * T::M_TILES * 16;
        State<T> state;
        walk<T>(state, p, task, smem_address(smem) + group * T::STAGES * T::STAGE_BYTES, group, task.first_row + row,
                thread % T::GROUP_THREADS);
        launch_next_kernel();  // the reducer starts up while this CTA merges and stores
        copies_wait<0>();
        __syncthreads();
        publish_state<T>(state, merge, group, row, thread % 32);
        __syncthreads();
        merge_groups<T>(merge, thread);
    }
    const Segment segment = segment_of(info, blockIdx.x, p.cluster);
    if (p.cluster > 1) {
        sync_cluster();
    } else {
        __syncthreads();
    }
    if (active) merge_segment<T>(p, task, segment, smem_address(smem), thread);
    if (p.cluster > 1) sync_cluster();  // no CTA ends while another reads its shared memory
    if (clears) clear_row<T>(p, blockIdx.x, thread);
}

}  // namespace pa
