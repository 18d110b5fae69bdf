// The two products of a chunk on 16-row tensor-core tiles: S = Q K^T and O += P V.
//
// A warp holds M_TILES tiles of 16 rows. In a lane, g = lane / 4 and t = lane % 4. Which channel is which k index of QK, which token which
// column of S and k index of PV, and which channel which column of O is free as long as both sides agree. 16-bit caches take the order of
// ldmatrix. FP8 caches that are widened in registers are read 16 bytes a lane:
//   QK: k-step 4j + w of lane t holds channels 16 (t + 4j) + 4w + 0..3; column 2a + e of n-tile n is token 4a + 2n + e of 16.
//   PV: k indices of lane t are tokens 4t..4t+3; column c of n-tile 16b + i is channel 128b + 16c + i.
#pragma once

#include "wgmma.cuh"

namespace pa {

template <class T>
struct Query {
    u32 a[T::M_TILES][T::K_STEPS][4];
    float scale[T::M_TILES][2];  // positive factor that turns the scores of rows g and g + 8 into log2 units; a negative one's sign is the query's
    float cap[T::M_TILES][2];    // with a softcap: what a score is multiplied by before its tanh; `scale` is that of the tanh then
};

// First of the two channels that a lane's A fragment holds in k-step `step`, low or high half.
template <class T>
__device__ __forceinline__ int query_channel(int step, int half, int t) {
    return T::FP8 ? 16 * (t + 4 * (step / 4)) + 4 * (step % 4) + 2 * half : 16 * step + 8 * half + 2 * t;
}

// Channel of column 2t + e of n-tile `n` of the output.
template <class T>
__device__ __forceinline__ int out_channel(int n, int t, int e) {
    return T::PACKED ? 128 * (n / 16) + 16 * (2 * t + e) + n % 16 : 8 * n + 2 * t + e;
}

// Token within its 16 of element `e` (0, 1) of n-tile `n` (0, 1) of the scores.
template <class T>
__device__ __forceinline__ int score_token(int n, int t, int e) {
    return T::PACKED ? 4 * t + 2 * n + e : 8 * n + 2 * t + e;
}

// Where a query row of the task is stored.
template <class T>
__device__ __forceinline__ const u16* query_row(const CudaTileArgs& p, const Task& task, int row) {
    const int query = row / T::GROUP, head = task.head * T::GROUP + row % T::GROUP;
    return static_cast<const u16*>(p.q) + task.sequence * p.q_sequence + (task.query_first + query) * p.q_row + head * p.q_head;
}

// Whether pieces of eight channels of query rows are at multiples of 16 bytes.
static __device__ __forceinline__ bool is_query_aligned(const CudaTileArgs& p) {
    return ((reinterpret_cast<u64>(p.q) | u64((p.q_sequence | p.q_row | p.q_head) * 2)) & 15) == 0;
}

// The warp's query rows as they are stored; rows past the last are zeros.
template <class T>
__device__ __forceinline__ void fetch_query(Query<T>& q, const CudaTileArgs& p, const Task& task, int first_row, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first_row + m * 16 + h * 8 + g;
            const bool real = row < task.rows;
            const u16* src = query_row<T>(p, task, real ? row : 0);
#pragma unroll
            for (int s = 0; s < T::K_STEPS; s++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    q.a[m][s][2 * half + h] = real ? *reinterpret_cast<const u32*>(src + query_channel<T>(s, half, t)) : 0;
                }
            }
        }
    }
}

// Scales of the lane's two tokens of n-tile `n`.
template <class T>
__device__ __forceinline__ float2 token_scale(u32 scales, int n, int t) {
    return load_shared_float2(scales + 4 * (16 * (n / 2) + score_token<T>(n % 2, t, 0)));
}

// Of a row's four lanes together.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// A factor of at least 0 that -inf can be multiplied by. NaN stays.
__device__ __forceinline__ float not_zero(float x) { return x < 1e-30f ? 1e-30f : x; }

