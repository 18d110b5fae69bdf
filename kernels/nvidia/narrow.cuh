// The walk of a warpgroup over an FP8 cache: S = Q K^T on E4M3 itself, O += P V on F16, of 64 query rows and 64 tokens.
//
// Helper warps copy K and V and widen V; they keep ahead of the group that they serve. K is read where its copies put it. Q is the sum of two E4M3 parts
// (narrow_query.cuh). P goes from accumulators to operand A in registers.
//   S: a lane has rows g and g + 8 of its warp's 16, tokens 8n + 2t + e.
//   O: n-tile n has channels 16n.. up to n = 7, then 16(n - 8) + 8..
#pragma once

#include "direct.cuh"
#include "helpers.cuh"
#include "narrow_query.cuh"

namespace pa {

// The largest probability of a row after its base was set, in log2 units above the base, and what the sum of a lane's of a chunk may come to: F16 holds them.
constexpr float AIM_LOG2 = 8.0f, LANE_MOST = 32768.0f;
// Where the scores that count are beyond this, in log2 units, too few of the bits that E4M3's products are added in are behind the point: these are computed
// in F32.
template <class T>
constexpr float LARGE = T::SUMS == 1 ? 12.0f : 40.0f;
// Where no token has been attended yet.
constexpr float NO_BASE = -1e30f;

template <class T>
struct NarrowState {
    float o[T::OUT_TILES][4];  // times 2^base, and with token scales in V's unit
    float base[2];             // of rows g and g + 8; the same in the four lanes of a row
    float sum[2];              // of the lane's tokens only
    float scale;               // positive factor that turns scores into log2 units
    float cap;                 // with a softcap: what a score is multiplied by before its tanh
    int newest[2];             // last token that the row attends
    int unit;                  // of V, see helpers.cuh
    bool large;                // whether a row of the warp has scores beyond LARGE
};

template <class T>
using NarrowScores = float[T::CHUNK / 8][4];

// With token scales: what turns the scores of a lane's tokens 8n + 2t and the next into log2 units; with a softcap, K's scales alone. A
// scale times the row's own factor must be in F32.
template <class T>
struct TokenFactors {
    float2 each[T::PER_TOKEN ? T::CHUNK / 8 : 1];

    __device__ __forceinline__ void fetch(const NarrowState<T>& state, u32 stage, int t) {
        if constexpr (T::PER_TOKEN) {
            const float scale = T::Opt::SOFTCAP ? 1.0f : state.scale;
#pragma unroll
            for (int n = 0; n < T::CHUNK / 8; n++) {
                const float2 x = load_shared_float2(stage + 2 * T::KV_BYTES + 4 * (8 * n + 2 * t));
                each[n] = {x.x * scale, x.y * scale};
            }
        }
    }

    // Of the score i of n-tile n.
    __device__ __forceinline__ float of(int n, int i) const { return i % 2 ? each[n].y : each[n].x; }
};

// P as operand A, in steps of 16 tokens.
template <class T>
using Probabilities = u32[T::CHUNK / 16][4];

template <class T>
__device__ __forceinline__ void start(NarrowState<T>& state, const CudaTileArgs& p, const Task& task, u32 scales, int row, int lane) {
#pragma unroll
    for (int n = 0; n < T::OUT_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) state.o[n][i] = 0.0f;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        state.base[h] = NO_BASE, state.sum[h] = 0.0f;
        state.newest[h] = newest_of<T>(task, task.first_row + row + 8 * h + lane / 4);
    }
    const float scale = __uint_as_float(load_shared4(scales + 4 * (row + lane / 4)));
    state.scale = T::Opt::SOFTCAP ? p.softcap * LOG2E : scale;
    state.cap = scale * (LN2 / p.softcap);
    state.unit = LEAST_UNIT;
    state.large = false;
}

