// Online softmax over the chunks of a group, in log2 units.
#pragma once

#include "gemm.cuh"

namespace pa {

// The last token that a query row attends.
template <class T>
__device__ __forceinline__ int newest_of(const Task& task, int row) {
    return task.context - task.query_len + min(row, task.rows - 1) / T::GROUP;
}

// Whether a row whose last token is `newest` attends the token `at`.
template <class T>
__device__ __forceinline__ bool is_attended(const CudaTileArgs& p, const Task& task, int newest, int at) {
    bool attended = at <= min(newest, task.end - 1);
    if constexpr (T::Opt::WINDOW) attended = attended && at > newest - p.window;
    return attended;
}

// Only chunks near the newest token or the window's edge hold tokens that some row does not attend.
template <class T>
__device__ __forceinline__ bool needs_mask(const CudaTileArgs& p, const Task& task, int token) {
    bool masked = token + T::CHUNK - 1 > min(task.context - task.query_len, task.end - 1);
    if constexpr (T::Opt::WINDOW) masked = masked || token <= task.context - 1 - p.window;
    return masked;
}

template <class T>
struct Softmax {
    float max[T::M_TILES][2];    // of rows g and g + 8 in the scores' units, at most 2^8 too low; the same in the four lanes of a row
    float sum[T::M_TILES][2];    // this lane's columns only
    int newest[T::M_TILES][2];   // last token that the row attends
    float v_most;                // per-token scales: the largest |v_scale| so far, the unit of the output
};

template <class T>
__device__ __forceinline__ void start(Softmax<T>& x, const Task& task, int first_row, int lane) {
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first_row + 16 * m + 8 * h + lane / 4;
            x.max[m][h] = neg_inf();
            x.sum[m][h] = 0.0f;
            x.newest[m][h] = newest_of<T>(task, row);
        }
    }
    x.v_most = 1e-30f;
}

template <class T>
using Scores = float[T::M_TILES][T::N_TILES][4];

// Calls f(score, m, h, n, e) for each of a lane's scores.
template <class T, class F>
__device__ __forceinline__ void each(Scores<T>& s, F f) {
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
#pragma unroll
        for (int n = 0; n < T::N_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) f(s[m][n][i], m, i / 2, n, i % 2);
        }
    }
}

// -inf for tokens that a row does not attend.
template <class T>
__device__ __forceinline__ void mask(Scores<T>& s, const Softmax<T>& x, const CudaTileArgs& p, const Task& task, int token, int t) {
    each<T>(s, [&](float& y, int m, int h, int n, int e) {
        const int at = token + 16 * (n / 2) + score_token<T>(n % 2, t, e), newest = x.newest[m][h];
        if (!is_attended<T>(p, task, newest, at)) y = neg_inf();
    });
}

// The largest |v_scale| of the chunk becomes the output's unit, and the K scales join the scores. Returns the old unit over the new one.
template <class T>
__device__ __forceinline__ float apply_token_scales(Scores<T>& s, Softmax<T>& x, u32 scales, int t) {
    float most = x.v_most;
#pragma unroll
    for (int n = 0; n < T::N_TILES; n++) {
        const float2 v = token_scale<T>(scales + T::SCALE_BYTES, n, t), k = token_scale<T>(scales, n, t);
        most = fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y)));
#pragma unroll
        for (int m = 0; m < T::M_TILES; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] *= i % 2 ? k.y : k.x;
        }
    }
    most = row_max(most);
    const float ratio = x.v_most / most;
    x.v_most = most;
    return ratio;
}

// Turns the scores of the chunk at `token` into probabilities for PV, and rescales the output where a maximum moved.
template <class T>
__device__ __forceinline__ void update(Softmax<T>& x, float (&o)[T::M_TILES][T::OUT_TILES][4], u32 (&pr)[T::M_TILES][T::N_TILES / 2][4],
                                       Scores<T>& s, const Query<T>& q, const CudaTileArgs& p, const Task& task, int token, u32 scales, int lane) {
    const int t = lane % 4;
    float v_ratio = 1.0f;
    if constexpr (T::PER_TOKEN) v_ratio = apply_token_scales<T>(s, x, scales, t);
    if constexpr (T::Opt::SOFTCAP) {
        each<T>(s, [&](float& y, int m, int h, int, int) { y = tanh_fast(y * q.cap[m][h]); });
    }
    if (needs_mask<T>(p, task, token)) mask<T>(s, x, p, task, token, t);
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
        float alpha[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = x.max[m][h];
#pragma unroll
            for (int n = 0; n < T::N_TILES; n++) most = fmaxf(most, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            most = row_max(most);
            // A maximum that grew by less than 2^8 is left as it is: nothing overflows, and the output is rarely rescaled.
            const float scale = q.scale[m][h];
            if ((most - x.max[m][h]) * scale <= 8.0f) most = x.max[m][h];
            const float base = most == neg_inf() ? 0.0f : most * scale;
            alpha[h] = most == x.max[m][h] ? 1.0f : exp2_fast(x.max[m][h] * scale - base);
            x.max[m][h] = most;
            float sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int n = 0; n < T::N_TILES; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& y = s[m][n][2 * h + e];
                    y = exp2_fast(y * scale - base);
                    sum[e] += y;
                }
            }
            x.sum[m][h] = x.sum[m][h] * alpha[h] + (sum[0] + sum[1]);
            alpha[h] *= v_ratio;
        }
        if (__any_sync(FULL_WARP, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < T::OUT_TILES; n++) {
                o[m][n][0] *= alpha[0], o[m][n][1] *= alpha[0];
                o[m][n][2] *= alpha[1], o[m][n][3] *= alpha[1];
            }
        }
    }
    const float v_unit = T::PER_TOKEN ? 1.0f / x.v_most : 1.0f;
#pragma unroll
    for (int n = 0; n < T::N_TILES; n++) {
        float2 unit = {1.0f, 1.0f};
        if constexpr (T::PER_TOKEN) {
            unit = token_scale<T>(scales + T::SCALE_BYTES, n, t);
            unit.x *= v_unit, unit.y *= v_unit;
        }
#pragma unroll
        for (int m = 0; m < T::M_TILES; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) pr[m][n / 2][2 * (n % 2) + h] = T::Compute::pack(s[m][n][2 * h] * unit.x, s[m][n][2 * h + 1] * unit.y);
        }
    }
}

}  // namespace pa
