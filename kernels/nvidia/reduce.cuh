// The second step of the merge: a row's partial results, in the order of the slots.
#pragma once

#include "args.h"
#include "epilogue.cuh"

namespace pa {

// Partial results, N at a time: their maximum first, so that no weight waits for another.
template <int N, int VECTORS>
__device__ __forceinline__ void add_partials(Joined (&x)[VECTORS], const float2 (&ml)[N], const float4 (&o)[N][VECTORS]) {
    float most = x[0].max;
#pragma unroll
    for (int i = 0; i < N; i++) most = fmaxf(most, ml[i].x);
    const float base = most == neg_inf() ? 0.0f : most, keep = exp2_fast(x[0].max - base);
    float weight[N];
#pragma unroll
    for (int i = 0; i < N; i++) weight[i] = exp2_fast(ml[i].x - base);
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        x[j].max = most, x[j].sum *= keep;
        x[j].o.x *= keep, x[j].o.y *= keep, x[j].o.z *= keep, x[j].o.w *= keep;
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[j].sum += ml[i].y * weight[i];
            x[j].o.x += o[i][j].x * weight[i], x[j].o.y += o[i][j].y * weight[i];
            x[j].o.z += o[i][j].z * weight[i], x[j].o.w += o[i][j].w * weight[i];
        }
    }
}

// WARPS warps of a row take every WARPS-th partial, then meet; a block has ROWS rows, query heads side by side, or a SPLIT-th of a row's channels:
// a warp reads SPLIT partials at once then. Rows of one task or none are not its business.
template <class Element, int HEAD_DIM, bool RAGGED, bool PER_HEAD, int WARPS, int ROWS, int SPLIT>
__device__ __forceinline__ void reduce(const ReduceArgs& p) {
    constexpr int CHANNELS = HEAD_DIM / SPLIT, LANES = SPLIT == 1 ? 32 : CHANNELS / 4, AT_ONCE = 32 / LANES;
    constexpr int VECTORS = (CHANNELS + 127) / 128, AHEAD = VECTORS > 1 ? 4 : 8 / AT_ONCE;
    static_assert(SPLIT == 1 || (HEAD_DIM % SPLIT == 0 && LANES * 4 == CHANNELS && AT_ONCE * LANES == 32), "lanes share a warp's partials evenly");
    static_assert(WARPS == 1 ? SPLIT == 1 : ROWS == 1, "rows that need no meeting share a block");
    __shared__ float4 outs[WARPS][VECTORS * 32];
    __shared__ float2 ends[WARPS];
    launch_next_kernel();
    const int token = blockIdx.x / SPLIT, slice = blockIdx.x % SPLIT * CHANNELS;
    const int warp = ROWS == 1 ? threadIdx.x / 32 : 0, lane = threadIdx.x % 32, head = blockIdx.y * ROWS + (ROWS == 1 ? 0 : threadIdx.x / 32);
    if (ROWS > 1 && head >= p.q_heads) return;
    const int group = p.q_heads / p.kv_heads, kv_head = head / group, sequence = blockIdx.z;
    // The records are the planner's, for whom the tiles had waited before any of them let this kernel start: they are read while the tiles finish,
    // and the addresses of the partials brought near.
    const int2 queries = RAGGED ? ragged_queries(p.query_start, sequence, p.q_rows) : int2{sequence * p.query_len, p.query_len};
    const int query_first = queries.x, query_len = queries.y;
    const ReduceInfo info = load_record<ReduceInfo>(p.reduce + (PER_HEAD ? sequence * p.kv_heads + kv_head : sequence));
    const int first = info.first_slot, end = first + info.count;
    if (info.count <= 1 || token >= query_len) {
        wait_for_previous_kernel();  // or this kernel could end before the tiles, and what follows it in the stream start
        return;
    }
    const i64 slot_rows = i64(PER_HEAD ? 1 : p.kv_heads) * p.rows;
    const i64 row = i64(PER_HEAD ? 0 : kv_head) * p.rows + i64(token) * group + head % group, query = query_first + token;
    for (int part = warp * 32 + lane; part < end - first; part += WARPS * 32) {
        const i64 at = (first + part) * slot_rows + row;
        prefetch_l2(p.statistics + at * 2);
        prefetch_l2(p.partial + at * HEAD_DIM + slice);
    }
    wait_for_previous_kernel();
    Joined x[VECTORS];
    for (int start = first + warp * AT_ONCE; start < end; start += WARPS * AT_ONCE * AHEAD) {
        float2 ml[AHEAD];
        float4 o[AHEAD][VECTORS];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int part = start + i * WARPS * AT_ONCE + lane / LANES;
            const i64 at = part * slot_rows + row;
            const bool real = part < end;
            ml[i] = real ? *reinterpret_cast<const float2*>(p.statistics + at * 2) : float2{neg_inf(), 0.0f};
#pragma unroll
            for (int j = 0; j < VECTORS; j++) {
                o[i][j] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (real) o[i][j] = *reinterpret_cast<const float4*>(p.partial + at * HEAD_DIM + slice + min((j * 32 + lane % LANES) * 4, CHANNELS - 4));
            }
        }
        add_partials<AHEAD, VECTORS>(x, ml, o);
    }
    // The groups of lanes meet.
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
        auto other = [&](float y) { return __shfl_xor_sync(FULL_WARP, y, step); };
        const float4 o = x[0].o;
        x[0].add({other(x[0].max), other(x[0].sum)}, {other(o.x), other(o.y), other(o.z), other(o.w)});
    }
    float* lse = p.lse ? p.lse + query * p.q_heads + head : nullptr;
    const i64 out = sequence * p.out_sequence + query * p.out_row + head * p.out_head;
    if constexpr (WARPS == 1) {
#pragma unroll
        for (int j = 0; j < VECTORS; j++) {
            const int channel = (j * 32 + lane) * 4;
            if (channel < HEAD_DIM) store_output<Element>(p.out, out + channel, lse, p.sinks, head, x[j], channel == 0);
        }
    } else {
#pragma unroll
        for (int j = 0; j < VECTORS; j++) outs[warp][j * 32 + lane] = x[j].o;
        if (lane == 0) ends[warp] = {x[0].max, x[0].sum};
        __syncthreads();
        for (int piece = threadIdx.x; piece < CHANNELS / 4; piece += WARPS * 32) {
            Joined all[1];
            float2 ml[WARPS];
            float4 o[WARPS][1];
#pragma unroll
            for (int i = 0; i < WARPS; i++) ml[i] = ends[i], o[i][0] = outs[i][piece];
            add_partials<WARPS, 1>(all, ml, o);
            store_output<Element>(p.out, out + slice + piece * 4, lse, p.sinks, head, all[0], slice + piece == 0);
        }
    }
}

}  // namespace pa
