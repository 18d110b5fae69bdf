// 16-bit floats to and from F32, to nearest even. A NaN keeps the payload that fits and becomes quiet, as on the CPU.
#pragma once

#include "device.h"

namespace pa {

// PA_QUERY: dtypes of q, k, v and the output; of a 16-bit cache too.
enum Number { BF16 = 0, F16 = 1, F32 = 2 };

template <int NUMBER> struct Stored {
    typedef unsigned short Type;
};
template <> struct Stored<F32> {
    typedef float Type;
};

PA_DEVICE bool is_nan(float x) { return (bits_of(x) & 0x7fffffff) > 0x7f800000; }

template <int NUMBER> PA_DEVICE float to_float(typename Stored<NUMBER>::Type x) {
    if constexpr (NUMBER == F32) {
        return x;
    } else if constexpr (NUMBER == BF16) {
        return float_of((unsigned)x << 16);
    } else {
        bool nan = (x & 0x7fff) > 0x7c00;
        return nan ? float_of((x & 0x8000u) << 16 | 0x7fc00000 | (x & 0x3ffu) << 13) : half_to_float(x);
    }
}

template <int NUMBER> PA_DEVICE typename Stored<NUMBER>::Type from_float(float x) {
    unsigned bits = bits_of(x);
    if constexpr (NUMBER == F32) {
        return x;
    } else if constexpr (NUMBER == BF16) {
        return (is_nan(x) ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    } else {
        return is_nan(x) ? (bits >> 16 & 0x8000) | 0x7e00 | (bits >> 13 & 0x3ff) : float_to_half(x);
    }
}

}  // namespace pa
