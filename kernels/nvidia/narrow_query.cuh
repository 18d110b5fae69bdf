// The query of a walk on E4M3 products (narrow.cuh): the sum of two E4M3 parts, the nearest value and what is left, as good as BF16.
//
// All threads that walk share the work, ahead of the first products, which wait for it: four lanes have a row, 16 bytes at a time. Rows g and g + 8 of a
// warp's 16, which are a lane's in the products, share a factor: a warp has four such pairs here.
#pragma once

#include "pipeline.cuh"

namespace pa {

// What a thread has of the query: a quarter of each of its rows, 16 bits a channel.
template <class T>
struct QueryQuarters {
    static constexpr int LANES = 4, ROWS_AT_ONCE = T::THREADS / LANES, ROWS = T::ROWS / ROWS_AT_ONCE, WORDS = T::HEAD_DIM / LANES / 2;
    static_assert(T::ROWS % ROWS_AT_ONCE == 0 && WORDS % 8 == 0, "whole rows, of whole pieces of 16 channels");

    u32 words[ROWS][WORDS];

    // Row `i` of a thread.
    static __device__ __forceinline__ int row(int i, int thread) {
        const int lane = thread % 32, warp = thread / 32;
        return i * ROWS_AT_ONCE + warp / 2 * 16 + lane / 16 * 8 + warp % 2 * 4 + lane / 4 % 4;
    }

    // Rows past the last are zeros.
    __device__ __forceinline__ void fetch(const CudaTileArgs& p, const Task& task, int thread) {
        const bool aligned = is_query_aligned(p);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int at = task.first_row + row(i, thread);
            const bool real = at < task.rows;
            const u16* src = query_row<T>(p, task, real ? at : 0) + thread % LANES * (WORDS * 2);
#pragma unroll
            for (int word = 0; word < WORDS; word += 4) {
                uint4 x = {};
                if (real && aligned) x = *reinterpret_cast<const uint4*>(src + 2 * word);
                u32(&to)[WORDS] = words[i];
                to[word] = x.x, to[word + 1] = x.y, to[word + 2] = x.z, to[word + 3] = x.w;
#pragma unroll
                for (int j = word; j < word + 4; j++) {
                    if (real && !aligned) to[j] = *reinterpret_cast<const u32*>(src + 2 * j);
                }
            }
        }
    }
};

// Splits four channels, two words, times a power of two.
template <class T>
__device__ __forceinline__ void split_four(u32& nearest, u32& rest, u32 first, u32 second, float up) {
    const float2 low = T::Query::unpack(first), high = T::Query::unpack(second);
    float x[4] = {low.x * up, low.y * up, high.x * up, high.y * up};
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] += x[i] - x[i];  // E4M3 has no infinity: NaN
    nearest = E4m3::narrow(x);
    rest = E4m3::narrow(F16::subtract(F16::pack(x[0], x[1]), E4m3::widen<0>(nearest)), F16::subtract(F16::pack(x[2], x[3]), E4m3::widen<1>(nearest)));
}

// Stores the two parts of the query, each pair of rows scaled by a power of two that puts its largest value in 128..256, and for each row what turns
// scores into log2 units, a positive factor, where `scales(group)` says, for every group.
template <class T, class Scales>
__device__ __forceinline__ void split_query(const QueryQuarters<T>& q, const CudaTileArgs& p, u32 query, float k_scale, int thread, Scales scales) {
    using Q = QueryQuarters<T>;
    const float factor = p.scale_log2 * k_scale;
    // An infinity is its own row's alone.
    auto finite = [](float x) { return fabsf(x) < -neg_inf() ? fabsf(x) : 0.0f; };
#pragma unroll
    for (int i = 0; i < Q::ROWS; i++) {
        const int row = Q::row(i, thread), quarter = thread % Q::LANES;
        float most = 0.0f;
#pragma unroll
        for (int word = 0; word < Q::WORDS; word++) {
            const float2 x = T::Query::unpack(q.words[i][word]);
            most = fmaxf(most, fmaxf(finite(x.x), finite(x.y)));
        }
        most = row_max(most);
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 16));
        const u32 exponent = min(max(__float_as_uint(most) >> 23, 27u), 254u);
        const float up = copysignf(__uint_as_float((261 - exponent) << 23), factor), down = __uint_as_float((exponent - 7) << 23);
#pragma unroll
        for (int piece = 0; piece < Q::WORDS / 8; piece++) {
            u32 nearest[4], rest[4];
            const u32* words = q.words[i] + 8 * piece;
#pragma unroll
            for (int j = 0; j < 4; j++) split_four<T>(nearest[j], rest[j], words[2 * j], words[2 * j + 1], up);
            const u32 at = query + row * 128 + (((quarter * (Q::WORDS / 8) + piece) ^ (row & 7)) << 4);
            store_shared16(at, nearest), store_shared16(at + T::ROWS * 128, rest);
        }
        if (quarter != 0) continue;
#pragma unroll
        for (int group = 0; group < T::GROUPS; group++) store_shared4(scales(group) + 4 * row, __float_as_uint(not_zero(fabsf(factor) * down)));
    }
}

// The query's two parts as operand A, in steps of 32 channels: in registers, which leaves more of the shared memory's rate to others; what is left of it
// where it was stored, where a second sum takes the registers.
template <class T>
struct QueryParts {
    static constexpr int HELD = T::SUMS == 1 ? 2 : 1, STEPS = T::HEAD_DIM / 32;

    u32 a[HELD][STEPS][4];
    u64 rest;  // describes the second part

    __device__ __forceinline__ void fetch(u32 query, int row, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int part = 0; part < HELD; part++) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const u32 rows = query + part * T::ROWS * 128 + (row + i % 2 * 8 + g) * 128;
                    a[part][step][i] = load_shared4(rows + (((2 * step + i / 2) ^ g) << 4) + 4 * t);
                }
            }
        }
        rest = describe(query + T::ROWS * 128);
    }
};

}  // namespace pa
