// The answer in double precision, one CTA for a (query row, head), and caches filled from a counter-based hash.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../reduce.cuh"
#include "../tile.cuh"

namespace dev {

__host__ __device__ inline uint32_t hash(uint64_t x) {
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    return uint32_t(x);
}

// About normal: the sum of four uniforms.
__host__ __device__ inline float noise(uint64_t i) {
    const uint32_t a = hash(2 * i), b = hash(2 * i + 1);
    const float sum = float(a & 0xffff) + float(a >> 16) + float(b & 0xffff) + float(b >> 16);
    return (sum / 65536.0f - 2.0f) * 1.7320508f;
}

__device__ inline void put(pa::Bf16, void* at, int64_t i, float x) { static_cast<__nv_bfloat16*>(at)[i] = __float2bfloat16(x); }
__device__ inline void put(pa::F16, void* at, int64_t i, float x) { static_cast<__half*>(at)[i] = __float2half(x); }
__device__ inline void put(pa::E4m3, void* at, int64_t i, float x) { static_cast<__nv_fp8_e4m3*>(at)[i] = __nv_fp8_e4m3(x); }
__device__ inline double get(pa::Bf16, const void* at, int64_t i) { return __bfloat162float(static_cast<const __nv_bfloat16*>(at)[i]); }
__device__ inline double get(pa::F16, const void* at, int64_t i) { return __half2float(static_cast<const __half*>(at)[i]); }
__device__ inline double get(pa::E4m3, const void* at, int64_t i) { return float(static_cast<const __nv_fp8_e4m3*>(at)[i]); }

template <class E>
__global__ void fill(void* at, int64_t n, uint64_t seed, float scale) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        put(E{}, at, i, noise(seed * 0x9e3779b97f4a7c15ull + i) * scale);
    }
}

// NaN wherever no row may look: `owner[page]` is the number of owned tokens of the page, from `owner_first[page]` on.
template <class E>
__global__ void poison(pa::TileParams p, const int* first, const int* end, int page_size, int head_dim, float* k_scales, float* v_scales) {
    const int page = blockIdx.x;
    for (int i = threadIdx.x; i < page_size * p.kv_heads; i += blockDim.x) {
        const int token = i % page_size, head = i / page_size;
        if (token >= first[page] && token < end[page]) continue;
        for (int d = 0; d < head_dim; d++) {
            put(E{}, (char*)p.k + page * p.k_page_stride + head * p.k_head_stride + token * p.k_token_stride, d, nanf(""));
            put(E{}, (char*)p.v + page * p.v_page_stride + head * p.v_head_stride + token * p.v_token_stride, d, nanf(""));
        }
        if (k_scales) {
            const int64_t at = page * p.scale_page_stride + head * p.scale_head_stride + token;
            k_scales[at] = nanf(""), v_scales[at] = nanf("");
        }
    }
}

struct RefScale {
    double softmax, softcap, k, v;
};

template <class T>
__global__ void reference(pa::TileParams p, RefScale scale, double* scratch, int max_context, double* out, double* lse) {
    const int row = blockIdx.x, sequence = row / p.query_len, query = row % p.query_len, head = blockIdx.y, kv_head = head / p.group;
    const int context = int(p.context_lens[sequence]), newest = context - p.query_len + query;
    const int first = T::Opt::WINDOW ? max(newest - p.window + 1, 0) : 0, end = min(newest + 1, context);
    double* s = scratch + (int64_t(row) * gridDim.y + head) * max_context;
    __shared__ double shared[256];
    auto all = [&](double x, bool is_max) {
        shared[threadIdx.x] = x;
        __syncthreads();
        for (int n = 128; n > 0; n /= 2) {
            if (threadIdx.x < n) {
                const double y = shared[threadIdx.x + n];
                shared[threadIdx.x] = is_max ? fmax(shared[threadIdx.x], y) : shared[threadIdx.x] + y;
            }
            __syncthreads();
        }
        const double r = shared[0];
        __syncthreads();
        return r;
    };
    auto page = [&](int t) { return int64_t(p.tables[sequence * p.table_stride + t / T::PAGE_SIZE]); };
    double most = -INFINITY;
    for (int t = first + threadIdx.x; t < end; t += 256) {
        const int in_page = t % T::PAGE_SIZE;
        const char* k = (const char*)p.k + page(t) * p.k_page_stride + kv_head * p.k_head_stride + in_page * p.k_token_stride;
        double x = 0;
        for (int d = 0; d < T::HEAD_DIM; d++) {
            x += get(typename T::Query{}, p.q, row * p.q_token_stride + head * p.q_head_stride + d) * get(typename T::Kv{}, k, d);
        }
        x *= scale.softmax * scale.k;
        if (T::PER_TOKEN) x *= p.k_scales[page(t) * p.scale_page_stride + kv_head * p.scale_head_stride + in_page];
        if (T::Opt::SOFTCAP) x = scale.softcap * tanh(x / scale.softcap);
        s[t] = x;
        most = fmax(most, x);
    }
    most = all(most, true);
    const bool empty = most == -INFINITY;
    if (T::Opt::SINKS && !empty) most = fmax(most, double(p.sinks[head]));
    double sum = 0;
    for (int t = first + threadIdx.x; t < end; t += 256) {
        s[t] = exp(s[t] - most);
        sum += s[t];
    }
    sum = all(sum, false);
    if (T::Opt::SINKS && !empty) sum += exp(double(p.sinks[head]) - most);
    __syncthreads();
    const int part = threadIdx.x / T::HEAD_DIM, parts = 256 / T::HEAD_DIM, d = threadIdx.x % T::HEAD_DIM;
    double o = 0;
    for (int t = first + part; t < end; t += parts) {
        const int in_page = t % T::PAGE_SIZE;
        const char* v = (const char*)p.v + page(t) * p.v_page_stride + kv_head * p.v_head_stride + in_page * p.v_token_stride;
        double x = s[t] * get(typename T::Kv{}, v, d) * scale.v;
        if (T::PER_TOKEN) x *= p.v_scales[page(t) * p.scale_page_stride + kv_head * p.scale_head_stride + in_page];
        o += x;
    }
    shared[threadIdx.x] = o;
    __syncthreads();
    if (part == 0) {
        for (int i = 1; i < parts; i++) o += shared[i * T::HEAD_DIM + d];
        out[(int64_t(row) * gridDim.y + head) * T::HEAD_DIM + d] = empty ? 0 : o / sum;
        if (d == 0) lse[int64_t(row) * gridDim.y + head] = empty ? -INFINITY : most + log(sum);
    }
}

}  // namespace dev
