// The MXFP4 tile: each wave goes through its own 64 tokens of every tile by itself, all dims, with a softmax of its own; no barrier until
// the waves' results are merged at the end.
//
// Loads in flight, oldest first: K of a tile, V of the tile; K of the next, once Q K^T has used up the registers; V of the next, after P V.
// Page ids come a tile earlier.
#pragma once

#include "epilogue.h"
#include "mxfp4.h"
#include "query.h"

namespace pa {

// LDS of a group: Q's rows, then each wave's rows of V. The merge starts over from the beginning: O of one M-tile and unit a wave, then
// statistics. Groups are merged as waves are: all at once, each from its group's LDS.
template <class T>
struct Mxfp4Lds {
    using M = Mxfp4<T>;
    static constexpr int ROWS = Lds<T>::P;
    static constexpr int BYTES = ROWS + T::WAVES * ValueRows<T>::BYTES;
    static constexpr int MERGE_DIMS = 4 * M::UNIT;
    static constexpr int MERGE_ROW = (MERGE_DIMS + 4) * 4;
    static constexpr int STATISTICS = T::WAVES * 16 * MERGE_ROW;
    static_assert(STATISTICS + T::ROWS * T::WAVES * 8 <= BYTES && T::GROUPS * BYTES <= PA_LDS_BYTES);
    static constexpr int WAVES = T::GROUPS * T::WAVES;
    const Lds<T> query;
    const StagedPages<T> pages;

    PA_DEVICE Mxfp4Lds(const Call &call, u8 *memory, u8 *ids) : query(memory, BYTES), pages(call, ids) {}

    PA_DEVICE int wave() const { return query.wave; }
    PA_DEVICE int workgroup_wave() const { return T::group() * T::WAVES + wave(); }
    PA_DEVICE ValueRows<T> values() const { return {query.base + ROWS + wave() * ValueRows<T>::BYTES}; }
    // Of a wave of the workgroup: O, and maximum and sum of a row.
    PA_DEVICE f32x4 &output(int wave, int row, int dim) const { return lds_at<f32x4>(copy(wave), (wave % T::WAVES * 16 + row) * MERGE_ROW + dim * 4); }
    PA_DEVICE f32x2 &statistic(int row, int wave) const { return lds_at<f32x2>(copy(wave), STATISTICS + (row * T::WAVES + wave % T::WAVES) * 8); }
    PA_DEVICE u8 *copy(int wave) const { return query.workgroup + wave / T::WAVES * BYTES; }
};

template <class T>
struct Mxfp4Pipeline {
    using M = Mxfp4<T>;
    static constexpr int STEPS = T::HEAD_DIM / 32;
    static constexpr bool QUERY_HELD = T::QUERY_PARTS * T::M_TILES * STEPS * 4 <= 32;

    const Call &call;
    const Task<T> &task;
    const Mxfp4Lds<T> lds;
    u32x4 held[T::QUERY_PARTS][T::M_TILES][QUERY_HELD ? STEPS : 1];
    RowStates<T> rows;
    WavePages<T> pages, next;
    PackedKeys<T> keys;
    PackedValues<T> values;
    u32x4 p[T::M_TILES][2];
    f32x4 output[T::M_TILES][M::UNITS][M::WORDS][2] = {};

    PA_DEVICE Mxfp4Pipeline(const Call &call, const Task<T> &task, Mxfp4Lds<T> lds)
        : call(call), task(task), lds(lds), rows(call, lds.query) {
        if constexpr (QUERY_HELD) {
            PA_UNROLL for (int part = 0; part < T::QUERY_PARTS; part++)
                PA_UNROLL for (int m = 0; m < T::M_TILES; m++)
                    PA_UNROLL for (int step = 0; step < STEPS; step++) held[part][m][step] = read_query(part, m, step);
        }
    }

    // Q for a word of K: a step's unit and word, this lane's quarter.
    PA_DEVICE u32x4 read_query(int part, int m, int step) const {
        const int dim = M::dim(step / M::WORDS, lane() / 16) + step % M::WORDS * 8;
        return lds.query.template query<u32x4>(part, m * 16 + lane() % 16, dim * 2);
    }
    PA_DEVICE u32x4 query(int part, int m, int step) const {
        if constexpr (QUERY_HELD) return held[part][m][step];
        return read_query(part, m, step);
    }

    // The tiles in which this wave's tokens are attended at all.
    PA_DEVICE int first_tile() const {
        return task.first_tile + (T::WINDOW && task.first_token - task.first_tile * T::TOKENS >= (lds.wave() + 1) * T::WAVE_TOKENS);
    }
    PA_DEVICE int end_tile() const {
        const int last = task.end_tile - T::GROUPS;
        return last * T::TOKENS + lds.wave() * T::WAVE_TOKENS >= task.context ? last : task.end_tile;
    }

