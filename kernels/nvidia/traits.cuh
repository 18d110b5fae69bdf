// Element types, and everything a tile is specialized by.
#pragma once

#include "args.h"
#include "ptx.cuh"

namespace pa {

struct Bf16 {
    static constexpr int BYTES = 2;
    using Compute = Bf16;

    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 r;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    static __device__ __forceinline__ float2 unpack(u32 x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }
    static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct F16 {
    static constexpr int BYTES = 2;
    using Compute = F16;

    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 r;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
        return r;
    }
    static __device__ __forceinline__ u32 multiply(u32 a, u32 b) {
        u32 r;
        asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ u32 add(u32 a, u32 b) {
        u32 r;
        asm("add.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ u32 subtract(u32 a, u32 b) {
        u32 r;
        asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
        return r;
    }
    static __device__ __forceinline__ float2 unpack(u32 x) {
        float2 r;
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(r.x), "=f"(r.y) : "r"(x));
        return r;
    }
    static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct F32 {
    static constexpr int BYTES = 4;
};

// Computed in F16, which holds every E4M3 value exactly.
struct E4m3 {
    static constexpr int BYTES = 1;
    using Compute = F16;

    // The two values of half `HALF` of a word, as F16.
    template <int HALF>
    static __device__ __forceinline__ u32 widen(u32 word) {
        u32 r;
#if __CUDA_ARCH__ >= 890
        if constexpr (HALF == 0) {
            asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(word));
        } else {
            asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(word));
        }
#else
        // The bits where F16 has them, 2^8 too low. NaN comes out as 480.
        const u32 x = __byte_perm(word, 0, HALF == 0 ? 0x1404 : 0x3424);
        asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"((x & 0x80008000u) | (x & 0x7f007f00u) >> 1), "r"(0x5c005c00u));
#endif
        return r;
    }

    // The nearest values of four; beyond 448, 448.
    static __device__ __forceinline__ u32 narrow(const float (&x)[4]) {
        u32 r;
        asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h};}"
            : "=r"(r)
            : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
        return r;
    }
    // Of two pairs in F16.
    static __device__ __forceinline__ u32 narrow(u32 first, u32 second) {
        u32 r;
        asm("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f16x2 l, %1; cvt.rn.satfinite.e4m3x2.f16x2 h, %2; mov.b32 %0, {l, h};}"
            : "=r"(r)
            : "r"(first), "r"(second));
        return r;
    }
};

template <class A, class B>
struct Same {
    static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
    static constexpr bool value = true;
};

// What attention itself varies by; the numbers are those of the macros in tile.cu.
template <int SCALES_, bool WINDOW_, bool SOFTCAP_, bool RAGGED_, bool PER_HEAD_>
struct Options {
    static constexpr bool SCALAR = SCALES_ == 1, PER_TOKEN = SCALES_ == 2;
    static constexpr bool WINDOW = WINDOW_, SOFTCAP = SOFTCAP_, RAGGED = RAGGED_, PER_HEAD = PER_HEAD_;
};

// How a CTA is cut. `GROUPS` warp groups take every GROUPS-th chunk of a task's tokens, each with a ring of its own of `STAGES` chunks;
// the `ROW_WARPS` warps of a group read the same chunks and hold `M_TILES` tiles of 16 query rows each. The `CLUSTER` CTAs of a cluster share a
// task: their groups walk it together.
template <int M_TILES_, int ROW_WARPS_, int GROUPS_, int STAGES_, int CHUNK_, int CLUSTER_, bool WARPGROUP_>
struct Shape {
    static constexpr int M_TILES = M_TILES_, ROW_WARPS = ROW_WARPS_, GROUPS = GROUPS_, STAGES = STAGES_, CHUNK = CHUNK_;
    static constexpr int CLUSTER = CLUSTER_;
    static constexpr bool WARPGROUP = WARPGROUP_;
};

template <class KV_, class Q_, int HEAD_DIM_, int PAGE_SIZE_, int GROUP_, int TILE_TOKENS_, class Shape_, class Options_>
struct Traits {
    using Kv = KV_;
    using Query = Q_;
    using Compute = typename KV_::Compute;
    using Opt = Options_;

    static constexpr int HEAD_DIM = HEAD_DIM_, PAGE_SIZE = PAGE_SIZE_, GROUP = GROUP_, TILE_TOKENS = TILE_TOKENS_;
    static constexpr int M_TILES = Shape_::M_TILES, ROW_WARPS = Shape_::ROW_WARPS, GROUPS = Shape_::GROUPS;
    static constexpr int STAGES = Shape_::STAGES, CHUNK = Shape_::CHUNK, CLUSTER = Shape_::CLUSTER;

    static constexpr bool FP8 = KV_::BYTES == 1;
    static constexpr bool PER_TOKEN = FP8 && Opt::PER_TOKEN;
    // How KV is copied. With more channels the ptxas of CUDA 13.0 makes an illegal instruction of a copy that says so.
    static constexpr bool ONCE = HEAD_DIM_ <= 128;
    // F16 queries go into F16 products as they are; others are scaled by a power of two a row, so that they cannot overflow.
    static constexpr bool SCALED_QUERY = Same<Compute, F16>::value && !Same<Query, F16>::value;

