// The reducer: merges the partitions of a row, in their order.
#pragma once

#include "epilogue.cuh"

namespace pa {

// A CTA for an (output row of a plan row, KV head): WARPS warps take every WARPS-th partition, then meet. Rows without a task get zeros.
template <class Element, int HEAD_DIM, bool SINKS, int WARPS>
__global__ void __launch_bounds__(WARPS * 32) reduce_kernel(const __grid_constant__ TileParams p) {
    constexpr int VECTORS = (HEAD_DIM + 127) / 128, AHEAD = 8;
    __shared__ float4 outs[WARPS][VECTORS * 32];
    __shared__ float2 ends[WARPS];
    wait_for_previous_kernel();
    launch_next_kernel();
    const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    for (int part = lane; part < info.count; part += 32) max = fmaxf(max, p.partial_ml[first + part * step].x);
#pragma unroll
    for (int shift = 16; shift > 0; shift /= 2) max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, shift));
    const float base = max == neg_inf() ? 0.0f : max;
    float4 o[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) o[i] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int start = warp; start < info.count; start += WARPS * AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int part = start + i * WARPS;
            if (part < info.count) {
                const float2 ml = p.partial_ml[first + part * step];
                const float weight = exp2_fast(ml.x - base);
                sum += ml.y * weight;
#pragma unroll
                for (int j = 0; j < VECTORS; j++) {
                    const int channel = (j * 32 + lane) * 4;
                    if (channel < HEAD_DIM) {
                        const float4 x = *reinterpret_cast<const float4*>(p.partial_o + (first + part * step) * HEAD_DIM + channel);
                        o[j].x += x.x * weight, o[j].y += x.y * weight, o[j].z += x.z * weight, o[j].w += x.w * weight;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < VECTORS; j++) outs[warp][j * 32 + lane] = o[j];
    if (lane == 0) ends[warp] = {max, sum};
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < WARPS; i++) sum += ends[i].y;
    const int query = query_first + blockIdx.x / p.group, head = kv_head * p.group + blockIdx.x % p.group;
    const RowEnd end = finish_row<SINKS>(max, sum, p.sinks, head);
    for (int piece = threadIdx.x; piece < HEAD_DIM / 4; piece += WARPS * 32) {
        float4 x = outs[0][piece];
        for (int i = 1; i < WARPS; i++) {
            const float4 y = outs[i][piece];
            x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
        }
        const float f = end.scale * p.v_scale;
        store4<Element>(p.out, query * p.out_token_stride + head * p.out_head_stride + piece * 4, {x.x * f, x.y * f, x.z * f, x.w * f});
    }
    if (p.lse && threadIdx.x == 0) p.lse[i64(query) * p.kv_heads * p.group + head] = end.lse;
}

}  // namespace pa
