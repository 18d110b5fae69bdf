// An MXFP4 cache: a wave's 64 tokens of K and of V, from memory to BF16 operands.
//
// A row of K or V is cut into units of 16 bytes (32 dims, one scale; 8 bytes where head_dim is no multiple of 128), and a quarter of the lanes
// takes every fourth. Sums over dims may run in any order, so K needs nothing but conversion: the lane that holds a unit holds operands, a word
// (8 dims) a step. V is needed along tokens: a lane has one quarter's dims of four tokens, converts a word of each and puts them into LDS as
// rows of 64 tokens; each word makes 32 such rows. Scales go into the conversion, which is exact.
#pragma once

#include "lds.h"
#include "task.h"

namespace pa {

template <class T>
struct Mxfp4 {
    static_assert(T::MXFP4 && T::SCALES == Scales::BLOCK, "an MXFP4 cache has block scales");
    static constexpr int UNIT = T::HEAD_DIM % 128 == 0 ? 32 : 16;  // dims
    static constexpr int WORDS = UNIT / 8;
    static constexpr int UNITS = T::HEAD_DIM / UNIT / 4;  // of a lane
    // Units that a lane holds at a time; where there are many more, the next are loaded once these are used up.
    static constexpr int HELD = UNITS > 4 ? 2 : UNITS;
    static constexpr int PARTS = UNITS / HELD;

    // O, the scores, K and V as loaded; two workgroups a CU or more where they leave room for Q, P, addresses and temporaries.
    static constexpr int REGISTERS = T::M_TILES * (T::HEAD_DIM / 4 + T::SUBTILES * 4) + 8 * HELD * (WORDS + 1);
    static constexpr int WAVES_PER_EU = REGISTERS <= 136 ? 2 : 1;

    typedef u32 Unit __attribute__((ext_vector_type(WORDS)));

    // The first dim of a quarter's unit.
    static PA_DEVICE int dim(int unit, int quarter) { return (unit * 4 + quarter) * UNIT; }
};

// The F32 of an E8M0 code. The mantissa's top bit makes 2^-127 of 0 and NaN of 0xff; conversions look at the exponent alone.
PA_DEVICE float block_scale(u32 code) { return from_bits(code << 23 | (code == 0 || code == 0xff ? 0x400000 : 0)); }

// Two BF16 from a byte of a word of E2M1 codes, exact.
template <int BYTE>
PA_DEVICE u32 widen_fp4(u32 codes, float scale) {
    return __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, BYTE));
}

PA_DEVICE u32x4 widen_word(u32 codes, float scale) {
    return {widen_fp4<0>(codes, scale), widen_fp4<1>(codes, scale), widen_fp4<2>(codes, scale), widen_fp4<3>(codes, scale)};
}

// Orders LDS accesses of this wave's lanes, whose instructions the hardware executes in order.
PA_DEVICE void wave_fence() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront", "local");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
}

// The pages of a wave's 64 tokens of a tile. Ids are the same in all lanes: they come by scalar loads, whose wait drains no K or V.
template <class T>
struct WavePages {
    static constexpr int COUNT = T::PAGE < T::WAVE_TOKENS ? T::WAVE_TOKENS / T::PAGE : 1;
    int first;  // token
    u32 id[COUNT];

    // Pages that no row attends are not looked up: one that is attended stands for them.
    PA_DEVICE void load(const Call &call, const Task<T> &task, int tile) {
        const auto *table = (const __attribute__((address_space(4))) u32 *)(u64)task.table;
        const int attended = u32(task.first_token) / T::PAGE, most = min(u32(task.context - 1) / T::PAGE, call.max_pages - 1);
        first = tile * T::TOKENS + wave() * T::WAVE_TOKENS;
        PA_UNROLL for (int i = 0; i < COUNT; i++) {
            const int page = u32(first) / T::PAGE + i;
            const u32 entry = table[uniform(min(max(page, attended), most))], last = call.args.pages - 1;
            id[i] = entry < last ? entry : last;
        }
    }

    // Where token `token + own` of the wave's is in a tensor: `token` is the same in all lanes, `own` the lane's, less than SPAN.
    struct Place {
        const u8 *base;
        u32 offset;
    };
    template <int SPAN>
    PA_DEVICE Place place(const void *tensor, const Paged &stride, int head, int token, int own) const {
        constexpr bool WHOLE = T::PAGE >= SPAN;
        u32 page = id[token / T::PAGE % COUNT];
        if constexpr (!WHOLE) {
            PA_UNROLL for (int i = 1; i < SPAN / T::PAGE; i++) page = own >= i * T::PAGE ? id[token / T::PAGE + i] : page;
        }
        const int shared = T::PAGE > T::WAVE_TOKENS ? (first + token) % T::PAGE : WHOLE ? token % T::PAGE : 0;
        const u8 *base = at(tensor, page * stride.page + head * stride.head + shared * stride.token);
        return {base, u32(WHOLE ? own : own % T::PAGE) * u32(stride.token)};
    }
};

