// The second step of the merge: a row's partial results, in the order of the slots.
#pragma once

#include "args.h"
#include "epilogue.cuh"

namespace pa {

// Partial results, N at a time: their maximum first, so that no weight waits for another.
template <int N, int VECTORS>
__device__ __forceinline__ void add_partials(Joined (&x)[VECTORS], const float2 (&ml)[N], const float4 (&o)[N][VECTORS]) {
    float most = x[0].max;
#pragma unroll
    for (int i = 0; i < N; i++) most = fmaxf(most, ml[i].x);
    const float base = most == neg_inf() ? 0.0f : most, keep = exp2_fast(x[0].max - base);
    float weight[N];
#pragma unroll
    for (int i = 0; i < N; i++) weight[i] = exp2_fast(ml[i].x - base);
#pragma unroll
    for (int j = 0; j < VECTORS; j++) {
        x[j].max = most, x[j].sum *= keep;
        x[j].o.x *= keep, x[j].o.y *= keep, x[j].o.z *= keep, x[j].o.w *= keep;
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[j].sum += ml[i].y * weight[i];
            x[j].o.x += o[i][j].x * weight[i], x[j].o.y += o[i][j].y * weight[i];
            x[j].o.z += o[i][j].z * weight[i], x[j].o.w += o[i][j].w * weight[i];
        }
    }
}

// Channels of a partial result as they are stored, four to `o`.
template <bool HALF, int WORDS>
__device__ __forceinline__ void widen_words(float4* o, const u32 (&x)[WORDS]) {
    if constexpr (HALF) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 2) {
            const float2 low = F16::unpack(x[i]), high = F16::unpack(x[i + 1]);
            o[i / 2] = {low.x, low.y, high.x, high.y};
        }
    } else {
        static_assert(WORDS == 4, "four channels in F32");
        o[0] = {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3])};
    }
}

// The partial results of a row that are to be merged. Once the tiles are over nothing may keep their loads waiting: an address is one product.
struct RowParts {
    int first, end;                   // slots
    const u8 *partials, *statistics;  // slot 0's, partial results from the lane's first channel on
    u64 partial_step;                 // bytes from slot to slot
    u32 statistics_step;

    __device__ __forceinline__ const u8* partial(int part) const { return partials + u32(part) * partial_step; }
    __device__ __forceinline__ const u8* ends(int part) const { return statistics + u64(u32(part)) * statistics_step; }

    // N of them from slot `part` on, every `step`-th, up to the end: maximum and sum, and in words of WORDS each piece what is stored `offsets` bytes on.
    template <int N, int VECTORS, int WORDS>
    __device__ __forceinline__ void load(float2 (&ml)[N], u32 (&x)[N][VECTORS][WORDS], int part, int step, const int (&offsets)[VECTORS]) const {
        u32 state[N][2];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int at = part + i * step;
            state[i][0] = 0xff800000, state[i][1] = 0;
            load_where(state[i], ends(at), at < end);
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
#pragma unroll
                for (int word = 0; word < WORDS; word++) x[i][v][word] = 0;
                load_where(x[i][v], partial(at) + offsets[v], at < end);
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) ml[i] = {__uint_as_float(state[i][0]), __uint_as_float(state[i][1])};
    }
};

// Rows of one task or none are not the reducer's business: they have no parts.
template <bool HALF, int HEAD_DIM, bool PER_HEAD>
__device__ __forceinline__ RowParts find_parts(const ReduceArgs& p, int sequence, int token, int head, int channel) {
    constexpr int BYTES = HALF ? 2 : 4;
    const int group = p.q_heads / p.kv_heads, kv_head = head / group;
    const ReduceInfo info = load_record<ReduceInfo>(p.reduce + (PER_HEAD ? sequence * p.kv_heads + kv_head : sequence));
    const i64 row = i64(PER_HEAD ? 0 : kv_head) * p.rows + i64(token) * group + head % group;
    const u32 rows = u32(PER_HEAD ? 1 : p.kv_heads) * p.rows;
    RowParts parts = {info.first_slot, info.first_slot + (info.count > 1 ? info.count : 0),
                      reinterpret_cast<const u8*>(p.partial) + (row * HEAD_DIM + channel) * BYTES, reinterpret_cast<const u8*>(p.statistics) + row * 8,
                      u64(rows) * (HEAD_DIM * BYTES), rows * 8};
    // Or the compiler takes these apart and settles them once for every load.
    asm volatile("" : "+l"(parts.partials), "+l"(parts.statistics), "+l"(parts.partial_step), "+r"(parts.statistics_step));
    return parts;
}