// Turns the query rows into the products' type.
template <class T>
__device__ __forceinline__ void prepare_query(Query<T>& q, const CudaTileArgs& p, float k_scale) {
    using Compute = typename T::Compute;
    using Element = typename T::Query;
    const float factors = p.scale_log2 * k_scale;
    const u32 sign = factors < 0.0f ? 0x80008000u : 0;
    const float scale = not_zero(fabsf(factors));
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float factor = 1.0f, inverse = 1.0f;
            if constexpr (T::SCALED_QUERY) {
                float most = 0.0f;
#pragma unroll
                for (int s = 0; s < T::K_STEPS; s++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float2 x = Element::unpack(q.a[m][s][2 * half + h]);
                        most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
                    }
                }
                most = row_max(most);
                // The power of two at or below the row's largest value, kept where its reciprocal is normal too.
                const u32 exponent = min(max(__float_as_uint(most) >> 23, 27u), 227u);
                factor = __uint_as_float(exponent << 23), inverse = __uint_as_float((254 - exponent) << 23);
            }
            if constexpr (!Same<Compute, Element>::value) {
#pragma unroll
                for (int s = 0; s < T::K_STEPS; s++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32& x = q.a[m][s][2 * half + h];
                        const float2 f = Element::unpack(x);
                        x = Compute::pack(f.x * inverse, f.y * inverse);
                    }
                }
            }
#pragma unroll
            for (int s = 0; s < T::K_STEPS && !T::COPIED_QUERY; s++) {
                q.a[m][s][h] ^= sign, q.a[m][s][2 + h] ^= sign;
            }
            q.scale[m][h] = T::Opt::SOFTCAP ? p.softcap * LOG2E : not_zero(scale * factor);
            q.cap[m][h] = T::Opt::SOFTCAP ? scale * factor * (LN2 / p.softcap) : 1.0f;
        }
    }
}

template <class T>
__device__ __forceinline__ void warp_scores(float (&s)[T::M_TILES][T::N_TILES][4], const Query<T>& q, u32 k, int lane) {
    using Compute = typename T::Compute;
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
#pragma unroll
        for (int n = 0; n < T::N_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
        }
    }
    if constexpr (T::PACKED) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int n = 0; n < T::N_TILES; n++) {
            const int row = 16 * (n / 2) + 4 * (g / 2) + 2 * (n % 2) + g % 2;
#pragma unroll
            for (int j = 0; j < T::K_STEPS / 4; j++) {
                u32 words[4];
                load_shared16(words, k + swizzled<T, false>(row, t + 4 * j));
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const u32 b0 = E4m3::widen<0>(words[w]), b1 = E4m3::widen<1>(words[w]);
#pragma unroll
                    for (int m = 0; m < T::M_TILES; m++) Compute::mma(s[m][n], q.a[m][4 * j + w], b0, b1);
                }
            }
        }
    } else {
#pragma unroll
        for (int step = 0; step < T::K_STEPS; step++) {
#pragma unroll
            for (int n = 0; n < T::N_TILES; n += 2) {
                u32 b[4];
                ldmatrix(b, k + swizzled<T, false>(8 * n + (lane & 7) + ((lane >> 4) << 3), 2 * step + ((lane >> 3) & 1)));
#pragma unroll
                for (int m = 0; m < T::M_TILES; m++) {
                    Compute::mma(s[m][n], q.a[m][step], b[0], b[1]);
                    Compute::mma(s[m][n + 1], q.a[m][step], b[2], b[3]);
                }
            }
        }
    }
}

// Calls f(row, piece, where it is) for the 16-byte pieces of the query in shared memory that are this thread's.
template <class T, class F>
__device__ __forceinline__ void each_query_piece(u32 rows, int thread, F f) {
    constexpr int PIECES = T::HEAD_DIM / 8, ALL = T::ROWS * PIECES;
#pragma unroll
    for (int i = 0; i < (ALL + T::THREADS - 1) / T::THREADS; i++) {
        const int at = i * T::THREADS + thread, row = at / PIECES, piece = at % PIECES;
        if (ALL % T::THREADS == 0 || at < ALL) f(row, piece, rows + wide_swizzled<T>(row, piece));
    }
}

// Copies the query rows of the CTA to where a warpgroup's products read them; rows past the last are zeros.
template <class T>
__device__ __forceinline__ void copy_query(const CudaTileArgs& p, const Task& task, u32 rows, int thread) {
    const bool aligned = is_query_aligned(p);
    each_query_piece<T>(rows, thread, [&](int r, int piece, u32 to) {
        const int row = task.first_row + r;
        const bool real = row < task.rows;
        const u16* src = query_row<T>(p, task, real ? row : 0) + piece * 8;
        if (aligned) return copy16<false>(to, src, real);
#pragma unroll
        for (int word = 0; word < 4; word++) copy4(to + 4 * word, src + 2 * word, real);
    });
}

// The other sign for what this thread has copied of the query.
template <class T>
__device__ __forceinline__ void negate_query(u32 rows, int thread) {
    each_query_piece<T>(rows, thread, [&](int, int, u32 at) {
        u32 words[4];
        load_shared16(words, at);
#pragma unroll
        for (int i = 0; i < 4; i++) store_shared4(at + 4 * i, words[i] ^ 0x80008000u);
    });
}