// The first sum has what is left of the query, each its share of the channels of the nearest values.
template <class T>
__device__ __forceinline__ void start_narrow_scores(NarrowScores<T> (&s)[T::SUMS], const QueryParts<T>& q, u32 k) {
    constexpr int STEPS = QueryParts<T>::STEPS;
    const u64 b = describe(k);
    warpgroup_begin();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        if constexpr (QueryParts<T>::HELD == 2) {
            warpgroup_narrow_scores(s[0], q.a[1][step], b + step * 32 / 16, step > 0);
        } else {
            warpgroup_narrow_scores(s[0], q.rest + step * 32 / 16, b + step * 32 / 16, step > 0);
        }
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int sum = step * T::SUMS / STEPS;
        warpgroup_narrow_scores(s[sum], q.a[0][step], b + step * 32 / 16, sum == 0 || step % (STEPS / T::SUMS) > 0);
    }
    warpgroup_commit();
}

// Waits for all but the last `LEFT` commits, the scores among them; the first sum is all of them then.
template <class T, int LEFT>
__device__ __forceinline__ void finish_narrow_scores(NarrowScores<T> (&s)[T::SUMS]) {
    warpgroup_wait<T::CHUNK / 8, LEFT>(s[0]);
#pragma unroll
    for (int sum = 1; sum < T::SUMS; sum++) {
        hold(s[sum]);
#pragma unroll
        for (int n = 0; n < T::CHUNK / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) s[0][n][i] += s[sum][n][i];
        }
    }
}

template <class T>
__device__ __forceinline__ void start_values(NarrowState<T>& state, const Probabilities<T>& pr, u32 slot) {
    const u64 b = describe(slot, T::CHUNK * 128);
    warpgroup_begin();
#pragma unroll
    for (int step = 0; step < T::CHUNK / 16; step++) warpgroup_values<F16, 128>(state.o, pr[step], b + step * 16 * 128 / 16);
    warpgroup_commit();
}

// The warp's scores once more: the sum of the query's parts and K in F16, added in F32. Slow.
template <class T>
__device__ __forceinline__ void exact_scores(NarrowScores<T>& s, u32 query, u32 k, int row, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < T::CHUNK / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = 0.0f;
    }
#pragma unroll 1
    for (int piece = 0; piece < T::ROW_PIECES; piece++) {
        const u32 at = ((piece ^ g) << 4) + 4 * t;
        u32 a[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 from = query + (row + 8 * h + g) * 128 + at, high = load_shared4(from), low = load_shared4(from + T::ROWS * 128);
            a[h] = F16::add(E4m3::widen<0>(high), E4m3::widen<0>(low)), a[2 + h] = F16::add(E4m3::widen<1>(high), E4m3::widen<1>(low));
        }
#pragma unroll
        for (int n = 0; n < T::CHUNK / 8; n++) {
            const u32 word = load_shared4(k + (8 * n + g) * 128 + at);
            F16::mma(s[n], a, E4m3::widen<0>(word), E4m3::widen<1>(word));
        }
    }
}

// What lies between the scores of the chunk at `token` and the softmax: the cap; -inf for tokens that a row does not attend. Their factors are part of
// the scores then: -inf bears no factor of 0 or below.
template <class T>
__device__ __forceinline__ void shape_scores(NarrowScores<T>& s, TokenFactors<T>& factors, const NarrowState<T>& state, const CudaTileArgs& p,
                                             const Task& task, int token, bool masked, int t) {
#pragma unroll
    for (int n = 0; n < T::CHUNK / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (T::PER_TOKEN) s[n][i] *= factors.of(n, i);
            if constexpr (T::Opt::SOFTCAP) s[n][i] = tanh_fast(s[n][i] * state.cap);
        }
        if constexpr (T::PER_TOKEN) factors.each[n] = {1.0f, 1.0f};
    }
    if (!masked) return;
#pragma unroll
    for (int n = 0; n < T::CHUNK / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = token + 8 * n + 2 * t + i % 2;
            if (!is_attended<T>(p, task, state.newest[i / 2], at)) s[n][i] = neg_inf();
        }
    }
}

