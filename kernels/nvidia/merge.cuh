// From a CTA's groups to the output or a partial result.
#pragma once

#include "epilogue.cuh"

namespace pa {

// Four channels of an output row.
template <class T>
__device__ __forceinline__ void store_row(const CudaTileArgs& p, const Task& task, int row, int channel, const Joined& x) {
    const i64 query = task.query_first + row / T::GROUP, head = task.head * T::GROUP + row % T::GROUP;
    store_output<typename T::Query>(p.out, task.sequence * p.out_sequence + query * p.out_row + head * p.out_head + channel,
                                    p.lse ? p.lse + query * p.kv_heads * T::GROUP + head : nullptr, p.sinks, int(head), x, channel == 0);
}

// Which of the partial results is that of row `row` of a task.
template <class T>
__device__ __forceinline__ i64 partial_row(const CudaTileArgs& p, const Task& task, int row) {
    return (i64(task.slot) * (T::Opt::PER_HEAD ? 1 : p.kv_heads) + (T::Opt::PER_HEAD ? 0 : task.head)) * p.rows + row;
}

// Four channels of a row of a task: the output where the task is the whole of its row, else a partial result.
template <class T>
__device__ __forceinline__ void store_merged(const CudaTileArgs& p, const Task& task, int row, int channel, const Joined& x) {
    if (task.parts == 1) {
        store_row<T>(p, task, row, channel, x);
    } else {
        const i64 at = partial_row<T>(p, task, row);
        *reinterpret_cast<float4*>(static_cast<float*>(p.partial) + at * T::HEAD_DIM + channel) = x.o;
        if (channel == 0) static_cast<float2*>(p.statistics)[at] = {x.max, x.sum};
    }
}

// Calls f(row, piece, x) for each four channels of the CTA's `rows` rows, its groups' together. Eight threads or more to a row, each with its
// weights: shared memory is read before anything is stored, in whole lines.
template <class T, class F>
__device__ __forceinline__ void each_joined(const float* merge, int rows, int thread, F f) {
    constexpr int PIECES = T::HEAD_DIM / 4, AT_ONCE = T::THREADS / T::ROWS >= 16 ? 16 : 8, N = (PIECES + AT_ONCE - 1) / AT_ONCE;
    for (int row = thread / AT_ONCE; row < rows; row += T::THREADS / AT_ONCE) {
        const int piece = thread % AT_ONCE;
        Joined all[N];
        join_groups<T, N, AT_ONCE>(all, merge, row, piece);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int at = piece + i * AT_ONCE;
            if (at < PIECES) f(row, at, all[i]);
        }
    }
}

template <class T>
__device__ __forceinline__ int rows_of_block(const Task& task) {
    return min(task.rows - task.first_row, T::ROWS);
}

template <class T>
__device__ __forceinline__ void merge_task(const CudaTileArgs& p, const Task& task, const float* merge, int thread) {
    each_joined<T>(merge, rows_of_block<T>(task), thread,
                   [&](int row, int piece, const Joined& x) { store_merged<T>(p, task, task.first_row + row, piece * 4, x); });
}

}  // namespace pa
