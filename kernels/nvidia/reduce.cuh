// The second step of the merge: the clusters' partial results of a row, in the order of the slots.
#pragma once

#include "args.h"
#include "epilogue.cuh"

namespace pa {

// While the tiles finish: touches the partials that this CTA will read. What is read here is used for nothing but clamped addresses, since
// the kernel before may be about to change it.
template <int HEAD_DIM>
__device__ __forceinline__ void prefetch_partials(const ReduceArgs& p, const ReduceInfo* record, i64 slot_rows, i64 row, int capacity, int thread) {
    int slot, count;
    asm volatile("ld.global.cg.v2.s32 {%0,%1}, [%2];" : "=r"(slot), "=r"(count) : "l"(record));
    if (slot < 0 || slot >= capacity || thread >= min(count, capacity - slot)) return;
    const i64 at = (slot + thread) * slot_rows + row;
    prefetch_l2(p.statistics + at * 2);
    prefetch_l2(p.partial + at * HEAD_DIM);
}

// WARPS warps take every WARPS-th partial, then meet. Rows without a task, and rows that one cluster has finished, are not its business.
template <class Element, int HEAD_DIM, int CLUSTER, bool RAGGED, bool PER_HEAD, int WARPS>
__device__ __forceinline__ void reduce(const ReduceArgs& p, int capacity) {
    constexpr int VECTORS = (HEAD_DIM + 127) / 128, AHEAD = VECTORS == 1 ? 8 : 4;
    __shared__ float4 outs[WARPS][VECTORS * 32];
    __shared__ float2 ends[WARPS];
    launch_next_kernel();
    const int group = p.q_heads / p.kv_heads, kv_head = blockIdx.y / group, sequence = blockIdx.z;
    const ReduceInfo* record = p.reduce + (PER_HEAD ? sequence * p.kv_heads + kv_head : sequence);
    const i64 slot_rows = i64(PER_HEAD ? 1 : p.kv_heads) * p.rows;
    const i64 row = i64(PER_HEAD ? 0 : kv_head) * p.rows + i64(blockIdx.x) * group + blockIdx.y % group;
    prefetch_partials<HEAD_DIM>(p, record, slot_rows, row, capacity, threadIdx.x);
    wait_for_previous_kernel();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const ReduceInfo info = load_record<ReduceInfo>(record);
    const int query_first = RAGGED ? p.query_start[sequence] : sequence * p.query_len;
    const int query_len = RAGGED ? p.query_start[sequence + 1] - query_first : p.query_len;
    const int first = info.first_slot / CLUSTER, end = (info.first_slot + info.count - 1) / CLUSTER + 1;
    if (info.count == 0 || end - first == 1 || int(blockIdx.x) >= query_len) return;
    Joined x[VECTORS];
    for (int start = first + warp; start < end; start += WARPS * AHEAD) {
        float2 ml[AHEAD];
        float4 o[AHEAD][VECTORS];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int slot = max(info.first_slot, min(start + i * WARPS, end - 1) * CLUSTER);
            const i64 at = slot * slot_rows + row;
            ml[i] = reinterpret_cast<const float2*>(p.statistics)[at];
#pragma unroll
            for (int j = 0; j < VECTORS; j++) {
                const int channel = min((j * 32 + lane) * 4, HEAD_DIM - 4);
                o[i][j] = *reinterpret_cast<const float4*>(p.partial + at * HEAD_DIM + channel);
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
    const i64 query = query_first + blockIdx.x;
    for (int piece = threadIdx.x; piece < HEAD_DIM / 4; piece += WARPS * 32) {
        Joined all;
#pragma unroll
        for (int i = 0; i < WARPS; i++) all.add(ends[i], outs[i][piece]);
        store_output<Element>(p.out, query * p.out_row + blockIdx.y * p.out_head + piece * 4, p.lse ? p.lse + query * p.q_heads + blockIdx.y : nullptr,
                              p.sinks, blockIdx.y, all, piece == 0);
    }
}

}  // namespace pa
