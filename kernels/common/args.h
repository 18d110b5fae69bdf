// What the host passes to each kernel: mirrored field for field in src/gpu/args.rs. No system headers.
//
// Strides count elements (bytes in an MXFP4 cache). Pointers to scales are never null where the specialization reads them. "Rows" of a
// (sequence, KV head) are (query token, head of the group), token major: row r is token r / group, head r % group.
#pragma once

#include "records.h"

namespace pa {

// K, V or their scales as [page, head, token]; what lies inside a page's head follows from the layout. `token` is read for Nhd and Hnd only.
struct Paged {
    long page, head, token;
};

// The tile's arguments after the leading ones, which are passed apart so that they can be preloaded into scalar registers:
//   const WorkInfo *work, const int *block_tables, const void *q, unsigned max_pages, unsigned plan_rows, unsigned q_row, unsigned q_head,
//   void *statistics, const void *key, TileArgs args
// 14 dwords up to `key`. `work` null: plan-free, slot s is all tiles of plan row s. `q_row` and `q_head` are q's strides.
// `statistics`: float2 [capacity, grid.y, args.rows] (maximum of score * log2 e, sum of exp2(score - maximum)); with DIRECT_OUTPUT the plan's
// ReduceInfo [plan_rows] instead (null: plan-free).
// Grid: x slots, y KV heads (1 where tables are per head: then a plan row is sequence * kv_heads + head), z groups of M_TILES * 16 rows.
struct TileArgs {
    const void *value;
    const void *k_scale, *v_scale;  // one F32; F32 [page, head, token]; or U8 (E8M0) [page, head, token, head_dim / 32]
    const int *context_lens;        // [plan_rows]
    const int *query_start;         // [sequences + 1], or null: every sequence has `query_len` rows
    void *out;                      // partial: F32 [capacity, grid.y, rows, head_dim], not divided by the sum; direct: the call's output
    float *lse;                     // direct only: [q rows, q heads], or null
    long table_row;                 // from one plan row's page ids to the next's
    Paged key_stride, value_stride, k_scale_stride, v_scale_stride;
    long out_row, out_head;         // direct only
    float scale_log2;               // softmax scale * log2 e
    float softcap;                  // the cap, where the specialization has one
    int window;                     // tokens, where the specialization has one
    int query_len;                  // new tokens of each sequence; of the longest where `query_start` is given
    int kv_heads;
    int pages;                      // of the cache: ids are clamped to it
    int rows;                       // rows that a (slot, KV head) has room for: grid.z * M_TILES * 16
    int q_rows;                     // of q and the output: `query_start` is clamped to them
};

// Merges partial results: one plan row's tasks for each query row and head. Grid: x query rows of a sequence (token) times the chunks of
// head_dim (256 dims where that divides it, else 128, else 64; token major), y q heads, z sequences. Blocks of PA_THREADS (64, 256 or 1024).
struct ReduceArgs {
    const ReduceInfo *reduce;  // [plan_rows], or null: plan-free, each row is one task in the slot of its number
    const float *partial;      // as TileArgs::out, or CudaTileArgs::partial
    const float *statistics;   // float2, as the tile's
    const float *sinks;        // [q_heads], or null
    const int *query_start;    // or null
    void *out;
    float *lse;                // [q rows, q heads], or null
    long out_row, out_head;
    int query_len, q_heads, kv_heads, rows;
    int per_head;              // plan rows are (sequence, KV head)
    int q_rows;                // of the output: `query_start` is clamped to them
    long out_sequence;         // NVIDIA only: added for each sequence, where its rows are not `out_row` after the last one's
};

// Plans on the device: one block of 256 threads, a row or more a thread.
struct PlanArgs {
    const int *context_lens;   // [rows]
    const int *query_start;    // [rows / heads_per_row + 1], or null
    WorkInfo *work;            // [capacity]
    ReduceInfo *reduce;        // [rows]
    int rows, heads_per_row;   // heads_per_row: plan rows of one sequence, above 1 with per-head tables
    int query_len, window;     // window 0: none
    int capacity;
    unsigned max_partitions;   // 2^32 - 1: no limit
};

// Writes new tokens into their pages. Grid: x sixteens of tokens, y KV heads, z K and V. Blocks of 256. Of tokens that share a slot any one, or
// parts of several, may stay: the host leaves one.
struct WriteArgs {
    const void *k, *v;         // [tokens, kv_heads, head_dim], last dim contiguous
    const long *slots;         // [tokens]: page * page_size + offset; negative or past the cache: not written
    void *key, *value;
    void *k_scale, *v_scale;   // scalar, or per token with strides of 0: one F32 to divide by; per token and block: written
    long k_row, k_head, v_row, v_head;
    Paged key_stride, value_stride, k_scale_stride, v_scale_stride;
    int tokens, kv_heads, pages;
};

}  // namespace pa
