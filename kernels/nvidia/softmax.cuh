// Online softmax over the chunks of a group, in log2 units.
#pragma once

#include "gemm.cuh"

namespace pa {

template <class T>
struct Softmax {
    float max[T::M_TILES][2];    // of rows g and g + 8, the same in the four lanes of a row
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
            x.newest[m][h] = task.context - task.query_len + min(row, task.rows - 1) / T::GROUP;
        }
    }
    x.v_most = 1e-30f;
}

template <class T>
__device__ __forceinline__ float scaled(float s, float scale, const CudaTileArgs& p) {
    if constexpr (T::Opt::SOFTCAP) return p.softcap * LOG2E * tanh_fast(s * scale * (LN2 / p.softcap));
    return s * scale;
}

// Turns the scores of the chunk at `token` into probabilities for PV, and rescales the output where a maximum moved.
template <class T>
__device__ __forceinline__ void update(Softmax<T>& x, float (&o)[T::M_TILES][T::OUT_TILES][4], u32 (&pr)[T::M_TILES][T::N_TILES / 2][4],
                                       float (&s)[T::M_TILES][T::N_TILES][4], const Query<T>& q, const CudaTileArgs& p, const Task& task,
                                       int token, u32 scales, int lane) {
    const int t = lane % 4;
    // Only chunks near the newest token or the window's edge hold tokens that some row does not attend.
    const int oldest_newest = task.context - task.query_len;
    bool masked = token + T::CHUNK - 1 > min(oldest_newest, task.end - 1);
    if constexpr (T::Opt::WINDOW) masked = masked || token <= task.context - 1 - p.window;
    float v_ratio = 1.0f, v_unit = 1.0f;
    auto token_scale = [&](int n, u32 at) { return load_shared_float2(at + 4 * (16 * (n / 2) + score_token<T>(n % 2, t, 0))); };
    if constexpr (T::PER_TOKEN) {
        float most = x.v_most;
#pragma unroll
        for (int n = 0; n < T::N_TILES; n++) {
            const float2 v = token_scale(n, scales + T::SCALE_BYTES);
            most = fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y)));
        }
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
        v_ratio = x.v_most / most;
        x.v_most = most;
        v_unit = 1.0f / most;
#pragma unroll
        for (int n = 0; n < T::N_TILES; n++) {
            const float2 k = token_scale(n, scales);
#pragma unroll
            for (int m = 0; m < T::M_TILES; m++) {
                s[m][n][0] *= k.x, s[m][n][1] *= k.y, s[m][n][2] *= k.x, s[m][n][3] *= k.y;
            }
        }
    }
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
        float alpha[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = x.max[m][h];
#pragma unroll
            for (int n = 0; n < T::N_TILES; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& y = s[m][n][2 * h + e];
                    y = scaled<T>(y, q.scale[m][h], p);
                    if (masked) {
                        const int at = token + 16 * (n / 2) + score_token<T>(n % 2, t, e), newest = x.newest[m][h];
                        bool attended = at <= newest && at < task.end;
                        if constexpr (T::Opt::WINDOW) attended = attended && at > newest - p.window;
                        y = attended ? y : neg_inf();
                    }
                    most = fmaxf(most, y);
                }
            }
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
            const float base = most == neg_inf() ? 0.0f : most;
            alpha[h] = exp2_fast(x.max[m][h] - base);
            x.max[m][h] = most;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < T::N_TILES; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& y = s[m][n][2 * h + e];
                    y = exp2_fast(y - base);
                    sum += y;
                }
            }
            x.sum[m][h] = x.sum[m][h] * alpha[h] + sum;
            alpha[h] *= v_ratio;
        }
        if (__any_sync(FULL_WARP, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < T::OUT_TILES; n++) {
                o[m][n][0] *= alpha[0], o[m][n][1] *= alpha[0];
                o[m][n][2] *= alpha[1], o[m][n][3] *= alpha[1];
            }
        }
#pragma unroll
        for (int n = 0; n < T::N_TILES; n++) {
            float2 unit = {1.0f, 1.0f};
            if constexpr (T::PER_TOKEN) {
                unit = token_scale(n, scales + T::SCALE_BYTES);
                unit.x *= v_unit, unit.y *= v_unit;
            }
#pragma unroll
            for (int h = 0; h < 2; h++) pr[m][n / 2][2 * (n % 2) + h] = T::Compute::pack(s[m][n][2 * h] * unit.x, s[m][n][2 * h + 1] * unit.y);
        }
    }
}

}  // namespace pa
