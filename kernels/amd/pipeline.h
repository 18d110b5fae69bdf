// A task from its first tile to its last.
//
// Loads in flight, oldest first, and what waits for them (vector memory returns in order, so a wait for one waits for all before it):
//   K of the tile (issued a tile ago), ids of the tile after the next, per-token scales, V of the tile | S = Q K^T waits for K
//   K of the next tile, into the registers just read                                                  | P V waits for V
// Where V is not ahead (traits.h), V, ids and K of the next tile come in this order once P is published, and ids wait in a register for the
// next tile's barrier: until then, waves may still read this tile's.
// A tile has two barriers for each M-tile, or for all where they have slots of their own: maxima published, P published. Each also
// separates the reads of one buffer from the next writes.
#pragma once

#include "epilogue.h"
#include "query.h"

namespace pa {

template <class T>
struct Pipeline {
    const Call &call;
    const Task<T> &task;
    const Lds<T> lds;
    Pages<T> pages;
    QueryOperands<T> query;
    RowStates<T> rows;
    Keys<T> keys;
    Values<T> values;
    Output<T> output[T::M_TILES] = {};
    u32 id;  // of a page, on its way to LDS or to those at hand: the next to be staged

    // Q and the page ids of the first tiles are staged, and K of the first is on its way.
    PA_DEVICE Pipeline(const Pages<T> &pages, const Keys<T> &keys, u32 id)
        : call(pages.call), task(pages.task), lds(pages.lds), pages(pages), rows(call, lds), keys(keys), id(id) {
        query.hold(lds);
    }

    PA_DEVICE void run() {
        if (task.first_tile >= task.end_tile) return;
        int tile = task.first_tile;
        for (; tile < task.end_tile - T::GROUPS * T::PEELED; tile += T::GROUPS) step<false>(tile);
        if (T::PEELED) step<true>(tile);
    }

    // A tile; LAST: the peeled last one, which loads nothing for tiles after it. Where it is not peeled, it loads as any other does, so that a
    // wait leaves as many loads in flight in every tile; what it loads are pages that exist, and nothing reads it.
    template <bool LAST>
    PA_DEVICE void step(int tile) {
        const bool maybe_last = LAST || !T::PEELED;
        if (T::IDS_FIRST && !LAST) id = pages.load_id(tile + 2 * T::GROUPS);
        TokenScales<T> scales;
        NextScales<T> next_scales;
        if constexpr (T::SCALES_STAGED) {
            next_scales.load_tile(pages, tile + 1);
        } else if constexpr (T::PER_TOKEN) {
            scales.load_tile(pages, tile);
        }
        if constexpr (T::VALUES_AHEAD) values.load_steps(pages, tile, 0, 0, T::VALUE_STEPS_EARLY);
        pin();
        if (T::VALUES_AHEAD && !T::IDS_FIRST && !LAST) {
            id = pages.load_id(tile + 2 * T::GROUPS);
            pin();
        }
        Scores<T> scores = dot_products<LAST>(tile);
        if constexpr (T::VALUE_STEPS_EARLY < T::VALUE_CHUNK) {
            values.load_steps(pages, tile, 0, T::VALUE_STEPS_EARLY, T::VALUE_CHUNK);
            pin();
        }
        if constexpr (T::SCALES_STAGED) scales.read(scales.key, 0, lds);
        const bool values_masked = (maybe_last || T::WINDOW) && task.masks_values(tile);
        scale_scores(scores, rows, scales, call.args.softcap);
        if ((maybe_last || T::MASKS_INTERIOR) && task.masks_scores(tile)) mask_scores(scores, task, lds, tile);
        if constexpr (T::PER_TOKEN && !T::SCALES_STAGED) {
            if (values_masked) scales.mask(task, lds, tile);
            const float largest = scales.largest_value();
            if (lane() == 0) lds.value_scale(lds.wave) = largest;
        }
        float value_scale = 1;
        PA_UNROLL for (int first = 0; first < T::M_TILES; first += T::P_SLOTS) {
            const int end = first + T::P_SLOTS;
            float decay[T::M_TILES];
            PA_UNROLL for (int m = first; m < end; m++) publish_maximum(scores, rows, lds, m);
            if constexpr (T::SCALES_STAGED) {
                if (first == 0) {
                    pin();
                    scales.read(scales.value, 1, lds);
                    value_scale = largest(lds.value_scales());
                }
            }
            barrier();
            if (first == 0) {
                if (!LAST) pages.stage_id(tile + T::IDS_AHEAD * T::GROUPS, id);
                if constexpr (T::SCALES_STAGED) {
                    next_scales.stage(task, lds, tile + 1);
                } else if constexpr (T::PER_TOKEN) {
                    value_scale = largest(lds.value_scales());
                }
                if constexpr (T::PER_TOKEN) {
                    value_scale = max(value_scale, 0x1p-126f);
                    PA_UNROLL for (int sub = 0; sub < T::SUBTILES; sub++) scales.value[sub] *= reciprocal(value_scale);
                }
            }
            PA_UNROLL for (int m = first; m < end; m++) decay[m] = publish_p(scores, rows, scales, lds, m);
            if (!LAST && T::TIGHT) {
                pin();
                keys.load_chunk(pages, tile + T::GROUPS, 0);
                pin();
            }
            barrier();
            if (!T::KEYS_EARLY && end == T::M_TILES) load_late<LAST>(tile);
            PA_UNROLL for (int m = first; m < end; m++) add_values(tile, m, decay[m], value_scale, values_masked);
        }
    }

