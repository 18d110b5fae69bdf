// What a workgroup does: a range of tiles of one plan row, for some of the rows of one KV head.
#pragma once

#include "../common/args.h"
#include "traits.h"

namespace pa {

// The kernel's arguments.
struct Call {
    const WorkInfo *work;
    const int *block_tables;
    const void *q;
    u32 max_pages, plan_rows, q_row, q_head;
    void *statistics;
    const void *key;
    const TileArgs &args;
};

// The rows of a (sequence, KV head) that a workgroup takes, where they come from and go to.
template <class T>
struct RowGroup {
    int head;         // KV head
    int first_query;  // row of q of the sequence's first new token
    int queries;      // new tokens of the sequence
    int first;        // row of the (sequence, KV head) that is the workgroup's row 0

    PA_DEVICE RowGroup(const Call &call, int plan_row) {
        const int kv_heads = call.args.kv_heads;
        const int sequence = T::PER_HEAD ? plan_row / kv_heads : plan_row;
        head = T::PER_HEAD ? plan_row % kv_heads : __builtin_amdgcn_workgroup_id_y();
        if constexpr (T::RAGGED) {
            const int *start = call.args.query_start + sequence, rows = call.args.q_rows;
            first_query = min(max(start[0], 0), rows);
            queries = min(max(start[1], first_query), rows) - first_query;
        } else {
            queries = T::SINGLE_QUERY ? 1 : call.args.query_len;
            first_query = sequence * queries;
        }
        first = __builtin_amdgcn_workgroup_id_z() * T::ROWS;
    }

    // New token of the workgroup's row, its query head, and whether there is such a row.
    PA_DEVICE int query(int row) const { return u32(first + row) / T::GROUP; }
    PA_DEVICE int query_head(int row) const { return head * T::GROUP + u32(first + row) % T::GROUP; }
    PA_DEVICE bool has(int row) const { return first + row < queries * T::GROUP; }
    // Offset of a row in a tensor of [q rows, q heads, ...] with these strides.
    PA_DEVICE long offset(int row, long row_stride, long head_stride) const {
        return (first_query + query(row)) * row_stride + query_head(row) * head_stride;
    }
};

template <class T>
struct Task {
    int slot;
    RowGroup<T> rows;
    int context;      // tokens, the new ones included
    int first_token;  // the first that any row attends
    int window;
    // Tiles of this group: every GROUPS-th, as many for each, so that their barriers pair up. The last may lie past the context.
    int first_tile, end_tile;
    const int *table;

    // `work` is the slot's record, or just a plan row where there is no plan.
    PA_DEVICE Task(const Call &call, int slot, const WorkInfo &work) : slot(slot), rows(call, work.row) {
        const TileArgs &args = call.args;
        // A length that the table has no lanes for ends with the table.
        context = min(args.context_lens[work.row], min(int(call.max_pages), 0x7fffffff / T::PAGE) * T::PAGE);
        table = call.block_tables + work.row * args.table_row;
        first_token = 0;
        window = args.window;
        if constexpr (T::WINDOW) {
            const u32 reach = u32(window) + rows.queries - 1;
            first_token = context > 0 && u32(context) > reach ? context - reach : 0;
        }
        // Past the context there is nothing, whatever context the plan was made for.
        const int tiles = context > 0 && rows.queries > 0 ? (context - 1) / T::TOKENS + 1 : 0;
        first_tile = call.work ? work.first_tile : first_token / T::TOKENS;
        end_tile = call.work ? min(work.end_tile, tiles) : tiles;
        if constexpr (T::GROUPS > 1) {
            if (end_tile < tiles) context = end_tile * T::TOKENS;
            int rounds = (max(end_tile - first_tile, 0) + T::GROUPS - 1) / T::GROUPS;
#if defined(PA_TEST_UNEVEN_GROUPS)
            rounds = (max(end_tile - first_tile - T::group(), 0) + T::GROUPS - 1) / T::GROUPS;
#endif
            first_tile += T::group();
            end_tile = first_tile + rounds * T::GROUPS;
        }
    }

    // The position of a row's query; negative where the row attends nothing.
    PA_DEVICE int position(int row) const { return rows.has(row) ? context - rows.queries + rows.query(row) : -1; }
    // Whether a tile has tokens that some row does not attend.
    PA_DEVICE bool masks_scores(int tile) const {
        const int first_position = context - rows.queries + rows.query(0);
        const bool late = tile * T::TOKENS + (T::TOKENS - 1) > first_position;
        return late || (T::WINDOW && tile * T::TOKENS < context - window);
    }
    // Whether a tile has tokens that are not the call's.
    PA_DEVICE bool masks_values(int tile) const {
        return tile >= context / T::TOKENS || (T::WINDOW && tile * T::TOKENS < first_token);
    }
};

// Ids are clamped to the cache.
PA_DEVICE u32 clamped_id(const TileArgs &args, u32 entry) {
    const u32 last = args.pages - 1;
    return entry < last ? entry : last;
}

}  // namespace pa
