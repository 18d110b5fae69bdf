// A tile without tensor cores, in F32 throughout: every cache, layout and head size that tile.cuh does not take.
#pragma once

#include "task.cuh"

namespace pa {

// What an element of a cache is worth, scales apart. `i` counts elements.
struct PlainBf16 {
    static constexpr int BITS = 16;
    static __device__ __forceinline__ float get(const void* p, i64 i) { return __uint_as_float(u32(static_cast<const u16*>(p)[i]) << 16); }
};

struct PlainF16 {
    static constexpr int BITS = 16;
    static __device__ __forceinline__ float get(const void* p, i64 i) { return F16::unpack(static_cast<const u16*>(p)[i]).x; }
};

struct PlainF32 {
    static constexpr int BITS = 32;
    static __device__ __forceinline__ float get(const void* p, i64 i) { return static_cast<const float*>(p)[i]; }
};

// Moves the bits to where F32 has them, 2^120 too low; 0x7f and 0xff are NaN.
struct PlainE4m3 {
    static constexpr int BITS = 8;
    static __device__ __forceinline__ float get(const void* p, i64 i) {
        const u32 x = static_cast<const u8*>(p)[i], magnitude = x & 0x7f;
        const float y = __uint_as_float((x & 0x80) << 24 | magnitude << 20) * __uint_as_float(247u << 23);
        return magnitude == 0x7f ? __uint_as_float(0x7fffffff) : y;
    }
};

// E2M1, two a byte, low nibble first. `i` counts elements from the byte-strided row.
struct PlainMxfp4 {
    static constexpr int BITS = 4;
    static __device__ __forceinline__ float get(const void* p, i64 i) {
        const u32 x = static_cast<const u8*>(p)[i >> 1] >> (i & 1) * 4 & 15, magnitude = x & 7;
        const float y = __uint_as_float(magnitude << 22) * __uint_as_float(253u << 23);
        return x & 8 ? -y : y;
    }
};

// 2^(x - 127); 0xff is NaN.
__device__ __forceinline__ float e8m0(u8 x) { return __uint_as_float(x == 0xff ? 0x7fffffff : x == 0 ? 0x00400000 : u32(x) << 23); }

enum class Scale { NONE, SCALAR, PER_TOKEN, BLOCK };
enum class Layout { SHUFFLED, VLLM, NHD, HND };

// The same constants as Traits, as far as tasks and merging need them: four warps are the groups, each with all of the CTA's rows.
template <class KV_, class Q_, int HEAD_DIM_, int PAGE_SIZE_, int GROUP_, int TILE_TOKENS_, int ROWS_, Scale SCALE_, Layout LAYOUT_, class Options_>
struct PlainTraits {
    using Kv = KV_;
    using Query = Q_;
    using Opt = Options_;
    static constexpr int HEAD_DIM = HEAD_DIM_, PAGE_SIZE = PAGE_SIZE_, GROUP = GROUP_, TILE_TOKENS = TILE_TOKENS_, ROWS = ROWS_;
    static constexpr Scale SCALE = SCALE_;
    static constexpr Layout LAYOUT = LAYOUT_;
    static constexpr int GROUPS = 4, THREADS = GROUPS * 32, CHUNK = 32, CLUSTER = 1;
    static constexpr int MERGE_ROW = HEAD_DIM, MERGE_ENDS = GROUPS * ROWS * MERGE_ROW;
    static constexpr int QUERY_BYTES = ROWS * HEAD_DIM * 4;
    static constexpr int SMEM_BYTES = QUERY_BYTES + (MERGE_ENDS + GROUPS * ROWS * 2) * 4;
    static constexpr int OUT = (HEAD_DIM + 31) / 32;  // channels a lane