// What turns score i of n-tile n into log2 units.
template <class T>
__device__ __forceinline__ float factor_of(const NarrowState<T>& state, const TokenFactors<T>& factors, int n, int i) {
    return T::PER_TOKEN && !T::Opt::SOFTCAP ? factors.of(n, i) : state.scale;
}

// The probabilities, and what they add to the sums. True where a row's base is too low for them. P V of the chunk before may be under way up to them.
template <class T>
__device__ __forceinline__ bool weigh(Probabilities<T>& pr, float (&sums)[2], const NarrowScores<T>& s, const TokenFactors<T>& factors,
                                      NarrowState<T>& state) {
    float y[T::CHUNK / 8][4], adds[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
    for (int n = 0; n < T::CHUNK / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            y[n][i] = exp2_fast(__fmaf_rn(s[n][i], factor_of<T>(state, factors, n, i), -state.base[i / 2]));
            adds[i / 2][i % 2] += y[n][i];
            asm volatile("" : "+f"(y[n][i]));
        }
    }
    warpgroup_wait(state.o);
#pragma unroll
    for (int n = 0; n < T::CHUNK / 8; n++) {
#pragma unroll
        for (int h = 0; h < 2; h++) pr[n / 2][2 * (n % 2) + h] = F16::pack(y[n][2 * h], y[n][2 * h + 1]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) sums[h] = adds[h][0] + adds[h][1];
    return sums[0] > LANE_MOST || sums[1] > LANE_MOST;
}

// Raises the bases by the chunk's scores. Says what the output and the sums are to be multiplied by.
template <class T>
__device__ __forceinline__ void raise_bases(NarrowState<T>& state, float (&keep)[2], const NarrowScores<T>& s, const TokenFactors<T>& factors) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = neg_inf();
#pragma unroll
        for (int n = 0; n < T::CHUNK / 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) most = fmaxf(most, s[n][2 * h + e] * factor_of<T>(state, factors, n, e));
        }
        most = row_max(most);
        const float base = fmaxf(state.base[h], most - AIM_LOG2);
        keep[h] = exp2_fast(state.base[h] - base), state.base[h] = base;
    }
}

// Raises the bases, and the output and the sums with them.
template <class T>
__device__ __forceinline__ void lift_bases(NarrowState<T>& state, const NarrowScores<T>& s, const TokenFactors<T>& factors) {
    float keep[2];
    raise_bases<T>(state, keep, s, factors);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        state.sum[h] *= keep[h];
#pragma unroll
        for (int n = 0; n < T::OUT_TILES; n++) state.o[n][2 * h] *= keep[h], state.o[n][2 * h + 1] *= keep[h];
    }
}

template <class T>
__device__ __forceinline__ bool are_large(const NarrowState<T>& state) {
    bool large = false;
#pragma unroll
    for (int h = 0; h < 2; h++) large = large || (state.base[h] != NO_BASE && fabsf(state.base[h] + AIM_LOG2) > LARGE<T>);
    return __any_sync(FULL_WARP, large);
}

// From the scores of the chunk at `token` to its probabilities; `first`, of the walk's first chunk, which sets the bases ahead of them.
template <class T>
__device__ __forceinline__ void update(NarrowState<T>& state, Probabilities<T>& pr, NarrowScores<T>& s, TokenFactors<T>& factors, const CudaTileArgs& p,
                                       const Task& task, int token, bool first, u32 query, u32 k, int row, int lane) {
    const bool masked = needs_mask<T>(p, task, token);
    auto shape = [&](bool exact) {
        if (exact) exact_scores<T>(s, query, k, row, lane), factors.fetch(state, k, lane % 4);
        if (T::Opt::SOFTCAP || masked) shape_scores<T>(s, factors, state, p, task, token, masked, lane % 4);
    };
    // After the bases have moved: true where the scores turn out to be large, and have been computed again.
    auto turned_large = [&] {
        const bool was = state.large;
        state.large = are_large<T>(state);
        if (was || !state.large) return false;
        shape(true);
        return true;
    };
    if (state.large || T::Opt::SOFTCAP || masked) shape(state.large);
    if (first) {
        float keep[2];
        raise_bases<T>(state, keep, s, factors);
        if (turned_large()) raise_bases<T>(state, keep, s, factors);
    }
    float sums[2];
    if (__any_sync(FULL_WARP, weigh<T>(pr, sums, s, factors, state))) {
        lift_bases<T>(state, s, factors);
        if (turned_large()) lift_bases<T>(state, s, factors);
        weigh<T>(pr, sums, s, factors, state);
    }
    state.sum[0] += sums[0], state.sum[1] += sums[1];
}

