// The helpers of a group that walks an FP8 cache (narrow.cuh): two warps that copy its chunks and turn V.
//
// A chunk goes through a stage of the ring (K and V as they come) and a slot of turned V, of which there are three. Barriers of a group and its helpers,
// two a slot: `full` for a chunk whose K and turned V are there, `empty` for a chunk that the group is through with; it is through with V of the one before
// at the same time, whose slot the barrier's number is.
#pragma once

#include "pipeline.cuh"

namespace pa {

// Registers of a thread of the group and of its helpers: together what 384 threads of 168 have.
constexpr int WALK_REGISTERS = 224, HELPER_REGISTERS = 56;
constexpr int SLOTS = 3;

__device__ __forceinline__ int next_slot(int slot) { return slot == SLOTS - 1 ? 0 : slot + 1; }

template <class T>
__device__ __forceinline__ u32 next_stage(u32 stage, u32 ring) {
    return stage == ring + (T::STAGES - 1) * T::STAGE_BYTES ? ring : stage + T::STAGE_BYTES;
}

__device__ __forceinline__ int full_barrier(int group, int slot) { return 1 + group * SLOTS + slot; }
__device__ __forceinline__ int empty_barrier(int group, int slot) { return 7 + group * SLOTS + slot; }
__device__ __forceinline__ int helpers_barrier(int group) { return 13 + group; }

template <class T>
__device__ __forceinline__ void wait_for_chunk(int group, int slot) {
    barrier_named(full_barrier(group, slot), T::GROUP_THREADS + T::HELPERS);
}

template <class T>
__device__ __forceinline__ void release_chunk(int group, int slot) {
    barrier_arrive(empty_barrier(group, slot == 0 ? SLOTS - 1 : slot - 1), T::GROUP_THREADS + T::HELPERS);
}

// 16 tokens of V into rows of 64 tokens in the 64-byte swizzle: row 8c + g of 16 is channel 2g + c.
template <class T>
__device__ __forceinline__ void turn_values(u32 turned, u32 v, int part, int lane) {
    const u32 from = v + swizzled<T, true>(16 * part + (lane & 15), lane >> 4);
    const u32 to = turned + lane * T::CHUNK + ((part ^ (lane >> 1 & 3)) << 4);
    u32 x[T::HEAD_DIM / 32][4];
    // Pairs of channels of tokens 2t, 2t + 1 and 8 + 2t, 9 + 2t; of 16 channels and the next 16.
#pragma unroll
    for (int step = 0; step < T::HEAD_DIM / 32; step++) ldmatrix_transposed(x[step], from ^ (step << 5));
#pragma unroll
    for (int step = 0; step < T::HEAD_DIM / 32; step++) {
        const u32(&y)[4] = x[step];
        store_matrices(to + step * (32 * T::CHUNK),
                       {__byte_perm(y[0], y[1], 0x6420), __byte_perm(y[0], y[1], 0x7531), __byte_perm(y[2], y[3], 0x6420), __byte_perm(y[2], y[3], 0x7531)});
    }
}

// The threads that copy are the helpers.
template <class T>
struct HelperTraits : T {
    static constexpr int GROUP_THREADS = T::HELPERS;
};

template <class T>
__device__ __forceinline__ void serve_group(const CudaTileArgs& p, const Task& task, u32 own, int group, int thread) {
    using H = HelperTraits<T>;
    const int lane = thread & 31, chunks = chunks_of<T>(task, group);
    const u32 ring = own + T::TURNED_BYTES;
    PageIds<H> pages;
    pages.start(p, task, group, lane);
    int loaded = 0, slot = 0;
    auto load_up_to = [&](int end) {
        for (; loaded < end; loaded++) {
            if (loaded < chunks) load_chunk<H>(p, task, pages, group, loaded, ring + loaded % T::STAGES * T::STAGE_BYTES, thread);
            copies_commit();
        }
    };
    load_up_to(2);
    u32 stage = ring;
    for (int chunk = 0; chunk < chunks; chunk++) {
        // Of the chunks on their way this is the first.
        if (chunk == 0) {
            copies_wait<1>();
        } else if (chunk == 1) {
            copies_wait<T::STAGES - 2>();
        } else {
            copies_wait<T::STAGES - 3>();
        }
        barrier_named(helpers_barrier(group), T::HELPERS);
        if (chunk >= 2) barrier_named(empty_barrier(group, slot), T::GROUP_THREADS + T::HELPERS);
#pragma unroll 1
        for (int part = thread / 32; part < T::CHUNK / 16; part += T::HELPERS / 32) turn_values<T>(own + slot * T::KV_BYTES, stage + T::KV_BYTES, part, lane);
        fence_async_proxy();
        barrier_arrive(full_barrier(group, slot), T::GROUP_THREADS + T::HELPERS);
        // The stages but for that of the chunk before, which the group may be at, are free of what is behind this one.
        load_up_to(max(chunk - 1, 0) + T::STAGES);
        slot = next_slot(slot), stage = next_stage<T>(stage, ring);
    }
}

}  // namespace pa