    static __device__ __forceinline__ constexpr int merge_channel(int channel) { return channel; }
    static_assert(HEAD_DIM % 4 == 0 && TILE_TOKENS % CHUNK == 0, "outputs are stored four channels at a time, a tile is whole chunks");
};

// Element of a page's head that holds channel `c` of token `t`.
template <class T, bool VALUE>
__device__ __forceinline__ int element(int t, int c) {
    constexpr int X = 128 / T::Kv::BITS, S = T::PAGE_SIZE;
    if constexpr (T::LAYOUT == Layout::NHD || T::LAYOUT == Layout::HND) return c;
    if constexpr (!VALUE) return (c / X * S + t) * X + c % X;
    if constexpr (T::LAYOUT == Layout::VLLM) return c * S + t;
    return (t / X * T::HEAD_DIM + c) * X + t % X;
}

// Where a token is.
struct Place {
    i64 page;
    int in_page;
};

template <class T>
__device__ __forceinline__ Place place_of(const CudaTileArgs& p, const Task& task, int token) {
    const int page = p.block_tables[task.table_row * p.table_row + token / T::PAGE_SIZE];
    return {i64(min(u32(page), u32(p.pages - 1))), token % T::PAGE_SIZE};
}

template <class T>
__device__ __forceinline__ const u8* row_of(const void* cache, const Paged& stride, const Task& task, const Place& at) {
    constexpr bool ROWS = T::LAYOUT == Layout::NHD || T::LAYOUT == Layout::HND;
    const i64 elements = at.page * stride.page + task.head * stride.head + (ROWS ? at.in_page * stride.token : 0);
    return static_cast<const u8*>(cache) + (T::Kv::BITS == 4 ? elements : elements * (T::Kv::BITS / 8));
}

// The factor of channel `c` of a token.
template <class T>
__device__ __forceinline__ float scale_of(const void* scales, const Paged& stride, const Task& task, const Place& at, int c) {
    const i64 i = at.page * stride.page + task.head * stride.head + at.in_page * stride.token;
    if constexpr (T::SCALE == Scale::PER_TOKEN) return static_cast<const float*>(scales)[i];
    if constexpr (T::SCALE == Scale::BLOCK) return e8m0(static_cast<const u8*>(scales)[i + c / 32]);
    return 1.0f;
}

// The CTA's query rows in shared memory, in F32; zeros past the last.
template <class T>
__device__ __forceinline__ void load_plain_query(float* q, const CudaTileArgs& p, const Task& task, int thread) {
    for (int i = thread; i < T::ROWS * T::HEAD_DIM; i += T::THREADS) {
        const int row = task.first_row + i / T::HEAD_DIM, c = i % T::HEAD_DIM;
        const i64 query = task.query_first + row / T::GROUP, head = task.head * T::GROUP + row % T::GROUP;
        q[i] = row < task.rows ? T::Query::get(p.q, task.sequence * p.q_sequence + query * p.q_row + head * p.q_head + c) : 0.0f;
    }
}

// A warp's chunk of 32 tokens: a lane has one token's scores, then OUT channels of every row.
template <class T>
__device__ __forceinline__ void plain_chunk(float (&o)[T::ROWS][T::OUT], float (&max)[T::ROWS], float (&sum)[T::ROWS], const float* q,
                                            const CudaTileArgs& p, const Task& task, float factor, int token, int lane) {
    const int mine = token + lane;
    const bool owned = mine >= task.first_token && mine < task.end;
    const Place at = place_of<T>(p, task, owned ? mine : task.end - 1);
    const u8* k = row_of<T>(p.key, p.key_stride, task, at);
    float s[T::ROWS] = {};
    for (int block = 0; block < T::HEAD_DIM; block += 32) {
        const float scale = owned ? scale_of<T>(p.k_scale, p.k_scale_stride, task, at, block) : 0.0f;
#pragma unroll 8
        for (int c = block; c < min(block + 32, T::HEAD_DIM); c++) {
            const float x = owned ? T::Kv::get(k, element<T, false>(at.in_page, c)) * scale : 0.0f;
#pragma unroll
            for (int row = 0; row < T::ROWS; row++) s[row] += q[row * T::HEAD_DIM + c] * x;
        }
    }
#pragma unroll
    for (int row = 0; row < T::ROWS; row++) {
        const int newest = task.context - task.query_len + min(task.first_row + row, task.rows - 1) / T::GROUP;
        bool attended = owned && mine <= newest;
        if constexpr (T::Opt::WINDOW) attended = attended && mine > newest - p.window;
        float y = s[row] * factor;
        if constexpr (T::Opt::SOFTCAP) y = p.softcap * LOG2E * tanhf(y * (LN2 / p.softcap));
        y = attended ? y : neg_inf();
        float most = y;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, step));
        most = fmaxf(most, max[row]);
        const float base = most == neg_inf() ? 0.0f : most, keep = exp2f(max[row] - base);
        max[row] = most;
        const float weight = exp2f(y - base);
        sum[row] = sum[row] * keep + weight;
        // Below 0: a value that another row attends may be NaN, which no weight makes nothing of.
        s[row] = attended ? weight : -1.0f;
#pragma unroll
        for (int i = 0; i < T::OUT; i++) o[row][i] *= keep;
    }
    const int first = ::max(task.first_token - token, 0), end = min(task.end - token, 32);
    for (int t = first; t < end; t++) {
        const Place there = {__shfl_sync(FULL_WARP, at.page, t), __shfl_sync(FULL_WARP, at.in_page, t)};
        const u8* v = row_of<T>(p.value, p.value_stride, task, there);
        float weight[T::ROWS];
#pragma unroll
        for (int row = 0; row < T::ROWS; row++) weight[row] = __shfl_sync(FULL_WARP, s[row], t);
#pragma unroll
        for (int i = 0; i < T::OUT; i++) {
            const int c = i * 32 + lane;
            if (T::HEAD_DIM % 32 && c >= T::HEAD_DIM) continue;
            const float x = T::Kv::get(v, element<T, true>(there.in_page, c)) * scale_of<T>(p.v_scale, p.v_scale_stride, task, there, c);
#pragma unroll
            for (int row = 0; row < T::ROWS; row++) {
                if (!(weight[row] < 0.0f)) o[row][i] += weight[row] * x;
            }
        }
    }
}

