// From the registers of a CTA's groups to the output or a partial result: each group finishes its share of the channels.
#pragma once

#include "merge.cuh"
#include "pipeline.cuh"

namespace pa {

// Word i of lane t of four lanes side by side becomes word t of lane i.
__device__ __forceinline__ void transpose_four(u32 (&x)[4], int t) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = t & step;
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const int i = step == 1 ? 2 * pair : pair;
            const u32 other = __shfl_xor_sync(FULL_WARP, upper ? x[i] : x[i + step], step);
            (upper ? x[i] : x[i + step]) = other;
        }
    }
}

// A lane's share of rows g and g + 8 of its warp: the channels of TILES n-tiles, and what belongs to the whole rows.
template <class T>
struct Share {
    static constexpr int TILES = T::OUT_TILES / T::GROUPS;

    float o[TILES][4];
    float max[2], sum[2], most[2];  // most: no channel is more than that
};

// What a lane's walk ended with.
template <class T>
struct End {
    const float (&o)[T::OUT_TILES][4];
    float max[2], sum[2];  // of rows g and g + 8: in log2 units; of the lane's tokens
};

template <class T>
__device__ __forceinline__ End<T> end_of(const State<T>& state, const Query<T>& q) {
    const Softmax<T>& x = state.softmax;
    return {state.o[0], {x.max[0][0] * q.scale[0][0], x.max[0][1] * q.scale[0][1]}, {x.sum[0][0], x.sum[0][1]}};
}

// First channel of an n-tile.
template <class T>
__device__ __forceinline__ int first_channel(int tile) {
    return T::NARROW ? 16 * (tile % 8) + 8 * (tile / 8) : 8 * tile;
}

// The largest magnitude of a row's channels that the lane has.
template <class T, class Magnitude>
__device__ __forceinline__ float most_of(const End<T>& end, int h, Magnitude magnitude) {
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < T::OUT_TILES; n++) most = fmaxf(most, fmaxf(magnitude(end.o[n][2 * h]), magnitude(end.o[n][2 * h + 1])));
    return most;
}

// The group's own state.
template <class T>
__device__ __forceinline__ void take_share(Share<T>& x, const End<T>& end, int group) {
    constexpr int TILES = Share<T>::TILES;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        x.max[h] = end.max[h];
        x.sum[h] = end.sum[h];
        x.most[h] = most_of<T>(end, h, [](float o) { return fabsf(o); });
        // An infinity stays one in any unit.
        if (x.most[h] == -neg_inf()) x.most[h] = most_of<T>(end, h, [](float o) { return fabsf(o) == -neg_inf() ? 0.0f : fabsf(o); });
        // row_sum and row_max, one beside the other.
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            x.sum[h] += __shfl_xor_sync(FULL_WARP, x.sum[h], step);
            x.most[h] = fmaxf(x.most[h], __shfl_xor_sync(FULL_WARP, x.most[h], step));
        }
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x.o[n][i] = end.o[n][i];
#pragma unroll
            for (int other = 1; other < T::GROUPS; other++) {
                if (group == other) x.o[n][i] = end.o[other * TILES + n][i];
            }
        }
    }
}

// Lanes of the same place in every group hold the same rows and channels: they exchange their shares through shared memory.
template <class T>
__device__ __forceinline__ void join_shares(Share<T>& x, const End<T>& own, float* shared, int group, int row, int lane) {
    constexpr int TILES = Share<T>::TILES, OTHERS = T::GROUPS - 1;
    const int thread = row / 16 * 32 + lane;
    float4* ends = reinterpret_cast<float4*>(shared) + row + lane / 4;
    float4* outs = reinterpret_cast<float4*>(shared) + T::GROUPS * T::ROWS + thread;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (lane % 4 == 0) ends[group * T::ROWS + 8 * h] = {x.max[h], x.sum[h], x.most[h], 0.0f};
    }
