// The walk of a warpgroup over an FP8 cache without token scales: both products on E4M3 itself, S = Q K^T and O += P V of 64 query rows and 64 tokens.
//
// K is read where its copies put it. Helper warps copy, and turn V so that tokens lie along its rows; they keep ahead of the group that they serve. Q and P
// are sums of two E4M3 parts, the nearest value and what is left: as good as BF16. P goes from accumulators to operand A in registers.
//   S: a lane has rows g and g + 8 of its warp's 16, tokens 8n + 2t + e.
//   P V: k index 4t + 2h + e of 16 is token 8h + 2t + e. Column 8c + g of 16 of the output is channel 2g + c.
// E4M3 reaches from 2^-9 to 448, and its products are added in about 14 bits. So P stands against a base that leaves the sum of a chunk's probabilities
// within bounds, whatever other chunks hold: a long tail behind a peak is not lost. The tensor cores add up no more than SPAN chunks, which F32 takes over.
#pragma once

#include "helpers.cuh"

namespace pa {

// Bounds of the sum of a chunk's probabilities: of a lane's of a row, of a row's; and what a row's is set to.
constexpr float LANE_MOST = 448.0f, ROW_LEAST = 32.0f, AIM_LOG2 = 8.0f;
constexpr int SPAN = 8;
// Where the scores that count are beyond this, in log2 units, 14 bits leave too few behind the point: they are computed in F32.
constexpr float LARGE = 12.0f;
// Where no token has been attended yet.
constexpr float NO_BASE = -1e30f;

template <class T>
struct NarrowState {
    static constexpr int N = T::HEAD_DIM / 8;
    float o[N][4];               // times 2^unit
    float fresh[N][4];           // times 2^base: what the tensor cores have added up, not yet in `o`
    float base[2], unit[2];      // of rows g and g + 8; the same in the four lanes of a row
    float fresh_sum[2], sum[2];  // of the lane's tokens only
    float scale;                 // positive factor that turns scores into log2 units
    float cap;                   // with a softcap: what a score is multiplied by before its tanh
    int newest[2];               // last token that the row attends
};

template <class T>
using NarrowScores = float[T::CHUNK / 8][4];

// P's two parts as operand A, in steps of 32 tokens.
template <class T>
using Parts = u32[2][T::CHUNK / 32][4];

struct Split {
    u32 high, low;
};

// Four values in two parts.
__device__ __forceinline__ Split split(const float (&x)[4]) {
    const u32 high = E4m3::narrow(x);
    const u32 first = F16::subtract(F16::pack(x[0], x[1]), E4m3::widen<0>(high)), second = F16::subtract(F16::pack(x[2], x[3]), E4m3::widen<1>(high));
    return {high, E4m3::narrow(first, second)};
}

// Stores the query's two parts, rows g and g + 8 scaled by a power of two that puts their largest value in 128..256, and what turns scores into log2
// units.
template <class T>
__device__ __forceinline__ void split_query(NarrowState<T>& state, const Query<T>& q, const CudaTileArgs& p, u32 query, float k_scale, bool stores,
                                            int row, int lane) {
    const float factor = p.scale_log2 * k_scale;
    const int g = lane / 4, t = lane % 4;
    float most = 0.0f;
#pragma unroll
    for (int s = 0; s < T::K_STEPS; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 x = T::Query::unpack(q.a[0][s][i]);
            most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
        }
    }
    most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
    most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
    const u32 exponent = min(max(__float_as_uint(most) >> 23, 27u), 227u);
    const float up = copysignf(__uint_as_float((261 - exponent) << 23), factor), down = __uint_as_float((exponent - 7) << 23);
#pragma unroll
    for (int s = 0; s < T::K_STEPS; s++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 low = T::Query::unpack(q.a[0][s][h]), high = T::Query::unpack(q.a[0][s][2 + h]);
            float x[4] = {low.x * up, low.y * up, high.x * up, high.y * up};
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] += x[i] - x[i];  // E4M3 has no infinity: NaN
            const Split parts = split(x);
            const u32 at = query + (row + 8 * h + g) * 128 + (((t + s / 4 * 4) ^ g) << 4) + s % 4 * 4;
            if (stores) store_shared4(at, parts.high), store_shared4(at + T::ROWS * 128, parts.low);
        }
    }
    const float scale = not_zero(fabsf(factor) * down);
    state.scale = T::Opt::SOFTCAP ? p.softcap * LOG2E : scale;
    state.cap = scale * (LN2 / p.softcap);
}

template <class T>
__device__ __forceinline__ void start(NarrowState<T>& state, const Task& task, int first_row, int lane) {
#pragma unroll
    for (int n = 0; n < state.N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) state.o[n][i] = state.fresh[n][i] = 0.0f;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        state.base[h] = state.unit[h] = NO_BASE, state.fresh_sum[h] = state.sum[h] = 0.0f;
        state.newest[h] = newest_of<T>(task, first_row + 8 * h + lane / 4);
    }
}

