// Element types, and everything a tile is specialized by.
#pragma once

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

// Computed in F16, which holds every E4M3 value exactly.
struct E4m3 {
    static constexpr int BYTES = 1;
    using Compute = F16;

    // The two values of half `HALF` of a word, as F16.
    template <int HALF>
    static __device__ __forceinline__ u32 widen(u32 word) {
        u32 r;
        if constexpr (HALF == 0) {
            asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(word));
        } else {
            asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(word));
        }
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

// How FP8 scales come: nothing or one factor (in the launch's arguments), or F32 [P, Hkv, S].
enum class Scales { SCALAR, PER_TOKEN };

// What attention itself varies by.
template <bool WINDOW_ = false, bool SINKS_ = false, bool SOFTCAP_ = false, Scales SCALES_ = Scales::SCALAR>
struct Options {
    static constexpr bool WINDOW = WINDOW_, SINKS = SINKS_, SOFTCAP = SOFTCAP_;
    static constexpr Scales SCALES = SCALES_;
};

// How a CTA is cut. `GROUPS` warp groups take every GROUPS-th chunk of a task's tokens, each with a ring of its own of `STAGES` chunks;
// the `ROW_WARPS` warps of a group read the same chunks and hold `M_TILES` tiles of 16 query rows each.
template <int M_TILES_, int ROW_WARPS_, int GROUPS_, int STAGES_, int CHUNK_, int MIN_CTAS_ = 1, bool WARPGROUP_ = false>
struct Shape {
    static constexpr int M_TILES = M_TILES_, ROW_WARPS = ROW_WARPS_, GROUPS = GROUPS_, STAGES = STAGES_, CHUNK = CHUNK_;
    static constexpr int MIN_CTAS = MIN_CTAS_;
    static constexpr bool WARPGROUP = WARPGROUP_;
};

template <class KV_, class Q_, int HEAD_DIM_, int PAGE_SIZE_, int TILE_TOKENS_, class Shape_, class Options_>
struct Traits {
    using Kv = KV_;
    using Query = Q_;
    using Compute = typename KV_::Compute;
    using Opt = Options_;

    static constexpr int HEAD_DIM = HEAD_DIM_, PAGE_SIZE = PAGE_SIZE_, TILE_TOKENS = TILE_TOKENS_;
    static constexpr int M_TILES = Shape_::M_TILES, ROW_WARPS = Shape_::ROW_WARPS, GROUPS = Shape_::GROUPS;
    static constexpr int STAGES = Shape_::STAGES, CHUNK = Shape_::CHUNK, MIN_CTAS = Shape_::MIN_CTAS;

    static constexpr bool FP8 = KV_::BYTES == 1;
    static constexpr bool PER_TOKEN = FP8 && Opt::SCALES == Scales::PER_TOKEN;
    // F16 queries go into F16 products as they are; others are scaled by a power of two a row, so that they cannot overflow.
    static constexpr bool SCALED_QUERY = Same<Compute, F16>::value && !Same<Query, F16>::value;

    // Four row warps of one M-tile each are a warpgroup, whose products read K and V straight from shared memory.
    static constexpr bool WARPGROUP = Shape_::WARPGROUP;
    static_assert(!WARPGROUP || (!FP8 && M_TILES == 1 && ROW_WARPS == 4 && CHUNK == 64), "a warpgroup's products are 64 x 64 x 16, 16-bit");

    static constexpr int WARPS = ROW_WARPS * GROUPS, THREADS = WARPS * 32, GROUP_THREADS = ROW_WARPS * 32;
    static constexpr int ROWS = 16 * M_TILES * ROW_WARPS;
    static constexpr int K_STEPS = HEAD_DIM / 16, N_TILES = CHUNK / 8, OUT_TILES = HEAD_DIM / 8;

    // A stage: CHUNK rows of K, CHUNK rows of V, and with per-token scales CHUNK floats of each.
    static constexpr int ROW_BYTES = HEAD_DIM * KV_::BYTES, ROW_PIECES = ROW_BYTES / 16;
    static constexpr int KV_BYTES = CHUNK * ROW_BYTES, SCALE_BYTES = PER_TOKEN ? CHUNK * 4 : 0;
    static constexpr int STAGE_BYTES = 2 * KV_BYTES + 2 * SCALE_BYTES;
    static constexpr int RING_BYTES = GROUPS * STAGES * STAGE_BYTES;

    // The merge, over the drained rings: for each group, then for the CTA, outputs in rows padded against bank conflicts; behind them
    // in the same order (maximum, sum) of every row.
    static constexpr int MERGE_ROW = HEAD_DIM + 8;
    static constexpr int MERGE_ENDS = (GROUPS + 1) * ROWS * MERGE_ROW;
    static constexpr int MERGE_BYTES = (MERGE_ENDS + (GROUPS + 1) * ROWS * 2) * 4;
    static constexpr int SMEM_BYTES = RING_BYTES > MERGE_BYTES ? RING_BYTES : MERGE_BYTES;

    static_assert(CHUNK % 16 == 0 && TILE_TOKENS % CHUNK == 0, "a chunk is whole k-steps of PV, a tile whole chunks");
    static_assert(HEAD_DIM % (FP8 ? 128 : 64) == 0, "the swizzles of shared memory permute eight pieces of 16 bytes");
    static_assert(!PER_TOKEN || CHUNK <= GROUP_THREADS, "a thread copies one token's scales");
};

// The arguments of a launch. Strides of the query and the output count elements, those of caches bytes, those of scales elements.
struct TileParams {
    const void* work_info;
    const void* reduce_info;
    const void* q;
    const void* k;
    const void* v;
    const u32* tables;
    const u32* context_lens;
    const u32* query_start;  // null: `query_len` rows a sequence
    const float* k_scales;
    const float* v_scales;
    const float* sinks;
    void* out;
    float* lse;         // may be null
    float* partial_o;   // F32 [capacity, Hkv, rows, D], unnormalized
    float2* partial_ml; // [capacity, Hkv, rows]: maximum of the scores in log2 units, sum
    i64 q_token_stride, q_head_stride, out_token_stride, out_head_stride;
    i64 k_page_stride, k_head_stride, k_token_stride;
    i64 v_page_stride, v_head_stride, v_token_stride;
    i64 scale_page_stride, scale_head_stride;
    i64 table_stride;
    int capacity, num_pages, max_pages, plan_rows, kv_heads, group, query_len, window;  // max_pages: width of a table row
    int cluster;        // CTAs of a cluster, along the slots
    int heads_per_row;  // KV heads that have plan rows of their own: kv_heads with per-head tables, else 1
    float scale_log2;   // softmax scale, times the K scale, times log2(e); with a softcap the scale over the cap alone
    float softcap_log2;
    float v_scale;
};

}  // namespace pa