    PA_DEVICE void run() {
        int tile = first_tile();
        const int end = end_tile();
        if (tile >= end) return;
        pages.find(call, task, lds.pages, lds.wave(), tile);
        keys.load_part(call, pages, task.rows.head, 0);
        pin();
        values.load_part(call, pages, task.rows.head, 0);
        next.find(call, task, lds.pages, lds.wave(), tile + T::GROUPS);
        pin();
        if constexpr (M::LARGE) {
            for (; tile < end; tile += T::GROUPS) step(tile, tile + T::GROUPS < end, true, true);
        } else {
            // The last tile apart, so that the compiler knows in either code what is in flight. It costs registers.
            for (; tile < end - T::GROUPS; tile += T::GROUPS) step(tile, true, T::WINDOW || !T::SINGLE_QUERY, T::WINDOW);
            step(tile, false, true, true);
        }
    }

    // `more`: another tile follows. Masks are asked for only where a tile may need them.
    PA_DEVICE void step(int tile, bool more, bool masks_scores, bool masks_values) {
        const int head = task.rows.head;
        Scores<T> scores = {};
        PA_UNROLL for (int part = 0; part < M::PARTS; part++) {
            add_products(scores, part);
            pin();
            if (part + 1 < M::PARTS) keys.load_part(call, pages, head, part + 1);
        }
        WavePages<T> after;
        if (more) {
            keys.load_part(call, next, head, 0);
            after.find(call, task, lds.pages, lds.wave(), tile + 2 * T::GROUPS);
        }
        pin();
        scale_scores(scores, rows, TokenScales<T>(), call.args.softcap);
        if (masks_scores && task.masks_scores(tile)) mask_scores(scores, task, lds.query, tile);
        PA_UNROLL for (int m = 0; m < T::M_TILES; m++) softmax(scores, m);
        PA_UNROLL for (int part = 0; part < M::PARTS; part++) {
            if (T::MASKS_VALUES && masks_values && task.masks_values(tile)) values.mask(task, pages);
            add_values(part);
            pin();
            if (part + 1 < M::PARTS) values.load_part(call, pages, head, part + 1);
        }
        if (more) {
            values.load_part(call, next, head, 0);
            pages = next;
            next = after;
            pin();
        }
    }