template <class T>
__device__ __forceinline__ void start_narrow_scores(NarrowScores<T>& s, u32 query, u32 k) {
    const u64 a = describe(query), b = describe(k);
    warpgroup_begin();
#pragma unroll
    for (int part = 1; part >= 0; part--) {
#pragma unroll
        for (int step = 0; step < T::HEAD_DIM / 32; step++) {
            warpgroup_narrow_scores(s, a + (part * T::ROWS * 128 + step * 32) / 16, b + step * 32 / 16, step > 0 || part == 0);
        }
    }
    warpgroup_commit();
}

template <class T>
__device__ __forceinline__ void start_narrow_values(NarrowState<T>& state, const Parts<T>& parts, u32 turned, int add) {
    const u64 b = describe_half_rows(turned);
    warpgroup_begin();
#pragma unroll
    for (int step = 0; step < T::CHUNK / 32; step++) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
            warpgroup_narrow_values(state.fresh, parts[part][step], b + step * 32 / 16, step + part > 0 ? 1 : add);
        }
    }
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

// What lies between the scores of the chunk at `token` and the softmax: the cap; -inf for tokens that a row does not attend.
template <class T>
__device__ __forceinline__ void shape_scores(NarrowScores<T>& s, const NarrowState<T>& state, const CudaTileArgs& p, const Task& task, int token,
                                             bool masked, int t) {
#pragma unroll
    for (int n = 0; n < T::CHUNK / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (T::Opt::SOFTCAP) s[n][i] = tanh_fast(s[n][i] * state.cap);
        }
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

// The probabilities in two parts, and what they add to the sums. True where a row's base is too low or too high for them. P V of the chunk before may be
// under way up to the first part. `zero` is 0, which the compiler does not know: it keeps it from doing all exponentials first and all conversions after.
template <class T>
__device__ __forceinline__ bool weigh(Parts<T>& parts, float (&sums)[2], const NarrowScores<T>& s, NarrowState<T>& state, u32 zero) {
    constexpr int STEPS = T::CHUNK / 16;
    float adds[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}}, y[STEPS][2][4];
#pragma unroll
    for (int step = 0; step <= STEPS; step++) {
#pragma unroll
        for (int h = 0; h < 2 && step < STEPS; h++) {
            float base = state.base[h];
            if (step >= 2) base = __uint_as_float(__float_as_uint(base) ^ (parts[1][(step - 2) / 2][(step - 2) % 2 * 2 + h] & zero));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                y[step][h][i] = exp2_fast(__fmaf_rn(s[2 * step + i / 2][2 * h + i % 2], state.scale, -base));
                adds[h][i % 2] += y[step][h][i];
            }
        }
        if (step == 0) continue;
        if (step == 1) {
            warpgroup_wait(state.fresh);
#pragma unroll
            for (int i = 0; i < 8; i++) asm volatile("" : "+f"(y[0][i / 4][i % 4]));
        }
        const int done = step - 1;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Split both = split(y[done][h]);
            parts[0][done / 2][done % 2 * 2 + h] = both.high, parts[1][done / 2][done % 2 * 2 + h] = both.low;
        }
    }
    bool outside = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = sums[h] = adds[h][0] + adds[h][1];
        outside = outside || sum > LANE_MOST;
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        outside = outside || sum < ROW_LEAST;
    }
    return outside;
}

// Takes over what is fresh.
template <class T>
__device__ __forceinline__ void fold(NarrowState<T>& state) {
    // The unit follows where F32 could not hold the sums against it.
    const bool far[2] = {state.base[0] - state.unit[0] > 60.0f, state.base[1] - state.unit[1] > 60.0f};
    if (__any_sync(FULL_WARP, far[0] || far[1])) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float unit = far[h] ? state.base[h] : state.unit[h], keep = exp2_fast(state.unit[h] - unit);
            state.unit[h] = unit, state.sum[h] *= keep;
#pragma unroll
            for (int n = 0; n < state.N; n++) state.o[n][2 * h] *= keep, state.o[n][2 * h + 1] *= keep;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float weight = exp2_fast(state.base[h] - state.unit[h]);
        state.sum[h] += state.fresh_sum[h] * weight, state.fresh_sum[h] = 0.0f;
#pragma unroll
        for (int n = 0; n < state.N; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) state.o[n][2 * h + e] += state.fresh[n][2 * h + e] * weight;
        }
    }
}

// Sets the bases by the chunk's scores.
template <class T>
__device__ __forceinline__ void rebase(NarrowState<T>& state, const NarrowScores<T>& s) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = neg_inf(), sum = 0.0f;
#pragma unroll
        for (int n = 0; n < T::CHUNK / 8; n++) most = fmaxf(most, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2)) * state.scale;
        if (most == neg_inf()) most = NO_BASE;
