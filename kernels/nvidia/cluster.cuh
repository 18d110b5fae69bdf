// From the CTAs of a cluster, which share a task, to its output or partial result: each finishes every CLUSTER-th eight pieces of the rows. What it
// needs of the others' is sent into its shared memory, where the drained rings were.
#pragma once

#include "merge.cuh"
#include "reduce.cuh"

namespace pa {

// Between two meetings of the cluster: after the first every CTA's ring is drained and its parts are published, after the second everything has arrived.
template <class T>
__device__ __forceinline__ void send_parts(const Task& task, u32 outs, u32 ends, const float* merge, int thread) {
    constexpr int PIECES = T::HEAD_DIM / 4;
    static_assert(PIECES % 8 == 0, "eight pieces are of one row");
    sync_cluster();
    each_joined<T>(merge, rows_of_block<T>(task), thread, [&](int row, int piece, const Joined& x) {
        const int eight = (row * PIECES + piece) / 8, rank = eight % T::CLUSTER;
        const int at = task.rank * T::SENT_PIECES + eight / T::CLUSTER * 8 + piece % 8;
        store_cluster(outs + at * 16, rank, x.o);
        store_cluster(ends + at * 8, rank, float2{x.max, x.sum});
    });
    __syncwarp();
    sync_cluster();
}

template <class T>
__device__ __forceinline__ void merge_cluster(const CudaTileArgs& p, const Task& task, bool whole, float* merge, int thread) {
    constexpr int PIECES = T::HEAD_DIM / 4, SENT = T::CLUSTER * T::SENT_PIECES;
    const float4* outs = reinterpret_cast<const float4*>(merge + T::MERGE_SENT);
    const float2* ends = reinterpret_cast<const float2*>(merge + T::MERGE_SENT + SENT * 4);
    static_assert(T::MERGE_SENT % 4 == 0, "16 bytes at a time");
    send_parts<T>(task, smem_address(outs), smem_address(ends), merge, thread);
    const int items = rows_of_block<T>(task) * PIECES;
#pragma unroll 1
    for (int i = thread; i < T::SENT_PIECES; i += T::THREADS) {
        const int item = (i / 8 * T::CLUSTER + task.rank) * 8 + i % 8;
        if (item >= items) break;
        float2 ml[T::CLUSTER];
        float4 o[T::CLUSTER][1];
#pragma unroll
        for (int part = 0; part < T::CLUSTER; part++) ml[part] = ends[part * T::SENT_PIECES + i], o[part][0] = outs[part * T::SENT_PIECES + i];
        Joined x[1];
        add_partials<T::CLUSTER, 1>(x, ml, o);
        store_merged<T>(p, task, whole, task.first_row + item / PIECES, item % PIECES * 4, x[0]);
    }
}

}  // namespace pa
