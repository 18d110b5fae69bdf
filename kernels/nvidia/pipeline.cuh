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

template <class T>
struct State {
    Softmax<T> softmax;
    float o[T::M_TILES][T::OUT_TILES][4];
};

template <class T>
__device__ __forceinline__ void walk(State<T>& state, const TileParams& p, const Task& task, u32 ring, int group, int first_row, int thread) {
    const int lane = thread & 31;
    const int all = (task.end - task.begin + T::CHUNK - 1) / T::CHUNK;
    const int chunks = (all - group + T::GROUPS - 1) / T::GROUPS;
    PageIds<T> pages;
    pages.start(p, task, group, lane);
#pragma unroll
    for (int stage = 0; stage < T::STAGES - 1; stage++) {
        if (stage < chunks) load_chunk<T>(p, task, pages, group, stage, ring + stage * T::STAGE_BYTES, thread);
        copies_commit();
    }
    Query<T> q;
    load_query<T>(q, p, task, first_row, lane);
    start<T>(state.softmax, p, task, first_row, lane);
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
#pragma unroll
        for (int n = 0; n < T::OUT_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) state.o[m][n][i] = 0.0f;
        }
    }
    int stage = 0;
    for (int chunk = 0; chunk < chunks; chunk++) {
        copies_wait<T::STAGES - 2>();
        if constexpr (T::WARPGROUP) fence_async_proxy();
        sync_group<T>(group);
        // Every warp of the group is done with the chunk before, so that its stage takes the next.
        const int ahead = chunk + T::STAGES - 1;
        const int ahead_stage = stage == 0 ? T::STAGES - 1 : stage - 1;
        if (ahead < chunks) load_chunk<T>(p, task, pages, group, ahead, ring + ahead_stage * T::STAGE_BYTES, thread);
        copies_commit();
        const u32 k = ring + stage * T::STAGE_BYTES;
        float s[T::M_TILES][T::N_TILES][4];
        u32 pr[T::M_TILES][T::N_TILES / 2][4];
        scores<T>(s, q, k, lane);
        const int token = task.begin + (group + chunk * T::GROUPS) * T::CHUNK;
        update<T>(state.softmax, state.o, pr, s, q, p, task, token, k + 2 * T::KV_BYTES, lane);
        add_values<T>(state.o, pr, k + T::KV_BYTES, lane);
        stage = stage + 1 == T::STAGES ? 0 : stage + 1;
    }
}

}  // namespace pa
