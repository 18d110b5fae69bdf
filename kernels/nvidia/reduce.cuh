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

// While the tiles finish: touches the records and partials that this CTA will read. What is read here is used for nothing but clamped addresses,
// since the kernel before may be about to change it.
template <class T>
__device__ __forceinline__ void prefetch_partials(const TileParams& p, int thread) {
    int slot, count;
    asm volatile("ld.global.cg.v2.s32 {%0,%1}, [%2];" : "=r"(slot), "=r"(count) : "l"(static_cast<const ReduceInfo*>(p.reduce_info) + blockIdx.y));
    if (slot < 0 || slot >= p.capacity || thread >= min(count, p.capacity - slot)) return;
    const i64 at = partial_row(p, blockIdx.z, gridDim.x, slot + thread, blockIdx.x);
    prefetch_l2(p.partial_ml + at);
    prefetch_l2(p.partial_o + at * T::HEAD_DIM);
}

// A CTA for a (query row of a plan row, KV head): WARPS warps take every WARPS-th segment, then meet. Rows without a task, and rows that one
// cluster has finished, are not its business.
template <class T, int WARPS>
__global__ void __launch_bounds__(WARPS * 32) reduce_kernel(const __grid_constant__ TileParams p) {
    constexpr int VECTORS = (T::HEAD_DIM + 127) / 128, AHEAD = VECTORS == 1 ? 8 : 4;
    __shared__ float4 outs[WARPS][VECTORS * 32];
    __shared__ float2 ends[WARPS];
    launch_next_kernel();
    prefetch_partials<T>(p, threadIdx.x);
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
