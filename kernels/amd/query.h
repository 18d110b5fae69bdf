// Q: from global memory into LDS as matrix operands of the cache's dtype, once a task.
#pragma once

#include "lds.h"
#include "task.h"

namespace pa {

// Four elements of q as F32.
template <class T>
PA_DEVICE f32x4 load_query(const void *row, int dim) {
    if constexpr (T::QUERY == Query::F32) {
        return load<f32x4>(row, dim * 4);
    } else {
        constexpr Element E = T::QUERY == Query::BF16 ? Element::BF16 : Element::F16;
        const u32x2 x = load<u32x2>(row, dim * 2);
        return {widen<E>(x.x), widen<E>(x.x >> 16), widen<E>(x.y), widen<E>(x.y >> 16)};
    }
}

struct RowScale {
    float factor;   // what q is multiplied by
    float inverse;  // what its products are multiplied by
};

// FP8: the largest magnitude becomes the largest FP8. F16: a power of two takes it near the top of the range.
template <class T>
PA_DEVICE RowScale row_scale(float largest) {
    const float magnitude = max(largest, 0x1p-100f);
    if constexpr (T::FP8) {
        return {FP8_MAX / magnitude, magnitude / FP8_MAX};
    } else {
        const u32 exponent = bits(magnitude) >> 23;
        return {from_bits((127 + 14 + 127 - exponent) << 23), from_bits((exponent - 14) << 23)};
    }
}

// Four elements into the operand rows; a split Q's second part is what the first leaves over.
template <class T>
PA_DEVICE void stage_query(const Lds<T> &lds, int row, int dim, f32x4 x) {
    if constexpr (T::FP8) {
        lds.template query<u32>(0, row, dim) = narrow_fp8(x);
        return;
    }
    PA_UNROLL for (int part = 0; part < T::QUERY_PARTS; part++) {
        const u32x2 packed = {narrow<T::KV>(x.x, x.y), narrow<T::KV>(x.z, x.w)};
        lds.template query<u32x2>(part, row, dim * 2) = packed;
        x -= f32x4{widen<T::KV>(packed.x), widen<T::KV>(packed.x >> 16), widen<T::KV>(packed.y), widen<T::KV>(packed.y >> 16)};
    }
}

// Stages all rows of the workgroup, 16 lanes a row; rows that the sequence does not have are zeros.
template <class T>
PA_DEVICE void stage_queries(const Call &call, const RowGroup<T> &rows, const Lds<T> &lds) {
    constexpr int PIECES = T::HEAD_DIM / 64;
    constexpr int BYTES = T::QUERY == Query::F32 ? 4 : 2;
    const int part = thread() % 16 * 4;
    for (int row = thread() / 16; row < T::ROWS; row += 16) {
        f32x4 x[PIECES] = {};
        if (rows.has(row)) {
            const u8 *q = at(call.q, rows.offset(row, call.q_row, call.q_head) * BYTES);
            PA_UNROLL for (int i = 0; i < PIECES; i++) x[i] = load_query<T>(q, i * 64 + part);
        }
        if constexpr (T::ROW_SCALED) {
            float magnitude = 0;
            PA_UNROLL for (int i = 0; i < PIECES; i++) magnitude = max(magnitude, largest(__builtin_elementwise_abs(x[i])));
            const RowScale scale = row_scale<T>(largest_of_16(magnitude));
            PA_UNROLL for (int i = 0; i < PIECES; i++) x[i] *= scale.factor;
            if (part == 0) lds.query_scale(row) = scale.inverse;
        }
        PA_UNROLL for (int i = 0; i < PIECES; i++) stage_query<T>(lds, row, i * 64 + part, x[i]);
    }
}

}  // namespace pa
