// The helpers of a group that walks an FP8 cache (narrow.cuh): four warps that copy its chunks, and widen V to F16, times its tokens' scales.
//
// A thread widens what it has copied itself. A chunk goes through a stage of the ring (K and V as they come, and their scales) and one of two slots of
// widened V. Barriers of a group and its helpers, two of each, taken in turn: `full` for a chunk whose K is there, with widened V of the chunk before;
// `empty` for a chunk whose K the group is through with, and with widened V of the chunk before.
#pragma once

#include "pipeline.cuh"

namespace pa {

// Registers of a thread of the group, and of its helpers: what is left of those of 512 threads of 128.
template <class T>
constexpr int WALK_REGISTERS = T::PER_TOKEN ? 184 : 192;
template <class T>
constexpr int HELPER_REGISTERS = 256 - WALK_REGISTERS<T>;

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

// A lane's two of a chunk's scales of V.
__device__ __forceinline__ float2 load_scales(u32 scales, int lane) { return load_shared_float2(scales + lane * 8); }

// The unit with a chunk's scales among those so far. What is not finite has none.
__device__ __forceinline__ int raise_unit(int unit, float2 scales) {
    auto exponent = [](float scale) {
        const u32 field = __float_as_uint(scale) >> 23 & 0xff;
        return field == 0xff ? 0 : field;
    };
    return max(unit, int(__reduce_max_sync(FULL_WARP, max(exponent(scales.x), exponent(scales.y)))));
}

// Copies token scales of a chunk into its stage: K's by the first half of the threads, V's by the other.
template <class T>
struct ScaleCopies {
    // Where scales of tokens follow each other, eight lanes of a warp have four tokens each.
    static constexpr bool WHOLE = PageIds<T>::WHOLE && T::PAGE_SIZE % 4 == 0;
    static_assert(T::CHUNK == 64 && T::GROUP_THREADS == 128, "16 pieces of K's and of V's");

    const float* from;  // of page 0
    i64 page_stride;
    bool value, in_fours;

    __device__ __forceinline__ void start(const CudaTileArgs& p, const Task& task, int thread) {
        auto follow = [](const void* scales, const Paged& stride) {
            return stride.token == 1 && ((reinterpret_cast<u64>(scales) | u64((stride.page | stride.head) * 4)) & 15) == 0;
        };
        value = thread >= T::CHUNK;
        in_fours = WHOLE && follow(p.k_scale, p.k_scale_stride) && follow(p.v_scale, p.v_scale_stride);
        from = static_cast<const float*>(value ? p.v_scale : p.k_scale) + task.head * (value ? p.v_scale_stride.head : p.k_scale_stride.head);
        page_stride = value ? p.v_scale_stride.page : p.k_scale_stride.page;
    }

