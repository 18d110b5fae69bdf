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
    static constexpr int PAGE_IDS = QUERY_SCALES + (T::ROW_SCALED ? T::ROWS * 4 : 0);
    static constexpr int BYTES = PAGE_IDS + T::PAGE_SLOTS * PAGES * 4;
    static_assert(BYTES <= PA_LDS_BYTES, "the host reserves less LDS than the tile has");

    u8 *base;
    u32 wave;  // of the workgroup's, this one

    PA_DEVICE explicit Lds(u8 *memory) : base(memory), wave(pa::wave()) {}

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
    PA_DEVICE int &page_id(u32 tile, int page) const { return lds_at<int>(base, PAGE_IDS + (tile % T::PAGE_SLOTS * PAGES + page) * 4); }
};

}  // namespace pa
