// The instructions that the AMD kernels are written in, by the compiler's builtins: no HIP headers are needed. Wave64, gfx942 and gfx950.
#pragma once

#define PA_DEVICE __attribute__((device, always_inline)) inline
#define PA_UNROLL _Pragma("unroll")

namespace pa {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long u64;
typedef u32 u32x2 __attribute__((ext_vector_type(2)));
typedef u32 u32x4 __attribute__((ext_vector_type(4)));
typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef u16 u16x2 __attribute__((ext_vector_type(2)));
typedef short i16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));
typedef _Float16 f16x4 __attribute__((ext_vector_type(4)));
typedef _Float16 f16x8 __attribute__((ext_vector_type(8)));
typedef __bf16 bf16x2 __attribute__((ext_vector_type(2)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));

// What a cache stores and a matrix instruction multiplies.
enum class Element { BF16, F16, FP8 };

constexpr int WAVE = 64;
constexpr float INFINITE = __builtin_inff();

// --- Work items -----------------------------------------------------------------------------------------------------------------------

// Threads and waves are counted within their tile group of 256: a workgroup is one of them, or two.
constexpr int GROUP_THREADS = 256;

PA_DEVICE u32 thread() { return __builtin_amdgcn_workitem_id_x() % GROUP_THREADS; }
PA_DEVICE u32 lane() { return thread() % WAVE; }
PA_DEVICE u32 uniform(u32 x) { return __builtin_amdgcn_readfirstlane(x); }
PA_DEVICE u32 wave() { return uniform(thread() / WAVE); }
PA_DEVICE u32 group() { return uniform(__builtin_amdgcn_workitem_id_x() / GROUP_THREADS); }

// Waits for the waves of the workgroup; LDS written before is visible after. Global loads stay in flight.
PA_DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// Keeps the compiler from moving instructions across: loads are issued where they are written.
PA_DEVICE void pin() { __builtin_amdgcn_sched_barrier(0); }

// --- Memory ---------------------------------------------------------------------------------------------------------------------------

#define PA_GLOBAL __attribute__((address_space(1)))

// A global load from a base (scalar registers where the base is the same in all lanes) and the lane's byte offset. What is streamed
// passes the caches by, for it is read once.
template <class V, bool STREAMED = false>
PA_DEVICE V load(const void *base, u32 offset) {
    const auto *from = (const PA_GLOBAL V *)((const PA_GLOBAL u8 *)base + offset);
    if constexpr (STREAMED) return __builtin_nontemporal_load(from);
    return *from;
}

template <class V>
PA_DEVICE void store(void *base, u64 offset, V value) {
    *(PA_GLOBAL V *)((PA_GLOBAL u8 *)base + offset) = value;
}

PA_DEVICE const u8 *at(const void *base, long bytes) { return (const u8 *)base + bytes; }

template <class V>
PA_DEVICE V &lds_at(u8 *lds, int offset) {
    typedef V __attribute__((may_alias)) Alias;
    return *(Alias *)__builtin_assume_aligned(lds + offset, sizeof(V));
}

// A scalar value that the compiler takes as it is, instead of taking apart what it was made of in every iteration.
PA_DEVICE u64 opaque(u64 x) {
    asm("" : "+s"(x));
    return x;
}

// An address that all lanes share, likewise: a lane's part stays apart from it, an offset of 32 bits.
PA_DEVICE const u8 *opaque_scalar(const u8 *x) {
    asm("" : "+s"(x));
    return x;
}

// A value that no kernel writes while this one runs, by a scalar load.
template <class V>
PA_DEVICE V constant(const void *address) { return *(const __attribute__((address_space(4))) V *)(u64)address; }

// Has scalar values there from here on: loads that they come by are not put off.
PA_DEVICE void settle() {}
template <class V, class... More>
PA_DEVICE void settle(V x, More... more) {
    asm volatile("" ::"s"(x));
    settle(more...);
}

// A value of this lane that is not looked through: what it is made into is not computed, nor waited for, earlier, nor kept in scalar registers.
PA_DEVICE u32 opaque_lane(u32 x) {
    asm("" : "+v"(x));
    return x;
}
PA_DEVICE float opaque_lane(float x) {
    asm("" : "+v"(x));
    return x;
}

// An address of this lane, likewise.
PA_DEVICE const u8 *opaque_lane(const u8 *x) {
    asm("" : "+v"(x));
    return x;
}

// A value of this lane, likewise, that is made anew in every iteration, not once ahead of the loop.
PA_DEVICE u32 fresh_lane(u32 x) {
    asm volatile("" : "+v"(x));
    return x;
}

