// What CDNA4 alone has.
#define GLOBAL extern "C" __attribute__((global))
#define SHARED __attribute__((shared))
typedef unsigned int uint;
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));
typedef __bf16 bf16x2 __attribute__((ext_vector_type(2)));
typedef int i32x8 __attribute__((ext_vector_type(8)));

static __attribute__((device)) int thread() { return __builtin_amdgcn_workitem_id_x(); }

// C (16x16) = A (16x32, bf16) x B^T (16x32).
GLOBAL void tile32(const __bf16 *a, const __bf16 *b, float *c) {
    int lane = thread(), row = lane % 16, k = lane / 16 * 8;
    f32x4 acc = {0, 0, 0, 0};
    acc = __builtin_amdgcn_mfma_f32_16x16x32_bf16(*(const bf16x8 *)(a + row * 32 + k), *(const bf16x8 *)(b + row * 32 + k), acc, 0, 0, 0);
    for (int i = 0; i < 4; i++) c[(lane / 16 * 4 + i) * 16 + row] = acc[i];
}

// Pairs of floats to bf16.
GLOBAL void narrow(const f32x2 *in, bf16x2 *out) { out[thread()] = __builtin_convertvector(in[thread()], bf16x2); }