    PA_DEVICE void add_products(Scores<T> &scores, int part) {
        PA_UNROLL for (int unit = 0; unit < M::HELD; unit++) {
            float scale[T::SUBTILES];
            PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) scale[sub] = block_scale(keys.scale[sub][unit]);
            PA_UNROLL for (int word = 0; word < M::WORDS; word++) {
                u32x4 k[T::SUBTILES];
                PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) k[sub] = widen_word(keys.unit[sub][unit][word], scale[sub]);
                PA_UNROLL for (int m = 0; m < T::M_TILES; m++)
                    PA_UNROLL for (int i = 0; i < T::QUERY_PARTS; i++) {
                        const u32x4 q = query(i, m, (part * M::HELD + unit) * M::WORDS + word);
                        PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++)
                            scores.of[m][sub] = multiply<T::KV>(k[sub], q, scores.of[m][sub]);
                    }
                if (M::LARGE) pin();
            }
        }
    }

    // P of one M-tile as operands, with this wave's running maximum and sum; O moves to the new maximum.
    PA_DEVICE void softmax(const Scores<T> &scores, int m) {
        float x = largest(scores.of[m][0]);
        PA_UNROLL for (int sub = 1; sub < T::SUBTILES; sub++) x = max(x, largest(scores.of[m][sub]));
        const float maximum = max(rows.maximum[m], largest_of_row(x));
        // A row that has attended nothing yet has P = exp2(-inf - 0).
        const float reference = maximum == -INFINITE ? 0 : maximum;
        const float decay = exp2(rows.maximum[m] - reference);
        f32x4 total = 0;
        PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) {
            f32x4 e = scores.of[m][sub] - reference;
            PA_UNROLL for (int i = 0; i < 4; i++) e[i] = exp2(e[i]);
            total += e;
            p[m][sub / 2][sub % 2 * 2] = narrow<T::KV>(e.x, e.y);
            p[m][sub / 2][sub % 2 * 2 + 1] = narrow<T::KV>(e.z, e.w);
        }
        rows.sum[m] = rows.sum[m] * decay + sum(total);
        rows.maximum[m] = maximum;
        if (__builtin_amdgcn_ballot_w64(decay != 1)) {
            PA_UNROLL for (int unit = 0; unit < M::UNITS; unit++)
                PA_UNROLL for (int word = 0; word < M::WORDS; word++)
                    PA_UNROLL for (int i = 0; i < 2; i++) output[m][unit][word][i] *= decay;
        }
    }

    // O += P V, a word of V after the other: while one is on its way from LDS, the next is converted.
    PA_DEVICE void add_values(int part) {
        constexpr int WORDS = M::HELD * M::WORDS;
        const ValueRows<T> staged = lds.values();
        staged.put(values, 0, 0, 0);
        PA_UNROLL for (int word = 0; word < WORDS; word++) {
            wave_fence();
            const auto v = staged.get(word % 2);
            wave_fence();
            if (!M::LARGE && word + 1 < WORDS) staged.put(values, (word + 1) / M::WORDS, (word + 1) % M::WORDS, (word + 1) % 2);
            PA_UNROLL for (int i = 0; i < 2; i++)
                PA_UNROLL for (int step = 0; step < 2; step++)
                    PA_UNROLL for (int m = 0; m < T::M_TILES; m++) {
                        f32x4 &o = output[m][part * M::HELD + word / M::WORDS][word % M::WORDS][i];
                        o = multiply<T::KV>(v.of[i][step], p[m][step], o);
                    }
            pin();
            if (M::LARGE && word + 1 < WORDS) staged.put(values, (word + 1) / M::WORDS, (word + 1) % M::WORDS, (word + 1) % 2);
        }
        wave_fence();
    }

    // Merges the waves' results, M-tile by M-tile and unit by unit, and stores them.
    PA_DEVICE void finish() {
        barrier();
        PA_UNROLL for (int m = 0; m < T::M_TILES; m++) {
            const float total = sum_of_row(rows.sum[m]);
            if (lane() < 16) lds.statistic(m * 16 + lane(), lds.workgroup_wave()) = {rows.maximum[m], total};
        }
        barrier();
        PA_UNROLL for (int m = 0; m < T::M_TILES; m++) {
            const float decay = exp2(rows.maximum[m] - merged(m * 16 + lane() % 16).reference);
            Merged of;
            PA_UNROLL for (int unit = 0; unit < M::UNITS; unit++) {
                PA_UNROLL for (int word = 0; word < M::WORDS; word++)
                    PA_UNROLL for (int i = 0; i < 2; i++) {
                        // Row `l / 16 * 4` of the 16 is dim `.. % 8` of the word of quarter `.. / 8`.
                        const int dim = (i * 2 + lane() / 32) * M::UNIT + word * 8 + lane() / 16 % 2 * 4;
                        lds.output(lds.workgroup_wave(), lane() % 16, dim) = output[m][unit][word][i] * decay;
                    }
                barrier();
                store_unit(m, unit, of);
                barrier();
            }
        }
    }

    struct Merged {
        float maximum, reference, sum;
    };
    PA_DEVICE Merged merged(int row) const {
        constexpr int WAVES = Mxfp4Lds<T>::WAVES;
        f32x2 of[WAVES];
        PA_UNROLL for (int i = 0; i < WAVES; i++) of[i] = lds.statistic(row, i);
        float maximum = of[0].x;
        PA_UNROLL for (int i = 1; i < WAVES; i++) maximum = max(maximum, of[i].x);
        const float reference = maximum == -INFINITE ? 0 : maximum;
        float sum = 0;
        PA_UNROLL for (int i = 0; i < WAVES; i++) sum += of[i].y * exp2(of[i].x - reference);
        return {maximum, reference, sum};
    }

    // 16 threads a row, four dims each at a time; groups take 64 dims in turn. `of`: the row's, from the first unit on.
    PA_DEVICE void store_unit(int m, int unit, Merged &of) const {
        const int row = m * 16 + thread() / 16, piece = thread() % 16 * 4;
        if (!task.rows.has(row)) return;
        if (unit == 0) of = merged(row);
        const TileArgs &args = call.args;
        const bool first = unit == 0 && piece == 0 && T::group() == 0;
        const long part = T::PER_HEAD ? task.slot : long(task.slot) * args.kv_heads + task.rows.head;
        const long at = part * args.rows + task.rows.first + row;
        const float inverse = of.sum == 0 ? 0 : 1 / of.sum;
        PA_UNROLL for (int i = 0; i < Mxfp4Lds<T>::MERGE_DIMS / 64; i++) {
            if (T::GROUPS > 1 && i % T::GROUPS != T::group()) continue;
            f32x4 x = 0;
            PA_UNROLL for (int from = 0; from < Mxfp4Lds<T>::WAVES; from++) x += lds.output(from, thread() / 16, i * 64 + piece);
            const int dim = unit * Mxfp4Lds<T>::MERGE_DIMS + i * 64 + piece;
            if constexpr (T::DIRECT_OUTPUT) {
                store_output<T>(args.out, task.rows.offset(row, args.out_row, args.out_head) + dim, x * inverse);
            } else {
                store(args.out, (at * T::HEAD_DIM + dim) * 4, x);
            }
        }
        if (!first) return;
        if constexpr (T::DIRECT_OUTPUT) {
            store_lse(call, task.rows, row, of.sum == 0 ? -INFINITE : (of.maximum + log2(of.sum)) * 0.6931471805599453f);
        } else {
            store(call.statistics, at * 8, f32x2{of.maximum, of.sum});
        }
    }
};

template <class T>
PA_DEVICE void run_mxfp4_task(const Call &call, int slot, const WorkInfo &work, Mxfp4Lds<T> lds) {
    const Task<T> task(call, slot, work);
    if (T::STAGED_PAGES && task.first_tile < task.end_tile) lds.pages.stage(call, task);
    stage_queries(call, task.rows, lds.query);
    barrier();
    Mxfp4Pipeline<T> pipeline(call, task, lds);
    pipeline.run();
    pipeline.finish();
}

}  // namespace pa
