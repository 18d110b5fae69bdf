// Writes new tokens' k and v into their pages, quantized as src/cache/write.rs does it.
//
// 16 threads take a row (one token's k or v of one head), 8 values each at a time; a block has 16 rows.
#pragma once

#include "args.h"
#include "quant.h"

namespace pa {

enum Kv { KV_BF16 = 0, KV_F16 = 1, KV_FP8 = 2, KV_MXFP4 = 3, KV_F32 = 4 };
enum Scales { NO_SCALES = 0, ONE_SCALE = 1, TOKEN_SCALES = 2, BLOCK_SCALES = 3 };
enum Layout { SHUFFLED = 0, VLLM = 1, NHD = 2, HND = 3 };

constexpr int WRITE_THREADS = 256, ROW_THREADS = 16, WRITE_ROWS = WRITE_THREADS / ROW_THREADS;

// K's or V's part of the arguments.
struct WriteSide {
    const void *rows;
    void *cache, *scale;
    long row, head;
    Paged stride, scale_stride;
};

template <int HEAD_DIM, int PAGE, int NUMBER, int KV, int SCALES, int LAYOUT, bool VALUE> struct Writer {
    static constexpr int UNITS = (HEAD_DIM + ROW_THREADS * 8 - 1) / (ROW_THREADS * 8);
    static constexpr int X = KV == KV_FP8 ? 16 : KV == KV_F32 ? 4 : 8;  // elements in 16 bytes
    static constexpr bool ROWS = LAYOUT == NHD || LAYOUT == HND;
    static_assert(HEAD_DIM % (KV == KV_MXFP4 ? 32 : 8) == 0, "head_dim of a cache write");

    const WriteSide &side;
    int token, head, lane;
    long page;
    int offset;  // in the page

    // The first dim of this thread's n-th eight.
    PA_DEVICE int dim(int n) const { return (n * ROW_THREADS + lane) * 8; }

    PA_DEVICE void load(float (&values)[UNITS][8]) const {
        typedef typename Stored<NUMBER>::Type Type;
        const Type *row = (const Type *)side.rows + token * side.row + head * side.head;
        for (int n = 0; n < UNITS; n++) {
            Elements<Type, 8> eight = {};
            if (dim(n) < HEAD_DIM) eight = *(const Elements<Type, 8> *)(row + dim(n));
            for (int i = 0; i < 8; i++) values[n][i] = to_float<NUMBER>(eight.x[i]);
        }
    }

    // A value over its scale. A NaN stays the one it is.
    PA_DEVICE float scaled(float x, float scale) const { return is_nan(x) || scale == 1 ? x : x / scale; }

    PA_DEVICE long scale_at() const {
        return page * side.scale_stride.page + head * side.scale_stride.head + offset * side.scale_stride.token;
    }

    // Where strides are all 0, a kernel for per-token scales is given one factor.
    PA_DEVICE bool one_scale() const {
        return SCALES == ONE_SCALE || (side.scale_stride.page | side.scale_stride.head | side.scale_stride.token) == 0;
    }

    // The row's scale; one that is chosen here is written too.
    PA_DEVICE float row_scale(const float (&values)[UNITS][8]) const {
        if (SCALES == NO_SCALES) return 1;
        if (one_scale()) return *(const float *)side.scale;
        unsigned most = 0;  // magnitudes order like their bits; a NaN plays no part
        for (int n = 0; n < UNITS; n++)
            for (int i = 0; i < 8; i++) most = max_of(most, is_nan(values[n][i]) ? 0 : bits_of(values[n][i]) & 0x7fffffff);
        most = max_of(most, swap_lanes<1>(most));
        most = max_of(most, swap_lanes<2>(most));
        most = max_of(most, swap_lanes<4>(most));
        most = max_of(most, swap_lanes<8>(most));
        float scale = token_scale<FNUZ>(float_of(most));
        if (lane == 0) ((float *)side.scale)[scale_at()] = scale;
        return scale;
    }

    template <class Type> PA_DEVICE void store(int n, Elements<Type, 8> eight) const {
        long base = page * side.stride.page + head * side.stride.head;
        Type *cache = (Type *)side.cache + base;
        if (ROWS) {
            *(Elements<Type, 8> *)(cache + offset * side.stride.token + dim(n)) = eight;
        } else if (!VALUE) {
            constexpr int N = X < 8 ? X : 8;
            for (int i = 0; i < 8; i += N) {
                int d = dim(n) + i;
                *(Elements<Type, N> *)(cache + (d / X * PAGE + offset) * X + d % X) = *(const Elements<Type, N> *)&eight.x[i];
            }
        } else {
            for (int i = 0; i < 8; i++) {
                int d = dim(n) + i;
                cache[LAYOUT == VLLM ? d * PAGE + offset : (offset / X * HEAD_DIM + d) * X + offset % X] = eight.x[i];
            }
        }
    }

    PA_DEVICE void write_numbers(const float (&values)[UNITS][8]) const {
        float scale = row_scale(values);
        for (int n = 0; n < UNITS; n++) {
            if (dim(n) >= HEAD_DIM) continue;
            if constexpr (KV == KV_FP8) {
                Elements<unsigned char, 8> codes;
                for (int i = 0; i < 8; i++) codes.x[i] = encode_e4m3<FNUZ>(scaled(values[n][i], scale));
                store(n, codes);
            } else if constexpr (KV == KV_F32) {
                Elements<float, 8> stored;
                for (int i = 0; i < 8; i++) stored.x[i] = scaled(values[n][i], scale);
                store(n, stored);
            } else {
                Elements<unsigned short, 8> stored;
                for (int i = 0; i < 8; i++) stored.x[i] = from_float<KV>(scaled(values[n][i], scale));
                store(n, stored);
            }
        }
    }

    // Four threads share a block of 32. All of a row's threads take part in the exchange.
    PA_DEVICE void write_blocks(const float (&values)[UNITS][8]) const {
        for (int n = 0; n < UNITS; n++) {
            unsigned most = 0;  // infinity and NaN lie above every finite value
            for (int i = 0; i < 8; i++) most = max_of(most, bits_of(values[n][i]) & 0x7fffffff);
            most = max_of(most, swap_lanes<1>(most));
            most = max_of(most, swap_lanes<2>(most));
            if (dim(n) >= HEAD_DIM) continue;
            unsigned scale = block_scale(most);
            if (lane % 4 == 0) ((unsigned char *)side.scale)[scale_at() + dim(n) / 32] = scale;
            float inverse = block_inverse(scale);
            Elements<unsigned char, 4> packed;
            for (int i = 0; i < 4; i++) packed.x[i] = encode_e2m1(values[n][2 * i] * inverse) | encode_e2m1(values[n][2 * i + 1] * inverse) << 4;
            unsigned char *row = (unsigned char *)side.cache + page * side.stride.page + head * side.stride.head + offset * side.stride.token;
            *(Elements<unsigned char, 4> *)(row + dim(n) / 2) = packed;
        }
    }

    PA_DEVICE void write() const {
        float values[UNITS][8];
        load(values);
        if constexpr (KV == KV_MXFP4) {
            write_blocks(values);
        } else {
            write_numbers(values);
        }
    }
};

// Whether a later token has this one's slot: that one stays. A row's threads look together.
PA_DEVICE bool is_superseded(const WriteArgs &args, int token, int lane) {
    long slot = args.slots[token];
    unsigned found = 0;
    for (int first = token + 1; first < args.tokens; first += ROW_THREADS) {
        int other = first + lane;
        if (other < args.tokens && args.slots[other] == slot) found = 1;
    }
    found |= swap_lanes<1>(found);
    found |= swap_lanes<2>(found);
    found |= swap_lanes<4>(found);
    found |= swap_lanes<8>(found);
    return found;
}

// NUMBER and VALUE_NUMBER: dtypes of k and v. LATEST: of tokens that share a slot the last one stays; without it the host has left one.
template <int HEAD_DIM, int PAGE, int NUMBER, int VALUE_NUMBER, int KV, int SCALES, int LAYOUT, bool LATEST> PA_DEVICE void write(const WriteArgs &args) {
    int token = block_x() * WRITE_ROWS + thread() / ROW_THREADS, head = block_y(), lane = thread() % ROW_THREADS;
    if (token >= args.tokens) return;
    long slot = args.slots[token];
    if (slot < 0 || slot >= (long)args.pages * PAGE) return;
    if (LATEST && is_superseded(args, token, lane)) return;
    long page = slot / PAGE;
    int offset = slot % PAGE;
    if (block_z() == 0) {
        WriteSide side = {args.k, args.key, args.k_scale, args.k_row, args.k_head, args.key_stride, args.k_scale_stride};
        Writer<HEAD_DIM, PAGE, NUMBER, KV, SCALES, LAYOUT, false>{side, token, head, lane, page, offset}.write();
    } else {
        WriteSide side = {args.v, args.value, args.v_scale, args.v_row, args.v_head, args.value_stride, args.v_scale_stride};
        Writer<HEAD_DIM, PAGE, VALUE_NUMBER, KV, SCALES, LAYOUT, true>{side, token, head, lane, page, offset}.write();
    }
}

}  // namespace pa
