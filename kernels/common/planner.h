// The planner on the device: src/plan, record for record, by one block of 256 threads.
#pragma once

#include "args.h"
#include "device.h"

namespace pa {

constexpr int PLANNER_THREADS = 256, PLANNER_WAVES = PLANNER_THREADS / WAVE;
// Tokens of a tile are 128 or 256, so the longest row, of 2^31 tokens, has so many tiles at most. Every tile count and number of slots is exact in F32.
constexpr unsigned MAX_TILES = 1u << 24;

struct Tiles {
    unsigned first, count;
};

// The tiles of a row whose `query` new tokens are the last of its `context`. `window` 0: none.
template <unsigned TILE> PA_DEVICE Tiles tile_range(int context, int query, int window) {
    if (context <= 0 || query <= 0) return {0, 0};
    unsigned tokens = context, reach = (unsigned)window + query - 1;
    unsigned first = window > 0 && tokens > reach ? (tokens - reach) / TILE : 0;
    return {first, (tokens + TILE - 1) / TILE - first};
}

template <unsigned TILE, bool RAGGED> PA_DEVICE Tiles row_tiles(const PlanArgs &args, int row) {
    if (row >= args.rows) return {0, 0};
    int query = args.query_len;
    if (RAGGED) {
        int sequence = row / args.heads_per_row;
        query = args.query_start[sequence + 1] - args.query_start[sequence];
    }
    return tile_range<TILE>(args.context_lens[row], query, args.window);
}

// ceil(tiles / bound): a guess off by at most one, and its remainder.
PA_DEVICE unsigned ceil_ratio(unsigned tiles, unsigned bound, float inverse) {
    unsigned top = tiles + bound - 1, guess = (unsigned)((float)top * inverse);
    int rest = top - guess * bound;
    return guess + (rest >= (int)bound) - (rest < 0);
}

// floor(a * b / divisor), which is at most 2^24: a guess off by a few, and the same of its remainder.
PA_DEVICE unsigned floor_ratio(unsigned a, unsigned b, unsigned long long divisor, float inverse) {
    unsigned guess = (unsigned)((float)a * (float)b * inverse);
    long long rest = (unsigned long long)a * b - guess * divisor;
    float rough = (float)(int)(rest >> 16) * 65536.0f + (float)(unsigned)(rest & 0xffff);  // below 2^47: two conversions make it
    int more = (int)(rough * inverse);
    rest -= more * (long long)divisor;
    return guess + more + (rest >= (long long)divisor) - (rest < 0);
}

struct Sums {
    unsigned before, all;
};

// Sums of x over the threads before this one, and over all. `parts` may serve again after the next barrier.
PA_DEVICE Sums block_sums(unsigned x, unsigned *parts) {
    int wave = thread() / WAVE;
    unsigned up_to = wave_scan(x);
    if (thread() % WAVE == WAVE - 1) parts[wave] = up_to;
    barrier();
    Sums sums = {up_to - x, 0};
    for (int i = 0; i < PLANNER_WAVES; i++) {
        sums.before += i < wave ? parts[i] : 0;
        sums.all += parts[i];
    }
    return sums;
}

// A row of t tiles gets min(ceil(t / bound), max_partitions) tasks.
struct MinMaxRule {
    unsigned bound, max_partitions;
    float inverse;

    PA_DEVICE MinMaxRule(unsigned bound, unsigned max_partitions)
        : bound(bound), max_partitions(max_partitions), inverse(reciprocal((float)bound)) {}

    PA_DEVICE unsigned tasks(unsigned tiles) const { return min_of(ceil_ratio(tiles, bound, inverse), max_partitions); }
};

// The smallest bound that the slots allow. Each wave finds it for itself, all rows in its registers: no barrier a step.
template <int BUCKET> PA_DEVICE MinMaxRule min_max_rule(const PlanArgs &args, const unsigned *tiles) {
    constexpr int ROWS = BUCKET < WAVE ? 1 : BUCKET / WAVE;
    unsigned rows[ROWS], total = 0, filled = 0, longest = 0, capacity = args.capacity;
    for (int i = 0; i < ROWS; i++) {
        int row = thread() % WAVE * ROWS + i;
        rows[i] = row < BUCKET ? tiles[row] : 0;
        total += rows[i];
        filled += rows[i] > 0;
        longest = max_of(longest, rows[i]);
    }
    total = wave_sum(total) - 1;  // of at most 256 rows of 2^24: with the last one, too much for 32 bits
    filled = wave_sum(filled);
    longest = wave_max(longest);
    if (filled == 0 || capacity <= filled) return {MAX_TILES, args.max_partitions};
    unsigned spare = capacity - filled;
    unsigned low = min_of(total / capacity, longest - 1) + 1, high = min_of(total / spare, longest - 1) + 1;
    while (low < high) {
        MinMaxRule rule(low + (high - low) / 2, args.max_partitions);
        unsigned tasks = 0;
        for (int i = 0; i < ROWS; i++) tasks += rule.tasks(rows[i]);
        bool fits = wave_sum(tasks) <= capacity;
        low = fits ? low : rule.bound + 1;
        high = fits ? rule.bound : high;
    }
    return {low, args.max_partitions};
}

// A row of t tiles gets 1 + floor(spare * t / total) tasks, at most t and max_partitions; none without tiles.
struct ProportionalRule {
    unsigned spare, max_partitions;
    unsigned long long total;
    float inverse;

