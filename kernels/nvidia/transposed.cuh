// The walk of a warpgroup over an FP8 cache with token scales: tokens are the rows of the products, S^T = K Q^T and O^T += V^T P^T.
//
// K and V are then operand A, which comes from registers: each warp widens its own 16 tokens of K and its own 32 channels of V, and nothing
// widened goes back to shared memory. There are the query (as gemm.cuh's packed order has it) and the chunk's P^T, a row of 64 query rows a token.
//   S^T: a lane of warp w has tokens 16w + g and 16w + g + 8, query rows 8n + 2t + e.
//   O^T: channels 32w + 4g + 2 tile + 0, 1 in rows g and g + 8 of a tile of 64; query rows 8n + 2t + e.
#pragma once

#include "pipeline.cuh"

namespace pa {

template <class T>
struct TransposedState {
    static constexpr int N = T::ROWS / 8;
    float o[2][N][4];
    float base[N][2];  // of the lane's query rows: a maximum of their scores in log2 units, at most 8 too low; the same in all of the group
    float sum[N][2];   // of the lane's tokens only
    float scale;       // positive factor that turns scores into log2 units
    float cap;         // with a softcap: what a score is multiplied by before its tanh
    float v_most;      // the largest |v_scale| so far, the unit of the output
    float v_unit;      // 1 / v_most
};

// Where no token has been attended yet.
constexpr float UNSET = -1e30f;

// Scales the query by one power of two for all rows, so that F16 holds it, and stores it. Returns the power that was taken out.
template <class T>
__device__ __forceinline__ float share_query(Query<T>& q, u32 query, u32 sign, int group, int row, int lane) {
    using Element = typename T::Query;
    float factor = 1.0f, inverse = 1.0f;
    if constexpr (T::SCALED_QUERY) {
        float most = 0.0f;
#pragma unroll
        for (int s = 0; s < T::K_STEPS; s++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 x = Element::unpack(q.a[0][s][i]);
                most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
            }
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, step));
        // Every group has the same rows: the first one's four warps tell each other.
        if (group == 0) store_shared4(query + row / 16 * 4, __float_as_uint(most));
        __syncthreads();
        u32 all[4];
        load_shared16(all, query);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) most = fmaxf(most, __uint_as_float(all[i]));
        const u32 exponent = min(max(__float_as_uint(most) >> 23, 27u), 227u);
        factor = __uint_as_float(exponent << 23), inverse = __uint_as_float((254 - exponent) << 23);
    }
#pragma unroll
    for (int s = 0; s < T::K_STEPS; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32& x = q.a[0][s][i];
            if constexpr (!Same<typename T::Compute, Element>::value) {
                const float2 f = Element::unpack(x);
                x = T::Compute::pack(f.x * inverse, f.y * inverse);
            }
            x ^= sign;
        }
    }
    if (group == 0) store_query<T>(q, query, row, lane);
    return factor;
}

// A warp's 16 tokens of K, widened.
template <class T>
__device__ __forceinline__ void widen_keys(u32 (&a)[T::K_STEPS][4], u32 k, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int j = 0; j < T::K_STEPS / 4; j++) {
            u32 words[4];
            load_shared16(words, k + swizzled<T, false>(16 * warp + g + 8 * h, t + 4 * j));
#pragma unroll
            for (int w = 0; w < 4; w++) a[4 * j + w][h] = E4m3::widen<0>(words[w]), a[4 * j + w][2 + h] = E4m3::widen<1>(words[w]);
        }
    }
}

// A warp's 32 channels of V in steps of 16 tokens, widened.
template <class T>
__device__ __forceinline__ void widen_values(u32 (&a)[T::CHUNK / 16][2][4], u32 v, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    const u32 from = v + swizzled<T, true>(2 * t, 2 * warp + g / 4) + g % 4 * 4;
#pragma unroll
    for (int step = 0; step < T::CHUNK / 16; step++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 at = from + (16 * step + 8 * half) * T::ROW_BYTES, first = load_shared4(at), second = load_shared4(at + T::ROW_BYTES);
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                // Bytes of two tokens side by side: channels 0, 1 or 2, 3 of the word.
                const u32 pairs = __byte_perm(first, second, tile ? 0x7362 : 0x5140);
                a[step][tile][2 * half] = E4m3::widen<0>(pairs), a[step][tile][2 * half + 1] = E4m3::widen<1>(pairs);
            }
        }
    }
}

