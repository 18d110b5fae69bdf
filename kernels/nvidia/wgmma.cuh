// Products of a warpgroup: 64 query rows, operand B in shared memory, swizzled. sm_90a only.
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

// Nothing that reads the accumulators moves ahead of it.
template <int TILES>
__device__ __forceinline__ void hold(float (&c)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++) asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}

// Waits for the products but those of the last `LEFT` commits, and holds accumulators of theirs.
template <int TILES, int LEFT = 0>
__device__ __forceinline__ void warpgroup_wait(float (&c)[TILES][4]) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#endif
    hold(c);
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

// On E4M3: S[64, 64] = A[64, 32] B[64, 32]^T, added to S where `add`; B in rows along k, A in registers or in rows too.
__device__ __forceinline__ void warpgroup_narrow_scores(float (*s)[4], const u32 (&a)[4], u64 b, int add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" PA_C0_31
                 "}, {%32,%33,%34,%35}, %36, p, 1, 1;}"
                 : PA_SIXTEEN(s, 0), PA_SIXTEEN(s, 4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
#endif
}
__device__ __forceinline__ void warpgroup_narrow_scores(float (*s)[4], u64 a, u64 b, int add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" PA_C0_31
                 "}, %32, %33, p, 1, 1;}"
                 : PA_SIXTEEN(s, 0), PA_SIXTEEN(s, 4)
                 : "l"(a), "l"(b), "r"(add));
#endif
}

}  // namespace pa
