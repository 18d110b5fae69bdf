// What compilers and GPUs spell differently: clang for AMD (waves of 64; of 32 from gfx10 on), NVRTC for NVIDIA. No system headers.
#pragma once

#ifdef __AMDGCN__
#include "device_amd.h"
#else
#include "device_nvidia.h"
#endif

namespace pa {

PA_DEVICE unsigned sum_of(unsigned a, unsigned b) { return a + b; }
PA_DEVICE unsigned max_of(unsigned a, unsigned b) { return a > b ? a : b; }
PA_DEVICE unsigned min_of(unsigned a, unsigned b) { return a < b ? a : b; }

// The sum of x over the wave's lanes up to this one, over all of them, and the largest of them.
PA_DEVICE unsigned wave_scan(unsigned x) { return scan<sum_of>(x); }
PA_DEVICE unsigned wave_sum(unsigned x) { return lane_of(wave_scan(x), WAVE - 1); }
PA_DEVICE unsigned wave_max(unsigned x) { return lane_of(scan<max_of>(x), WAVE - 1); }

// Four floats, and stored elements that may lie at any address an element may.
struct alignas(16) Float4 {
    float x[4];
};
template <class T, int N> struct Elements {
    T x[N];
};

}  // namespace pa