#pragma unroll
        for (int n = 0; n < T::CHUNK / 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) sum += exp2_fast(__fmaf_rn(s[n][2 * h + e], state.scale, -most));
        }
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        // A row that attends nothing of the chunk keeps its own.
        if (most != NO_BASE) state.base[h] = most + log2_fast(sum) - AIM_LOG2;
    }
}

template <class T>
__device__ __forceinline__ bool are_large(const NarrowState<T>& state) {
    bool large = false;
    // They are 2 above the base where all are equal, 8 where one is above all others.
#pragma unroll
    for (int h = 0; h < 2; h++) large = large || (state.base[h] != NO_BASE && fabsf(state.base[h] + 5.0f) > LARGE);
    return __any_sync(FULL_WARP, large);
}

// Walks the chunks of a group. `own` is the group's shared memory: three chunks of turned V, the ring.
template <class T>
__device__ __forceinline__ void walk_narrow(NarrowState<T>& state, const CudaTileArgs& p, const Task& task, u32 own, u32 query, float k_scale,
                                            int group, int row, int lane) {
    const int t = lane % 4, chunks = chunks_of<T>(task, group);
    const u32 ring = own + T::TURNED_BYTES;
    {
        Query<T> q;
        fetch_query<T>(q, p, task, task.first_row + row, lane);
        split_query<T>(state, q, p, query, k_scale, group == 0, row, lane);
    }
    start<T>(state, task, task.first_row + row, lane);
    fence_async_proxy();
    sync_block<T>();
    NarrowScores<T> s;
    Parts<T> parts = {};
    u32 k = ring, turned = own;
    int slot = 0;
    bool add = false;
    for (int chunk = 0; chunk < chunks; chunk++) {
        wait_for_chunk<T>(group, slot);
        start_narrow_scores<T>(s, query, k);
        // Of the chunk before; ahead of the first one, of zeros.
        start_narrow_values<T>(state, parts, turned, add);
        warpgroup_wait<T::CHUNK / 8, 1>(s);
        const int token = token_of<T>(task, group, chunk);
        const bool large = are_large<T>(state), masked = needs_mask<T>(p, task, token);
        if (T::Opt::SOFTCAP || large || masked) {
            if (large) exact_scores<T>(s, query, k, row, lane);
            shape_scores<T>(s, state, p, task, token, masked, t);
        }
        float sums[2];
        const bool due = chunk % SPAN == 0;
        const bool outside = __any_sync(FULL_WARP, weigh<T>(parts, sums, s, state, u32(p.kv_heads) >> 31));
        if (due || outside) fold<T>(state);
        if (outside) {
            rebase<T>(state, s);
            if (!large && are_large<T>(state)) {
                exact_scores<T>(s, query, k, row, lane);
                shape_scores<T>(s, state, p, task, token, masked, t);
                rebase<T>(state, s);
            }
            weigh<T>(parts, sums, s, state, 0);
            if (!due) {
#pragma unroll
                for (int n = 0; n < state.N; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) state.fresh[n][i] = 0.0f;
                }
            }
        }
        state.fresh_sum[0] += sums[0], state.fresh_sum[1] += sums[1];
        if (chunk + 2 < chunks) release_chunk<T>(group, slot);
        add = !due, turned = own + slot * T::KV_BYTES;
        slot = next_slot(slot), k = next_stage<T>(k, ring);
    }
    if (chunks > 0) {
        start_narrow_values<T>(state, parts, turned, add);
        warpgroup_wait(state.fresh);
        fold<T>(state);
    }
}

// Leaves a group's state in shared memory for the merge, the V scale applied.
template <class T>
__device__ __forceinline__ void publish_narrow(const NarrowState<T>& state, float* merge, float v_scale, int group, int first_row, int lane) {
    const int g = lane / 4, t = lane % 4;
    float2* ml = reinterpret_cast<float2*>(merge + T::MERGE_ENDS) + group * T::ROWS;
    float* o = merge + group * T::ROWS * T::MERGE_ROW;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = first_row + 8 * h + g;
        float sum = state.sum[h];
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if (t == 0) ml[row] = {state.unit[h] == NO_BASE ? neg_inf() : state.unit[h], sum};
#pragma unroll
        for (int n = 0; n < state.N; n += 2) {
            *reinterpret_cast<float4*>(o + row * T::MERGE_ROW + 8 * n + 4 * t) = {state.o[n][2 * h] * v_scale, state.o[n + 1][2 * h] * v_scale,
                                                                                 state.o[n][2 * h + 1] * v_scale, state.o[n + 1][2 * h + 1] * v_scale};
        }
    }
}

}  // namespace pa