template <class T>
__device__ __forceinline__ void plain_tile(const CudaTileArgs& p) {
    extern __shared__ __align__(16) float shared[];
    float *q = shared, *merge = shared + T::QUERY_BYTES / 4;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    wait_for_previous_kernel();
    const GridPosition at = grid_position<T>(p);
    const int parts = parts_of(p, at.slot);
    Task task;
    if (read_task<T>(task, p, at)) {
        const float k_scale = T::SCALE == Scale::SCALAR ? *static_cast<const float*>(p.k_scale) : 1.0f;
        const float v_scale = T::SCALE == Scale::SCALAR ? *static_cast<const float*>(p.v_scale) : 1.0f;
        load_plain_query<T>(q, p, task, thread);
        __syncthreads();
        float o[T::ROWS][T::OUT] = {}, max[T::ROWS], sum[T::ROWS] = {};
#pragma unroll
        for (int row = 0; row < T::ROWS; row++) max[row] = neg_inf();
        for (int token = task.begin + warp * T::CHUNK; token < task.end; token += T::GROUPS * T::CHUNK) {
            plain_chunk<T>(o, max, sum, q, p, task, p.scale_log2 * k_scale, token, lane);
        }
        launch_next_kernel();
#pragma unroll
        for (int row = 0; row < T::ROWS; row++) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sum[row] += __shfl_xor_sync(FULL_WARP, sum[row], step);
            float* out = merge + (warp * T::ROWS + row) * T::MERGE_ROW;
#pragma unroll
            for (int i = 0; i < T::OUT; i++) {
                if (i * 32 + lane < T::HEAD_DIM) out[i * 32 + lane] = o[row][i] * v_scale;
            }
            if (lane == 0) reinterpret_cast<float2*>(merge + T::MERGE_ENDS)[warp * T::ROWS + row] = {max[row], sum[row]};
        }
        __syncthreads();
        merge_task<T>(p, task, merge, thread);
    }
    if (parts == 0) clear_row<T>(p, at, thread);
}

}  // namespace pa