    // Four row warps of one M-tile each are a warpgroup, whose products read K and V straight from shared memory; FP8: see narrow.cuh.
    static constexpr bool WARPGROUP = Shape_::WARPGROUP, NARROW = FP8 && WARPGROUP;
    static constexpr bool PACKED = FP8 && !WARPGROUP;
    // Sums that a narrow walk's scores are made of: E4M3's products are added in about 14 bits, and two sums, added in F32, lose a third of what one does.
    // With token scales no registers are left for that.
    static constexpr int SUMS = PER_TOKEN ? 1 : 2;
    static_assert(!WARPGROUP || (M_TILES == 1 && ROW_WARPS == 4 && CHUNK == 64), "a warpgroup's products are 64 x 64 x 16");

    // A warpgroup's query that needs no conversion is copied to where its products read it.
    static constexpr bool COPIED_QUERY = WARPGROUP && !FP8 && Same<Compute, Query>::value;

    static constexpr int WARPS = ROW_WARPS * GROUPS, THREADS = WARPS * 32, GROUP_THREADS = ROW_WARPS * 32;
    // Threads beside those that copy for a group.
    static constexpr int HELPERS = NARROW ? 128 : 0, ALL_THREADS = THREADS + GROUPS * HELPERS;
    static constexpr int ROWS = 16 * M_TILES * ROW_WARPS, WALKERS = GROUPS * CLUSTER;
    static constexpr int K_STEPS = HEAD_DIM / 16, N_TILES = CHUNK / 8, OUT_TILES = HEAD_DIM / 8;

    // A stage: CHUNK rows of K, CHUNK rows of V, and with per-token scales CHUNK floats of each (narrow, in 512 bytes, as stages begin at multiples of
    // 1024). A group: narrow, two chunks of V widened to F16; then the stages.
    static constexpr int ROW_BYTES = HEAD_DIM * KV_::BYTES, ROW_PIECES = ROW_BYTES / 16;
    static constexpr int KV_BYTES = CHUNK * ROW_BYTES, SCALE_BYTES = PER_TOKEN ? NARROW ? 512 : CHUNK * 4 : 0;
    static constexpr int STAGE_BYTES = 2 * KV_BYTES + 2 * SCALE_BYTES;
    static constexpr int WIDE_BYTES = NARROW ? 2 * KV_BYTES : 0, GROUP_BYTES = (2 * WIDE_BYTES + STAGES * STAGE_BYTES + 1023) / 1024 * 1024;
    // A warpgroup reads the query from shared memory too, the same rows for every group; narrow, in two parts.
    static constexpr int QUERY_BYTES = WARPGROUP ? ROWS * HEAD_DIM * 2 : 0;
    static constexpr int RING_BYTES = GROUPS * GROUP_BYTES + QUERY_BYTES;

    // The merge, over the drained rings: outputs of each group in rows (of packed FP8 their 32 channels too) padded against bank conflicts;
    // behind them in the same order (maximum, sum) of every row.
    static constexpr int MERGE_ROW = HEAD_DIM + (PACKED ? HEAD_DIM / 8 : 8);
    static constexpr int MERGE_ENDS = GROUPS * ROWS * MERGE_ROW, MERGE_BYTES = (MERGE_ENDS + GROUPS * ROWS * 2) * 4;
    // Behind both, in a cluster, what its CTAs send this one (Parts, cluster.cuh): its share of the rows' eights of four channels, of each CTA.
    static constexpr int PARTS_AT = RING_BYTES > MERGE_BYTES ? RING_BYTES : MERGE_BYTES;
    static constexpr int SENT_EIGHTS = (ROWS * HEAD_DIM / 32 + CLUSTER - 1) / CLUSTER, EIGHT_BYTES = 8 * 16 + 8;
    static constexpr int SMEM_BYTES = PARTS_AT + (CLUSTER > 1 ? CLUSTER * SENT_EIGHTS * EIGHT_BYTES + 16 : 0);

    static __device__ __forceinline__ constexpr int merge_channel(int channel) { return PACKED ? channel + channel / 32 * 4 : channel; }

    // By the shared memory of an SM of compute capability 9.0, of which each takes 1 KB more; registers hold no third.
    static constexpr u32 BLOCKS_AN_SM = (228 << 10) / (SMEM_BYTES + 1024) < 2 ? 1 : 2;
    // 16-bit products of other than packed FP8: the groups are merged out of their registers, and partial results are F16 (direct.cuh).
    static constexpr bool DIRECT = CLUSTER == 1 && !PACKED && M_TILES == 1 && OUT_TILES % (4 * GROUPS) == 0;

    static_assert(CHUNK % 16 == 0 && TILE_TOKENS % CHUNK == 0, "a chunk is whole k-steps of PV, a tile whole chunks");
    static_assert(!NARROW || (HEAD_DIM == 128 && GROUPS <= 2 && STAGES >= 3), "a row is swizzled as a whole; groups have five barriers each");
    static_assert(HEAD_DIM % (FP8 ? 128 : 64) == 0, "the swizzles of shared memory permute eight pieces of 16 bytes");
    static_assert(CLUSTER == 1 || (!NARROW && CLUSTER <= 16), "a cluster's CTAs walk as one, all of them in one GPC");
    static_assert(!PER_TOKEN || CHUNK <= GROUP_THREADS, "a thread copies one token's scales");
};

// What a CTA works on: rows of one KV head of one sequence, and the tokens of its task.
struct Task {
    int sequence, head, table_row, slot;
    int query_first, query_len, rows, first_row;  // rows: query_len * group, of which this CTA takes ROWS from first_row on
    int rank;                                     // of this CTA among its cluster's
    int context, first_token;                     // tokens that any row attends: first_token..context
    int begin, end;                               // tokens of the task; begin is a multiple of a chunk
    int parts;                                    // tasks of the row, this one among them
    int table_end;                                // tokens that the task's tiles and the table's row both hold, whatever the context
};

}  // namespace pa
