// The two products: S^T = K Q^T, whose waves split the tokens, and O^T = V^T P^T, whose waves split the dims.
//
// The cache's operands come straight from global memory: a 16-byte unit of K is one token's consecutive dims, one of V consecutive tokens
// of one dim, and lane `l` holds unit `l / 16` of row `l % 16` of a step. Q and P come from LDS.
#pragma once

#include "pages.h"

namespace pa {

// Where this lane's part of an address goes: apart from a base that all lanes share, or into it where their pages differ.
struct LanePart {
    const u8 *base;
    u32 offset;

    PA_DEVICE LanePart(const u8 *base, u32 offset, bool apart)
        : base(apart ? base : opaque_lane(base + offset)), offset(apart ? offset : 0) {}
};

// A chunk of K: this wave's tokens in 16s, steps of dims.
template <class T>
struct Keys {
    u32x4 unit[T::SUBTILES][T::KEY_CHUNK];

    // What is loaded past the task's last tile is not `used`: all lanes load the same 16 bytes.
    PA_DEVICE void load_chunk(const Pages<T> &pages, int tile, int chunk, bool used = true) {
        const u32 own = lane() % 16;
        const u32 offset = (lane() / 16 * T::PAGE + pages.template own_place<16>(own)) * 16;
        const LanePart part(pages.key.base, used || T::PEELED ? offset : 0, T::PAGE >= 16);
        // As many 16s as have a page in common share a base.
        constexpr int SHARED = T::PAGE >= T::WAVE_TOKENS ? T::SUBTILES : T::PAGE >= 16 ? T::PAGE / 16 : 1;
        PA_UNROLL for (int first = 0; first < T::SUBTILES; first += SHARED) {
            const u32 token = pages.lds.wave * T::WAVE_TOKENS + first * 16;
            const u8 *page = part.base + pages.template page<16>(pages.key, tile, token, own);
            page += pages.template shared_place<16>(tile, token) * 16;
            const u8 *base[T::KEY_CHUNK];
            PA_UNROLL for (int step = 0; step < T::KEY_CHUNK; step++) {
                base[step] = page + (chunk * T::KEY_CHUNK + step) * 4 * T::PAGE * 16;
                if (T::SCALAR_BASES) base[step] = opaque_scalar(base[step]);
            }
            PA_UNROLL for (int i = 0; i < SHARED; i++)
                PA_UNROLL for (int step = 0; step < T::KEY_CHUNK; step++) {
                    unit[first + i][step] = load<u32x4, T::STREAMS_KEYS>(base[step] + i * 256, part.offset);
                }
        }
    }
};

// A chunk of V: steps of tokens, this wave's dims in 16s.
template <class T>
struct Values {
    u32x4 unit[T::VALUE_CHUNK][T::DIM_TILES];

    PA_DEVICE void load_chunk(const Pages<T> &pages, int tile, int chunk) { load_steps(pages, tile, chunk, 0, T::VALUE_CHUNK); }

    PA_DEVICE void load_steps(const Pages<T> &pages, int tile, int chunk, int first, int end) {
        const bool shuffled = T::LAYOUT == Layout::SHUFFLED;
        const u32 own = lane() / 16 * T::UNIT;
        const u32 place = pages.template own_place<T::STEP>(own);
        const u8 *base = pages.value.base + pages.lds.wave * T::WAVE_DIMS * (shuffled ? 16 : T::PAGE * T::BYTES);
        const u32 offset = shuffled ? (place / T::UNIT * T::HEAD_DIM + lane() % 16) * 16 : (lane() % 16 * T::PAGE + place) * T::BYTES;
        const LanePart part(base, offset, T::PAGE >= T::STEP);
        PA_UNROLL for (int step = first; step < end; step++) {
            const u32 token = (chunk * T::VALUE_CHUNK + step) * T::STEP;
            const u32 shared = pages.template shared_place<T::STEP>(tile, token);
            const u8 *page = part.base + pages.template page<T::STEP>(pages.value, tile, token, own);
            page += shared * (shuffled ? T::HEAD_DIM * T::BYTES : T::BYTES);
            if (T::SCALAR_BASES) page = opaque_scalar(page);
            PA_UNROLL for (int tile16 = 0; tile16 < T::DIM_TILES; tile16++) {
                unit[step][tile16] = load<u32x4, T::STREAMS_VALUES>(page + tile16 * 16 * (shuffled ? 16 : T::PAGE * T::BYTES), part.offset);
            }
        }
    }

