// The reducer: merges the partitions of a row, in their order.
#pragma once

#include "epilogue.cuh"

namespace pa {

// A CTA for an (output row of a plan row, KV head): WARPS warps take every WARPS-th partition, then meet. Rows without a task get zeros.
template <class Element, int HEAD_DIM, bool SINKS, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 32 / WARPS) reduce_kernel(const __grid_constant__ TileParams p) {
    constexpr int VECTORS = (HEAD_DIM + 127) / 128, AHEAD = VECTORS == 1 ? 8 : 4;
    __shared__ float4 outs[WARPS][VECTORS * 32];
    __shared__ float2 ends[WARPS];
    launch_next_kernel();
    const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    prefetch_l2(static_cast<const ReduceInfo*>(p.reduce_info) + row);
    wait_for_previous_kernel();
    const ReduceInfo info = static_cast<const ReduceInfo*>(p.reduce_info)[row];
    if (info.count == 1) return;
    const bool per_head = p.heads_per_row > 1;
    const int sequence = per_head ? row / p.heads_per_row : row, kv_head = per_head ? row % p.heads_per_row : blockIdx.z;
    const int query_first = p.query_start ? p.query_start[sequence] : sequence * p.query_len;
    const int query_len = p.query_start ? p.query_start[sequence + 1] - query_first : p.query_len;
    const int rows = query_len * p.group, heads = per_head ? 1 : p.kv_heads;
    if (int(blockIdx.x) >= rows) return;
    const i64 first = (i64(info.first_slot) * heads + (per_head ? 0 : kv_head)) * rows + blockIdx.x, step = i64(heads) * rows;
    float max = neg_inf(), sum = 0.0f;
    float4 o[VECTORS];
#pragma unroll
    for (int j = 0; j < VECTORS; j++) o[j] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int start = warp; start < info.count; start += WARPS * AHEAD) {
        float2 ml[AHEAD];
        float4 x[AHEAD][VECTORS];
        float most = max;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int part = start + i * WARPS;
            const bool real = part < info.count;
            const i64 at = first + (real ? part : start) * step;
            ml[i] = p.partial_ml[at];
            if (!real) ml[i] = {neg_inf(), 0.0f};
#pragma unroll
            for (int j = 0; j < VECTORS; j++) {
                const int channel = (j * 32 + lane) * 4;
                x[i][j] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (real && channel < HEAD_DIM) x[i][j] = *reinterpret_cast<const float4*>(p.partial_o + at * HEAD_DIM + channel);
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) most = fmaxf(most, ml[i].x);
        const float base = most == neg_inf() ? 0.0f : most, alpha = exp2_fast(max - base);
        max = most, sum *= alpha;
#pragma unroll
        for (int j = 0; j < VECTORS; j++) o[j].x *= alpha, o[j].y *= alpha, o[j].z *= alpha, o[j].w *= alpha;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const float weight = exp2_fast(ml[i].x - base);
            sum += ml[i].y * weight;
#pragma unroll
            for (int j = 0; j < VECTORS; j++) {
                o[j].x += x[i][j].x * weight, o[j].y += x[i][j].y * weight, o[j].z += x[i][j].z * weight, o[j].w += x[i][j].w * weight;
            }
        }
    }
#pragma unroll
    for (int j = 0; j < VECTORS; j++) outs[warp][j * 32 + lane] = o[j];
    if (lane == 0) ends[warp] = {max, sum};
    __syncthreads();
    max = neg_inf(), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) max = fmaxf(max, ends[i].x);
    const float base = max == neg_inf() ? 0.0f : max;
    float weights[WARPS];
#pragma unroll
    for (int i = 0; i < WARPS; i++) weights[i] = exp2_fast(ends[i].x - base), sum += ends[i].y * weights[i];
    const int query = query_first + blockIdx.x / p.group, head = kv_head * p.group + blockIdx.x % p.group;
    const RowEnd end = finish_row<SINKS>(max, sum, p.sinks, head);
    for (int piece = threadIdx.x; piece < HEAD_DIM / 4; piece += WARPS * 32) {
        float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const float4 y = outs[i][piece];
            x.x += y.x * weights[i], x.y += y.y * weights[i], x.z += y.z * weights[i], x.w += y.w * weights[i];
        }
        const float f = end.scale * p.v_scale;
        store4<Element>(p.out, query * p.out_token_stride + head * p.out_head_stride + piece * 4, {x.x * f, x.y * f, x.z * f, x.w * f});
    }
    if (p.lse && threadIdx.x == 0) p.lse[i64(query) * p.kv_heads * p.group + head] = end.lse;
}

}  // namespace pa
