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
    static constexpr bool LARGE = UNITS > 4;
    static constexpr int PARTS = UNITS / HELD;

    // O, scores, P, K and V as loaded; two workgroups a CU or more where they leave room for Q, addresses and temporaries.
    static constexpr int REGISTERS = T::M_TILES * (T::HEAD_DIM / 4 + T::SUBTILES * 6) + 8 * HELD * (WORDS + 1);
    static constexpr int WAVES_PER_EU = T::GROUPS == 2 || REGISTERS <= 168 ? 2 : 1;

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

// A base that lanes' offsets, which are made anew, are added to. Where all lanes share it it is not looked through: sums that are moved out of the loop
// take two vector registers and two instructions for each load. Addresses of one page follow one from the other, and lanes find their pages anew:
// multiples of strides and masks of lanes would keep scalar registers for the whole loop.
template <bool UNIFORM>
PA_DEVICE const u8 *opaque_base(const u8 *base) {
    return UNIFORM ? opaque_scalar(base) : base;
}

// The pages that rows attend: one of these stands for any other, which is not looked up.
template <class T>
struct AttendedPages {
    int first, last;

    PA_DEVICE AttendedPages(const Call &call, const Task<T> &task)
        : first(u32(task.first_token) / T::PAGE), last(min(u32(task.context - 1) / T::PAGE, call.max_pages - 1)) {}
    PA_DEVICE int page(int page) const { return min(max(page, first), last); }
};

// The ids of all pages of the group's tiles in LDS, where the launch has room for them: tiles find theirs without the block table, whose
// scalar loads LDS results would wait for, too.
template <class T>
struct StagedPages {
    // Of a tile. A larger page serves tiles of both groups: each stages all.
    static constexpr int TILE_PAGES = T::TOKENS > T::PAGE ? T::TOKENS / T::PAGE : 1;
    static constexpr int STRIDE = T::TOKENS >= T::PAGE ? T::GROUPS : 1;
    u8 *ids;

    // `workgroup`: room for both groups', as the registry counts it.
    PA_DEVICE StagedPages(const Call &call, u8 *workgroup) : ids(workgroup) {
        if constexpr (STRIDE > 1) {
            ids += T::group() * ((call.max_pages + STRIDE * TILE_PAGES - 1) / (STRIDE * TILE_PAGES) * TILE_PAGES) * 4;
        } else if constexpr (T::GROUPS > 1) {
            ids += T::group() * call.max_pages * 4;
        }
    }

    static PA_DEVICE int page(u32 token) { return token / T::PAGE; }
    // Of pages from the group's first on, `i` of them before it, how many are its own; and back.
    static PA_DEVICE int place(u32 i) { return i - i / (STRIDE * TILE_PAGES) * TILE_PAGES * (STRIDE - 1); }
    static PA_DEVICE int offset(u32 place) { return place + place / TILE_PAGES * TILE_PAGES * (STRIDE - 1); }

    PA_DEVICE void stage(const Call &call, const Task<T> &task) const {
        const AttendedPages<T> attended(call, task);
        const int first = page(task.first_tile * T::TOKENS), last = page(u32(task.end_tile - T::GROUPS + 1) * T::TOKENS - 1);
        for (int i = thread(); i <= place(last - first); i += GROUP_THREADS) {
            lds_at<u32>(ids, i * 4) = clamped_id(call.args, pa::load<u32>(task.table + attended.page(first + offset(i)), 0));
        }
    }
    // Those from a token on.
    PA_DEVICE u8 *from(const Task<T> &task, int token) const { return ids + place(page(token) - page(task.first_tile * T::TOKENS)) * 4; }
};

// The pages of a wave's 64 tokens of a tile.
template <class T>
struct WavePages {
    static constexpr int COUNT = T::PAGE < T::WAVE_TOKENS ? T::WAVE_TOKENS / T::PAGE : 1;
    int first;         // token
    u8 *staged;        // ids
    u32 entry[COUNT];  // else, of the block table: clamped where it is used, so that nothing waits for it here

