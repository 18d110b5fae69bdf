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
    const int2 queries = T::Opt::RAGGED ? ragged_queries(p.query_start, task.sequence, p.q_rows) : int2{task.sequence * p.query_len, p.query_len};
    task.query_first = queries.x;
    task.query_len = queries.y;
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
    // A length that the table has no lanes for ends with the table.
    task.context = int(min(i64(reload_record(p.context_lens + task.table_row)), i64(p.max_pages) * T::PAGE_SIZE));
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
