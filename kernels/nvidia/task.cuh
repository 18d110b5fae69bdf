// What a CTA works on, and the rows that no CTA works on.
#pragma once

#include "merge.cuh"

namespace pa {

// A cluster's place in the grid. Heads of a slot are side by side: they read neighbouring bytes of the same tokens, at about the same time.
struct GridPosition {
    int slot, head, rank;
};

template <class T>
__device__ __forceinline__ GridPosition grid_position(const CudaTileArgs& p) {
    const u32 cluster = blockIdx.x / T::CLUSTER, rank = blockIdx.x % T::CLUSTER, heads = p.kv_heads;
    if constexpr (T::Opt::PER_HEAD) return {int(cluster), 0, int(rank)};
    return {int(cluster / heads), int(cluster % heads), int(rank)};
}

// A plan row's sequence, KV head and query rows.
template <class T>
__device__ __forceinline__ void locate(Task& task, const CudaTileArgs& p, const GridPosition& at, int row) {
    task.table_row = row;
    task.rank = at.rank;
    task.sequence = T::Opt::PER_HEAD ? row / p.kv_heads : row;
    task.head = T::Opt::PER_HEAD ? row % p.kv_heads : at.head;
    const int2 queries = T::Opt::RAGGED ? ragged_queries(p.query_start, task.sequence, p.q_rows) : int2{task.sequence * p.query_len, p.query_len};
    task.query_first = queries.x;
    task.query_len = queries.y;
    task.rows = task.query_len * T::GROUP;
    task.first_row = blockIdx.z * T::ROWS;
}

// What of the task of this CTA's cluster follows from its record; false where its slot is padding or its rows are past the sequence's. `length`, and how many
// parts the row has, are on their way then. Whatever the record holds, the tokens that it names and the table's row are there.
template <class T>
__device__ __forceinline__ bool read_record(Task& task, int& length, const CudaTileArgs& p, const GridPosition& at) {
    task.slot = at.slot;
    const WorkInfo work = p.work ? reload_record(p.work + task.slot) : WorkInfo{task.slot, 0, 0x7fffffff, 0};
    if (u32(work.row) >= u32(p.plan_rows)) return false;
    length = reload_record(p.context_lens + work.row);
    task.parts = 1;
    reload_where(task.parts, &(p.reduce + work.row)->count, p.reduce != nullptr);
    locate<T>(task, p, at, work.row);
    task.begin = work.first_tile * T::TILE_TOKENS;
    task.table_end = int(max(min(min(i64(work.end_tile) * T::TILE_TOKENS, i64(p.max_pages) * T::PAGE_SIZE), i64(0x7fffffff)), i64(0)));
    return task.first_row < task.rows;
}

// The rest of the task.
template <class T>
__device__ __forceinline__ void take_length(Task& task, int length, const CudaTileArgs& p) {
    // A length that the table has no lanes for ends with the table.
    task.context = int(min(i64(length), i64(p.max_pages) * T::PAGE_SIZE));
    task.first_token = 0;
    if constexpr (T::Opt::WINDOW) task.first_token = int(max(i64(task.context) - task.query_len - p.window + 1, i64(0)));
    task.begin = max(task.begin, task.first_token / T::CHUNK * T::CHUNK);
    task.end = min(task.table_end, task.context);
}

template <class T>
__device__ __forceinline__ bool read_task(Task& task, const CudaTileArgs& p, const GridPosition& at) {
    int length;
    const bool found = read_record<T>(task, length, p, at);
    if (found) take_length<T>(task, length, p);
    return found;
}

// Tasks of the plan row of this slot's number, or 1 where it is no row's.
static __device__ __forceinline__ int parts_of(const CudaTileArgs& p, int row) {
    int parts = 1;
    reload_where(parts, &(p.reduce + row)->count, p.reduce && row < p.plan_rows);
    return parts;
}

// Zeros and -inf for the plan row of this slot's number, which has no task.
template <class T>
__device__ __forceinline__ void clear_row(const CudaTileArgs& p, const GridPosition& at, int thread) {
    Task task;
    locate<T>(task, p, at, at.slot);
    constexpr int PIECES = T::HEAD_DIM / 4;
    for (i64 item = thread + i64(blockIdx.z) * T::THREADS; item < i64(task.rows) * PIECES; item += i64(gridDim.z) * T::THREADS) {
        store_row<T>(p, task, int(item / PIECES), int(item % PIECES) * 4, Joined{});
    }
}

}  // namespace pa