// What the lane's two tokens multiply: their scores on the way to log2 units, and their probabilities.
struct TokenFactors {
    float2 score;
    u32 probability[2];  // in both halves
};

// Bases are lifted where the probabilities of a lane's two tokens add up to more than this: then none is more than 2^8, which F16 holds.
constexpr float MOST_PROBABILITY = 256.0f;

// Scores times their tokens' factors, -inf for tokens that a row does not attend, whatever the factor (a NaN is another row's).
template <class T>
__device__ __forceinline__ void mask_transposed(float (&s)[T::ROWS / 8][4], float2 factor, const CudaTileArgs& p, const Task& task,
                                                int token, int t) {
    // Kept from being computed ahead for every row: few chunks come here.
    int first = task.first_row + 2 * t;
    asm volatile("" : "+r"(first));
#pragma unroll
    for (int n = 0; n < T::ROWS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = first + 8 * n + i % 2, at = token + i / 2 * 8;
            s[n][i] = is_attended<T>(p, task, newest_of<T>(task, row), at) ? s[n][i] * (i < 2 ? factor.x : factor.y) : neg_inf();
        }
    }
}

// P^T of the lane's tokens into shared memory, with what it adds to the sums. True where a base is too low for it.
template <class T>
__device__ __forceinline__ bool store_probabilities(const TransposedState<T>& state, float (&add)[T::ROWS / 8][2], const float (&s)[T::ROWS / 8][4],
                                                    const TokenFactors& factors, u32 probabilities, int warp, int lane) {
    const int row = 16 * warp + (lane & 15);
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < T::ROWS / 8; n += 2) {
        u32 words[4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float y[4];
#pragma unroll
            for (int i = 0; i < 4; i++) y[i] = exp2_fast(__fmaf_rn(s[n + j][i], i < 2 ? factors.score.x : factors.score.y, -state.base[n + j][i % 2]));
#pragma unroll
            for (int e = 0; e < 2; e++) {
                add[n + j][e] = y[e] + y[2 + e];
                most = fmaxf(most, add[n + j][e]);
            }
            words[2 * j] = F16::pack(y[0], y[1]), words[2 * j + 1] = F16::pack(y[2], y[3]);
            words[2 * j] = F16::multiply(words[2 * j], factors.probability[0]);
            words[2 * j + 1] = F16::multiply(words[2 * j + 1], factors.probability[1]);
        }
        store_matrices(probabilities + row * 128 + (((n + (lane >> 4)) ^ (row & 7)) << 4), words);
    }
    return most > MOST_PROBABILITY;
}

// Lifts the bases to the maximum of the group's chunk, and the output and the sums with them.
template <class T>
__device__ __forceinline__ void lift_bases(TransposedState<T>& state, const float (&s)[T::ROWS / 8][4], float2 factor, u32 scratch, int group,
                                           int warp, int lane) {
    const int t = lane % 4;
#pragma unroll
    for (int n = 0; n < T::ROWS / 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float most = fmaxf(s[n][e] * factor.x, s[n][2 + e] * factor.y);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, step));
            if (lane < 4) store_shared4(scratch + (warp * T::ROWS + 8 * n + 2 * t + e) * 4, __float_as_uint(most));
        }
    }
    sync_group<T>(group);
#pragma unroll
    for (int n = 0; n < T::ROWS / 8; n++) {
        float2 most = {state.base[n][0], state.base[n][1]};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 x = load_shared_float2(scratch + (i * T::ROWS + 8 * n + 2 * t) * 4);
            most.x = fmaxf(most.x, x.x), most.y = fmaxf(most.y, x.y);
        }
        const float2 keep = {exp2_fast(state.base[n][0] - most.x), exp2_fast(state.base[n][1] - most.y)};
        state.base[n][0] = most.x, state.base[n][1] = most.y;
        state.sum[n][0] *= keep.x, state.sum[n][1] *= keep.y;
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            float(&o)[4] = state.o[tile][n];
            o[0] *= keep.x, o[1] *= keep.y, o[2] *= keep.x, o[3] *= keep.y;
        }
    }
}

