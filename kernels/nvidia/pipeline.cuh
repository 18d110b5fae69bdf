// A group's walk over its chunks: a ring of stages filled by asynchronous copies.
#pragma once

#include "softmax.cuh"

namespace pa {

template <class T>
__device__ __forceinline__ void sync_group(int group) {
    if constexpr (T::ROW_WARPS == 1) {
        __syncwarp();
    } else {
        barrier_named(1 + group, T::GROUP_THREADS);
    }
}

// The threads that walk and merge.
template <class T>
__device__ __forceinline__ void sync_block() {
    if constexpr (T::HELPERS == 0) {
        __syncthreads();
    } else {
        barrier_named(0, T::THREADS);
    }
}

template <class T>
struct State {
    Softmax<T> softmax;
    float o[T::M_TILES][T::OUT_TILES][4];
};

template <class T>
__device__ __forceinline__ void start(State<T>& state, const Task& task, int first_row, int lane) {
    start<T>(state.softmax, task, first_row, lane);
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
#pragma unroll
        for (int n = 0; n < T::OUT_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) state.o[m][n][i] = 0.0f;
        }
    }
}

// Walks the chunks of a group. `ring` is the group's stages, `query` that of the query rows for a warpgroup.
template <class T>
__device__ __forceinline__ void walk(State<T>& state, Query<T>& q, const CudaTileArgs& p, const Task& task, PageIds<T>& pages, u32 ring, u32 query,
                                     float k_scale, int group, int row, int thread) {
    constexpr int AHEAD = T::STAGES - 1;
    const int lane = thread & 31;
    const int first = task.rank * T::GROUPS, walker = first + group, chunks = chunks_of<T>(task, walker);
    if constexpr (T::COPIED_QUERY) {
        copy_query<T>(p, task, query, group * T::GROUP_THREADS + thread);
        copies_commit();
    } else {
        fetch_query<T>(q, p, task, task.first_row + row, lane);
    }
#pragma unroll
    for (int stage = 0; stage < AHEAD; stage++) {
        if (stage < chunks) load_chunk<T>(p, task, pages, bases_of<T>(p, task, thread), walker, stage, ring + stage * T::STAGE_BYTES, thread, [] {});
        copies_commit();
    }
    prepare_query<T>(q, p, k_scale);
    if constexpr (T::WARPGROUP) {
        if constexpr (T::COPIED_QUERY) {
            copies_wait<AHEAD>();
            if (p.scale_log2 < 0.0f) negate_query<T>(query, group * T::GROUP_THREADS + thread);
        } else {
            if (group == 0) store_query<T>(q, query, row, lane);
        }
        fence_async_proxy();
        __syncthreads();
    }
    start<T>(state, task, task.first_row + row, lane);
    int stage = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {
        copies_wait<AHEAD - 1>();
        if constexpr (T::WARPGROUP) fence_async_proxy();
        sync_group<T>(group);
        const u32 k = ring + stage * T::STAGE_BYTES, v = k + T::KV_BYTES;
        const int free_stage = stage == 0 ? T::STAGES - 1 : stage - 1;
        auto load_ahead = [&] {
            if (chunk + AHEAD < chunks) load_chunk<T>(p, task, pages, bases_of<T>(p, task, thread), walker, chunk + AHEAD, ring + free_stage * T::STAGE_BYTES, thread, [] {});
            copies_commit();
        };
        Scores<T> s;
        u32 pr[T::M_TILES][T::N_TILES / 2][4];
        const int token = token_of<T>(task, walker, chunk);
        if constexpr (T::WARPGROUP) {
            start_scores<T>(s[0], query, k);
            load_ahead();
            warpgroup_wait(s[0]);
        } else {
            load_ahead();
            warp_scores<T>(s, q, k, lane);
        }
        update<T>(state.softmax, state.o, pr, s, q, p, task, token, v + T::KV_BYTES, lane);
        add_values<T>(state.o, pr, v, lane);
        stage = stage + 1 == T::STAGES ? 0 : stage + 1;
    }
    // racecheck takes a block for out of step whose groups have met unequally often, and does not see that it meets as a whole after this.
    if (T::ROW_WARPS > 1 && chunks < chunks_of<T>(task, first)) sync_group<T>(group);
}

// Leaves a warp's state in shared memory for the merge, the V scale applied.
template <class T>
__device__ __forceinline__ void publish_state(const State<T>& state, const Query<T>& q, float* merge, float v_scale, int group,
                                              int first_row, int lane) {
    const int g = lane / 4, t = lane % 4;
    float2* ml = reinterpret_cast<float2*>(merge + T::MERGE_ENDS) + group * T::ROWS;
    float* o = merge + group * T::ROWS * T::MERGE_ROW;
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first_row + 16 * m + 8 * h + g;
            const float sum = row_sum(state.softmax.sum[m][h]);
            if (t == 0) ml[row] = {state.softmax.max[m][h] * q.scale[m][h], sum};
            const float unit = T::PER_TOKEN ? state.softmax.v_most : v_scale;
            if constexpr (T::PACKED) {
#pragma unroll
                for (int n = 0; n < T::OUT_TILES; n += 4) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int i = 2 * h + e;
                        *reinterpret_cast<float4*>(o + row * T::MERGE_ROW + T::merge_channel(out_channel<T>(n, t, e))) = {
                            state.o[m][n][i] * unit, state.o[m][n + 1][i] * unit, state.o[m][n + 2][i] * unit, state.o[m][n + 3][i] * unit};
                    }
                }
            } else {
#pragma unroll
                for (int n = 0; n < T::OUT_TILES; n++) {
                    *reinterpret_cast<float2*>(o + row * T::MERGE_ROW + out_channel<T>(n, t, 0)) = {state.o[m][n][2 * h] * unit,
                                                                                                   state.o[m][n][2 * h + 1] * unit};
                }
            }
        }
    }
}

}  // namespace pa
