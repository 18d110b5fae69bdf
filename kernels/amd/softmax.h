// From dot products to P: scale, cap, mask, and the running maximum and sum of each row. Scores are in units of log 2 throughout.
//
// Row sums are taken over P before it is rounded to the cache's dtype, so that the log-sum-exp is exact and the merge of parts consistent.
#pragma once

#include "gemm.h"

namespace pa {

// tanh to a few units in the last place: a rational of exp2 cancels near 0, where a polynomial serves.
PA_DEVICE float tanh(float x) {
    const float square = x * x;
    const float series = x * (1 + square * (-1 / 3.f + square * (2 / 15.f + square * (-17 / 315.f + square * (62 / 2835.f)))));
    const float rational = 1 - 2 * reciprocal(exp2(x * 2.8853900817779268f) + 1);
    return square < 0.0625f ? series : rational;
}

// What the rows of the workgroup need in every tile. Arrays are by M-tile; a lane stands for row `lane % 16` of each.
template <class T>
struct RowStates {
    float factor[T::M_TILES];   // from a dot product to a score
    float maximum[T::M_TILES];  // of all tiles so far
    float sum[T::M_TILES];      // of P of this lane's tokens, times 2^P_EXPONENT, against `maximum`

    PA_DEVICE RowStates(const Call &call, const Lds<T> &lds) {
        PA_UNROLL for (int m = 0; m < T::M_TILES; m++) {
            const int row = m * 16 + lane() % 16;
            factor[m] = call.args.scale_log2;
            // The MXFP4 tile's addresses take all scalar registers: what is the same in all lanes is kept in each.
            if constexpr (T::SCALES == Scales::BLOCK) factor[m] = opaque_lane(factor[m]);
            if constexpr (T::SCALES == Scales::SCALAR) factor[m] *= constant<float>(call.args.k_scale);
            if constexpr (T::ROW_SCALED) factor[m] *= lds.query_scale(row);
            maximum[m] = -INFINITE;
            sum[m] = 0;
        }
    }
};

// Scales of this wave's tokens as scores are spread over lanes.
template <class T>
struct TokenScales {
    typedef f32x4 Unaligned __attribute__((aligned(4)));
    f32x4 key[T::SUBTILES], value[T::SUBTILES];

    PA_DEVICE void load_tile(const Pages<T> &pages, int tile) {
        const TileArgs &args = pages.call.args;
        const HeadCache keys(args.k_scale, args.k_scale_stride, pages.task.rows.head, 4);
        const HeadCache values(args.v_scale, args.v_scale_stride, pages.task.rows.head, 4);
        const u32 offset = lane() / 16 * 16;
        PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) {
            const u32 token = pages.lds.wave * T::WAVE_TOKENS + sub * 16;
            const u32 place = pages.template shared_place<16>(tile, token) * 4;
            key[sub] = load<Unaligned>(keys.base + pages.template page<16>(keys, tile, token, 0) + place, offset);
            value[sub] = load<Unaligned>(values.base + pages.template page<16>(values, tile, token, 0) + place, offset);
        }
    }

    // Tokens that are not the call's get V scale 0.
    PA_DEVICE void mask(const Task<T> &task, const Lds<T> &lds, int tile) {
        const int token = tile * T::TOKENS + lds.wave * T::WAVE_TOKENS + lane() / 16 * 4;
        const int end = task.context - token, first = T::WINDOW ? task.first_token - token : 0;
        PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++)
            PA_UNROLL for (int i = 0; i < 4; i++) {
                const int element = sub * 16 + i;
                value[sub][i] = element < end && (!T::WINDOW || element >= first) ? value[sub][i] : 0;
            }
    }

    // The largest magnitude of this wave's V scales, in all lanes.
    PA_DEVICE float largest_value() const {
        float x = 0;
        PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) x = max(x, largest(__builtin_elementwise_abs(value[sub])));
        return largest_of_row(x);
    }
};

