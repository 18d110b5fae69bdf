// The tile kernel: a cluster for a (slot, KV head, block of query rows).
#pragma once

#include "cluster.cuh"
#include "direct.cuh"
#include "narrow.cuh"
#include "task.cuh"

namespace pa {

// Whether this CTA presumably starts when others have ended, so that the kernel before is over. Only where two share an SM: others are few.
template <class T>
__device__ __forceinline__ bool is_late() {
    return T::BLOCKS_AN_SM > 1 && blockIdx.x + gridDim.x * blockIdx.z >= T::BLOCKS_AN_SM * sm_count();
}

// The kernel before may be writing records, lengths, starts or tables, unless they are settled: these are read while it may still run.
static __device__ __forceinline__ void wait_unless_settled(const CudaTileArgs& p) {
    if (!p.settled) wait_for_previous_kernel();
}

// Finds the CTA's task and returns when the kernel before is over; false without a task. Threads that COPY for a walker get its first page ids too, and bring
// its first chunk near while the kernel before may still run. Nothing waits for what it does not follow from.
template <class T, bool COPY>
__device__ __forceinline__ bool find_task(Task& task, PageIds<T>& pages, const CudaTileArgs& p, const GridPosition& at, int group, int thread) {
    const int walker = at.rank * T::GROUPS + group;
    int length;
    const bool found = read_record<T>(task, length, p, at);
    if (found) {
        if constexpr (T::Opt::WINDOW) take_length<T>(task, length, p);
        if constexpr (COPY) pages.start(p, task, walker, thread % 32);
        if constexpr (!T::Opt::WINDOW) take_length<T>(task, length, p);
        if (COPY && PageIds<T>::WHOLE && p.settled && !is_late<T>()) hint_first_chunk<T>(p, task, pages, walker, thread);
    }
    wait_for_previous_kernel();
    return found;
}

// What a group's helpers do.
template <class T>
__device__ __forceinline__ void help(const CudaTileArgs& p, u32 smem) {
    release_registers<HELPER_REGISTERS<T>>();
    const int helper = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0) * 32 - T::THREADS, group = helper / T::HELPERS;
    const int thread = helper % T::HELPERS + threadIdx.x % 32;
    Task task;
    PageIds<HelperTraits<T>> pages;
    wait_unless_settled(p);
    if (find_task<HelperTraits<T>, true>(task, pages, p, grid_position<T>(p), group, thread)) {
        serve_group<T>(p, task, pages, smem + group * T::GROUP_BYTES, group, thread);
    }
}

template <class T>
__device__ __forceinline__ void tile(const CudaTileArgs& p) {
    extern __shared__ __align__(1024) u8 smem[];
    float* merge = reinterpret_cast<float*>(smem);
    if constexpr (T::HELPERS > 0) {
        if (threadIdx.x >= T::THREADS) return help<T>(p, smem_address(smem));
        claim_registers<WALK_REGISTERS<T>>();
    }
    const int thread = threadIdx.x, warp = __shfl_sync(FULL_WARP, thread / 32, 0);
    const int group = warp / T::ROW_WARPS, row = warp % T::ROW_WARPS * T::M_TILES * 16;
    const GridPosition at = grid_position<T>(p);
    Task task;
    PageIds<T> pages;
    wait_unless_settled(p);
    const int parts = at.rank == 0 ? parts_of(p, at.slot) : 1;
    const bool found = find_task<T, T::HELPERS == 0>(task, pages, p, at, group, thread % T::GROUP_THREADS);
    const float k_scale = T::Opt::SCALAR ? *static_cast<const float*>(p.k_scale) : 1.0f;
    const float v_scale = T::Opt::SCALAR ? *static_cast<const float*>(p.v_scale) : 1.0f;
    if (found) {
        const u32 base = smem_address(smem), own = base + group * T::GROUP_BYTES, query = base + T::GROUPS * T::GROUP_BYTES;
        // The reducer starts up while this CTA merges and stores.
        if constexpr (T::NARROW) {
            NarrowState<T> state;
            walk_narrow<T>(state, p, task, own, query, k_scale, group, row, thread % 32);
            launch_next_kernel();
            sync_block<T>();
            finish_states<T>(p, task, narrow_end<T>(state, v_scale), merge, group, row, thread % 32);
        } else {
            State<T> state;
            Query<T> q;
            walk<T>(state, q, p, task, pages, own, query, k_scale, group, row, thread % T::GROUP_THREADS);
            launch_next_kernel();
            if constexpr (T::GROUPS > 1 || !T::DIRECT) {
                copies_wait<0>();
                sync_block<T>();
            }
            if constexpr (T::CLUSTER > 1) expect_parts<T>(task, parts_of<T>(merge), thread);
            if constexpr (T::DIRECT) {
                finish_states<T>(p, task, end_of<T>(state, q), merge, group, row, thread % 32);
            } else {
                publish_state<T>(state, q, merge, v_scale, group, row, thread % 32);
            }
        }
        if constexpr (T::CLUSTER > 1) {
            merge_cluster<T>(p, task, merge, thread);
        } else if constexpr (!T::DIRECT) {
            sync_block<T>();
            merge_task<T>(p, task, merge, thread);
        }
    }
    if (parts == 0) clear_row<T>(p, at, thread);
}

}  // namespace pa