// K: lane `l` has tokens `l % 16` of every 16, quarter `l / 16`.
template <class T>
struct PackedKeys {
    using M = Mxfp4<T>;
    typename M::Unit unit[T::SUBTILES][M::HELD];
    u8 scale[T::SUBTILES][M::HELD];

    PA_DEVICE void load_part(const Call &call, const WavePages<T> &pages, int head, int part) {
        const int quarter = lane() / 16;
        PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) {
            const auto codes = pages.template place<16>(call.key, call.args.key_stride, head, sub * 16, lane() % 16);
            const auto scales = pages.template place<16>(call.args.k_scale, call.args.k_scale_stride, head, sub * 16, lane() % 16);
            PA_UNROLL for (int i = 0; i < M::HELD; i++) {
                const int dim = M::dim(part * M::HELD + i, quarter);
                unit[sub][i] = pa::load<typename M::Unit>(codes.base, codes.offset + dim / 2);
                scale[sub][i] = pa::load<u8>(scales.base, scales.offset + dim / 32);
            }
        }
    }
};

// V: lane `l` has tokens `l / 4 * 4 ..+ 4`, quarter `l % 4`.
template <class T>
struct PackedValues {
    using M = Mxfp4<T>;
    typename M::Unit unit[4][M::HELD];
    u8 scale[4][M::HELD];

    PA_DEVICE void load_part(const Call &call, const WavePages<T> &pages, int head, int part) {
        const TileArgs &args = call.args;
        const auto codes = pages.template place<T::WAVE_TOKENS>(args.value, args.value_stride, head, 0, lane() / 4 * 4);
        const auto scales = pages.template place<T::WAVE_TOKENS>(args.v_scale, args.v_scale_stride, head, 0, lane() / 4 * 4);
        PA_UNROLL for (int token = 0; token < 4; token++)
            PA_UNROLL for (int i = 0; i < M::HELD; i++) {
                const int dim = M::dim(part * M::HELD + i, lane() % 4);
                unit[token][i] = pa::load<typename M::Unit>(codes.base + token * args.value_stride.token, codes.offset + dim / 2);
                scale[token][i] = pa::load<u8>(scales.base + token * args.v_scale_stride.token, scales.offset + dim / 32);
            }
    }

    // Zeroes tokens that are not the call's: whatever they and their scales hold, 0 * NaN must not come of it.
    PA_DEVICE void mask(const Task<T> &task, const WavePages<T> &pages) {
        const int first = pages.first + lane() / 4 * 4;
        PA_UNROLL for (int token = 0; token < 4; token++) {
            const bool keep = first + token < task.context && (!T::WINDOW || first + token >= task.first_token);
            PA_UNROLL for (int i = 0; i < M::HELD; i++) {
                unit[token][i] = keep ? unit[token][i] : typename M::Unit(0);
                scale[token][i] = keep ? scale[token][i] : 127;
            }
        }
    }
};

// A wave's room in LDS for a word of V: 32 dims of 64 tokens, twice, so that the next word is put there while one is read.
template <class T>
struct ValueRows {
    static constexpr int ROW = T::WAVE_TOKENS * 2 + 8;
    static constexpr int BUFFER = 32 * ROW;
    static constexpr int BYTES = 2 * BUFFER;
    u8 *base;

    PA_DEVICE void put(const PackedValues<T> &values, const float (&scale)[4], int unit, int word, int buffer) const {
        u8 *rows = base + buffer * BUFFER + lane() % 4 * 8 * ROW + lane() / 4 * 8;
        const u32x4 pairs[4] = {widen_word(values.unit[0][unit][word], scale[0]), widen_word(values.unit[1][unit][word], scale[1]),
                                widen_word(values.unit[2][unit][word], scale[2]), widen_word(values.unit[3][unit][word], scale[3])};
        PA_UNROLL for (int i = 0; i < 4; i++) {
            auto tokens = [&](u32 halves) {
                return u32x2{__builtin_amdgcn_perm(pairs[1][i], pairs[0][i], halves), __builtin_amdgcn_perm(pairs[3][i], pairs[2][i], halves)};
            };
            lds_at<u32x2>(rows, 2 * i * ROW) = tokens(0x05040100);
            lds_at<u32x2>(rows, (2 * i + 1) * ROW) = tokens(0x07060302);
        }
    }

    // The operand of 16 rows for a step of 32 tokens, in the order that a lane has scores in: four of one 16, four of the next.
    PA_DEVICE u32x4 get(int buffer, int tile16, int step) const {
        u8 *row = base + buffer * BUFFER + (tile16 * 16 + lane() % 16) * ROW + step * 64 + lane() / 16 * 8;
        const u32x2 low = lds_at<u32x2>(row, 0), high = lds_at<u32x2>(row, 32);
        return {low.x, low.y, high.x, high.y};
    }
};

}  // namespace pa