// How many bytes on from a lane's first piece of N channels its others are, LANES pieces apart; past CHANNELS the last one again.
template <bool HALF, int N, int CHANNELS, int LANES, int VECTORS>
__device__ __forceinline__ void find_pieces(int (&offsets)[VECTORS], int lane) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) offsets[v] = (min((v * LANES + lane) * N, CHANNELS - N) - min(lane * N, CHANNELS - N)) * (HALF ? 2 : 4);
}

// Adds what a lane has of every `step`-th partial result from slot `part` on, N of them at a time, as many as are waited for together: pieces of WORDS
// words, four channels to one of `x`.
template <bool HALF, int WORDS, int N, int VECTORS, int PIECES>
__device__ __forceinline__ void add_parts(Joined (&x)[PIECES], const RowParts& parts, int start, int part, int step, const int (&offsets)[VECTORS]) {
    static_assert(PIECES * 4 == VECTORS * WORDS * (HALF ? 2 : 1), "four channels each");
    for (; start < parts.end; start += N * step, part += N * step) {
        float2 ml[N];
        u32 words[N][VECTORS][WORDS];
        float4 o[N][PIECES];
        parts.load(ml, words, part, step, offsets);
#pragma unroll
        for (int i = 0; i < N; i++) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) widen_words<HALF>(o[i] + v * (PIECES / VECTORS), words[i][v]);
        }
        add_partials<N, PIECES>(x, ml, o);
    }
}

// Few partial results a row: 32 lanes have a row, or fewer where 16 bytes each are all of it. Grid: x blocks of a sequence's query rows (token
// major, then heads), z sequences.
template <class Element, bool HALF, int HEAD_DIM, bool RAGGED, bool PER_HEAD, int THREADS>
__device__ __forceinline__ void reduce_few(const ReduceArgs& p) {
    constexpr int QUADS = HALF ? 2 : 1, N = 4 * QUADS, PIECES = (HEAD_DIM + N - 1) / N;
    constexpr int LANES = PIECES > 16 ? 32 : PIECES > 8 ? 16 : PIECES > 4 ? 8 : PIECES > 2 ? 4 : PIECES;
    constexpr int VECTORS = (PIECES + LANES - 1) / LANES, AHEAD = VECTORS > 1 ? 2 : 4;
    launch_next_kernel();
    const int row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int token = row / p.q_heads, head = row % p.q_heads, sequence = blockIdx.z;
    // The records are the planner's, for whom the tiles had waited before any of them let this kernel start: they are read while the tiles finish,
    // and the addresses of the partials brought near.
    const int2 queries = RAGGED ? ragged_queries(p.query_start, sequence, p.q_rows) : int2{sequence * p.query_len, p.query_len};
    RowParts parts = find_parts<HALF, HEAD_DIM, PER_HEAD>(p, sequence, token, head, min(lane * N, HEAD_DIM - N));
    if (token >= queries.y) parts.end = parts.first;
    for (int part = parts.first; part < parts.end; part++) {
        if (lane == 0) prefetch_l2(parts.ends(part));
        if (lane % 8 == 0) prefetch_l2(parts.partial(part));
    }
    // Whatever there is to do, or this kernel could end before the tiles, and what follows it in the stream start.
    wait_for_previous_kernel();
    if (parts.first == parts.end) return;
    Joined x[VECTORS * QUADS];
    int offsets[VECTORS];
    find_pieces<HALF, N, HEAD_DIM, LANES>(offsets, lane);
    // All at once where that is worth its registers: partial results in F32.
    if (HALF || parts.end - parts.first <= AHEAD) {
        add_parts<HALF, 4, AHEAD>(x, parts, parts.first, parts.first, 1, offsets);
    } else {
        add_parts<HALF, 4, 2 * AHEAD>(x, parts, parts.first, parts.first, 1, offsets);
    }
    const i64 query = queries.x + token;
    const i64 out = sequence * p.out_sequence + query * p.out_row + head * p.out_head;
    float* lse = p.lse ? p.lse + query * p.q_heads + head : nullptr;
#pragma unroll
    for (int i = 0; i < VECTORS * QUADS; i++) {
        const int channel = (i / QUADS * LANES + lane) * N + i % QUADS * 4;
        if (channel < HEAD_DIM) store_output<Element>(p.out, out + channel, lse, p.sinks, head, x[i], channel == 0);
    }
}

