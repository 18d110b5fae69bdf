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
    if (kind == F32) static_cast<float*>(at)[i] = x;
    // Any nibble is a number: half of the elements write their byte.
    if (kind == MXFP4 && i % 2 == 0) static_cast<uint8_t*>(at)[i / 2] = uint8_t(hash(i + __float_as_uint(x)));
}
__device__ inline double get(int kind, const void* at, int64_t i) {
    if (kind == BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(at)[i]);
    if (kind == F16) return __half2float(static_cast<const __half*>(at)[i]);
    if (kind == F32) return static_cast<const float*>(at)[i];
    if (kind == FP8) return float(static_cast<const __nv_fp8_e4m3*>(at)[i]);
    const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int x = static_cast<const uint8_t*>(at)[i / 2] >> i % 2 * 4 & 15;
    return x < 8 ? values[x] : -values[x - 8];
}

static __global__ void fill(int kind, void* at, int64_t n, uint64_t seed, float scale, bool positive = false) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        const float x = noise(seed * 0x9e3779b97f4a7c15ull + i) * scale;
        put(kind, at, i, positive ? fabsf(x) : x);
    }
}

// What the device functions below know of a variant.
struct Form {
    int kv, query, head_dim, page, group, per_head, window, softcap, scales, layout, bits;

    // Where an element is, by the layouts' definitions. Strides are those of the launch, in elements whatever the type.
    __device__ int64_t element(bool value, const pa::Paged& stride, int64_t page_id, int head, int token, int d) const {
        const int x = 128 / bits;
        const int64_t at = page_id * stride.page + head * stride.head;
        if (layout == NHD || layout == HND) return at + token * stride.token + d;
        if (!value) return at + (int64_t(d / x) * page + token) * x + d % x;
        if (layout == VLLM) return at + int64_t(d) * page + token;
        return at + (int64_t(token / x) * head_dim + d) * x + token % x;
    }
    // The strides of an MXFP4 cache count bytes.
    __device__ pa::Paged elements(pa::Paged s) const { return bits == 4 ? pa::Paged{2 * s.page, 2 * s.head, 2 * s.token} : s; }
    __device__ double scale(const void* scales_at, const pa::Paged& stride, int64_t page_id, int head, int token, int d) const {
        const int64_t at = page_id * stride.page + head * stride.head + token * stride.token;
        return scales == 2 ? static_cast<const float*>(scales_at)[at] : scales == 3 ? exp2(double(static_cast<const uint8_t*>(scales_at)[at + d / 32]) - 127) : 1.0;
    }
};

// NaN wherever no row may look: tokens `first..end` of a (page, head) are owned.
static __global__ void poison(Form f, pa::CudaTileArgs p, const int* first, const int* end) {
    const int page = blockIdx.x;
    for (int i = threadIdx.x; i < f.page * p.kv_heads; i += blockDim.x) {
        const int token = i % f.page, head = i / f.page;
        if (token >= first[page * p.kv_heads + head] && token < end[page * p.kv_heads + head]) continue;
        for (int d = 0; d < f.head_dim && f.kv != MXFP4; d++) {
            put(f.kv, (void*)p.key, f.element(false, p.key_stride, page, head, token, d), nanf(""));
            put(f.kv, (void*)p.value, f.element(true, p.value_stride, page, head, token, d), nanf(""));
        }
        const int64_t at = page * p.k_scale_stride.page + head * p.k_scale_stride.head + token * p.k_scale_stride.token;
        if (f.scales == 2) ((float*)p.k_scale)[at] = nanf(""), ((float*)p.v_scale)[at] = nanf("");
        for (int i = 0; i < f.head_dim / 32 && f.scales == 3; i++) ((uint8_t*)p.k_scale)[at + i] = ((uint8_t*)p.v_scale)[at + i] = 0xff;
    }
}

// Keys next to nothing but for token 5 of each plan row, whose score is about `bits` powers of two above the others' where queries are positive.
static __global__ void peak(Form f, pa::CudaTileArgs p, double bits) {
    const int row = blockIdx.x, context = p.context_lens[row];
    for (int i = threadIdx.x; i < context * p.kv_heads; i += blockDim.x) {
        const int token = i % context, head = i / context;
        if (f.per_head && head != row % p.kv_heads) continue;
        const int64_t page = p.block_tables[row * p.table_row + token / f.page];
        if (page < 0) continue;
        const double scale = f.scales == 1 ? *(const float*)p.k_scale : f.scale(p.k_scale, p.k_scale_stride, page, head, token % f.page, 0);
        // A query element is about 1.2.
        const double top = bits / (1.2 * f.head_dim * p.scale_log2 * scale);
        for (int d = 0; d < f.head_dim; d++) {
            const int64_t at = f.element(false, p.key_stride, page, head, token % f.page, d);
            put(f.kv, (void*)p.key, at, float(token == 5 ? top : 0.02 * get(f.kv, p.key, at)));
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
    auto page_of = [&](int t) { return int64_t(p.block_tables[plan_row * p.table_row + t / f.page]); };
    auto value_of = [&](bool value, int t, int d) {
        const pa::Paged stride = f.elements(value ? p.value_stride : p.key_stride);
        const double scale = value ? f.scale(p.v_scale, p.v_scale_stride, page_of(t), kv_head, t % f.page, d)
                                   : f.scale(p.k_scale, p.k_scale_stride, page_of(t), kv_head, t % f.page, d);
        return get(f.kv, value ? p.value : p.key, f.element(value, stride, page_of(t), kv_head, t % f.page, d)) * scale;
    };
    double most = -INFINITY;
    for (int t = first + threadIdx.x; t < end; t += 256) {
        double x = 0;
        for (int d = 0; d < f.head_dim; d++) x += get(f.query, p.q, row * p.q_row + head * p.q_head + d) * value_of(false, t, d);
        x *= double(p.scale_log2) * 0.69314718055994530942 * k_factor;
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
    for (int d = threadIdx.x; d < f.head_dim; d += 256) {
        double o = 0;
        for (int t = first; t < end; t++) o += s[t] * value_of(true, t, d) * v_factor;
        out[(int64_t(row) * gridDim.y + head) * f.head_dim + d] = empty ? 0 : o / sum;
        if (d == 0) lse[int64_t(row) * gridDim.y + head] = empty ? -INFINITY : most + log(sum);
    }
}

}  // namespace dev
