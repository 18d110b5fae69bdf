// From a CTA's groups to the output or a partial result: tasks of one cluster meet through distributed shared memory, in the order of the slots.
#pragma once

#include "epilogue.cuh"

namespace pa {

// The slots of a row that sit in this CTA's cluster.
struct Segment {
    int first, count;
    bool whole;  // all of the row's
};

template <class T>
__device__ __forceinline__ Segment segment_of(const ReduceInfo& info, int slot) {
    const int start = slot / T::CLUSTER * T::CLUSTER;
    const int first = max(info.first_slot, start), end = min(info.first_slot + info.count, start + T::CLUSTER);
    return {first, end - first, end - first == info.count};
}

// Four channels of an output row.
template <class T>
__device__ __forceinline__ void store_row(const CudaTileArgs& p, const Task& task, int row, int channel, const Joined& x) {
    const i64 query = task.query_first + row / T::GROUP, head = task.head * T::GROUP + row % T::GROUP;
    store_output<typename T::Query>(p.out, task.sequence * p.out_sequence + query * p.out_row + head * p.out_head + channel,
                                    p.lse ? p.lse + query * p.kv_heads * T::GROUP + head : nullptr, p.sinks, int(head), x, channel == 0);
}

// Four channels of a row, merged over the segment: the output where that is whole, else a partial of the segment's first slot.
template <class T>
__device__ __forceinline__ void store_merged(const CudaTileArgs& p, const Task& task, const Segment& segment, int row, int channel, const Joined& x) {
    if (segment.whole) {
        store_row<T>(p, task, row, channel, x);
    } else {
        const i64 at = (i64(segment.first) * (T::Opt::PER_HEAD ? 1 : p.kv_heads) + (T::Opt::PER_HEAD ? 0 : task.head)) * p.rows + row;
        *reinterpret_cast<float4*>(p.partial + at * T::HEAD_DIM + channel) = x.o;
        if (channel == 0) static_cast<float2*>(p.statistics)[at] = {x.max, x.sum};
    }
}

// Each CTA of a segment merges every count-th row. Called by every CTA, with a task or without, for the cluster's barriers.
template <class T>
__device__ __forceinline__ void merge_task(const CudaTileArgs& p, const Task& task, const ReduceInfo& info, float* merge, bool active, int thread) {
    constexpr int PIECES = T::HEAD_DIM / 4;
    const int rows = active ? min(task.rows - task.first_row, T::ROWS) : 0;
    const Segment segment = segment_of<T>(info, blockIdx.x);
    if constexpr (T::CLUSTER == 1) {
        // Eight threads or more to a row, each with its weights: shared memory is read before anything is stored, in whole lines.
        constexpr int AT_ONCE = T::THREADS / T::ROWS >= 16 ? 16 : 8, N = (PIECES + AT_ONCE - 1) / AT_ONCE;
        for (int row = thread / AT_ONCE; row < rows; row += T::THREADS / AT_ONCE) {
            const int piece = thread % AT_ONCE;
            Joined all[N];
            join_groups<T, N, AT_ONCE>(all, merge, row, piece);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const int at = piece + i * AT_ONCE;
                if (at < PIECES) store_merged<T>(p, task, segment, task.first_row + row, at * 4, all[i]);
            }
        }
    } else {
        constexpr int OWN = T::GROUPS * T::ROWS * T::MERGE_ROW, OWN_ENDS = T::MERGE_ENDS + T::GROUPS * T::ROWS * 2;
#pragma unroll 1
        for (int item = thread; item < rows * PIECES; item += T::THREADS) {
            const int row = item / PIECES, channel = item % PIECES * 4;
            Joined own[1];
            join_groups<T, 1, 1>(own, merge, row, channel / 4);
            *reinterpret_cast<float4*>(merge + OWN + row * T::MERGE_ROW + channel) = own[0].o;
            if (channel == 0) *reinterpret_cast<float2*>(merge + OWN_ENDS + row * 2) = {own[0].max, own[0].sum};
        }
        sync_cluster();
        const u32 outs = smem_address(merge + OWN), ends = smem_address(merge + OWN_ENDS);
        const int rank = task.slot - segment.first, first_cta = segment.first % T::CLUSTER;
#pragma unroll 1
        for (int item = thread; active; item += T::THREADS) {
            const int row = item / PIECES * segment.count + rank, channel = item % PIECES * 4;
            if (row >= rows) break;
            Joined x;
#pragma unroll 4
            for (int i = 0; i < segment.count; i++) {
                const float2 ml = load_cluster2(cluster_address(ends + row * 8, first_cta + i));
                x.add(ml, load_cluster4(cluster_address(outs + (row * T::MERGE_ROW + channel) * 4, first_cta + i)));
            }
            store_merged<T>(p, task, segment, task.first_row + row, channel, x);
        }
        sync_cluster();  // no CTA ends while another reads its shared memory
    }
}

}  // namespace pa
