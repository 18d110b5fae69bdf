// Freestanding kernels that the tests compile and run.
#define GLOBAL extern "C" __attribute__((global))
#define SHARED __attribute__((shared))
typedef unsigned int uint;
typedef unsigned short ushort;
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef uint u32x4 __attribute__((ext_vector_type(4)));
typedef uint u32x2 __attribute__((ext_vector_type(2)));
typedef short i16x4 __attribute__((ext_vector_type(4)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));
typedef __bf16 bf16x2 __attribute__((ext_vector_type(2)));

static __attribute__((device)) int thread() { return __builtin_amdgcn_workitem_id_x(); }
static __attribute__((device)) int block() { return __builtin_amdgcn_workgroup_id_x(); }
static __attribute__((device)) void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

GLOBAL void add(const float *a, const float *b, float *out, int n) {
    int i = block() * 256 + thread();
    if (i < n) out[i] = a[i] + b[i];
}

// Sum of 256 values a workgroup: DPP within rows, LDS across waves.
template <int CONTROL> static __attribute__((device)) float from(float x) {
    return __builtin_bit_cast(float, __builtin_amdgcn_update_dpp(0, __builtin_bit_cast(int, x), CONTROL, 15, 15, true));
}
GLOBAL void sum(const float *in, float *out) {
    SHARED float parts[16];
    float x = in[block() * 256 + thread()];
    x += from<0x111>(x);
    x += from<0x112>(x);
    x += from<0x114>(x);
    x += from<0x118>(x);
    if (thread() % 16 == 15) parts[thread() / 16] = x;
    barrier();
    if (thread() == 0) {
        float total = 0;
        for (int i = 0; i < 16; i++) total += parts[i];
        out[block()] = total;
    }
}

// Softmax of a row of 256, exact division included.
GLOBAL void softmax(const float *in, float *out) {
    SHARED float scratch[256];
    int t = thread();
    float x = in[block() * 256 + t];
    scratch[t] = x;
    barrier();
    float top = x;
    for (int i = 0; i < 256; i++) top = __builtin_fmaxf(top, scratch[i]);
    float e = __builtin_amdgcn_exp2f((x - top) * 1.44269504f);
    barrier();
    scratch[t] = e;
    barrier();
    float total = 0;
    for (int i = 0; i < 256; i++) total += scratch[i];
    out[block() * 256 + t] = e / total;
}

// C (16x16) = A (16x16, bf16 bits) x B^T (16x16): one wave.
GLOBAL void tile(const ushort *a, const ushort *b, float *c) {
    int lane = thread(), row = lane % 16, k = lane / 16 * 4;
    i16x4 x = *(const i16x4 *)(a + row * 16 + k), y = *(const i16x4 *)(b + row * 16 + k);
    f32x4 acc = {0, 0, 0, 0};
    acc = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, acc, 0, 0, 0);
    for (int i = 0; i < 4; i++) c[(k + i) * 16 + row] = acc[i];
}

// 64-bit index arithmetic, integer division, halves, atomics, local arrays.
GLOBAL void mixed(const int *in, uint *out, float *total, uint *count, int n, int divisor) {
    int i = block() * 256 + thread();
    if (i >= n) return;
    int x = in[i];
    long wide = (long)x * 1234567 + i;
    uint bits = (uint)(wide >> 7) ^ (uint)(x / divisor) ^ ((uint)(x % divisor) << 16);
    float h = (float)(_Float16)((float)x * 0.01f);
    __bf16 b = (__bf16)((float)x * 0.37f);
    ushort raw = __builtin_bit_cast(ushort, b);
    out[3 * i] = bits;
    out[3 * i + 1] = __builtin_bit_cast(uint, h);
    out[3 * i + 2] = raw;
    __hip_atomic_fetch_add(count, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_add(total, (float)(x & 3), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// A local array that the compiler keeps in scratch.
GLOBAL void spill(const int *in, int *out, int n) {
    int local[600];
    int t = thread();
    for (int i = 0; i < 600; i++) local[i] = in[i & 63] * t;
    int sum = 0;
    for (int i = 0; i < n; i++) sum += local[(i * 37 + t) % 600];
    out[t] = sum;
}

__attribute__((device)) const float table[8] = {1, 2, 4, 8, 16, 32, 64, 128};
GLOBAL void lookup(const int *in, float *out) { out[thread()] = table[in[thread()] & 7]; }