// A warpgroup's query rows in shared memory, as its products read them.
template <class T>
__device__ __forceinline__ void store_query(const Query<T>& q, u32 rows, int first_row, int lane) {
#pragma unroll
    for (int s = 0; s < T::K_STEPS; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            store_shared4(rows + wide_swizzled<T>(first_row + i % 2 * 8 + lane / 4, 2 * s + i / 2) + lane % 4 * 4, q.a[0][s][i]);
        }
    }
}

// Starts S = Q K^T; warpgroup_wait ends it.
template <class T>
__device__ __forceinline__ void start_scores(float (*s)[4], u32 query, u32 k) {
    const u64 a = describe(query), b = describe(k);
    warpgroup_begin();
#pragma unroll
    for (int step = 0; step < T::K_STEPS; step++) {
        const u32 at = step / 4 * (T::CHUNK * 128) + step % 4 * 32;
        warpgroup_scores<typename T::Compute>(s, a + at / 16, b + at / 16, step > 0);
    }
    warpgroup_commit();
}

template <class T>
__device__ __forceinline__ void add_warp_values(float (&o)[T::M_TILES][T::OUT_TILES][4], const u32 (&pr)[T::M_TILES][T::N_TILES / 2][4],
                                                u32 v, int lane) {
    using Compute = typename T::Compute;
#pragma unroll
    for (int step = 0; step < T::N_TILES / 2; step++) {
        if constexpr (T::PACKED) {
            const int g = lane / 4, t = lane % 4;
#pragma unroll
            for (int block = 0; block < T::HEAD_DIM / 128; block++) {
                u32 rows[4][4];
#pragma unroll
                for (int r = 0; r < 4; r++) load_shared16(rows[r], v + swizzled<T, true>(16 * step + 4 * t + r, 8 * block + g));
#pragma unroll
                for (int w = 0; w < 4; w++) {
#pragma unroll
                    for (int pair = 0; pair < 2; pair++) {
                        // Bytes of two tokens side by side: channels 0, 1 or 2, 3 of the word.
                        const u32 order = pair ? 0x7362 : 0x5140;
                        const u32 low = __byte_perm(rows[0][w], rows[1][w], order), high = __byte_perm(rows[2][w], rows[3][w], order);
                        const int n = 16 * block + 4 * w + 2 * pair;
                        const u32 b[4] = {E4m3::widen<0>(low), E4m3::widen<0>(high), E4m3::widen<1>(low), E4m3::widen<1>(high)};
#pragma unroll
                        for (int m = 0; m < T::M_TILES; m++) {
                            Compute::mma(o[m][n], pr[m][step], b[0], b[1]);
                            Compute::mma(o[m][n + 1], pr[m][step], b[2], b[3]);
                        }
                    }
                }
            }
        } else {
#pragma unroll
            for (int n = 0; n < T::OUT_TILES; n += 2) {
                u32 b[4];
                ldmatrix_transposed(b, v + swizzled<T, true>(16 * step + (lane & 15), n + (lane >> 4)));
#pragma unroll
                for (int m = 0; m < T::M_TILES; m++) {
                    Compute::mma(o[m][n], pr[m][step], b[0], b[1]);
                    Compute::mma(o[m][n + 1], pr[m][step], b[2], b[3]);
                }
            }
        }
    }
}

template <class T>
__device__ __forceinline__ void add_values(float (&o)[T::M_TILES][T::OUT_TILES][4], const u32 (&pr)[T::M_TILES][T::N_TILES / 2][4], u32 v,
                                           int lane) {
    using Compute = typename T::Compute;
    if constexpr (T::WARPGROUP) {
        constexpr int COLUMNS = T::HEAD_DIM % 128 == 0 ? 128 : 64;
        const u64 b = describe(v, T::CHUNK * 128);
        warpgroup_begin();
#pragma unroll
        for (int step = 0; step < T::N_TILES / 2; step++) {
#pragma unroll
            for (int n = 0; n < T::HEAD_DIM; n += COLUMNS) {
                warpgroup_values<Compute, COLUMNS>(&o[0][n / 8], pr[0][step], b + (n / 64 * (T::CHUNK * 128) + step * 16 * 128) / 16);
            }
        }
        warpgroup_commit();
        warpgroup_wait(o[0]);
    } else {
        add_warp_values<T>(o, pr, v, lane);
    }
}

}  // namespace pa