    // Zeros for tokens that no query attends.
    __device__ __forceinline__ void copy(const CudaTileArgs& p, const Task& task, const PageIds<T>& pages, int walker, int chunk, u32 stage, int thread) const {
        const int token = token_of<T>(task, walker, chunk);
        const u32 to = stage + 2 * T::KV_BYTES + (value ? T::SCALE_BYTES : 0);
        if (in_fours && token >= task.first_token && token + T::CHUNK <= task.end) {
            const int row = (thread / 32 % 2 * 8 + thread % 8) * 4;
            const i64 page = pages.page(chunk, token, row, true);
            if (thread % 32 < 8) copy16<T::ONCE>(to + 4 * row, from + page * page_stride + u32(token + row) % u32(T::PAGE_SIZE), true);
        } else {
            const int row = thread % T::CHUNK, t = token + row;
            const bool owned = t < task.end && t >= task.first_token;
            const i64 page = pages.page(chunk, token, row, owned);
            copy4(to + 4 * row, from + page * page_stride + u32(t) % u32(T::PAGE_SIZE) * (value ? p.v_scale_stride.token : p.k_scale_stride.token), owned);
        }
    }
};

// Widens the thread's pieces of 16 channels of V into a slot, whose rows are two halves of 64 columns: the eights of channels go to them in turn, so that
// eight lanes store all of a row's banks.
template <class T>
__device__ __forceinline__ void widen_values(u32 slot, u32 v, int unit, int thread) {
    constexpr int ROWS_AT_ONCE = T::HELPERS / T::ROW_PIECES, ROWS = T::CHUNK / ROWS_AT_ONCE;
    const int piece = thread % T::ROW_PIECES, row0 = thread / T::ROW_PIECES;
    const u32 scales = v + T::KV_BYTES + T::SCALE_BYTES;
    // All is read before anything is stored, so that it is waited for once.
    u32 words[ROWS][4], factors[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = i * ROWS_AT_ONCE + row0;
        load_shared16(words[i], v + swizzled<T, true>(row, piece));
        if constexpr (T::PER_TOKEN) factors[i] = load_shared4(scales + row * 4);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = i * ROWS_AT_ONCE + row0;
        u32 wide[2][4];
#pragma unroll
        for (int w = 0; w < 4; w++) wide[w / 2][w % 2 * 2] = E4m3::widen<0>(words[i][w]), wide[w / 2][w % 2 * 2 + 1] = E4m3::widen<1>(words[i][w]);
        if constexpr (T::PER_TOKEN) {
            const float factor = __uint_as_float(factors[i]) * into_unit(unit);
            const u32 both = F16::pack(factor, factor);
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
__device__ __forceinline__ void serve_group(const CudaTileArgs& p, const Task& task, PageIds<HelperTraits<T>>& pages, u32 own, int group,
                                            int thread) {
    using H = HelperTraits<T>;
    const int lane = thread & 31, chunks = chunks_of<T>(task, group);
    const u32 ring = own + 2 * T::WIDE_BYTES;
    if (chunks <= 0) return;
    // Or the compiler settles these for every chunk anew, and that time is all copies'.
    ScaleCopies<H> scales;
    if constexpr (T::PER_TOKEN) {
        scales.start(p, task, thread);
        asm volatile("" : "+l"(scales.from), "+l"(scales.page_stride));
    }
    PieceBases bases = bases_of<H>(p, task, thread);
    asm volatile("" : "+l"(bases.k), "+l"(bases.v));
    int loaded = 0, unit = LEAST_UNIT;
    auto load_up_to = [&](int end) {
        for (; loaded < end; loaded++) {
            const u32 stage = ring + loaded % T::STAGES * T::STAGE_BYTES;
            if (loaded < chunks) {
                // Scales first: ptxas has what follows another block's copies wait for them.
                load_chunk<H>(p, task, pages, bases, group, loaded, stage, thread, [&] {
                    if constexpr (T::PER_TOKEN) scales.copy(p, task, pages, group, loaded, stage, thread);
                });
            }
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
            } else if (T::PER_TOKEN) {
                barrier_named(helpers_barrier(group), T::HELPERS);  // the scales are other threads' copies
            }
            float2 lanes;
            if constexpr (T::PER_TOKEN) lanes = load_scales(before + 2 * T::KV_BYTES + T::SCALE_BYTES, lane);
            load_up_to(chunk - 1 + T::STAGES);
            if constexpr (T::PER_TOKEN) {
                unit = raise_unit(unit, lanes);
                if (thread == 0) store_shared4(unit_of<T>(before), unit);
            }
            copies_wait<T::STAGES - 2>();
            widen_values<T>(slot_of<T>(own, chunk - 1), before + T::KV_BYTES, unit, thread);
            before = next_stage<T>(before, ring);
        }
        fence_async_proxy();
        barrier_arrive(full_barrier(group, chunk), T::GROUP_THREADS + T::HELPERS);
        if (chunk == 0) load_up_to(T::STAGES);
    }
}

}  // namespace pa
