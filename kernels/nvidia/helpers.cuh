// The helpers of a group that walks an FP8 cache (narrow.cuh): four warps that copy its chunks, and widen V to F16, times its tokens' scales.
//
// A thread widens what it has copied itself. A chunk goes through a stage of the ring (K and V as they come, and their scales) and one of two slots of
// widened V. Barriers of a group and its helpers, two of each, taken in turn: `full` for a chunk whose K is there, with widened V of the chunk before;
// `empty` for a chunk whose K the group is through with, and with widened V of the chunk before.
#pragma once

#include "pipeline.cuh"

namespace pa {

// Registers of a thread of the group and of its helpers: together what 512 threads of 128 have.
constexpr int WALK_REGISTERS = 200, HELPER_REGISTERS = 56;

template <class T>
__device__ __forceinline__ u32 next_stage(u32 stage, u32 ring) {
    return stage == ring + (T::STAGES - 1) * T::STAGE_BYTES ? ring : stage + T::STAGE_BYTES;
}

__device__ __forceinline__ int full_barrier(int group, int chunk) { return 1 + 2 * group + chunk % 2; }
__device__ __forceinline__ int empty_barrier(int group, int chunk) { return 5 + 2 * group + chunk % 2; }
__device__ __forceinline__ int helpers_barrier(int group) { return 9 + group; }

template <class T>
__device__ __forceinline__ void wait_for_chunk(int group, int chunk) {
    barrier_named(full_barrier(group, chunk), T::GROUP_THREADS + T::HELPERS);
}

template <class T>
__device__ __forceinline__ void release_chunk(int group, int chunk) {
    barrier_arrive(empty_barrier(group, chunk), T::GROUP_THREADS + T::HELPERS);
}

// Where the slot of a chunk's widened V is.
template <class T>
__device__ __forceinline__ u32 slot_of(u32 own, int chunk) {
    return own + chunk % 2 * T::WIDE_BYTES;
}

// With token scales: where a stage has the unit that its widened V stands in, behind K's scales.
template <class T>
__device__ __forceinline__ u32 unit_of(u32 stage) {
    return stage + 2 * T::KV_BYTES + T::CHUNK * 4;
}

// Token scales of V are brought below 2^7, so that F16 holds E4M3 times them: 2^(133 - unit), where `unit` is the exponent field of the largest one so far.
constexpr int LEAST_UNIT = 27;
__device__ __forceinline__ float into_unit(int unit) { return __uint_as_float(u32(260 - unit) << 23); }
__device__ __forceinline__ float out_of_unit(int unit) { return __uint_as_float(u32(unit - 6) << 23); }

// The unit with a chunk's scales among those so far. What is not finite has none.
__device__ __forceinline__ int raise_unit(int unit, u32 scales, int lane) {
    const float2 x = load_shared_float2(scales + lane * 8);
    auto exponent = [](float scale) {
        const u32 field = __float_as_uint(scale) >> 23 & 0xff;
        return field == 0xff ? 0 : field;
    };
    return max(unit, int(__reduce_max_sync(FULL_WARP, max(exponent(x.x), exponent(x.y)))));
}

// Widens the thread's pieces of 16 channels of V into a slot, whose rows are two halves of 64 columns: the eights of channels go to them in turn, so that
// eight lanes store all of a row's banks.
template <class T>
__device__ __forceinline__ void widen_values(u32 slot, u32 v, int unit, int thread) {
    constexpr int ROWS_AT_ONCE = T::HELPERS / T::ROW_PIECES;
    const int piece = thread % T::ROW_PIECES, row0 = thread / T::ROW_PIECES;
    const u32 scales = v + T::KV_BYTES + T::SCALE_BYTES;
#pragma unroll
    for (int i = 0; i < T::CHUNK; i += ROWS_AT_ONCE) {
        const int row = i + row0;
        u32 words[4], wide[2][4];
        load_shared16(words, v + swizzled<T, true>(row, piece));
#pragma unroll
        for (int w = 0; w < 4; w++) wide[w / 2][w % 2 * 2] = E4m3::widen<0>(words[w]), wide[w / 2][w % 2 * 2 + 1] = E4m3::widen<1>(words[w]);
        if constexpr (T::PER_TOKEN) {
            const float scale = __uint_as_float(load_shared4(scales + row * 4)) * into_unit(unit);
            const u32 both = F16::pack(scale, scale);
#pragma unroll
            for (int w = 0; w < 8; w++) wide[w / 4][w % 4] = F16::multiply(wide[w / 4][w % 4], both);
        }
        store_shared16(slot + wide_swizzled<T>(row, piece), wide[0]);
        store_shared16(slot + wide_swizzled<T>(row, piece + 8), wide[1]);
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
    const u32 ring = own + 2 * T::WIDE_BYTES;
    if (chunks <= 0) return;
    PageIds<H> pages;
    pages.start(p, task, group, lane);
    int loaded = 0, unit = LEAST_UNIT;
    auto load_up_to = [&](int end) {
        for (; loaded < end; loaded++) {
            if (loaded < chunks) load_chunk<H>(p, task, pages, group, loaded, ring + loaded % T::STAGES * T::STAGE_BYTES, thread);
            copies_commit();
        }
    };
    // The first chunk is not kept waiting for all that there is room for.
    load_up_to(2);
    u32 before = ring;
    for (int chunk = 0; chunk <= chunks; chunk++) {
        // Of the chunks on their way this is the first.
        if (chunk == 0) {
            copies_wait<1>();
        } else {
            if (chunk >= 2) {
                barrier_named(empty_barrier(group, chunk), T::GROUP_THREADS + T::HELPERS);
                load_up_to(chunk - 1 + T::STAGES);
            } else if (T::PER_TOKEN) {
                barrier_named(helpers_barrier(group), T::HELPERS);  // the scales are other threads' copies
            }
            copies_wait<T::STAGES - 2>();
            if constexpr (T::PER_TOKEN) {
                unit = raise_unit(unit, before + 2 * T::KV_BYTES + T::SCALE_BYTES, lane);
                if (thread == 0) store_shared4(unit_of<T>(before), unit);
            }
            widen_values<T>(slot_of<T>(own, chunk - 1), before + T::KV_BYTES, unit, thread);
            before = next_stage<T>(before, ring);
        }
        fence_async_proxy();
        barrier_arrive(full_barrier(group, chunk), T::GROUP_THREADS + T::HELPERS);
        if (chunk == 0) load_up_to(T::STAGES);
    }
}

}  // namespace pa
