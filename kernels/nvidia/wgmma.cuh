// Products of a warpgroup: 64 query rows, the 16-bit operand B in shared memory in the 128-byte swizzle. sm_90a only.
#pragma once

#include "pages.cuh"

namespace pa {

// Describes rows of 128 bytes, eight to a swizzle atom of 1024; `next` bytes on come the next 64 columns where a product takes more.
__device__ __forceinline__ u64 describe(u32 address, u32 next = 16) {
    return u64((address & 0x3ffff) >> 4) | u64(next >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

__device__ __forceinline__ void warpgroup_begin() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void warpgroup_commit() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits for the products; nothing that reads the accumulators moves ahead of it.
template <int TILES>
__device__ __forceinline__ void warpgroup_wait(float (&c)[TILES][4]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
#pragma unroll
    for (int n = 0; n < TILES; n++) asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}

#define PA_FOUR(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define PA_SIXTEEN(c, n) PA_FOUR(c, n), PA_FOUR(c, n + 1), PA_FOUR(c, n + 2), PA_FOUR(c, n + 3)
#define PA_C0_31 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PA_C32_63 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// S[64, 64] = A[64, 16] B[64, 16]^T, added to S where `add`; both in rows along k.
template <class Element>
__device__ __forceinline__ void warpgroup_scores(float (*s)[4], u64 a, u64 b, int add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PA_PRODUCT(type)                                                                                                                  \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" PA_C0_31        \
                 "}, %32, %33, p, 1, 1, 0, 0;}"                                                                                           \
                 : PA_SIXTEEN(s, 0), PA_SIXTEEN(s, 4)                                                                                     \
                 : "l"(a), "l"(b), "r"(add))
    if constexpr (Same<Element, Bf16>::value) {
        PA_PRODUCT("bf16");
    } else {
        PA_PRODUCT("f16");
    }
#undef PA_PRODUCT
#endif
}

// O[64, 64 or 128] += A[64, 16] B[16, 64 or 128], B in rows along the columns.
template <class Element, int COLUMNS>
__device__ __forceinline__ void warpgroup_values(float (*o)[4], const u32 (&a)[4], u64 b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PA_PRODUCT_64(type)                                                                                                               \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" PA_C0_31 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"      \
                 : PA_SIXTEEN(o, 0), PA_SIXTEEN(o, 4)                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PA_PRODUCT_128(type)                                                                                                              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" PA_C0_31 "," PA_C32_63                                \
                 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"                                                                                 \
                 : PA_SIXTEEN(o, 0), PA_SIXTEEN(o, 4), PA_SIXTEEN(o, 8), PA_SIXTEEN(o, 12)                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
    if constexpr (COLUMNS == 64 && Same<Element, Bf16>::value) {
        PA_PRODUCT_64("bf16");
    } else if constexpr (COLUMNS == 64) {
        PA_PRODUCT_64("f16");
    } else if constexpr (Same<Element, Bf16>::value) {
        PA_PRODUCT_128("bf16");
    } else {
        PA_PRODUCT_128("f16");
    }
#undef PA_PRODUCT_64
#undef PA_PRODUCT_128
#endif
}

// Widens a chunk of FP8 K or V into 16-bit rows, once for all four warps. Eight lanes take four pieces of 16 bytes of two neighbouring rows,
// so that neither their loads nor their stores meet in a bank.
template <class T>
__device__ __forceinline__ void widen_rows(u32 wide, u32 stage, int thread) {
    constexpr int ROWS_AT_ONCE = T::GROUP_THREADS / T::ROW_PIECES, STEPS = T::CHUNK / ROWS_AT_ONCE;
    static_assert(ROWS_AT_ONCE % 8 == 0, "a thread's rows are alike to the swizzles");
    const int piece = (thread & 3) | (thread >> 1 & T::ROW_PIECES - 4), row = (thread >> 2 & 1) | thread / (2 * T::ROW_PIECES) * 2;
    const u32 from = stage + swizzled<T, false>(row, piece), low = wide + wide_swizzled<T>(row, 2 * piece), high = wide + wide_swizzled<T>(row, 2 * piece + 1);
    u32 words[STEPS][4];
#pragma unroll
    for (int i = 0; i < STEPS; i++) load_shared16(words[i], from + i * (ROWS_AT_ONCE * T::ROW_BYTES));
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const u32 to = i * (ROWS_AT_ONCE * 128), *w = words[i];
        store_shared16(low + to, {E4m3::widen<0>(w[0]), E4m3::widen<1>(w[0]), E4m3::widen<0>(w[1]), E4m3::widen<1>(w[1])});
        store_shared16(high + to, {E4m3::widen<0>(w[2]), E4m3::widen<1>(w[2]), E4m3::widen<0>(w[3]), E4m3::widen<1>(w[3])});
    }
}

// Keeps a chunk's scales where its stage is about to take the next one.
template <class T>
__device__ __forceinline__ void keep_scales(u32 wide, u32 stage, int thread) {
    if (thread < T::CHUNK / 2) {
        u32 words[4];
        load_shared16(words, stage + 2 * T::KV_BYTES + thread * 16);
        store_shared16(wide + 2 * T::WIDE_KV_BYTES + thread * 16, {words[0], words[1], words[2], words[3]});
    }
}

}  // namespace pa