// A value that lies in an accumulation register until its next use.
PA_DEVICE float parked(float x) {
    asm("" : "+a"(x));
    return x;
}

// --- Arithmetic -----------------------------------------------------------------------------------------------------------------------

PA_DEVICE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
PA_DEVICE float log2(float x) { return __builtin_amdgcn_logf(x); }
PA_DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
#if defined(__gfx950__)
PA_DEVICE float max(float a, float b) { return __builtin_elementwise_maximum(a, b); }
#else
PA_DEVICE float max(float a, float b) { return __builtin_fmaxf(a, b); }
#endif
PA_DEVICE int max(int a, int b) { return a > b ? a : b; }
PA_DEVICE int min(int a, int b) { return a < b ? a : b; }
PA_DEVICE u32 bits(float x) { return __builtin_bit_cast(u32, x); }
PA_DEVICE float from_bits(u32 x) { return __builtin_bit_cast(float, x); }
// A word with the lowest `count` bits set: none below 1, all above 31.
PA_DEVICE u32 low_bits(int count) { return (u64(0xffffffff) << min(max(count, 0), 32)) >> 32; }
PA_DEVICE float largest(f32x4 x) { return max(max(x.x, x.y), max(x.z, x.w)); }
PA_DEVICE float sum(f32x4 x) { return (x.x + x.y) + (x.z + x.w); }

// --- Lanes ----------------------------------------------------------------------------------------------------------------------------

// The value of the lane whose number differs in the bit of value 16, or of 32.
struct Swapped {
    float mine, other;
};

template <int BIT>
PA_DEVICE Swapped swapped(float x) {
    static_assert(BIT == 16 || BIT == 32);
#if defined(__gfx950__)
    // Both results of a swap of a register with its copy: between them they hold each lane's value and its partner's.
    auto pair = BIT == 16 ? __builtin_amdgcn_permlane16_swap(bits(x), bits(x), false, false)
                          : __builtin_amdgcn_permlane32_swap(bits(x), bits(x), false, false);
    return {from_bits(pair[0]), from_bits(pair[1])};
#else
    if constexpr (BIT == 16) {
        return {x, from_bits(__builtin_amdgcn_ds_swizzle(bits(x), 0x401f))};
    } else {
        return {x, from_bits(__builtin_amdgcn_ds_bpermute((thread() ^ 32) * 4, bits(x)))};
    }
#endif
}

// The largest value, or the sum, over the four lanes that hold one query row (lane % 16).
PA_DEVICE float largest_of_row(float x) {
    auto [a, b] = swapped<16>(x);
    auto [c, d] = swapped<32>(max(a, b));
    return max(c, d);
}

PA_DEVICE float sum_of_row(float x) {
    auto [a, b] = swapped<16>(x);
    auto [c, d] = swapped<32>(a + b);
    return c + d;
}

template <int CONTROL>
PA_DEVICE u32 dpp(u32 x) {
    return __builtin_amdgcn_update_dpp(0, x, CONTROL, 0xf, 0xf, true);
}

// The larger of each half's 16-bit integers.
PA_DEVICE u32 larger_halves(u32 a, u32 b) {
    return __builtin_bit_cast(u32, __builtin_elementwise_max(__builtin_bit_cast(u16x2, a), __builtin_bit_cast(u16x2, b)));
}

// The largest of 16 consecutive lanes. Not negative, so that the order of the bits is the order of the values.
PA_DEVICE float largest_of_16(float magnitude) {
    u32 x = bits(magnitude);
    auto step = [&](u32 other) { x = x > other ? x : other; };
    step(dpp<0x128>(x));  // rotated by 8
    step(dpp<0x124>(x));  // rotated by 4
    step(dpp<0x4e>(x));   // quads 2, 3, 0, 1
    step(dpp<0xb1>(x));   // quads 1, 0, 3, 2
    return from_bits(x);
}

// --- Conversions ----------------------------------------------------------------------------------------------------------------------

// The F32 of a 16-bit element in the low half of `x`.
template <Element E>
PA_DEVICE float widen(u16 x) {
    if constexpr (E == Element::BF16) return from_bits(u32(x) << 16);
    return float(__builtin_bit_cast(_Float16, x));
}

template <Element E>
PA_DEVICE f32x4 widen(u32x2 x) {
    return {widen<E>(u16(x.x)), widen<E>(u16(x.x >> 16)), widen<E>(u16(x.y)), widen<E>(u16(x.y >> 16))};
}

