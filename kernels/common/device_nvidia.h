// device.h for NVRTC and NVIDIA GPUs.
#pragma once

#define PA_DEVICE __device__ __forceinline__
#define PA_SHARED __shared__
#define PA_ENTRY(threads) extern "C" __global__ void __launch_bounds__(threads)

namespace pa {

constexpr int WAVE = 32;
constexpr bool FNUZ = false;

PA_DEVICE int thread() { return threadIdx.x; }
PA_DEVICE int block_x() { return blockIdx.x; }
PA_DEVICE int block_y() { return blockIdx.y; }
PA_DEVICE int block_z() { return blockIdx.z; }
PA_DEVICE void barrier() { __syncthreads(); }

// Sixteen lanes swap together; the warp's others may have left.
template <int MASK> PA_DEVICE unsigned swap_lanes(unsigned x) { return __shfl_xor_sync(0xffffu << (thread() & 16), x, MASK); }
PA_DEVICE unsigned lane_of(unsigned x, int lane) { return __shfl_sync(~0u, x, lane); }

template <unsigned COMBINE(unsigned, unsigned)> PA_DEVICE unsigned scan(unsigned x) {
    int lane = thread() % WAVE;
    for (int distance = 1; distance < WAVE; distance *= 2) {
        unsigned other = __shfl_up_sync(~0u, x, distance);
        x = COMBINE(x, lane >= distance ? other : 0);
    }
    return x;
}

PA_DEVICE float reciprocal(float x) { return __frcp_rn(x); }
PA_DEVICE float exp2(float x) { return ::exp2f(x); }
PA_DEVICE float log2(float x) { return ::log2f(x); }

PA_DEVICE unsigned bits_of(float x) { return __float_as_uint(x); }
PA_DEVICE float float_of(unsigned bits) { return __uint_as_float(bits); }
PA_DEVICE float half_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
PA_DEVICE unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

}  // namespace pa
