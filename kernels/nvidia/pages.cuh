// From tokens to pages to shared memory.
#pragma once

#include "traits.cuh"

namespace pa {

// Position of 16-byte piece `piece` of row `row` of what a warpgroup's products read: halves of 64 channels follow each other, each in the
// 128-byte swizzle.
template <class T>
__device__ __forceinline__ int wide_swizzled(int row, int piece) {
    return (piece >> 3) * (T::CHUNK * 128) + row * 128 + (((piece ^ row) & 7) << 4);
}

// Position of 16-byte piece `piece` of row `row` of a stage. 16-bit rows are read by ldmatrix, eight rows at once, narrow ones by products; other
// FP8 K by eight lanes that read four pieces of two neighbouring rows; V by lanes that read two pieces of rows four apart.
template <class T, bool VALUE>
__device__ __forceinline__ int swizzled(int row, int piece) {
    if constexpr (T::WARPGROUP && !T::FP8) return wide_swizzled<T>(row, piece);
    const int mask = !T::FP8 || T::NARROW ? row & 7 : !VALUE ? (row & 1) << 2 : (row >> 1) & 6;
    return row * T::ROW_BYTES + ((piece ^ mask) << 4);
}

// Chunks of a task that a walker takes.
template <class T>
__device__ __forceinline__ int chunks_of(const Task& task, int walker) {
    const int all = (task.end - task.begin + T::CHUNK - 1) / T::CHUNK;
    return (all - walker + T::WALKERS - 1) / T::WALKERS;
}

// First token of a walker's chunk.
template <class T>
__device__ __forceinline__ int token_of(const Task& task, int walker, int chunk) {
    return task.begin + (walker + chunk * T::WALKERS) * T::CHUNK;
}

// The page ids of a walker's next chunks, one a lane, the next 32 on their way.
template <class T>
struct PageIds {
    // Pages of a chunk where pages are smaller, and chunks whose ids a warp holds.
    static constexpr int SUB = T::CHUNK > T::PAGE_SIZE ? T::CHUNK / T::PAGE_SIZE : 1;
    static constexpr int HELD = SUB < 32 ? 32 / SUB : 1;
    static constexpr bool WHOLE = SUB <= 32 && (T::PAGE_SIZE % T::CHUNK == 0 || T::CHUNK % T::PAGE_SIZE == 0);

    const int* table;
    u32 last_page, ids, next;

    __device__ __forceinline__ u32 clamped(int id) const { return min(u32(id), last_page); }

    __device__ __forceinline__ u32 look_up(int token) const { return clamped(reload_record(table + u32(token) / u32(T::PAGE_SIZE))); }

    // A lane's id as it is in the table, 0 where it has none.
    __device__ __forceinline__ int fetch(const Task& task, int walker, int chunk, int lane) const {
        const int sub = lane % SUB;
        const int token = token_of<T>(task, walker, chunk + lane / SUB) + sub * T::PAGE_SIZE;
        int id = 0;
        // Page ids do not wait for the context's length: entries past it are in the table, hold anything, and are not used.
        const bool owned = u32(token) < u32(task.table_end) && (SUB == 1 || !T::Opt::WINDOW || token + T::PAGE_SIZE > task.first_token);
        reload_where(id, table + u32(token) / u32(T::PAGE_SIZE), owned);
        return id;
    }

    __device__ __forceinline__ void start(const CudaTileArgs& p, const Task& task, int walker, int lane) {
        table = p.block_tables + task.table_row * p.table_row;
        last_page = u32(p.pages - 1);
        if constexpr (WHOLE) {
            const int first = fetch(task, walker, 0, lane), second = fetch(task, walker, HELD, lane);
            ids = clamped(first), next = clamped(second);
        }
    }

    // Called for chunk 0, 1, 2, ... in turn.
    __device__ __forceinline__ void advance(const Task& task, int walker, int chunk, int lane) {
        if (WHOLE && chunk > 0 && chunk % HELD == 0) {
            ids = next;
            next = clamped(fetch(task, walker, chunk + HELD, lane));
        }
    }