// Two F32 to two 16-bit elements, to nearest even.
template <Element E>
PA_DEVICE u32 narrow(float low, float high) {
    if constexpr (E == Element::F16) {
        return __builtin_bit_cast(u32, f16x2{_Float16(low), _Float16(high)});
    } else {
#if defined(__gfx950__)
        return __builtin_bit_cast(u32, bf16x2{__bf16(low), __bf16(high)});
#else
        auto rounded = [](float x) { return bits(x) + 0x7fff + (bits(x) >> 16 & 1); };
        return __builtin_amdgcn_perm(rounded(high), rounded(low), 0x07060302);
#endif
    }
}

// Four F32 to FP8 (FNUZ on gfx942), to nearest even. Magnitudes must not round past the largest value: whether that saturates is a mode.
// The first conversion keeps half a word that the second fills: `NO_OLD` leaves it undefined, which takes no instruction that zeroes it.
// (A frozen undefined value would be zero to the compiler.)
template <bool NO_OLD>
PA_DEVICE u32 narrow_fp8(f32x4 x) {
    _Pragma("clang diagnostic push") _Pragma("clang diagnostic ignored \"-Wuninitialized\"")
    int word;
    if constexpr (!NO_OLD) word = 0;
    word = __builtin_amdgcn_cvt_pk_fp8_f32(x.x, x.y, word, false);
    _Pragma("clang diagnostic pop")
    return __builtin_amdgcn_cvt_pk_fp8_f32(x.z, x.w, word, true);
}

#if defined(__gfx950__)
constexpr float FP8_MAX = 448;
#else
constexpr float FP8_MAX = 240;
#endif

// --- Matrix instructions --------------------------------------------------------------------------------------------------------------

// C += A B of 16 x 16, with four 16-byte units of A's row `lane % 16` and of B's column `lane % 16`, unit `lane / 16` in this lane. The sum
// runs over 4 * 16 bytes of elements. C: column `lane % 16`, rows `lane / 16 * 4 ..+ 4`.
template <Element E>
PA_DEVICE f32x4 multiply(u32x4 a, u32x4 b, f32x4 c) {
    if constexpr (E == Element::FP8) {
        auto half = [](u32x4 x, int i) { return long(u64(x[2 * i + 1]) << 32 | x[2 * i]); };
        c = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(half(a, 0), half(b, 0), c, 0, 0, 0);
        return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(half(a, 1), half(b, 1), c, 0, 0, 0);
    } else if constexpr (E == Element::F16) {
#if defined(__gfx950__)
        return __builtin_amdgcn_mfma_f32_16x16x32_f16(__builtin_bit_cast(f16x8, a), __builtin_bit_cast(f16x8, b), c, 0, 0, 0);
#else
        auto half = [](u32x4 x, int i) { return __builtin_bit_cast(f16x4, u32x2{x[2 * i], x[2 * i + 1]}); };
        c = __builtin_amdgcn_mfma_f32_16x16x16f16(half(a, 0), half(b, 0), c, 0, 0, 0);
        return __builtin_amdgcn_mfma_f32_16x16x16f16(half(a, 1), half(b, 1), c, 0, 0, 0);
#endif
    } else {
#if defined(__gfx950__)
        return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(bf16x8, a), __builtin_bit_cast(bf16x8, b), c, 0, 0, 0);
#else
        auto half = [](u32x4 x, int i) { return __builtin_bit_cast(i16x4, u32x2{x[2 * i], x[2 * i + 1]}); };
        c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(half(a, 0), half(b, 0), c, 0, 0, 0);
        return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(half(a, 1), half(b, 1), c, 0, 0, 0);
#endif
    }
}

// Units of one or two steps that an instruction takes at once.
template <int WIDTH>
struct Operand {
    u32x4 unit[WIDTH];
};

template <Element E>
PA_DEVICE f32x4 multiply(const Operand<1> &a, const Operand<1> &b, f32x4 c) {
    return multiply<E>(a.unit[0], b.unit[0], c);
}

#if defined(__gfx950__)
// FP8 over both steps: a lane's 32 bytes are the same elements of A and B, whichever they are, and no scale is theirs.
template <Element E>
PA_DEVICE f32x4 multiply(const Operand<2> &a, const Operand<2> &b, f32x4 c) {
    static_assert(E == Element::FP8);
    auto whole = [](const Operand<2> &x) { return __builtin_shufflevector(x.unit[0], x.unit[1], 0, 1, 2, 3, 4, 5, 6, 7); };
    return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(whole(a), whole(b), c, 0, 0, 0, 0, 0, 0);
}
#endif

}  // namespace pa
