// Merging the tasks of a plan row, in two steps, both in the order of the slots: tasks of one cluster through distributed shared memory, then
// the clusters' results through global memory by whichever CTA of the row comes last.
#pragma once

#include "../common/records.h"
#include "epilogue.cuh"

namespace pa {

// The slots of this CTA's row that sit in its cluster.
struct Segment {
    int first, count;
    bool whole;  // all of the row's
};

__device__ __forceinline__ Segment segment_of(const ReduceInfo& info, int slot, int cluster) {
    const int start = slot / cluster * cluster;
    const int first = max(info.first_slot, start), end = min(info.first_slot + info.count, start + cluster);
    return {first, end - first, end - first == info.count};
}

// Index of row `row` of slot `slot` among the partial results.
__device__ __forceinline__ i64 partial_row(const TileParams& p, const Task& task, int slot, int row) {
    const bool per_head = p.heads_per_row > 1;
    return (i64(slot) * (per_head ? 1 : p.kv_heads) + (per_head ? 0 : task.head)) * task.rows + row;
}

// Each CTA of a segment merges every count-th row. The result is the output where the segment is whole, else a partial of its first slot.
template <class T>
__device__ __forceinline__ void merge_segment(const TileParams& p, const Task& task, const Segment& segment, u32 merge, int thread) {
    constexpr int PIECES = T::HEAD_DIM / 4;
    const int rank = task.slot - segment.first, first_cta = segment.first % p.cluster;
    const u32 outs = merge + T::GROUPS * T::ROWS * T::MERGE_ROW * 4, ends = merge + (T::MERGE_ENDS + T::GROUPS * T::ROWS * 2) * 4;
    for (int item = thread;; item += T::THREADS) {
        const int row = item / PIECES * segment.count + rank, channel = item % PIECES * 4, global_row = task.first_row + row;
        if (row >= T::ROWS || global_row >= task.rows) break;
        Joined x;
#pragma unroll 4
        for (int i = 0; i < segment.count; i++) {
            const float2 ml = load_cluster2(cluster_address(ends + row * 8, first_cta + i));
            x.add(ml, load_cluster4(cluster_address(outs + (row * T::MERGE_ROW + channel) * 4, first_cta + i)));
        }
        if (segment.whole) {
            store_output<T>(p, task, global_row, channel, x);
        } else {
            const i64 at = partial_row(p, task, segment.first, global_row);
            *reinterpret_cast<float4*>(p.partial_o + at * T::HEAD_DIM + channel) = x.o;
            if (channel == 0) p.partial_ml[at] = {x.max, x.sum};
        }
    }
}

// True in the CTA that is the last of the row's to get here; it sees what the others wrote before. Leaves the counter at zero.
__device__ __forceinline__ bool arrives_last(u32* arrivals, int count, int thread) {
    __shared__ bool last;
    __syncthreads();
    if (thread == 0) {
        __threadfence();
        last = atomicAdd(arrivals, 1u) == u32(count - 1);
        if (last) *arrivals = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

template <class T>
__device__ __forceinline__ void merge_partials(const TileParams& p, const Task& task, const ReduceInfo& info, int thread) {
    constexpr int PIECES = T::HEAD_DIM / 4, AHEAD = 8;
    const int first = info.first_slot / p.cluster, end = (info.first_slot + info.count - 1) / p.cluster + 1;
    for (int item = thread; item < T::ROWS * PIECES; item += T::THREADS) {
        const int row = task.first_row + item / PIECES, channel = item % PIECES * 4;
        if (row >= task.rows) break;
        Joined x;
        for (int start = first; start < end; start += AHEAD) {
            float2 ml[AHEAD];
            float4 o[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int cluster = min(start + i, end - 1);
                const i64 at = partial_row(p, task, max(info.first_slot, cluster * p.cluster), row);
                ml[i] = load_l2(p.partial_ml + at);
                o[i] = load_l2(reinterpret_cast<const float4*>(p.partial_o + at * T::HEAD_DIM + channel));
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (start + i < end) x.add(ml[i], o[i]);
            }
        }
        store_output<T>(p, task, row, channel, x);
    }
}

}  // namespace pa