// The factors by the tokens' scales. The unit of the output follows the largest |v_scale|.
template <class T>
__device__ __forceinline__ TokenFactors token_factors(TransposedState<T>& state, u32 scales, int warp, int lane) {
    const int token = 16 * warp + lane / 4;
    const float2 k = {__uint_as_float(load_shared4(scales + token * 4)), __uint_as_float(load_shared4(scales + token * 4 + 32))};
    const u32 v_scales = scales + T::SCALE_BYTES;
    const float2 v = {__uint_as_float(load_shared4(v_scales + token * 4)), __uint_as_float(load_shared4(v_scales + token * 4 + 32))};
    const float2 all = load_shared_float2(v_scales + lane * 8);
    float most = fmaxf(fabsf(all.x), fabsf(all.y));
    if (__any_sync(FULL_WARP, most > state.v_most)) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, step));
        const float ratio = state.v_most / most;
#pragma unroll
        for (int n = 0; n < T::ROWS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) state.o[0][n][i] *= ratio, state.o[1][n][i] *= ratio;
        }
        state.v_most = most, state.v_unit = 1.0f / most;
    }
    const float x = v.x * state.v_unit, y = v.y * state.v_unit;
    return {k, {F16::pack(x, x), F16::pack(y, y)}};
}

// What lies between the scores and the softmax: scales, the cap, the mask.
template <class T>
__device__ __forceinline__ TokenFactors shape_scores(TransposedState<T>& state, float (&s)[T::ROWS / 8][4], const CudaTileArgs& p, const Task& task,
                                                     int token, u32 scales, int warp, int lane) {
    TokenFactors factors = token_factors<T>(state, scales, warp, lane);
    if constexpr (T::Opt::SOFTCAP) {
#pragma unroll
        for (int n = 0; n < T::ROWS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) s[n][i] = tanh_fast(s[n][i] * (i < 2 ? factors.score.x : factors.score.y) * state.cap);
        }
        factors.score = {1.0f, 1.0f};
    }
    factors.score = {factors.score.x * state.scale, factors.score.y * state.scale};
    if (needs_mask<T>(p, task, token)) {
        mask_transposed<T>(s, factors.score, p, task, token + 16 * warp + lane / 4, lane % 4);
        factors.score = {1.0f, 1.0f};
    }
    return factors;
}

