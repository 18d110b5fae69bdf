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
            // Where scores are masked before it is multiplied, not even the least must become 0.
            if constexpr (T::SCALE_IN_EXP2) factor[m] = max(factor[m], 0x1p-126f);
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
        const u32 offset = lane() / 16 * 16;
        PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) {
            const u32 token = pages.lds.wave * T::WAVE_TOKENS + sub * 16;
            const u32 place = pages.template shared_place<16>(tile, token) * 4;
            auto of = [&](const HeadCache &cache) {
                return load<Unaligned>(cache.base + pages.template page<16>(cache, tile, token, 0) + place, offset);
            };
            key[sub] = of(pages.key_scale);
            value[sub] = of(pages.value_scale);
        }
    }

    // K's (0) or V's (1) that are staged.
    static PA_DEVICE void read(f32x4 *scales, int which, const Lds<T> &lds) {
        PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) {
            const int token = lds.wave * T::WAVE_TOKENS + sub * 16 + lane() / 16 * 4;
            scales[sub] = lds.template token_scale<f32x4>(which, token);
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

// Scales of a tile to come, a token a thread, on their way to LDS.
template <class T>
struct NextScales {
    float key, value;

    PA_DEVICE void load_tile(const Pages<T> &pages, int tile) {
        const u32 token = pages.lds.wave * T::WAVE_TOKENS;
        const u32 place = pages.template shared_place<T::WAVE_TOKENS>(tile, token) * 4;
        // Apart from what the page has in scalar registers.
        const u32 offset = opaque_lane(lane() * 4);
        auto of = [&](const HeadCache &cache) {
            return load<float>(cache.base + pages.template page<T::WAVE_TOKENS>(cache, tile, token, 0) + place, offset);
        };
        key = of(pages.key_scale);
        value = of(pages.value_scale);
    }

    // Tokens that are not the call's get V scale 0. The largest magnitude of each wave's V scales goes along.
    PA_DEVICE void stage(const Task<T> &task, const Lds<T> &lds, int tile) const {
        const int token = tile * T::TOKENS + thread();
        const float owned = token < task.context && (!T::WINDOW || token >= task.first_token) ? value : 0;
        lds.template token_scale<float>(0, thread()) = key;
        lds.template token_scale<float>(1, thread()) = owned;
        const float largest = largest_of_row(largest_of_16(__builtin_fabsf(owned)));
        if (lane() == 0) lds.value_scale(lds.wave) = largest;
    }
};

// Dot products become scores. Where the scale is part of exp2, they stay dot products.
template <class T>
PA_DEVICE void scale_scores(Scores<T> &scores, RowStates<T> &rows, const TokenScales<T> &scales, float cap) {
    // Not a value that was copied, before the loop, into both registers of each packed multiplication's operand.
    if constexpr (T::FP8) {
        PA_UNROLL for (int m = 0; m < T::M_TILES; m++) rows.factor[m] = opaque_lane(rows.factor[m]);
    }
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
        const int position = task.position(m * 16 + opaque_lane(lane() % 16));
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
    // Pair by pair, which is an instruction each, in two chains.
    f32x2 both = {max(scores.of[m][0].x, scores.of[m][0].y), max(scores.of[m][0].z, scores.of[m][0].w)};
    PA_UNROLL for (int sub = 1; sub < T::SUBTILES; sub++) {
        const f32x4 s = scores.of[m][sub];
        both = {max(max(both.x, s.x), s.y), max(max(both.y, s.z), s.w)};
    }
    float x = largest_of_row(max(both.x, both.y));
    if constexpr (T::SCALE_IN_EXP2) x *= rows.factor[m];
    if (lane() < 16) lds.maximum(m, lane(), lds.wave) = x;
}

// Scores become their distances from the reference: that of the largest is none.
template <class T>
PA_DEVICE void subtract_reference(Scores<T> &scores, float factor, float reference, int m) {
    // The reference was rounded when it was multiplied, and so are scores.
    _Pragma("clang fp contract(off)")
    PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) {
        const f32x4 scaled = scores.of[m][sub] * factor;
        scores.of[m][sub] = scaled - reference;
    }
}

// P of one M-tile goes to LDS, the row's maximum and sum move on; gives what O so far is to be multiplied by.
// With per-token scales P takes on V's, which are parts of the tile's largest.
template <class T>
PA_DEVICE float publish_p(Scores<T> &scores, RowStates<T> &rows, const TokenScales<T> &scales, const Lds<T> &lds, int m) {
    const float maximum = max(rows.maximum[m], largest(lds.maxima(m, lane() % 16)));
    // A row that has attended nothing yet has P = exp2(-inf - 0).
    const float reference = maximum == -INFINITE ? 0 : maximum;
    const float decay = exp2(rows.maximum[m] - reference);
    float factor = rows.factor[m], shift = T::P_SHIFT - reference;
    // A large reference rounds the shift: up by one or more, it would take P past the largest FNUZ (P_SHIFT of OCP does not round up so far).
    if constexpr (T::FP8 && !T::GFX950) shift = shift + reference > T::P_SHIFT + 0.5f ? -reference : shift;
    if constexpr (T::SCALE_IN_EXP2) {
        // By how much a large reference was rounded would be a factor of P, past what P can hold.
        if (__builtin_amdgcn_ballot_w64(__builtin_fabsf(reference) > 0x1p12f)) {
            subtract_reference(scores, factor, reference, m);
            factor = 1;
            shift = T::P_SHIFT;
        }
    }
    f32x4 total = 0;
    PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) {
        f32x4 p = T::SCALE_IN_EXP2 ? __builtin_elementwise_fma(scores.of[m][sub], f32x4(factor), f32x4(shift)) : scores.of[m][sub] + shift;
        PA_UNROLL for (int i = 0; i < 4; i++) p[i] = exp2(p[i]);
        total += p;
        const int token = lds.wave * T::WAVE_TOKENS + sub * 16 + lane() / 16 * 4;
        if constexpr (T::FP8) {
            if constexpr (T::PER_TOKEN) p *= scales.value[sub];
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
