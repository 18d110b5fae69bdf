// F32 to FP8 E4M3 (OCP and FNUZ) and MXFP4, as src/quant: to nearest even, the largest value for what is above it.
#pragma once

#include "device.h"
#include "number.h"

namespace pa {

// 2^exponent for -127..=127; the smallest one is subnormal.
PA_DEVICE float power_of_two(int exponent) { return float_of(exponent == -127 ? 1u << 22 : (unsigned)(exponent + 127) << 23); }

// The code (sign apart) nearest to |bits| in a format of MANTISSA bits and exponent bias BIAS, ties to even. Not NaN.
template <int MANTISSA, int BIAS> PA_DEVICE unsigned round_magnitude(unsigned bits, unsigned largest) {
    constexpr unsigned NORMAL = (unsigned)(128 - BIAS) << 23;                     // 2^(1 - BIAS)
    constexpr unsigned ANCHOR = (unsigned)(128 - BIAS - MANTISSA + 23) << 23;  // its last bit is a subnormal step, so adding it rounds
    constexpr int DROPPED = 23 - MANTISSA;
    unsigned subnormal = bits_of(float_of(bits) + float_of(ANCHOR)) - ANCHOR;
    unsigned normal = ((bits + (1u << (DROPPED - 1)) - 1 + (bits >> DROPPED & 1)) >> DROPPED) - ((unsigned)(127 - BIAS) << MANTISSA);
    return min_of(bits < NORMAL ? subnormal : normal, largest);
}

template <bool FNUZ> PA_DEVICE unsigned encode_e4m3(float x) {
    unsigned sign = bits_of(x) >> 24 & 0x80, bits = bits_of(x) & 0x7fffffff;
    if (bits > 0x7f800000) return FNUZ ? 0x80 : 0x7f;
    unsigned code = FNUZ ? round_magnitude<3, 8>(bits, 0x7f) : round_magnitude<3, 7>(bits, 0x7e);
    return FNUZ && code == 0 ? 0 : sign | code;
}

// The scale of a token whose largest magnitude is `absmax`: the largest code's, at least the smallest normal; 1 for zeros.
template <bool FNUZ> PA_DEVICE float token_scale(float absmax) {
    float scale = absmax / (FNUZ ? 240.0f : 448.0f), least = float_of(1u << 23);
    return absmax == 0 ? 1 : scale < least ? least : scale;
}

// A NaN gives 6: its block's scale marks it.
PA_DEVICE unsigned encode_e2m1(float x) {
    unsigned sign = bits_of(x) >> 28 & 8, bits = bits_of(x) & 0x7fffffff;
    return bits > 0x7f800000 ? 7 : sign | round_magnitude<1, 1>(bits, 7);
}

// The E8M0 scale of a block whose largest magnitude has these bits: 2^(its exponent - 2), 1 for zeros, NaN for infinity and NaN.
PA_DEVICE unsigned block_scale(unsigned absmax) {
    int scale = (int)(absmax >> 23) - 2;
    return absmax == 0 ? 127 : absmax >= 0x7f800000 ? 0xff : scale < 0 ? 0 : scale;
}

// What a block's values are multiplied by: one over its scale, exact, as both are powers of two.
PA_DEVICE float block_inverse(unsigned scale) { return scale == 0xff ? 0 : power_of_two(127 - (int)scale); }

}  // namespace pa
