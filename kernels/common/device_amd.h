// device.h for clang and AMD GPUs.
#pragma once

#define PA_DEVICE inline __attribute__((device, always_inline))
#define PA_SHARED static __attribute__((shared))
#define PA_ENTRY(threads) extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void

namespace pa {

#ifdef __GFX9__
constexpr int WAVE = 64;
#else
constexpr int WAVE = 32;
#endif

// FP8 is E4M3 in the FNUZ encoding on CDNA 3, OCP's elsewhere.
#ifdef __gfx942__
constexpr bool FNUZ = true;
#else
constexpr bool FNUZ = false;
#endif

PA_DEVICE int thread() { return __builtin_amdgcn_workitem_id_x(); }
PA_DEVICE int block_x() { return __builtin_amdgcn_workgroup_id_x(); }
PA_DEVICE int block_y() { return __builtin_amdgcn_workgroup_id_y(); }
PA_DEVICE int block_z() { return __builtin_amdgcn_workgroup_id_z(); }

// The block's threads meet, and see what was written to shared memory before.
PA_DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// x of the lane whose number differs in the bits of MASK, below 32.
template <int MASK> PA_DEVICE unsigned swap_lanes(unsigned x) { return __builtin_amdgcn_ds_swizzle(x, MASK << 10 | 0x1f); }
PA_DEVICE unsigned lane_of(unsigned x, int lane) { return __builtin_amdgcn_readlane(x, lane); }

#ifdef __GFX9__
template <int CONTROL, int ROWS> PA_DEVICE unsigned moved(unsigned x) {
    return __builtin_amdgcn_update_dpp(0, x, CONTROL, ROWS, 0xf, false);
}
// Combines x with that of every lane before it. 0 is neutral.
template <unsigned COMBINE(unsigned, unsigned)> PA_DEVICE unsigned scan(unsigned x) {
    x = COMBINE(x, moved<0x111, 0xf>(x));  // row_shr by 1, 2, 4 and 8 in rows of 16 lanes
    x = COMBINE(x, moved<0x112, 0xf>(x));
    x = COMBINE(x, moved<0x114, 0xf>(x));
    x = COMBINE(x, moved<0x118, 0xf>(x));
    x = COMBINE(x, moved<0x142, 0xa>(x));  // row_bcast:15 into the odd rows
    return COMBINE(x, moved<0x143, 0xc>(x));  // row_bcast:31 into the upper half
}
#else
template <unsigned COMBINE(unsigned, unsigned)> PA_DEVICE unsigned scan(unsigned x) {
    int lane = thread() % WAVE;
    for (int distance = 1; distance < WAVE; distance *= 2) {
        unsigned other = __builtin_amdgcn_ds_bpermute((lane - distance) * 4, x);
        x = COMBINE(x, lane >= distance ? other : 0);
    }
    return x;
}
#endif

PA_DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
PA_DEVICE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
PA_DEVICE float log2(float x) { return __builtin_amdgcn_logf(x); }

PA_DEVICE unsigned bits_of(float x) { return __builtin_bit_cast(unsigned, x); }
PA_DEVICE float float_of(unsigned bits) { return __builtin_bit_cast(float, bits); }
PA_DEVICE float half_to_float(unsigned short bits) { return (float)__builtin_bit_cast(_Float16, bits); }
PA_DEVICE unsigned short float_to_half(float x) { return __builtin_bit_cast(unsigned short, (_Float16)x); }

}  // namespace pa