// Many partial results a row: WARPS warps take every WARPS-th, then meet; a block has one row, or a SPLIT-th of its channels: a warp reads SPLIT
// partials at once then. Grid: x query rows of a sequence times SPLIT (token major), y query heads, z sequences.
template <class Element, bool HALF, int HEAD_DIM, bool RAGGED, bool PER_HEAD, int WARPS, int SPLIT>
__device__ __forceinline__ void reduce_many(const ReduceArgs& p) {
    constexpr int CHANNELS = HEAD_DIM / SPLIT, LANES = SPLIT == 1 ? 32 : CHANNELS / 4, AT_ONCE = 32 / LANES;
    constexpr int VECTORS = (CHANNELS + 127) / 128, AHEAD = VECTORS > 1 ? 4 : 8 / AT_ONCE;
    static_assert(SPLIT == 1 || (HEAD_DIM % SPLIT == 0 && LANES * 4 == CHANNELS && AT_ONCE * LANES == 32), "lanes share a warp's partials evenly");
    __shared__ float4 outs[WARPS][VECTORS * 32];
    __shared__ float2 ends[WARPS];
    launch_next_kernel();
    const int token = blockIdx.x / SPLIT, slice = blockIdx.x % SPLIT * CHANNELS, head = blockIdx.y, sequence = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The records are the planner's, for whom the tiles had waited before any of them let this kernel start: they are read while the tiles finish,
    // and the addresses of the partials brought near.
    const int2 queries = RAGGED ? ragged_queries(p.query_start, sequence, p.q_rows) : int2{sequence * p.query_len, p.query_len};
    const RowParts parts = find_parts<HALF, HEAD_DIM, PER_HEAD>(p, sequence, token, head, slice + min(lane % LANES * 4, CHANNELS - 4));
    if (parts.first == parts.end || token >= queries.y) {
        wait_for_previous_kernel();  // or this kernel could end before the tiles, and what follows it in the stream start
        return;
    }
    for (int part = parts.first + threadIdx.x; part < parts.end; part += WARPS * 32) {
        prefetch_l2(parts.ends(part));
        prefetch_l2(parts.partial(part));
    }
    wait_for_previous_kernel();
    Joined x[VECTORS];
    int offsets[VECTORS];
    find_pieces<HALF, 4, CHANNELS, LANES>(offsets, lane % LANES);
    const int start = parts.first + warp * AT_ONCE, part = start + lane / LANES, step = WARPS * AT_ONCE;
    if (AHEAD > 4 && parts.end - parts.first <= 4 * step) {
        add_parts<HALF, HALF ? 2 : 4, 4>(x, parts, start, part, step, offsets);
    } else {
        add_parts<HALF, HALF ? 2 : 4, AHEAD>(x, parts, start, part, step, offsets);
    }
    // The groups of lanes meet.
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
        auto other = [&](float y) { return __shfl_xor_sync(FULL_WARP, y, step); };
        const float4 o = x[0].o;
        x[0].add({other(x[0].max), other(x[0].sum)}, {other(o.x), other(o.y), other(o.z), other(o.w)});
    }
    const i64 query = queries.x + token;
    float* lse = p.lse ? p.lse + query * p.q_heads + head : nullptr;
    const i64 out = sequence * p.out_sequence + query * p.out_row + head * p.out_head;
#pragma unroll
    for (int j = 0; j < VECTORS; j++) outs[warp][j * 32 + lane] = x[j].o;
    if (lane == 0) ends[warp] = {x[0].max, x[0].sum};
    __syncthreads();
    for (int piece = threadIdx.x; piece < CHANNELS / 4; piece += WARPS * 32) {
        Joined all[1];
        float2 ml[WARPS];
        float4 o[WARPS][1];
#pragma unroll
        for (int i = 0; i < WARPS; i++) ml[i] = ends[i], o[i][0] = outs[i][piece];
        add_partials<WARPS, 1>(all, ml, o);
        store_output<Element>(p.out, out + slice + piece * 4, lse, p.sinks, head, all[0], slice + piece == 0);
    }
}

}  // namespace pa