#pragma unroll
    for (int n = 0; n < T::OUT_TILES; n++) {
        const float(&o)[4] = own.o[n];
        if (n / TILES != group) outs[(group * T::OUT_TILES + n) * T::GROUP_THREADS] = {o[0], o[1], o[2], o[3]};
    }
    sync_block<T>();
    float weight[OTHERS][2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float4 end[OTHERS];
        float most = x.max[h];
#pragma unroll
        for (int i = 0; i < OTHERS; i++) end[i] = ends[(group + 1 + i) % T::GROUPS * T::ROWS + 8 * h], most = fmaxf(most, end[i].x);
        const float base = most == neg_inf() ? 0.0f : most, keep = exp2_fast(x.max[h] - base);
        x.max[h] = most, x.sum[h] *= keep, x.most[h] *= keep;
#pragma unroll
        for (int i = 0; i < OTHERS; i++) {
            weight[i][h] = exp2_fast(end[i].x - base);
            x.sum[h] += end[i].y * weight[i][h], x.most[h] += end[i].z * weight[i][h];
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) x.o[n][2 * h] *= keep, x.o[n][2 * h + 1] *= keep;
    }
#pragma unroll
    for (int i = 0; i < OTHERS; i++) {
        const float4* other = outs + ((group + 1 + i) % T::GROUPS * T::OUT_TILES + group * TILES) * T::GROUP_THREADS;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const float4 o = other[n * T::GROUP_THREADS];
            x.o[n][0] += o.x * weight[i][0], x.o[n][1] += o.y * weight[i][0];
            x.o[n][2] += o.z * weight[i][1], x.o[n][3] += o.w * weight[i][1];
        }
    }
}

// Calls store(channel, four pairs of Element) for each eight channels that a lane has of row h of its two, `factor` times its share.
template <class Element, class T, class Store>
__device__ __forceinline__ void store_share(const Share<T>& x, int h, float factor, int group, int t, Store store) {
    constexpr int TILES = Share<T>::TILES;
#pragma unroll
    for (int n = 0; n < TILES; n += 4) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = Element::pack(x.o[n + i][2 * h] * factor, x.o[n + i][2 * h + 1] * factor);
        transpose_four(words, t);
        store(first_channel<T>(group * TILES + n + t), words);
    }
}

// The power of two that brings a row's partial result into F16: that much smaller in store, its maximum that much higher.
struct HalfUnit {
    float factor, shift;
};

// For channels of up to `most`: within [2^14, 2^15), as far as the row's sum can take the factor too.
__device__ __forceinline__ HalfUnit half_unit(float most) {
    const int shift = min(max(int(__float_as_uint(most) >> 23) - 127 - 14, -64), 113);
    return {__uint_as_float(u32(127 - shift) << 23), float(shift)};
}

// Merges the groups' states and stores them: the output where the task is all of the row's, else a partial result.
template <class T>
__device__ __forceinline__ void finish_states(const CudaTileArgs& p, const Task& task, const End<T>& own, float* shared,
                                              int group, int row, int lane) {
    const int t = lane % 4;
    Share<T> x;
    take_share<T>(x, own, group);
    if constexpr (T::GROUPS > 1) join_shares<T>(x, own, shared, group, row, lane);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int at = task.first_row + row + 8 * h + lane / 4;
        const bool real = at < task.rows, first = real && group == 0 && t == 0;
        if (task.parts == 1) {
            const i64 query = task.query_first + at / T::GROUP, head = task.head * T::GROUP + at % T::GROUP;
            const RowEnd end = finish_row(x.max[h], x.sum[h], p.sinks, int(head));
            if (p.lse && first) p.lse[query * p.kv_heads * T::GROUP + head] = end.lse;
            u16* out = static_cast<u16*>(p.out) + task.sequence * p.out_sequence + query * p.out_row + head * p.out_head;
            store_share<typename T::Query, T>(x, h, end.scale, group, t, [&](int channel, const u32(&words)[4]) {
                uint2* to = reinterpret_cast<uint2*>(out + channel);
                if (real) to[0] = {words[0], words[1]}, to[1] = {words[2], words[3]};
            });
        } else {
            const HalfUnit unit = half_unit(x.most[h]);
            const i64 state_row = partial_row<T>(p, task, at);
            if (first) static_cast<float2*>(p.statistics)[state_row] = {x.max[h] + unit.shift, x.sum[h] * unit.factor};
            u16* out = static_cast<u16*>(p.partial) + state_row * T::HEAD_DIM;
            store_share<F16, T>(x, h, unit.factor, group, t, [&](int channel, const u32(&words)[4]) {
                if (real) *reinterpret_cast<uint4*>(out + channel) = {words[0], words[1], words[2], words[3]};
            });
        }
    }
}

}  // namespace pa