    // Page of row `row` of the chunk that starts at `token`.
    __device__ __forceinline__ u32 page(int chunk, int token, int row, bool owned) const {
        if constexpr (WHOLE) {
            return __shfl_sync(FULL_WARP, ids, (chunk % HELD) * SUB + (SUB == 1 ? 0 : row / T::PAGE_SIZE));
        } else {
            return owned ? look_up(token + row) : 0;
        }
    }
};

// Brings the first chunk of a walker into the L2: hints, a line each.
template <class T>
__device__ __forceinline__ void hint_first_chunk(const CudaTileArgs& p, const Task& task, const PageIds<T>& pages, int walker, int thread) {
    constexpr i64 BYTES = T::Kv::BYTES;
    constexpr int LINES = (T::ROW_BYTES + 127) / 128, ALL = T::CHUNK * LINES;
    const int token = token_of<T>(task, walker, 0);
    const u8* k = static_cast<const u8*>(p.key) + task.head * p.key_stride.head * BYTES;
    const u8* v = static_cast<const u8*>(p.value) + task.head * p.value_stride.head * BYTES;
#pragma unroll
    for (int step = 0; step < ALL; step += T::GROUP_THREADS) {
        const int i = (step + thread) % ALL, row = i / LINES, line = i % LINES * 128, t = token + row;
        const bool owned = step + thread < ALL && t >= task.first_token && t < task.end;
        const i64 page = pages.page(0, token, row, owned);
        const int in_page = u32(t) % u32(T::PAGE_SIZE);
        if (!owned) continue;
        prefetch_l2(k + (page * p.key_stride.page + in_page * p.key_stride.token) * BYTES + line);
        prefetch_l2(v + (page * p.value_stride.page + in_page * p.value_stride.token) * BYTES + line);
    }
}

// Copies a thread's piece of rows row0, row0 + STEP, ... of the run of RUN tokens that begins at `run` in a chunk; zeros outside `first..end`.
template <class T, bool VALUE, int STEP, int RUN>
__device__ __forceinline__ void copy_rows(u32 stage, const u8* src, i64 stride, int run, int row0, int piece, int first, int end) {
#pragma unroll
    for (int i = 0; i < RUN; i += STEP) {
        const int row = run + i + row0;
        copy16<T::ONCE>(stage + swizzled<T, VALUE>(row, piece), src + i * stride, row >= first && row < end);
    }
}

// A thread's piece of the first row that it copies, of K and of V in page 0.
struct PieceBases {
    const u8 *k, *v;
};

template <class T>
__device__ __forceinline__ PieceBases bases_of(const CudaTileArgs& p, const Task& task, int thread) {
    const int piece = thread % T::ROW_PIECES, row0 = thread / T::ROW_PIECES;
    auto base = [&](const void* cache, const Paged& stride) {
        return static_cast<const u8*>(cache) + (task.head * stride.head + row0 * stride.token) * T::Kv::BYTES + piece * 16;
    };
    return {base(p.key, p.key_stride), base(p.value, p.value_stride)};
}

// Copies the token scales of a chunk into its stage, one a thread of K's and of V's; zeros for tokens that no query attends.
template <class T>
__device__ __forceinline__ void copy_scales(const CudaTileArgs& p, const Task& task, const PageIds<T>& pages, int walker, int chunk, u32 stage,
                                            int thread) {
    const int token = token_of<T>(task, walker, chunk), row = thread % T::CHUNK, t = token + row;
    const bool owned = t < task.end && t >= task.first_token;
    const i64 page = pages.page(chunk, token, row, owned);
    const u32 in_page = u32(t) % u32(T::PAGE_SIZE), dst = stage + 2 * T::KV_BYTES + row * 4;
    auto copy = [&](u32 to, const void* scales, const Paged& stride) {
        copy4(to, static_cast<const float*>(scales) + page * stride.page + task.head * stride.head + in_page * stride.token, owned);
    };
    // A thread copies one of K's or one of V's where there are enough.
    constexpr bool ONE = T::GROUP_THREADS >= 2 * T::CHUNK;
    if (thread < T::CHUNK) copy(dst, p.k_scale, p.k_scale_stride);
    if (ONE ? thread >= T::CHUNK && thread < 2 * T::CHUNK : thread < T::CHUNK) copy(dst + T::SCALE_BYTES, p.v_scale, p.v_scale_stride);
}

// Issues the copies of chunk `chunk` of a walker into a stage, after what `ahead` issues. Rows that no query attends become zeros, and are not read.
template <class T, class Ahead>
__device__ __forceinline__ void load_chunk(const CudaTileArgs& p, const Task& task, PageIds<T>& pages, const PieceBases& bases, int walker, int chunk,
                                           u32 stage, int thread, Ahead ahead) {
    constexpr int ROWS_AT_ONCE = T::GROUP_THREADS / T::ROW_PIECES;
    static_assert(T::GROUP_THREADS % T::ROW_PIECES == 0 && T::CHUNK % ROWS_AT_ONCE == 0, "a thread keeps its piece of the rows");
    const int lane = thread & 31;
    const int token = token_of<T>(task, walker, chunk);
    pages.advance(task, walker, chunk, lane);
    ahead();
    // Tokens that follow each other in a page.
    constexpr int RUN = T::PAGE_SIZE < T::CHUNK ? T::PAGE_SIZE : T::CHUNK;
    int piece = thread % T::ROW_PIECES, row0 = thread / T::ROW_PIECES;
    // Or the compiler settles what follows from them for each run once, in registers that helpers do not have.
    if constexpr (T::NARROW && RUN < T::CHUNK) asm volatile("" : "+r"(piece), "+r"(row0));
    constexpr i64 BYTES = T::Kv::BYTES;
    const i64 k_token = p.key_stride.token * BYTES, v_token = p.value_stride.token * BYTES;
    if constexpr (PageIds<T>::WHOLE && RUN % ROWS_AT_ONCE == 0) {
        auto copy = [&](int first, int end) {
#pragma unroll
            for (int run = 0; run < T::CHUNK; run += RUN) {
                const i64 page = pages.page(chunk, token, run, true);
                const int in_page = RUN < T::PAGE_SIZE ? token % T::PAGE_SIZE : 0;
                const u8* k_run = bases.k + in_page * k_token + page * p.key_stride.page * BYTES;
                const u8* v_run = bases.v + in_page * v_token + page * p.value_stride.page * BYTES;
                copy_rows<T, false, ROWS_AT_ONCE, RUN>(stage, k_run, k_token, run, row0, piece, first, end);
                copy_rows<T, true, ROWS_AT_ONCE, RUN>(stage + T::KV_BYTES, v_run, v_token, run, row0, piece, first, end);
            }
        };
        if (token >= task.first_token && token + T::CHUNK <= task.end) {
            copy(0, T::CHUNK);
        } else {
            copy(task.first_token - token, task.end - token);
        }
    } else {
#pragma unroll
        for (int step = 0; step < T::CHUNK; step += ROWS_AT_ONCE) {
            const int row = step + row0, t = token + row;
            const bool owned = t < task.end && t >= task.first_token;
            const i64 page = pages.page(chunk, token, row, owned);
            const int in_page = int(u32(t) % u32(T::PAGE_SIZE)) - row0;
            copy16<T::ONCE>(stage + swizzled<T, false>(row, piece), bases.k + in_page * k_token + page * p.key_stride.page * BYTES, owned);
            copy16<T::ONCE>(stage + T::KV_BYTES + swizzled<T, true>(row, piece), bases.v + in_page * v_token + page * p.value_stride.page * BYTES, owned);
        }
    }
    if constexpr (T::PER_TOKEN && !T::NARROW) copy_scales<T>(p, task, pages, walker, chunk, stage, thread);
}

}  // namespace pa
