// Products of a warpgroup: 64 query rows, the 16-bit operand B in shared memory in the 128-byte swizzle. sm_90a only.
#pragma once

#include "pages.cuh"

namespace pa {

// Describes rows of 128 bytes, eight to a swizzle atom of 1024.
__device__ __forceinline__ u64 describe(u32 address) {
    return u64((address & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

__device__ __forceinline__ void warpgroup_begin() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void warpgroup_end() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}

// C[64, 64] = A[64, 16] B[16, 64], added to C where `add`. B's rows of 128 bytes run along k, or along n where TRANSPOSED.
template <class Element, int TRANSPOSED>
__device__ __forceinline__ void warpgroup_mma(float (*c)[4], const u32 (&a)[4], u64 b, int add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Same<Element, Bf16>::value) {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                     "{%32,%33,%34,%35}, %36, p, 1, 1, %38;}"
                     : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    } else {
        asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                     "{%32,%33,%34,%35}, %36, p, 1, 1, %38;}"
                     : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
#endif
}

// Widens a chunk of FP8 K and V into 16-bit rows, once for all four warps. A lane takes 16 bytes of a row; the upper four of a row's eight
// lanes store their second half first, so that no two meet in a bank.
template <class T>
__device__ __forceinline__ void widen_chunk(u32 wide, u32 stage, int thread) {
    constexpr int ROWS_AT_ONCE = T::GROUP_THREADS / T::ROW_PIECES;
    const int piece = thread % T::ROW_PIECES, row0 = thread / T::ROW_PIECES, order = piece >> 2 & 1;
#pragma unroll
    for (int kv = 0; kv < 2; kv++) {
#pragma unroll
        for (int step = 0; step < T::CHUNK; step += ROWS_AT_ONCE) {
            const int row = step + row0;
            u32 words[4];
            load_shared16(words, stage + kv * T::KV_BYTES + row * T::ROW_BYTES + piece * 16);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 low = i == order ? words[0] : words[2], high = i == order ? words[1] : words[3];
                store_shared16(wide + kv * T::WIDE_KV_BYTES + wide_swizzled<T>(row, 2 * piece + (i ^ order)),
                               {E4m3::widen<0>(low), E4m3::widen<1>(low), E4m3::widen<0>(high), E4m3::widen<1>(high)});
            }
        }
    }
    if constexpr (T::PER_TOKEN) {
        if (thread < T::CHUNK / 2) {
            u32 words[4];
            load_shared16(words, stage + 2 * T::KV_BYTES + thread * 16);
            store_shared16(wide + 2 * T::WIDE_KV_BYTES + thread * 16, {words[0], words[1], words[2], words[3]});
        }
    }
}

}  // namespace pa