// With token scales: the output follows the unit of the chunk's V.
template <class T>
__device__ __forceinline__ void follow_unit(NarrowState<T>& state, u32 stage) {
    if constexpr (T::PER_TOKEN) {
        const int unit = load_shared4(unit_of<T>(stage));
        if (unit == state.unit) return;
        const float keep = exp2_fast(float(state.unit - unit));
        state.unit = unit;
#pragma unroll
        for (int n = 0; n < T::OUT_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) state.o[n][i] *= keep;
        }
    }
}

// Walks the chunks of a group. `own` is the group's shared memory: two slots of widened V, the ring.
template <class T>
__device__ __forceinline__ void walk_narrow(NarrowState<T>& state, const CudaTileArgs& p, const Task& task, u32 own, u32 query, float k_scale,
                                            int group, int row, int lane) {
    const int chunks = chunks_of<T>(task, group);
    const u32 ring = own + 2 * T::WIDE_BYTES;
    {
        QueryQuarters<T> quarters;
        quarters.fetch(p, task, threadIdx.x);
        // Where each group has its second slot: its helpers do not write there before its first chunk is over.
        split_query<T>(quarters, p, query, k_scale, threadIdx.x, [&](int other) { return slot_of<T>(own + (other - group) * T::GROUP_BYTES, 1); });
    }
    fence_async_proxy();
    sync_block<T>();
    start<T>(state, p, task, slot_of<T>(own, 1), row, lane);
    if (chunks <= 0) return;
    QueryParts<T> q;
    q.fetch(query, row, lane);
    NarrowScores<T> s[T::SUMS];
    Probabilities<T> pr;
    TokenFactors<T> factors;
    u32 k = ring;
    wait_for_chunk<T>(group, 0);
    start_narrow_scores<T>(s, q, k);
    finish_narrow_scores<T, 0>(s);
    factors.fetch(state, k, lane % 4);
    for (int chunk = 0;; chunk++) {
        update<T>(state, pr, s[0], factors, p, task, token_of<T>(task, group, chunk), chunk == 0, query, k, row, lane);
        if (chunk + 1 == chunks) break;
        release_chunk<T>(group, chunk);
        wait_for_chunk<T>(group, chunk + 1);
        const u32 before = k;
        k = next_stage<T>(k, ring);
        start_narrow_scores<T>(s, q, k);
        follow_unit<T>(state, before);
        start_values<T>(state, pr, slot_of<T>(own, chunk));
        finish_narrow_scores<T, 1>(s);
        factors.fetch(state, k, lane % 4);
    }
    wait_for_chunk<T>(group, chunks);
    follow_unit<T>(state, k);
    start_values<T>(state, pr, slot_of<T>(own, chunks - 1));
    warpgroup_wait(state.o);
}

// What the merge takes, the output in V's own unit.
template <class T>
__device__ __forceinline__ End<T> narrow_end(NarrowState<T>& state, float v_scale) {
    const float factor = T::PER_TOKEN ? out_of_unit(state.unit) : v_scale;
#pragma unroll
    for (int n = 0; n < T::OUT_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) state.o[n][i] *= factor;
    }
    auto max = [&](int h) { return state.base[h] == NO_BASE ? neg_inf() : state.base[h]; };
    return {state.o, {max(0), max(1)}, {state.sum[0], state.sum[1]}};
}

}  // namespace pa