    // Q K^T; K of the next tile is loaded into the registers as they are read.
    template <bool LAST>
    PA_DEVICE Scores<T> dot_products(int tile) {
        Scores<T> scores = {};
        PA_UNROLL for (int chunk = 0; chunk < T::KEY_CHUNKS; chunk++) {
            Keys<T> next;
            const bool more = chunk + 1 < T::KEY_CHUNKS;
            if (more) next.load_chunk(pages, tile, chunk + 1);
            pin();
            scores.add_chunk(keys, query, lds, chunk);
            pin();
            if (more) keys = next;
        }
        if (!LAST && T::KEYS_EARLY && !T::TIGHT) keys.load_chunk(pages, tile + T::GROUPS, 0, tile + T::GROUPS < task.end_tile);
        pin();
        return scores;
    }

    // What is not ahead of P.
    template <bool LAST>
    PA_DEVICE void load_late(int tile) {
        if constexpr (!T::VALUES_AHEAD) {
            values.load_chunk(pages, tile, 0);
            pin();
            if (!LAST) id = pages.load_id(tile + 2 * T::GROUPS);
        }
        if (!LAST) keys.load_chunk(pages, tile + T::GROUPS, 0, tile + T::GROUPS < task.end_tile);
        pin();
    }

    // O = O * decay + P V. Where V does not fit registers, every M-tile reads it again.
    PA_DEVICE void add_values(int tile, int m, float decay, float value_scale, bool masked) {
        Output<T> product = {};
        Output<T> &sum = T::PER_TOKEN ? product : output[m];
        output[m].scale(decay);
        PA_UNROLL for (int chunk = 0; chunk < T::VALUE_CHUNKS; chunk++) {
            Values<T> next;
            const bool more = chunk + 1 < T::VALUE_CHUNKS, again = T::VALUE_CHUNKS > 1 && m + 1 < T::M_TILES;
            if (T::CHUNKS_AHEAD && (more || again)) next.load_chunk(pages, tile, more ? chunk + 1 : 0);
            if (T::MASKS_VALUES && masked && (m == 0 || T::VALUE_CHUNKS > 1)) values.mask(task, tile, chunk);
            sum.add_chunk(values, lds, m, chunk);
            if (!T::CHUNKS_AHEAD && more) next.load_chunk(pages, tile, chunk + 1);
            if (more || again) values = next;
        }
        if constexpr (T::PER_TOKEN) {
            PA_UNROLL for (int i = 0; i < T::DIM_TILES; i++) output[m].of[i] += product.of[i] * value_scale;
        }
    }

    // Scales that all of O shares.
    PA_DEVICE void finish() {
        float factor = 1.f / (1 << T::P_EXPONENT);
        if constexpr (T::SCALES == Scales::SCALAR) factor *= constant<float>(call.args.v_scale);
        PA_UNROLL for (int m = 0; m < T::M_TILES; m++) {
            if constexpr (T::FP8) output[m].scale(factor);
        }
        total_sums(rows, lds);
        if constexpr (T::GROUPS > 1) {
            merge_groups(rows, output[0], lds);
            if (T::group() > 0) return;
        }
        if constexpr (T::DIRECT_OUTPUT) {
            store_rows(call, task.rows, rows, output);
        } else {
            store_partial(call, task, rows, output);
        }
    }
};

template <class T>
PA_DEVICE void run_task(const Call &call, int slot, const WorkInfo &work, Lds<T> lds) {
    const Task<T> task(call, slot, work);
    Pages<T> pages(call, task, lds);
    const bool some = task.first_tile < task.end_tile;
    // Q that comes first has arrived with the page ids, and is staged while K is on its way.
    QueryRow<T> early(task.rows, thread() / 16);
    if constexpr (T::QUERY_EARLY) early.load(call);
    u32 ids[2] = {};
    if (!T::PAGES_AHEAD || some) {
        PA_UNROLL for (int i = 0; i < 2; i++) ids[i] = pages.load_id(task.first_tile + i * T::GROUPS);
    }
    if constexpr (T::QUERY_EARLY) {
        // What comes by scalar loads comes with Q and the page ids: behind K, V would wait for it.
        settle(pages.value.base, pages.value.page_bytes, call.args.scale_log2, call.args.out);
        if constexpr (T::SCALES == Scales::SCALAR) settle(constant<float>(call.args.k_scale), constant<float>(call.args.v_scale));
    } else {
        stage_queries(call, task.rows, lds);
    }
    pages.stage_id(task.first_tile, ids[0]);
    if constexpr (T::IDS_AHEAD == 2) pages.stage_id(task.first_tile + T::GROUPS, ids[1]);
    if (!T::PAGES_AHEAD) barrier();
    NextScales<T> scales;
    if (T::SCALES_STAGED && T::SCALES_BEFORE_KEYS && some) scales.load_tile(pages, task.first_tile);
    Keys<T> keys;
    if (some) keys.load_chunk(pages, task.first_tile, 0);
    if (T::SCALES_STAGED && !T::SCALES_BEFORE_KEYS && some) scales.load_tile(pages, task.first_tile);
    pin();
    if (T::QUERY_EARLY && early.exists()) early.stage(lds);
    if (T::SCALES_STAGED && some) scales.stage(task, lds, task.first_tile);
    if (T::QUERY_EARLY || T::SCALES_STAGED || T::PAGES_AHEAD) barrier();
    Pipeline<T> pipeline(pages, keys, ids[1]);
    pipeline.run();
    pipeline.finish();
}

}  // namespace pa