// Walks the chunks of a group. `base` is the group's shared memory: P^T, the scratch of the bases, the ring.
template <class T>
__device__ __forceinline__ void walk_transposed(TransposedState<T>& state, const CudaTileArgs& p, const Task& task, u32 base, u32 query,
                                                int group, int row, int thread) {
    constexpr int AHEAD = T::STAGES - 1, N = T::ROWS / 8;
    const int lane = thread & 31, warp = row / 16;
    const u32 scratch = base + T::CHUNK * 128, ring = base + T::TRANSPOSED_BYTES;
    const int chunks = chunks_of<T>(task, group);
    PageIds<T> pages;
    pages.start(p, task, group, lane);
    {
        Query<T> q;
        fetch_query<T>(q, p, task, task.first_row + row, lane);
#pragma unroll
        for (int stage = 0; stage < AHEAD; stage++) {
            if (stage < chunks) load_chunk<T>(p, task, pages, group, stage, ring + stage * T::STAGE_BYTES, thread);
            copies_commit();
        }
        const float scale = fabsf(p.scale_log2) * share_query<T>(q, query, p.scale_log2 < 0.0f ? 0x80008000u : 0, group, row, lane);
        state.scale = T::Opt::SOFTCAP ? p.softcap * LOG2E : scale;
        state.cap = scale * (LN2 / p.softcap);
        fence_async_proxy();
        __syncthreads();
    }
    state.v_most = 1e-30f, state.v_unit = 1e30f;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) state.o[0][n][i] = state.o[1][n][i] = 0.0f;
        state.base[n][0] = state.base[n][1] = UNSET, state.sum[n][0] = state.sum[n][1] = 0.0f;
    }
    int stage = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {
        copies_wait<AHEAD - 1>();
        sync_group<T>(group);
        const u32 k = ring + stage * T::STAGE_BYTES, v = k + T::KV_BYTES;
        const int free_stage = stage == 0 ? T::STAGES - 1 : stage - 1;
        u32 keys[T::K_STEPS][4], values[T::CHUNK / 16][2][4];
        float s[N][4], add[N][2];
        widen_keys<T>(keys, k, warp, lane);
        const u64 queries = describe(query), probabilities = describe(base);
        warpgroup_begin();
#pragma unroll
        for (int step = 0; step < T::K_STEPS; step++) {
            warpgroup_mma<F16, 0>(s, keys[step], queries + (step / 4 * (T::ROWS * 128) + step % 4 * 32) / 16, step > 0);
        }
        warpgroup_commit();
        if (chunk + AHEAD < chunks) load_chunk<T>(p, task, pages, group, chunk + AHEAD, ring + free_stage * T::STAGE_BYTES, thread);
        copies_commit();
        widen_values<T>(values, v, warp, lane);
        warpgroup_wait(s);
        const int token = token_of<T>(task, group, chunk);
        const TokenFactors factors = shape_scores<T>(state, s, p, task, token, v + T::KV_BYTES, warp, lane);
        const bool low = store_probabilities<T>(state, add, s, factors, base, warp, lane);
        fence_async_proxy();
        if (any_of_group(1 + group, T::GROUP_THREADS, low)) {
            lift_bases<T>(state, s, factors.score, scratch, group, warp, lane);
            store_probabilities<T>(state, add, s, factors, base, warp, lane);
            fence_async_proxy();
            sync_group<T>(group);
        }
        warpgroup_begin();
#pragma unroll
        for (int step = 0; step < T::CHUNK / 16; step++) {
#pragma unroll
            for (int tile = 0; tile < 2; tile++) warpgroup_mma<F16, 1>(state.o[tile], values[step][tile], probabilities + step * (16 * 128 / 16), 1);
        }
        warpgroup_commit();
#pragma unroll
        for (int n = 0; n < N; n++) state.sum[n][0] += add[n][0], state.sum[n][1] += add[n][1];
        warpgroup_wait(state.o[0]);
        warpgroup_wait(state.o[1]);
        stage = stage + 1 == T::STAGES ? 0 : stage + 1;
    }
}

// Leaves a group's state in shared memory for the merge, in the unit of the values.
template <class T>
__device__ __forceinline__ void publish_transposed(TransposedState<T>& state, float* merge, int group, int row, int lane) {
    const int g = lane / 4, t = lane % 4, warp = row / 16;
    float* o = merge + group * T::ROWS * T::MERGE_ROW;
    float* sums = merge + T::MERGE_ENDS + T::GROUPS * T::ROWS * 2 + group * 4 * T::ROWS;
    const float unit = state.v_most;
#pragma unroll
    for (int n = 0; n < T::ROWS / 8; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int at = 8 * n + 2 * t + e;
            *reinterpret_cast<float4*>(o + at * T::MERGE_ROW + 32 * warp + 4 * g) = {
                state.o[0][n][e] * unit, state.o[0][n][2 + e] * unit, state.o[1][n][e] * unit, state.o[1][n][2 + e] * unit};
            float sum = state.sum[n][e];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
            if (g == 0) sums[warp * T::ROWS + at] = sum;
        }
    }
    sync_group<T>(group);
    if (warp == 0 && g == 0) {
        float2* ml = reinterpret_cast<float2*>(merge + T::MERGE_ENDS) + group * T::ROWS;
#pragma unroll
        for (int n = 0; n < T::ROWS / 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = 8 * n + 2 * t + e;
                const float base = state.base[n][e];
                ml[at] = {base == UNSET ? neg_inf() : base, sums[at] + sums[T::ROWS + at] + sums[2 * T::ROWS + at] + sums[3 * T::ROWS + at]};
            }
        }
    }
}

}  // namespace pa
