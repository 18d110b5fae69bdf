// States in the making, and from a finished one to the output.
#pragma once

#include "traits.cuh"

namespace pa {

// First row of q of a sequence in a ragged batch, and how many: whatever the starts say, among the `rows` that there are.
__device__ __forceinline__ int2 ragged_queries(const int* query_start, int sequence, int rows) {
    const int first = min(max(reload_record(query_start + sequence), 0), rows);
    return {first, min(max(reload_record(query_start + sequence + 1), first), rows) - first};
}

// What a merged row still needs.
struct RowEnd {
    float scale;  // factor that turns the unnormalized output into the output
    float lse;    // natural logarithm
};

// The sink joins the denominator. A row that attends nothing gives 0 and -inf, sink or not.
__device__ __forceinline__ RowEnd finish_row(float max, float sum, const float* sinks, int head) {
    if (sum == 0.0f) return {0.0f, neg_inf()};
    float factor = 1.0f;
    if (sinks) {
        const float sink = sinks[head] * LOG2E, most = fmaxf(max, sink);
        factor = exp2_fast(max - most);
        sum = sum * factor + exp2_fast(sink - most);
        max = most;
    }
    return {factor * rcp_fast(sum), (max + log2_fast(sum)) * LN2};
}

// Four elements of a 16-bit type that packs pairs, or of F32.
template <class Element>
__device__ __forceinline__ void store4(void* out, i64 at, float4 x) {
    if constexpr (Element::BYTES == 4) {
        *reinterpret_cast<float4*>(static_cast<float*>(out) + at) = x;
    } else {
        *reinterpret_cast<uint2*>(static_cast<u16*>(out) + at) = {Element::pack(x.x, x.y), Element::pack(x.z, x.w)};
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

// N pieces of four channels of a row of the CTA's own state, STEP pieces apart (the last one again past it): the groups' together.
template <class T, int N, int STEP>
__device__ __forceinline__ void join_groups(Joined (&all)[N], const float* merge, int row, int piece) {
    const float2* ml = reinterpret_cast<const float2*>(merge + T::MERGE_ENDS) + row;
    float2 part[T::GROUPS];
    float most = neg_inf(), sum = 0.0f, weight[T::GROUPS];
#pragma unroll
    for (int group = 0; group < T::GROUPS; group++) part[group] = ml[group * T::ROWS], most = fmaxf(most, part[group].x);
    const float base = most == neg_inf() ? 0.0f : most;
#pragma unroll
    for (int group = 0; group < T::GROUPS; group++) weight[group] = exp2_fast(part[group].x - base), sum += part[group].y * weight[group];
#pragma unroll
    for (int i = 0; i < N; i++) {
        all[i] = {most, sum};
        const int channel = min((piece + i * STEP) * 4, T::HEAD_DIM - 4);
        const float* o = merge + row * T::MERGE_ROW + T::merge_channel(channel);
#pragma unroll
        for (int group = 0; group < T::GROUPS; group++) {
            const float4 x = *reinterpret_cast<const float4*>(o + group * T::ROWS * T::MERGE_ROW);
            all[i].o.x += x.x * weight[group], all[i].o.y += x.y * weight[group];
            all[i].o.z += x.z * weight[group], all[i].o.w += x.w * weight[group];
        }
    }
}

// Stores four channels of an output row, and its LSE beside channel 0.
template <class Element>
__device__ __forceinline__ void store_output(void* out, i64 at, float* lse, const float* sinks, int head, const Joined& x, bool first) {
    const RowEnd end = finish_row(x.max, x.sum, sinks, head);
    store4<Element>(out, at, {x.o.x * end.scale, x.o.y * end.scale, x.o.z * end.scale, x.o.w * end.scale});
    if (lse && first) *lse = end.lse;
}

}  // namespace pa
