// Where things lie in the workgroup's LDS: src/registry/lds.rs counts the same bytes.
#pragma once

#include "traits.h"

namespace pa {

// Padding that keeps rows off the same banks.
constexpr int ROW_PAD = 16;

template <class T>
struct Lds {
    static constexpr int QUERY_ROW = T::HEAD_DIM * T::BYTES + ROW_PAD;
    static constexpr int P_ROW = T::TOKENS * T::BYTES + ROW_PAD;
    static constexpr int PAGES = T::TOKENS > T::PAGE ? T::TOKENS / T::PAGE : 1;

    static constexpr int P = T::QUERY_PARTS * T::ROWS * QUERY_ROW;
    static constexpr int MAXIMA = P + T::P_PARTS * T::P_SLOTS * 16 * P_ROW;
    static constexpr int SUMS = MAXIMA + T::P_SLOTS * 16 * T::WAVES * 4;
    static constexpr int VALUE_SCALES = SUMS + T::P_SLOTS * 16 * T::WAVES * 4;
    static constexpr int TOKEN_SCALES = VALUE_SCALES + (T::PER_TOKEN ? T::WAVES * 4 : 0);
    static constexpr int QUERY_SCALES = TOKEN_SCALES + (T::SCALES_STAGED ? 2 * T::TOKENS * 4 : 0);
    // Of a group's copy. The page ids of all groups' tiles come after the copies: their place follows from the tile.
    static constexpr int COPY = QUERY_SCALES + (T::ROW_SCALED ? T::ROWS * 4 : 0);
    static constexpr int PAGE_IDS = T::GROUPS * COPY;
    static constexpr int PAGE_SLOTS = T::GROUPS * T::PAGE_SLOTS;
    // After the loop the groups merge in the same space: O, then maximum and sum of each row.
    static constexpr int MERGED_STATISTICS = 16 * T::HEAD_DIM * 4;
    static constexpr int MERGED = T::GROUPS > 1 ? MERGED_STATISTICS + 16 * 8 : 0;
    static constexpr int USED = PAGE_IDS + PAGE_SLOTS * PAGES * 4;
    static constexpr int BYTES = USED > MERGED ? USED : MERGED;
    static_assert(BYTES <= PA_LDS_BYTES, "the host reserves less LDS than the tile has");

    u8 *workgroup;
    u8 *base;  // of this group's copy
    u32 wave;  // of the group's, this one

    PA_DEVICE explicit Lds(u8 *memory, int copy = COPY) : workgroup(memory), base(memory + T::group() * copy), wave(pa::wave()) {}

    // Q as operands: part 0, or 0 and 1 where it is split.
    template <class V>
    PA_DEVICE V &query(int part, int row, int byte) const {
        return lds_at<V>(base, (part * T::ROWS + row) * QUERY_ROW + byte);
    }
    // What a row of staged Q is to be multiplied by.
    PA_DEVICE float &query_scale(int row) const { return lds_at<float>(base, QUERY_SCALES + row * 4); }
    // P of an M-tile, [row][token], part 0, or 0 and 1 where it is split. M-tiles take slots in turn.
    template <class V>
    PA_DEVICE V &p(int part, int m, int row, int token) const {
        return lds_at<V>(base, P + (part * T::P_SLOTS * 16 + slot_row(m, row)) * P_ROW + token * T::BYTES);
    }
    // One value a wave for each row of an M-tile: the maxima of a tile, the sums of a task.
    PA_DEVICE float &maximum(int m, int row, int wave) const { return lds_at<float>(base, MAXIMA + (slot_row(m, row) * T::WAVES + wave) * 4); }
    PA_DEVICE f32x4 maxima(int m, int row) const { return lds_at<f32x4>(base, MAXIMA + slot_row(m, row) * T::WAVES * 4); }
    PA_DEVICE float &sum(int m, int row, int wave) const { return lds_at<float>(base, SUMS + (slot_row(m, row) * T::WAVES + wave) * 4); }
    PA_DEVICE f32x4 sums(int m, int row) const { return lds_at<f32x4>(base, SUMS + slot_row(m, row) * T::WAVES * 4); }
    static PA_DEVICE int slot_row(int m, int row) { return m % T::P_SLOTS * 16 + row; }
    // The largest V scale of each wave's tokens.
    PA_DEVICE float &value_scale(int wave) const { return lds_at<float>(base, VALUE_SCALES + wave * 4); }
    PA_DEVICE f32x4 value_scales() const { return lds_at<f32x4>(base, VALUE_SCALES); }
    // Scales of a tile's tokens: K's (0) and V's (1).
    template <class V>
    PA_DEVICE V &token_scale(int which, int token) const {
        return lds_at<V>(base, TOKEN_SCALES + (which * T::TOKENS + token) * 4);
    }
    // Page ids of a tile.
    PA_DEVICE int &page_id(u32 tile, int page) const { return lds_at<int>(workgroup, PAGE_IDS + (tile % PAGE_SLOTS * PAGES + page) * 4); }
    // What group 1 leaves for group 0: this lane's `i`-th part of O, and a row's maximum and sum.
    PA_DEVICE f32x4 &merged_output(int i) const { return lds_at<f32x4>(workgroup, (i * GROUP_THREADS + thread()) * 16); }
    PA_DEVICE f32x2 &merged_statistic(int row) const { return lds_at<f32x2>(workgroup, MERGED_STATISTICS + row * 8); }
};

}  // namespace pa