    PA_DEVICE void find(const Call &call, const Task<T> &task, StagedPages<T> pages, int wave, int tile) {
        first = tile * T::TOKENS + wave * T::WAVE_TOKENS;
        if constexpr (T::STAGED_PAGES) {
            staged = pages.from(task, first);
        } else {
            // By scalar loads, whose wait drains no K or V.
            const AttendedPages<T> attended(call, task);
            const auto *table = (const __attribute__((address_space(4))) u32 *)(u64)task.table;
            PA_UNROLL for (int i = 0; i < COUNT; i++) entry[i] = table[uniform(attended.page(u32(first) / T::PAGE + i))];
        }
    }

    PA_DEVICE u32 id(const TileArgs &args, int i) const {
        if constexpr (T::STAGED_PAGES) return uniform(lds_at<u32>(staged, i * 4));
        return clamped_id(args, entry[i]);
    }
    // Of page `i + own`, the lane's part less than WAYS.
    template <int WAYS>
    PA_DEVICE u32 own_id(const TileArgs &args, int i, int own) const {
        if constexpr (T::STAGED_PAGES) return lds_at<u32>(staged, (i + own) * 4);
        u32 page = id(args, i);
        PA_UNROLL for (int way = 1; way < WAYS; way++) page = own >= way ? id(args, i + way) : page;
        return page;
    }

    // The address of token `token + own` of the wave's in a tensor, in two parts: `token` is the same in all lanes, `own` the lane's, less
    // than SPAN. A span that pages do not cut has the same base in all lanes.
    template <int SPAN>
    PA_DEVICE const u8 *base(const TileArgs &args, const void *tensor, const Paged &stride, int head, int token, int own) const {
        constexpr bool WHOLE = T::PAGE >= SPAN;
        const u32 page = WHOLE ? id(args, token / T::PAGE % COUNT) : own_id<SPAN / T::PAGE>(args, token / T::PAGE, own / T::PAGE);
        const int wave = T::PAGE > T::WAVE_TOKENS ? u32(first) % T::PAGE : 0, shared = WHOLE ? token % T::PAGE : 0;
        return at(tensor, page * stride.page + head * stride.head + wave * stride.token) + shared * stride.token;
    }
    template <int SPAN>
    static PA_DEVICE u32 offset(const Paged &stride, int own) {
        return fresh_lane(u32(T::PAGE >= SPAN ? own : own % T::PAGE) * u32(stride.token));
    }
};

// K: lane `l` has tokens `l % 16` of every 16, quarter `l / 16`.
template <class T>
struct PackedKeys {
    using M = Mxfp4<T>;
    typename M::Unit unit[T::SUBTILES][M::HELD];
    u8 scale[T::SUBTILES][M::HELD];