    PA_DEVICE unsigned tasks(unsigned tiles) const {
        if (tiles == 0) return 0;
        return min_of(1 + floor_ratio(spare, tiles, total, inverse), min_of(tiles, max_partitions));
    }
};

template <int BUCKET> PA_DEVICE ProportionalRule proportional_rule(const PlanArgs &args, const unsigned *tiles, unsigned (*parts)[PLANNER_WAVES]) {
    unsigned low = 0, high = 0, filled = 0;
    for (int row = thread(); row < BUCKET; row += PLANNER_THREADS) {
        low += tiles[row] & 0xffff;
        high += tiles[row] >> 16;
        filled += tiles[row] > 0;
    }
    low = block_sums(low, parts[0]).all;
    high = block_sums(high, parts[1]).all;
    filled = block_sums(filled, parts[0]).all;
    unsigned long long total = ((unsigned long long)high << 16) + low;
    int spare = args.capacity - (int)filled;
    return {spare > 0 ? (unsigned)spare : 0, args.max_partitions, total, reciprocal((float)total)};
}

// The task of a slot that has one: the row's `index`-th of `count`.
PA_DEVICE WorkInfo task(int row, unsigned index, unsigned count, Tiles range) {
    float inverse = reciprocal((float)count);
    unsigned start = floor_ratio(index, range.count, count, inverse), end = floor_ratio(index + 1, range.count, count, inverse);
    return {row, (int)(range.first + start), (int)(range.first + end), (int)index};
}

// Rows by the tiles of their longest task, most first and equal ones as they come: order[i] is the i-th. A thread has a row; `keys` serves again
// after the next barrier.
template <int BUCKET, class Rule> PA_DEVICE void longest_first(const Rule &rule, const unsigned *tiles, unsigned *keys, unsigned *order) {
    static_assert(BUCKET <= PLANNER_THREADS, "a key has room for so many rows");
    int row = thread();
    unsigned key = 0;
    if (row < BUCKET) {
        unsigned count = rule.tasks(tiles[row]), longest = count > 0 ? ceil_ratio(tiles[row], count, reciprocal((float)count)) : 0;
        keys[row] = key = min_of(longest, MAX_TILES - 1) * PLANNER_THREADS + (PLANNER_THREADS - 1 - row);
    }
    barrier();
    if (row >= BUCKET) return;
    unsigned place = 0;
    for (int other = 0; other < BUCKET; other++) place += keys[other] > key;
    order[place] = row;
}

// Plans in tiles of TILE tokens for at most BUCKET rows (a power of two; at most 256 with MIN_MAX). Rows take their slots as they come, or those
// with the longest tasks first.
template <int BUCKET, unsigned TILE, bool MIN_MAX, bool RAGGED, bool LONGEST_FIRST> PA_DEVICE void plan(const PlanArgs &args) {
    static_assert((BUCKET & (BUCKET - 1)) == 0 && (!MIN_MAX || BUCKET <= PLANNER_THREADS), "rows of a planner");
    PA_SHARED unsigned first[BUCKET], tiles[BUCKET], slots[BUCKET], parts[2][PLANNER_WAVES], order[LONGEST_FIRST ? BUCKET : 1];
    for (int row = thread(); row < BUCKET; row += PLANNER_THREADS) {
        Tiles range = row_tiles<TILE, RAGGED>(args, row);
        first[row] = range.first;
        tiles[row] = range.count;
    }
    barrier();
    auto rule = [&] {
        if constexpr (MIN_MAX) {
            return min_max_rule<BUCKET>(args, tiles);
        } else {
            return proportional_rule<BUCKET>(args, tiles, parts);
        }
    }();
    if constexpr (LONGEST_FIRST) {
        longest_first<BUCKET>(rule, tiles, slots, order);
        barrier();
    }
    auto row_at = [&](int place) {
        if constexpr (LONGEST_FIRST) return (int)order[place];
        return place;
    };
    // A thread's rows follow each other in their order; their counts wait where their slots will be.
    constexpr int ROWS = BUCKET < PLANNER_THREADS ? 1 : BUCKET / PLANNER_THREADS;
    int begin = thread() * ROWS, end = begin < BUCKET ? begin + ROWS : begin;
    unsigned own = 0;
    for (int place = begin; place < end; place++) own += slots[place] = rule.tasks(tiles[row_at(place)]);
    Sums sums = block_sums(own, parts[1]);
    unsigned next = sums.before;
    for (int place = begin; place < end; place++) {
        unsigned count = slots[place];
        int row = row_at(place);
        slots[place] = next;
        if (row < args.rows) args.reduce[row] = {(int)next, (int)count};
        next += count;
    }
    barrier();
    for (unsigned slot = thread(); slot < (unsigned)args.capacity; slot += PLANNER_THREADS) {
        WorkInfo record = {-1, 0, 0, 0};
        if (slot < sums.all) {
            int place = 0;  // of the last row whose slots start at or before this one
            for (int step = BUCKET / 2; step > 0; step /= 2) place += slots[place + step] <= slot ? step : 0;
            unsigned after = place + 1 < BUCKET ? slots[place + 1] : sums.all;
            int row = row_at(place);
            record = task(row, slot - slots[place], after - slots[place], {first[row], tiles[row]});
        }
        args.work[slot] = record;
    }
}

}  // namespace pa
