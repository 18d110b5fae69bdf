// Merges one (query token, query head)'s partial results: the softmax of all of its tasks, sinks, the log-sum-exp.
//
// A block's threads fall into groups, each of which holds a chunk of head_dim, four floats a thread. Group g takes partials g, g + GROUPS, ...,
// up to eight in flight at a time with their statistics, and keeps a running maximum, sum and output; the groups are merged through shared
// memory. No load depends on another but for the plan row's record.
#pragma once

#include "args.h"
#include "number.h"

namespace pa {

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

// (Part of) a row's softmax: the largest score * log2 e, and relative to it the sum and the output.
struct Partial {
    float max, sum;
    Float4 out;
};

PA_DEVICE float infinity() { return float_of(0x7f800000); }
PA_DEVICE float larger(float a, float b) { return b > a ? b : a; }
// What to subtract from scores: their maximum, but where all are -inf.
PA_DEVICE float reference(float max) { return max == -infinity() ? 0 : max; }

// Adds N partials, `weights` of them relative to `into`'s maximum.
template <int N> PA_DEVICE void merge(Partial &into, const Partial *parts) {
    float max = into.max;
    for (int i = 0; i < N; i++) max = larger(max, parts[i].max);
    float from = reference(max), keep = exp2(into.max - from);
    into.max = max;
    into.sum *= keep;
    for (int d = 0; d < 4; d++) into.out.x[d] *= keep;
    for (int i = 0; i < N; i++) {
        float weight = exp2(parts[i].max - from);
        into.sum += parts[i].sum * weight;
        for (int d = 0; d < 4; d++) into.out.x[d] += parts[i].out.x[d] * weight;
    }
}

// A logit times log2 e; one that this would make infinite stays the largest float.
PA_DEVICE float in_powers_of_two(float logit) {
    float x = logit * LOG2_E, most = float_of(0x7f7fffff);
    bool overflows = (bits_of(x) & 0x7fffffff) == 0x7f800000 && (bits_of(logit) & 0x7fffffff) < 0x7f800000;
    return overflows ? (x > 0 ? most : -most) : x;
}

template <int HEAD_DIM, int NUMBER, bool RAGGED, int THREADS> struct Reducer {
    // The part of head_dim that a block merges.
    static constexpr int CHUNK = HEAD_DIM % 256 == 0 ? 256 : HEAD_DIM % 128 == 0 ? 128 : 64;
    static constexpr int CHUNKS = HEAD_DIM / CHUNK, LANES = CHUNK / 4, GROUPS = THREADS / LANES;
    static_assert(HEAD_DIM % 64 == 0 && THREADS >= LANES, "sizes of a reducer");

    const ReduceArgs &args;
    int token, head, sequence, dim;
    long first;  // of the partials' rows: this row of the first slot
    long step;   // to the next slot's

    PA_DEVICE Partial none() const { return {-infinity(), 0, {{0, 0, 0, 0}}}; }

    template <int N> PA_DEVICE void add(Partial &sum, int index, int count) const {
        // Past the last partial that one is loaded again: a branch a load would have each wait for the one before.
        Partial parts[N];
        for (int i = 0; i < N; i++) {
            long row = first + min_of(index + i * GROUPS, count - 1) * step;
            Elements<float, 2> statistic = *(const Elements<float, 2> *)(args.statistics + row * 2);
            parts[i] = {statistic.x[0], statistic.x[1], *(const Float4 *)(args.partial + row * HEAD_DIM + dim)};
        }
        for (int i = 0; i < N; i++) {
            if (index + i * GROUPS >= count) parts[i] = none();
        }
        merge<N>(sum, parts);
    }

    // What this thread's group makes of its partials.
    PA_DEVICE Partial own(int group, int count) const {
        Partial sum = none();
        int index = group, block = 0;  // `block` is the same for all threads, so that steps are chosen without divergence
        for (; count - block > 4 * GROUPS; block += 8 * GROUPS, index += 8 * GROUPS) add<8>(sum, index, count);
        for (; count - block > GROUPS; block += 4 * GROUPS, index += 4 * GROUPS) add<4>(sum, index, count);
        for (; count - block > 0; block += GROUPS, index += GROUPS) add<1>(sum, index, count);
        return sum;
    }

    // All groups' partials, in the first group.
    PA_DEVICE Partial merged(Partial own, int group, int lane) const {
        PA_SHARED Float4 outs[GROUPS][LANES];
        PA_SHARED float maxima[GROUPS], sums[GROUPS];
        outs[group][lane] = own.out;
        if (lane == 0) {
            maxima[group] = own.max;
            sums[group] = own.sum;
        }
        barrier();
        if (group > 0) return own;
        Partial all = own;
#pragma unroll 4
        for (int i = 1; i < GROUPS; i++) {
            Partial part = {maxima[i], sums[i], outs[i][lane]};
            merge<1>(all, &part);
        }
        return all;
    }

    PA_DEVICE void store(Partial all, long row) const {
        float weight = 0, lse = -infinity();
        if (all.sum != 0) {
            float keep = 1;
            if (args.sinks) {
                float sink = in_powers_of_two(args.sinks[head]), max = larger(all.max, sink);
                keep = exp2(all.max - max);
                all.sum = all.sum * keep + exp2(sink - max);
                all.max = max;
            }
            weight = keep / all.sum;
            lse = (all.max + log2(all.sum)) * LN_2;
        }
        typedef typename Stored<NUMBER>::Type Type;
        Elements<Type, 4> out;
        for (int d = 0; d < 4; d++) out.x[d] = from_float<NUMBER>(all.out.x[d] * weight);
        *(Elements<Type, 4> *)((Type *)args.out + row * args.out_row + head * args.out_head + dim) = out;
        if (args.lse && dim == 0) args.lse[row * args.q_heads + head] = lse;
    }
};

template <int HEAD_DIM, int NUMBER, bool RAGGED, int THREADS> PA_DEVICE void reduce(const ReduceArgs &args) {
    typedef Reducer<HEAD_DIM, NUMBER, RAGGED, THREADS> Reducer;
    int token = block_x() / Reducer::CHUNKS, head = block_y(), sequence = block_z();
    long row = (long)sequence * args.query_len + token;
    if (RAGGED) {
        int start = args.query_start[sequence], end = args.query_start[sequence + 1];
        row = (start > 0 ? start : 0) + (long)token;
        if (row >= (end < args.q_rows ? end : args.q_rows)) return;
    }
    int q_group = args.q_heads / args.kv_heads, kv_head = head / q_group;
    int plan_row = args.per_head ? sequence * args.kv_heads + kv_head : sequence;
    ReduceInfo info = {plan_row, 1};
    if (args.reduce) info = args.reduce[plan_row];
    int heads = args.per_head ? 1 : args.kv_heads;
    int group = thread() / Reducer::LANES, lane = thread() % Reducer::LANES;
    long first = ((long)info.first_slot * heads + (args.per_head ? 0 : kv_head)) * args.rows + token * q_group + head % q_group;
    Reducer reducer = {args, token, head, sequence, block_x() % Reducer::CHUNKS * Reducer::CHUNK + lane * 4, first, (long)heads * args.rows};
    Partial all = reducer.own(group, info.count);
    if constexpr (Reducer::GROUPS > 1) all = reducer.merged(all, group, lane);
    if (group == 0) reducer.store(all, row);
}

}  // namespace pa
