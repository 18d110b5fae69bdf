// From the CTAs of a cluster, which share a task, to its output or partial result: each finishes every CLUSTER-th eight pieces of the rows. What it
// needs of the others' is sent into its shared memory, behind the rings.
#pragma once

#include "merge.cuh"
#include "reduce.cuh"

namespace pa {

// What the CTAs of a cluster send one of them: eights of pieces, what each is weighed by (maximum, sum), and what counts their bytes.
template <class T>
struct Parts {
    float4 outs[T::CLUSTER][T::SENT_EIGHTS * 8];
    float2 ends[T::CLUSTER][T::SENT_EIGHTS];
    u64 arrived;
};

template <class T>
__device__ __forceinline__ Parts<T>& parts_of(float* merge) {
    static_assert(sizeof(Parts<T>) == T::SMEM_BYTES - T::PARTS_AT && T::PARTS_AT % 16 == 0, "16 bytes at a time, all that is there");
    return *reinterpret_cast<Parts<T>*>(reinterpret_cast<u8*>(merge) + T::PARTS_AT);
}

// Prepares this CTA for its parts, and says so to the cluster. Who has waited for that may send: nothing else writes where parts go, so it is the
// barrier alone that the wait must order, which its initialization releases. A warp's lanes arrive together.
template <class T>
__device__ __forceinline__ void expect_parts(const Task& task, Parts<T>& parts, int thread) {
    if (thread == 0) {
        const int eights = rows_of_block<T>(task) * (T::HEAD_DIM / 32), own = (eights - task.rank + T::CLUSTER - 1) / T::CLUSTER;
        mbarrier_init(smem_address(&parts.arrived));
        mbarrier_expect(smem_address(&parts.arrived), own * T::CLUSTER * T::EIGHT_BYTES);
    }
    __syncwarp();
    cluster_arrive();
}

// Sends each CTA its part of what this one's groups have, and waits for all parts of its own. No CTA ends with parts on their way to it, and its own
// leave from registers: none need be there for the others'.
template <class T>
__device__ __forceinline__ void send_parts(const Task& task, const Parts<T>& parts, const float* merge, int thread) {
    constexpr int PIECES = T::HEAD_DIM / 4;
    static_assert(PIECES % 8 == 0, "eight pieces are of one row");
    const u32 arrived = smem_address(&parts.arrived);
    // The groups have published theirs; all CTAs are prepared.
    __syncthreads();
    cluster_wait();
    each_joined<T>(merge, rows_of_block<T>(task), thread, [&](int row, int piece, const Joined& x) {
        const int eight = (row * PIECES + piece) / 8, rank = eight % T::CLUSTER, at = eight / T::CLUSTER;
        send_cluster(smem_address(&parts.outs[task.rank][at * 8 + piece % 8]), arrived, rank, x.o);
        if (piece % 8 == 0) send_cluster(smem_address(&parts.ends[task.rank][at]), arrived, rank, float2{x.max, x.sum});
    });
    mbarrier_wait(arrived);
}

template <class T>
__device__ __forceinline__ void merge_cluster(const CudaTileArgs& p, const Task& task, float* merge, int thread) {
    constexpr int PIECES = T::HEAD_DIM / 4;
    const Parts<T>& parts = parts_of<T>(merge);
    send_parts<T>(task, parts, merge, thread);
    const int items = rows_of_block<T>(task) * PIECES;
#pragma unroll 1
    for (int i = thread; i < T::SENT_EIGHTS * 8; i += T::THREADS) {
        const int item = (i / 8 * T::CLUSTER + task.rank) * 8 + i % 8;
        if (item >= items) break;
        float2 ml[T::CLUSTER];
        float4 o[T::CLUSTER][1];
#pragma unroll
        for (int part = 0; part < T::CLUSTER; part++) ml[part] = parts.ends[part][i / 8], o[part][0] = parts.outs[part][i];
        Joined x[1];
        add_partials<T::CLUSTER, 1>(x, ml, o);
        store_merged<T>(p, task, task.first_row + item / PIECES, item % PIECES * 4, x[0]);
    }
}

}  // namespace pa