    PA_DEVICE void load_part(const Call &call, const WavePages<T> &pages, int head, int part) {
        const TileArgs &args = call.args;
        constexpr bool UNIFORM = T::PAGE >= 16;
        const int quarter = lane() / 16, own = UNIFORM ? lane() % 16 : fresh_lane(lane() % 16);
        const u32 at_codes = pages.template offset<16>(args.key_stride, own), at_scales = pages.template offset<16>(args.k_scale_stride, own);
        const u8 *codes = nullptr, *scales = nullptr;
        PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) {
            if (UNIFORM && sub * 16 % T::PAGE != 0) {
                codes += 16 * args.key_stride.token;
                scales += 16 * args.k_scale_stride.token;
            } else {
                codes = pages.template base<16>(args, call.key, args.key_stride, head, sub * 16, own);
                scales = pages.template base<16>(args, args.k_scale, args.k_scale_stride, head, sub * 16, own);
            }
            codes = opaque_base<UNIFORM>(codes);
            scales = opaque_base<UNIFORM>(scales);
            PA_UNROLL for (int i = 0; i < M::HELD; i++) {
                const int dim = M::dim(part * M::HELD + i, quarter);
                unit[sub][i] = pa::load<typename M::Unit>(codes, at_codes + dim / 2);
                scale[sub][i] = pa::load<u8>(scales, at_scales + dim / 32);
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
        constexpr int SPAN = T::WAVE_TOKENS;
        constexpr bool UNIFORM = T::PAGE >= SPAN;
        const int quarter = lane() % 4, own = UNIFORM ? lane() / 4 * 4 : fresh_lane(lane() / 4 * 4);
        const u32 at_codes = pages.template offset<SPAN>(args.value_stride, own), at_scales = pages.template offset<SPAN>(args.v_scale_stride, own);
        const u8 *codes = pages.template base<SPAN>(args, args.value, args.value_stride, head, 0, own);
        const u8 *scales = pages.template base<SPAN>(args, args.v_scale, args.v_scale_stride, head, 0, own);
        PA_UNROLL for (int token = 0; token < 4; token++) {
            codes = opaque_base<UNIFORM>(codes + (token > 0 ? args.value_stride.token : 0));
            scales = opaque_base<UNIFORM>(scales + (token > 0 ? args.v_scale_stride.token : 0));
            PA_UNROLL for (int i = 0; i < M::HELD; i++) {
                const int dim = M::dim(part * M::HELD + i, quarter);
                unit[token][i] = pa::load<typename M::Unit>(codes, at_codes + dim / 2);
                scale[token][i] = pa::load<u8>(scales, at_scales + dim / 32);
            }
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

// A wave's room in LDS for a word of V: 32 dims of 64 tokens, twice, so that the next word is put there while one is read. Rows lie in pairs
// with 16 bytes between pairs: lanes meet no bank twice, neither when they put nor when they get.
template <class T>
struct ValueRows {
    static constexpr int ROW = T::WAVE_TOKENS * 2;
    static constexpr int PAIR = 2 * ROW + 16;
    static constexpr int BUFFER = 16 * PAIR;
    static constexpr int BYTES = 2 * BUFFER;
    u8 *base;

    PA_DEVICE void put(const PackedValues<T> &values, int unit, int word, int buffer) const {
        float scale[4];
        PA_UNROLL for (int token = 0; token < 4; token++) scale[token] = block_scale(values.scale[token][unit]);
        u8 *rows = base + buffer * BUFFER + lane() % 4 * 4 * PAIR + lane() / 4 * 8;
        const u32x4 pairs[4] = {widen_word(values.unit[0][unit][word], scale[0]), widen_word(values.unit[1][unit][word], scale[1]),
                                widen_word(values.unit[2][unit][word], scale[2]), widen_word(values.unit[3][unit][word], scale[3])};
        PA_UNROLL for (int i = 0; i < 4; i++) {
            auto tokens = [&](u32 halves) {
                return u32x2{__builtin_amdgcn_perm(pairs[1][i], pairs[0][i], halves), __builtin_amdgcn_perm(pairs[3][i], pairs[2][i], halves)};
            };
            lds_at<u32x2>(rows, i * PAIR) = tokens(0x05040100);
            lds_at<u32x2>(rows, i * PAIR + ROW) = tokens(0x07060302);
        }
    }

    // Operands of 16 rows each for steps of 32 tokens, in the order that a lane has scores in: four of one 16, four of the next.
    struct Operands {
        u32x4 of[2][2];
    };
    PA_DEVICE Operands get(int buffer) const {
        Operands operands;
        PA_UNROLL for (int tile16 = 0; tile16 < 2; tile16++)
            PA_UNROLL for (int step = 0; step < 2; step++) {
                u8 *row = base + buffer * BUFFER + (tile16 * 8 + lane() % 16 / 2) * PAIR + lane() % 2 * ROW + step * 64 + lane() / 16 * 8;
                const u32x2 low = lds_at<u32x2>(row, 0), high = lds_at<u32x2>(row, 32);
                operands.of[tile16][step] = {low.x, low.y, high.x, high.y};
            }
        return operands;
    }
};

}  // namespace pa
