// From the groups' states to one state of the CTA, and from a merged state to the output.
#pragma once

#include "pipeline.cuh"

namespace pa {

// Maximum (log2 units) and sum of a row, with its sink if it has one.
struct RowEnd {
    float scale;  // factor that turns the unnormalized output into the output
    float lse;    // natural logarithm
};

// The sink joins the denominator. A row that attends nothing gives 0 and -inf, sink or not.
template <bool SINKS>
__device__ __forceinline__ RowEnd finish_row(float max, float sum, const float* sinks, int head) {
    if (sum == 0.0f) return {0.0f, neg_inf()};
    float factor = 1.0f;
    if constexpr (SINKS) {
        const float sink = sinks[head] * LOG2E, most = fmaxf(max, sink);
        factor = exp2_fast(max - most);
        sum = sum * factor + exp2_fast(sink - most);
        max = most;
    }
    return {factor / sum, (max + log2_fast(sum)) * LN2};
}

template <class Element>
__device__ __forceinline__ void store4(void* out, i64 at, float4 x) {
    const uint2 packed = {Element::pack(x.x, x.y), Element::pack(x.z, x.w)};
    *reinterpret_cast<uint2*>(static_cast<u16*>(out) + at) = packed;
}

template <class T>
__device__ __forceinline__ void publish_state(const State<T>& state, float* merge, int group, int first_row, int lane) {
    const int g = lane / 4, t = lane % 4;
    float2* ml = reinterpret_cast<float2*>(merge + T::MERGE_ENDS) + group * T::ROWS;
    float* o = merge + group * T::ROWS * T::MERGE_ROW;
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first_row + 16 * m + 8 * h + g;
            float sum = state.softmax.sum[m][h];
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            if (t == 0) ml[row] = {state.softmax.max[m][h], sum};
            const float unit = T::PER_TOKEN ? state.softmax.v_most : 1.0f;
            if constexpr (T::FP8) {
#pragma unroll
                for (int n = 0; n < T::OUT_TILES; n += 4) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int i = 2 * h + e;
                        *reinterpret_cast<float4*>(o + row * T::MERGE_ROW + out_channel<T>(n, t, e)) = {
                            state.o[m][n][i] * unit, state.o[m][n + 1][i] * unit, state.o[m][n + 2][i] * unit, state.o[m][n + 3][i] * unit};
                    }
                }
            } else {
#pragma unroll
                for (int n = 0; n < T::OUT_TILES; n++) {
                    *reinterpret_cast<float2*>(o + row * T::MERGE_ROW + out_channel<T>(n, t, 0)) = {state.o[m][n][2 * h],
                                                                                                   state.o[m][n][2 * h + 1]};
                }
            }
        }
    }
}

// A state in the making: parts join in a fixed order, at most 2^x of their maximum each.
struct Joined {
    float max = neg_inf(), sum = 0.0f;
    float4 o = {0.0f, 0.0f, 0.0f, 0.0f};

    __device__ __forceinline__ void add(float2 ml, float4 x) {
        const float most = fmaxf(max, ml.x), base = most == neg_inf() ? 0.0f : most;
        const float keep = exp2_fast(max - base), weight = exp2_fast(ml.x - base);
        max = most, sum = sum * keep + ml.y * weight;
        o.x = o.x * keep + x.x * weight, o.y = o.y * keep + x.y * weight;
        o.z = o.z * keep + x.z * weight, o.w = o.w * keep + x.w * weight;
    }
};

// Merges the groups into the CTA's own state.
template <class T>
__device__ __forceinline__ void merge_groups(float* merge, int thread) {
    constexpr int PIECES = T::HEAD_DIM / 4;
    float2* ml = reinterpret_cast<float2*>(merge + T::MERGE_ENDS);
#pragma unroll 1
    for (int item = thread; item < T::ROWS * PIECES; item += T::THREADS) {
        const int row = item / PIECES, channel = item % PIECES * 4;
        float max = neg_inf(), sum = 0.0f;
#pragma unroll
        for (int group = 0; group < T::GROUPS; group++) max = fmaxf(max, ml[group * T::ROWS + row].x);
        const float base = max == neg_inf() ? 0.0f : max;
        float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int group = 0; group < T::GROUPS; group++) {
            const float2 part = ml[group * T::ROWS + row];
            const float weight = exp2_fast(part.x - base);
            const float4 x = *reinterpret_cast<const float4*>(merge + (group * T::ROWS + row) * T::MERGE_ROW + channel);
            sum += part.y * weight;
            o.x += x.x * weight, o.y += x.y * weight, o.z += x.z * weight, o.w += x.w * weight;
        }
        *reinterpret_cast<float4*>(merge + (T::GROUPS * T::ROWS + row) * T::MERGE_ROW + channel) = o;
        if (channel == 0) ml[T::GROUPS * T::ROWS + row] = {max, sum};
    }
}

// Stores four channels of an output row, and its LSE beside channel 0.
template <class T>
__device__ __forceinline__ void store_output(const TileParams& p, const Task& task, int row, int channel, const Joined& x) {
    const int query = task.query_first + row / p.group, head = task.head * p.group + row % p.group;
    const RowEnd end = finish_row<T::Opt::SINKS>(x.max, x.sum, p.sinks, head);
    const float f = end.scale * p.v_scale;
    store4<typename T::Query>(p.out, query * p.out_token_stride + head * p.out_head_stride + channel,
                              {x.o.x * f, x.o.y * f, x.o.z * f, x.o.w * f});
    if (p.lse && channel == 0) p.lse[i64(query) * p.kv_heads * p.group + head] = end.lse;
}

}  // namespace pa
