// Merging the tasks of a plan row, in two steps, both in the order of the slots: tasks of one cluster through distributed shared memory, then
// the clusters' results by a second kernel.
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
__device__ __forceinline__ i64 partial_row(const TileParams& p, int head, int rows, int slot, int row) {
    const bool per_head = p.heads_per_row > 1;
    return (i64(slot) * (per_head ? 1 : p.kv_heads) + (per_head ? 0 : head)) * rows + row;
}

// Each CTA of a segment merges every count-th row. The result is the output where the segment is whole, else a partial of its first slot.
template <class T>
__device__ __forceinline__ void merge_segment(const TileParams& p, const Task& task, const Segment& segment, u32 merge, int thread) {
    constexpr int PIECES = T::HEAD_DIM / 4;
    const int rank = task.slot - segment.first, first_cta = segment.first % p.cluster;
    const u32 outs = merge + T::GROUPS * T::ROWS * T::MERGE_ROW * 4, ends = merge + (T::MERGE_ENDS + T::GROUPS * T::ROWS * 2) * 4;
#pragma unroll 1
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
            const i64 at = partial_row(p, task.head, task.rows, segment.first, global_row);
            *reinterpret_cast<float4*>(p.partial_o + at * T::HEAD_DIM + channel) = x.o;
            if (channel == 0) p.partial_ml[at] = {x.max, x.sum};
        }
    }
}

// True in the CTA that is the last of `count` to get here; it sees what the others wrote before. Leaves the counter at zero.
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

// Merges `count` partials, those of slots `slot(0)`, `slot(1)`, ..., into the output (`to` below 0) or into the partial of slot `to`.
template <class T, class Slot>
__device__ __forceinline__ void merge_partials(const TileParams& p, const Task& task, int count, Slot slot, int to, int thread) {
    constexpr int PIECES = T::HEAD_DIM / 4, AHEAD = 8;
#pragma unroll 1
    for (int item = thread; item < T::ROWS * PIECES; item += T::THREADS) {
        const int row = task.first_row + item / PIECES, channel = item % PIECES * 4;
        if (row >= task.rows) break;
        Joined x;
#pragma unroll 1
        for (int start = 0; start < count; start += AHEAD) {
            float2 ml[AHEAD];
            float4 o[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const i64 at = partial_row(p, task.head, task.rows, slot(min(start + i, count - 1)), row);
                ml[i] = load_l2(p.partial_ml + at);
                o[i] = load_l2(reinterpret_cast<const float4*>(p.partial_o + at * T::HEAD_DIM + channel));
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (start + i < count) x.add(ml[i], o[i]);
            }
        }
        if (to < 0) {
            store_output<T>(p, task, row, channel, x);
        } else {
            const i64 at = partial_row(p, task.head, task.rows, to, row);
            *reinterpret_cast<float4*>(p.partial_o + at * T::HEAD_DIM + channel) = x.o;
            if (channel == 0) p.partial_ml[at] = {x.max, x.sum};
        }
    }
}

// Merges the row's segments in groups of eight, each by the last of the group to arrive, then the groups by the last of them: no CTA reads
// more than a few partials, and none waits for another.
template <class T>
__device__ __forceinline__ void merge_tree(const TileParams& p, const Task& task, const ReduceInfo& info, int thread) {
    constexpr int GROUP = 8;
    const int first = info.first_slot / p.cluster, segments = (info.first_slot + info.count - 1) / p.cluster + 1 - first;
    const int groups = (segments + GROUP - 1) / GROUP, group = (task.slot / p.cluster - first) / GROUP;
    const int members = min(GROUP, segments - group * GROUP);
    auto slot = [&](int segment) { return max(info.first_slot, (first + segment) * p.cluster); };
    auto counter = [&](int at) { return p.arrivals + (i64(at) * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z; };
    const int leader = slot(group * GROUP);
    if (!arrives_last(counter(leader), members, thread)) return;
    const int merged = gridDim.x;  // slot of a merged group: its leader's, in the second half
    merge_partials<T>(p, task, members, [&](int i) { return slot(group * GROUP + i); }, groups == 1 ? -1 : merged + leader, thread);
    if (groups == 1 || !arrives_last(counter(gridDim.x + task.table_row), groups, thread)) return;
    merge_partials<T>(p, task, groups, [&](int i) { return merged + slot(i * GROUP); }, -1, thread);
}

// A CTA for a (query row of a plan row, KV head): WARPS warps take every WARPS-th segment, then meet. Rows without a task, and rows that one
// cluster has finished, are not its business.
template <class T, int WARPS>
__global__ void __launch_bounds__(WARPS * 32) reduce_kernel(const __grid_constant__ TileParams p) {
    constexpr int VECTORS = (T::HEAD_DIM + 127) / 128, AHEAD = VECTORS == 1 ? 8 : 4;
    __shared__ float4 outs[WARPS][VECTORS * 32];
    __shared__ float2 ends[WARPS];
    launch_next_kernel();
    wait_for_previous_kernel();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const ReduceInfo info = static_cast<const ReduceInfo*>(p.reduce_info)[blockIdx.y];
    const int first = info.first_slot / p.cluster, end = (info.first_slot + info.count - 1) / p.cluster + 1;
    if (info.count == 0 || end - first == 1) return;
    const bool per_head = p.heads_per_row > 1;
    Task task;
    task.sequence = per_head ? blockIdx.y / p.heads_per_row : blockIdx.y;
    task.head = per_head ? blockIdx.y % p.heads_per_row : blockIdx.z;
    task.query_first = p.query_start ? p.query_start[task.sequence] : task.sequence * p.query_len;
    task.query_len = p.query_start ? p.query_start[task.sequence + 1] - task.query_first : p.query_len;
    task.rows = task.query_len * p.group;
    if (int(blockIdx.x) >= task.rows) return;
    Joined x[VECTORS];
    for (int start = first + warp; start < end; start += WARPS * AHEAD) {
        float2 ml[AHEAD];
        float4 o[AHEAD][VECTORS];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int cluster = min(start + i * WARPS, end - 1);
            const i64 at = partial_row(p, task.head, task.rows, max(info.first_slot, cluster * p.cluster), blockIdx.x);
            ml[i] = p.partial_ml[at];
#pragma unroll
            for (int j = 0; j < VECTORS; j++) {
                const int channel = min((j * 32 + lane) * 4, T::HEAD_DIM - 4);
                o[i][j] = *reinterpret_cast<const float4*>(p.partial_o + at * T::HEAD_DIM + channel);
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (start + i * WARPS < end) {
#pragma unroll
                for (int j = 0; j < VECTORS; j++) x[j].add(ml[i], o[i][j]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < VECTORS; j++) outs[warp][j * 32 + lane] = x[j].o;
    if (lane == 0) ends[warp] = {x[0].max, x[0].sum};
    __syncthreads();
    for (int piece = threadIdx.x; piece < T::HEAD_DIM / 4; piece += WARPS * 32) {
        Joined all;
#pragma unroll
        for (int i = 0; i < WARPS; i++) all.add(ends[i], outs[i][piece]);
        store_output<T>(p, task, blockIdx.x, piece * 4, all);
    }
}

}  // namespace pa
