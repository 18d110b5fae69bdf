// What the host passes to the NVIDIA kernels, beside common/args.h: mirrored field for field in src/gpu/args.rs. No system headers.
#pragma once

#include "../common/args.h"

namespace pa {

// The tile's arguments; names shared with TileArgs mean the same. A row of one task is finished by it (output, LSE, sinks); other rows leave partial
// results for the reducer.
// Grid: x slots times KV heads (1 where tables are per head) times CTAs of a cluster, the last fastest; z blocks of query rows.
struct CudaTileArgs {
    const WorkInfo *work;        // [slots]; null: each plan row is one task, in the slot of its number
    const ReduceInfo *reduce;    // [plan_rows]; null where `work` is
    const int *block_tables;     // [plan_rows, max_pages], rows `table_row` apart
    const int *context_lens;     // [plan_rows]
    const int *query_start;      // [sequences + 1]; read with PA_RAGGED
    const void *q, *key, *value; // 16 bytes a token's piece: the pointers and the strides of caches are multiples of 16 bytes, q's of 4
    const void *k_scale, *v_scale;
    const float *sinks;          // [q heads], or null
    void *out;                   // the call's output
    float *lse;                  // [q rows, q heads], or null
    void *partial;               // [slots, KV heads, rows, head_dim], all scales applied, not divided by the sum: F32, or F16 (Traits::DIRECT)
    void *statistics;            // float2 [slots, KV heads, rows]
    long table_row, q_row, q_head, out_row, out_head;
    Paged key_stride, value_stride, k_scale_stride, v_scale_stride;
    float scale_log2, softcap;
    int window, query_len, kv_heads, pages, max_pages, plan_rows, rows;
    int q_rows;                  // of q and the output: `query_start` is clamped to them
    long q_sequence, out_sequence; // added for each sequence, where its rows are not `q_row` or `out_row` after the last one's
    int settled;                 // block tables, lengths, starts and records stay as they are: no kernel that may run when this one starts writes them
};

}  // namespace pa
