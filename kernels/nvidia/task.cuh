// What a CTA works on, and the rows that no CTA works on.
#pragma once

#include "merge.cuh"

namespace pa {

// A plan row's sequence, KV head and query rows.
template <class T>
__device__ __forceinline__ void locate(Task& task, const CudaTileArgs& p, int row) {
    task.table_row = row;
    task.sequence = T::Opt::PER_HEAD ? row / p.kv_heads : row;
    task.head = T::Opt::PER_HEAD ? row % p.kv_heads : blockIdx.y;
    task.query_first = T::Opt::RAGGED ? reload_record(p.query_start + task.sequence) : task.sequence * p.query_len;
    task.query_len = T::Opt::RAGGED ? reload_record(p.query_start + task.sequence + 1) - task.query_first : p.query_len;
    task.rows = task.query_len * T::GROUP;
    task.first_row = blockIdx.z * T::ROWS;
}

// The task of this CTA; false where its slot is padding or its rows are past the sequence's. Whatever the records hold, the tokens that it names
// and the table's row are there: it is read before its time too (see look_ahead).
template <class T>
__device__ __forceinline__ bool read_task(Task& task, const CudaTileArgs& p) {
    task.slot = blockIdx.x;
    const WorkInfo work = reload_record(p.work + task.slot);
    if (u32(work.row) >= u32(p.plan_rows)) return false;
    locate<T>(task, p, work.row);
    task.context = reload_record(p.context_lens + task.table_row);
    task.first_token = 0;
    if constexpr (T::Opt::WINDOW) task.first_token = max(task.context - task.query_len - p.window + 1, 0);
    task.begin = max(work.first_tile * T::TILE_TOKENS, task.first_token / T::CHUNK * T::CHUNK);
    task.table_end = int(max(min(i64(work.end_tile) * T::TILE_TOKENS, i64(p.max_pages) * T::PAGE_SIZE), i64(0)));
    task.end = min(task.table_end, task.context);
    return task.first_row < task.rows;
}

// Zeros and -inf for a plan row without a task: the CTA in the slot of its number writes them.
template <class T>
__device__ __forceinline__ void clear_row(const CudaTileArgs& p, int row, int thread) {
    Task task;
    locate<T>(task, p, row);
    constexpr int PIECES = T::HEAD_DIM / 4;
    for (i64 item = thread + i64(blockIdx.z) * T::THREADS; item < i64(task.rows) * PIECES; item += i64(gridDim.z) * T::THREADS) {
        store_row<T>(p, task, int(item / PIECES), int(item % PIECES) * 4, Joined{});
    }
}

}  // namespace pa