    // Zeroes tokens that are not the call's: whatever they hold, 0 * NaN must not come of it.
    PA_DEVICE void mask(const Task<T> &task, int tile, int chunk) {
        constexpr int ELEMENT = 8 * T::BYTES;
        PA_UNROLL for (int step = 0; step < T::VALUE_CHUNK; step++) {
            const int token = tile * T::TOKENS + (chunk * T::VALUE_CHUNK + step) * T::STEP + lane() / 16 * T::UNIT;
            const int end = min(task.context - token, T::TOKENS) * ELEMENT;
            const int first = T::WINDOW ? max(task.first_token - token, -T::TOKENS) * ELEMENT : 0;
            u32x4 keep;
            PA_UNROLL for (int word = 0; word < 4; word++) {
                keep[word] = low_bits(end - word * 32);
                if (T::WINDOW) keep[word] &= ~low_bits(first - word * 32);
            }
            PA_UNROLL for (int tile16 = 0; tile16 < T::DIM_TILES; tile16++) unit[step][tile16] &= keep;
        }
    }
};

// Q as operands: from LDS, or held in registers for the whole task where few do.
template <class T>
struct QueryOperands {
    static constexpr int HELD = T::QUERY_HELD ? T::KEY_STEPS : 1;
    u32x4 held[T::QUERY_PARTS][T::M_TILES][HELD];

    static PA_DEVICE u32x4 read(const Lds<T> &lds, int part, int m, int step) {
        return lds.template query<u32x4>(part, m * 16 + lane() % 16, (step * 4 + lane() / 16) * 16);
    }
    PA_DEVICE void hold(const Lds<T> &lds) {
        if constexpr (T::QUERY_HELD) {
            PA_UNROLL for (int part = 0; part < T::QUERY_PARTS; part++)
                PA_UNROLL for (int m = 0; m < T::M_TILES; m++)
                    PA_UNROLL for (int step = 0; step < T::KEY_STEPS; step++) held[part][m][step] = read(lds, part, m, step);
        }
    }
    PA_DEVICE u32x4 get(const Lds<T> &lds, int part, int m, int step) const {
        if constexpr (T::QUERY_HELD) return held[part][m][step];
        return read(lds, part, m, step);
    }
};

// Scores of this wave's tokens: lane `l` has row `l % 16` of each M-tile, tokens `l / 16 * 4 ..+ 4` of every 16.
template <class T>
struct Scores {
    f32x4 of[T::M_TILES][T::SUBTILES];

    // An operand of Q that comes from LDS is read while the one before it is multiplied.
    PA_DEVICE void add_chunk(const Keys<T> &keys, const QueryOperands<T> &query, const Lds<T> &lds, int chunk) {
        constexpr int WIDTH = T::KEY_WIDTH, OPERANDS = T::KEY_CHUNK / WIDTH * T::M_TILES * T::QUERY_PARTS;
        auto operand = [&](int i) {
            const int m = i / T::QUERY_PARTS % T::M_TILES, step = i / T::QUERY_PARTS / T::M_TILES * WIDTH;
            Operand<WIDTH> q;
            PA_UNROLL for (int j = 0; j < WIDTH; j++) q.unit[j] = query.get(lds, i % T::QUERY_PARTS, m, chunk * T::KEY_CHUNK + step + j);
            return q;
        };
        Operand<WIDTH> q = operand(0);
        PA_UNROLL for (int i = 0; i < OPERANDS; i++) {
            const Operand<WIDTH> next = i + 1 < OPERANDS ? operand(i + 1) : q;
            if (!T::QUERY_HELD) pin();
            const int m = i / T::QUERY_PARTS % T::M_TILES, step = i / T::QUERY_PARTS / T::M_TILES * WIDTH;
            PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) {
                Operand<WIDTH> k;
                PA_UNROLL for (int j = 0; j < WIDTH; j++) k.unit[j] = keys.unit[sub][step + j];
                of[m][sub] = multiply<T::KV>(k, q, of[m][sub]);
            }
            q = next;
        }
    }
};

// O of one M-tile, and this wave's dims: lane `l` has row `l % 16`, dims `l / 16 * 4 ..+ 4` of every 16.
template <class T>
struct Output {
    f32x4 of[T::DIM_TILES];

    PA_DEVICE void scale(float factor) {
        PA_UNROLL for (int i = 0; i < T::DIM_TILES; i++) of[i] *= factor;
    }
    PA_DEVICE void add_chunk(const Values<T> &values, const Lds<T> &lds, int m, int chunk) {
        PA_UNROLL for (int part = 0; part < T::P_PARTS; part++) {
            constexpr int WIDTH = T::VALUE_WIDTH;
            Operand<WIDTH> p[T::VALUE_CHUNK / WIDTH];
            PA_UNROLL for (int step = 0; step < T::VALUE_CHUNK; step++) {
                const int token = (chunk * T::VALUE_CHUNK + step) * T::STEP + lane() / 16 * T::UNIT;
                p[step / WIDTH].unit[step % WIDTH] = lds.template p<u32x4>(part, m, lane() % 16, token);
            }
            pin();
            PA_UNROLL for (int step = 0; step < T::VALUE_CHUNK; step += WIDTH)
                PA_UNROLL for (int i = 0; i < T::DIM_TILES; i++) {
                    Operand<WIDTH> v;
                    PA_UNROLL for (int j = 0; j < WIDTH; j++) v.unit[j] = values.unit[step + j][i];
                    of[i] = multiply<T::KV>(v, p[step / WIDTH], of[i]);
                }
        }
    }
};

}  // namespace pa