// Dot products become scores. Where the scale is part of exp2, they stay dot products.
template <class T>
PA_DEVICE void scale_scores(Scores<T> &scores, const RowStates<T> &rows, const TokenScales<T> &scales, float cap) {
    PA_UNROLL for (int m = 0; m < T::M_TILES; m++)
        PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) {
            f32x4 &s = scores.of[m][sub];
            if constexpr (!T::SCALE_IN_EXP2) s *= rows.factor[m];
            if constexpr (T::PER_TOKEN) s *= scales.key[sub];
            if constexpr (T::SOFTCAP) {
                const float log2_e = 1.4426950408889634f;
                const float inner = 1 / (cap * log2_e), outer = cap * log2_e;
                PA_UNROLL for (int i = 0; i < 4; i++) s[i] = tanh(s[i] * inner) * outer;
            }
        }
}

// Scores of tokens that a row does not attend become -inf, whatever they are. Few tiles need it: what it takes is not kept in registers.
template <class T>
PA_DEVICE void mask_scores(Scores<T> &scores, const Task<T> &task, const Lds<T> &lds, int tile) {
    const int token = tile * T::TOKENS + lds.wave * T::WAVE_TOKENS + lane() / 16 * 4;
    PA_UNROLL for (int m = 0; m < T::M_TILES; m++) {
        const int position = task.position(opaque_lane(m * 16 + lane() % 16));
        const int last = position - token, first = T::WINDOW && position >= task.window ? last - task.window + 1 : -token;
        PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++)
            PA_UNROLL for (int i = 0; i < 4; i++) {
                const int element = sub * 16 + i;
                const bool attended = element <= last && (!T::WINDOW || element >= first);
                scores.of[m][sub][i] = attended ? scores.of[m][sub][i] : -INFINITE;
            }
    }
}

// The largest score of each row over this wave's tokens goes to LDS.
template <class T>
PA_DEVICE void publish_maximum(const Scores<T> &scores, const RowStates<T> &rows, const Lds<T> &lds, int m) {
    float x = largest(scores.of[m][0]);
    PA_UNROLL for (int sub = 1; sub < T::SUBTILES; sub++) x = max(x, largest(scores.of[m][sub]));
    x = largest_of_row(x);
    if constexpr (T::SCALE_IN_EXP2) x *= rows.factor[m];
    if (lane() < 16) lds.maximum(m, lane(), lds.wave) = x;
}

// P of one M-tile goes to LDS, the row's maximum and sum move on; gives what O so far is to be multiplied by.
// `value_factor`: with per-token scales V's, which P takes on, in parts of the tile's largest.
template <class T>
PA_DEVICE float publish_p(const Scores<T> &scores, RowStates<T> &rows, const TokenScales<T> &scales, float value_factor, const Lds<T> &lds,
                          int m) {
    const float maximum = max(rows.maximum[m], largest(lds.maxima(m, lane() % 16)));
    // A row that has attended nothing yet has P = exp2(-inf - 0).
    const float reference = maximum == -INFINITE ? 0 : maximum;
    const float decay = exp2(rows.maximum[m] - reference);
    const float shift = T::P_EXPONENT - reference;
    f32x4 total = 0;
    PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) {
        f32x4 p = T::SCALE_IN_EXP2 ? __builtin_elementwise_fma(scores.of[m][sub], f32x4(rows.factor[m]), f32x4(shift)) : scores.of[m][sub] + shift;
        PA_UNROLL for (int i = 0; i < 4; i++) p[i] = exp2(p[i]);
        total += p;
        const int token = lds.wave * T::WAVE_TOKENS + sub * 16 + lane() / 16 * 4;
        if constexpr (T::FP8) {
            if constexpr (T::PER_TOKEN) p *= scales.value[sub] * value_factor;
            lds.template p<u32>(0, m, lane() % 16, token) = narrow_fp8<T::PACK_NO_OLD>(p);
        } else {
            PA_UNROLL for (int part = 0; part < T::P_PARTS; part++) {
                const u32x2 packed = {narrow<T::KV>(p.x, p.y), narrow<T::KV>(p.z, p.w)};
                lds.template p<u32x2>(part, m, lane() % 16, token) = packed;
                p -= widen<T::KV>(packed);
            }
        }
    }
    const float sums = rows.sum[m] * decay + sum(total);
    rows.sum[m] = T::PARKS_STATES ? parked(sums) : sums;
    rows.maximum[m] = T::PARKS_STATES ? parked(maximum) : maximum;
    return decay;
}

}  // namespace pa
