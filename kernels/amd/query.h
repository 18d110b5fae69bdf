// Q: from global memory into LDS as matrix operands of the cache's dtype, once a task.
#pragma once

#include "lds.h"
#include "task.h"

namespace pa {

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
        lds.template query<u32>(0, row, dim) = narrow_fp8<T::PACK_NO_OLD>(x);
        return;
    }
    PA_UNROLL for (int part = 0; part < T::QUERY_PARTS; part++) {
        const u32x2 packed = {narrow<T::KV>(x.x, x.y), narrow<T::KV>(x.z, x.w)};
        lds.template query<u32x2>(part, row, dim * 2) = packed;
        x -= widen<T::KV>(packed);
    }
}

// One row of Q, spread over 16 lanes.
template <class T>
struct QueryRow {
    static constexpr int PIECES = T::HEAD_DIM / 64;
    static constexpr int BYTES = T::QUERY == Query::F32 ? 4 : 2;
    static constexpr Element ELEMENT = T::QUERY == Query::BF16 ? Element::BF16 : Element::F16;
    // Four elements as they are stored.
    typedef u32 Piece __attribute__((ext_vector_type(BYTES)));

    const RowGroup<T> &rows;
    int row;
    int dim = thread() % 16 * 4;
    Piece piece[PIECES] = {};

    PA_DEVICE QueryRow(const RowGroup<T> &rows, int row) : rows(rows), row(row) {}

    PA_DEVICE bool exists() const { return rows.has(row); }

    // Rows past the sequence's load its last: a load by all lanes has no branch.
    PA_DEVICE void load(const Call &call) {
        const int last = rows.queries * T::GROUP - 1 - rows.first;
        if (last < 0) return;
        const u8 *q = at(call.q, rows.offset(min(row, last), call.q_row, call.q_head) * BYTES);
        PA_UNROLL for (int i = 0; i < PIECES; i++) piece[i] = pa::load<Piece>(q, (i * 64 + dim) * BYTES);
    }

    PA_DEVICE f32x4 widened(int i) const {
        if constexpr (T::QUERY == Query::F32) {
            return __builtin_bit_cast(f32x4, piece[i]);
        } else {
            const u32 low = piece[i].x, high = piece[i].y;
            return {widen<ELEMENT>(low), widen<ELEMENT>(low >> 16), widen<ELEMENT>(high), widen<ELEMENT>(high >> 16)};
        }
    }

    // The largest magnitude of this lane's elements. Without their signs, 16-bit floats have the order of their bits.
    PA_DEVICE float largest_magnitude() const {
        if constexpr (T::PACKED_ABSMAX) {
            u32 x = 0;
            PA_UNROLL for (int i = 0; i < PIECES; i++)
                PA_UNROLL for (int word = 0; word < 2; word++) x = larger_halves(x, piece[i][word] & 0x7fff7fff);
            return widen<ELEMENT>(larger_halves(x, x >> 16));
        } else {
            float x = 0;
            PA_UNROLL for (int i = 0; i < PIECES; i++) x = max(x, largest(__builtin_elementwise_abs(widened(i))));
            return x;
        }
    }

    PA_DEVICE void stage(const Lds<T> &lds) const {
        float factor = 1;
        if constexpr (T::ROW_SCALED) {
            const RowScale scale = row_scale<T>(largest_of_16(largest_magnitude()));
            factor = scale.factor;
            if (dim == 0) lds.query_scale(row) = scale.inverse;
        }
        PA_UNROLL for (int i = 0; i < PIECES; i++) stage_query<T>(lds, row, i * 64 + dim, T::ROW_SCALED ? widened(i) * factor : widened(i));
    }
};

// Stages all rows of the workgroup; rows that the sequence does not have are zeros.
template <class T>
PA_DEVICE void stage_queries(const Call &call, const RowGroup<T> &rows, const Lds<T> &lds) {
    for (int i = thread() / 16; i < T::ROWS; i += 16) {
        QueryRow<T> row(rows, i);
        if (row.exists()) row.load(call);
        row.stage(lds);
    }
}

}  // namespace pa
