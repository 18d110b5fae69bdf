// The answer in double precision, one CTA for a (query row, head), and caches filled from a counter-based hash.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../args.h"
#include "variant.h"

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

__device__ inline void put(int kind, void* at, int64_t i, float x) {
    if (kind == BF16) static_cast<__nv_bfloat16*>(at)[i] = __float2bfloat16(x);
    if (kind == F16) static_cast<__half*>(at)[i] = __float2half(x);
    if (kind == FP8) static_cast<__nv_fp8_e4m3*>(at)[i] = __nv_fp8_e4m3(x);
}
__device__ inline double get(int kind, const void* at, int64_t i) {
    if (kind == BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(at)[i]);
    if (kind == F16) return __half2float(static_cast<const __half*>(at)[i]);
    return float(static_cast<const __nv_fp8_e4m3*>(at)[i]);
}

static __global__ void fill(int kind, void* at, int64_t n, uint64_t seed, float scale) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        put(kind, at, i, noise(seed * 0x9e3779b97f4a7c15ull + i) * scale);
    }
}

// What the device functions below know of a variant.
struct Form {
    int kv, query, head_dim, page, group, per_head, window, softcap, scales;
};

// NaN wherever no row may look: tokens `first..end` of a (page, head) are owned.
static __global__ void poison(Form f, pa::CudaTileArgs p, const int* first, const int* end) {
    const int page = blockIdx.x;
    for (int i = threadIdx.x; i < f.page * p.kv_heads; i += blockDim.x) {
        const int token = i % f.page, head = i / f.page;
        if (token >= first[page * p.kv_heads + head] && token < end[page * p.kv_heads + head]) continue;
        for (int d = 0; d < f.head_dim; d++) {
            put(f.kv, (void*)p.key, page * p.key_stride.page + head * p.key_stride.head + token * p.key_stride.token + d, nanf(""));
            put(f.kv, (void*)p.value, page * p.value_stride.page + head * p.value_stride.head + token * p.value_stride.token + d, nanf(""));
        }
        if (f.scales == 2) {
            const int64_t at = page * p.k_scale_stride.page + head * p.k_scale_stride.head + token;
            ((float*)p.k_scale)[at] = nanf(""), ((float*)p.v_scale)[at] = nanf("");
        }
    }
}

// Where a query row stands: its sequence, its place among the sequence's `len` rows.
struct Row {
    int sequence, query, len;
};

static __global__ void reference(Form f, pa::CudaTileArgs p, const Row* rows, double* scratch, int max_context, double* out, double* lse) {
    const Row at = rows[blockIdx.x];
    const int row = blockIdx.x, head = blockIdx.y, kv_head = head / f.group;
    const int plan_row = f.per_head ? at.sequence * p.kv_heads + kv_head : at.sequence;
    const int context = p.context_lens[plan_row], newest = context - at.len + at.query;
    const int first = f.window ? max(newest - p.window + 1, 0) : 0, end = min(newest + 1, context);
    const double k_factor = f.scales == 1 ? *(const float*)p.k_scale : 1.0, v_factor = f.scales == 1 ? *(const float*)p.v_scale : 1.0;
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
    auto place = [&](const pa::Paged& stride, int t) {
        return p.block_tables[plan_row * p.table_row + t / f.page] * stride.page + kv_head * stride.head + t % f.page * stride.token;
    };
    double most = -INFINITY;
    for (int t = first + threadIdx.x; t < end; t += 256) {
        double x = 0;
        for (int d = 0; d < f.head_dim; d++) x += get(f.query, p.q, row * p.q_row + head * p.q_head + d) * get(f.kv, p.key, place(p.key_stride, t) + d);
        x *= double(p.scale_log2) * 0.69314718055994530942 * k_factor;
        if (f.scales == 2) x *= ((const float*)p.k_scale)[place(p.k_scale_stride, t)];
        if (f.softcap) x = p.softcap * tanh(x / p.softcap);
        s[t] = x;
        most = fmax(most, x);
    }
    most = all(most, true);
    const bool empty = most == -INFINITY;
    if (p.sinks && !empty) most = fmax(most, double(p.sinks[head]));
    double sum = 0;
    for (int t = first + threadIdx.x; t < end; t += 256) {
        s[t] = exp(s[t] - most);
        sum += s[t];
    }
    sum = all(sum, false);
    if (p.sinks && !empty) sum += exp(double(p.sinks[head]) - most);
    __syncthreads();
    const int parts = 256 / f.head_dim, part = threadIdx.x / f.head_dim, d = threadIdx.x % f.head_dim;
    double o = 0;
    if (part < parts) {
        for (int t = first + part; t < end; t += parts) {
            double x = s[t] * get(f.kv, p.value, place(p.value_stride, t) + d) * v_factor;
            if (f.scales == 2) x *= ((const float*)p.v_scale)[place(p.v_scale_stride, t)];
            o += x;
        }
    }
    shared[threadIdx.x] = o;
    __syncthreads();
    if (part == 0) {
        for (int i = 1; i < parts; i++) o += shared[i * f.head_dim + d];
        out[(int64_t(row) * gridDim.y + head) * f.head_dim + d] = empty ? 0 : o / sum;
        if (d == 0) lse[int64_t(row) * gridDim.y + head] = empty ? -INFINITY : most + log(sum);
    }
}

}  // namespace dev
