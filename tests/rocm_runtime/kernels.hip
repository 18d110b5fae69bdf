// Freestanding kernels of the runtime's tests.
#define GLOBAL extern "C" __attribute__((global))

static __attribute__((device)) int index() { return __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x(); }

struct Add {
    const float *in;
    float *out;
    float add;
    int n;
};

GLOBAL void add(Add args) {
    int i = index();
    if (i < args.n) args.out[i] = args.in[i] + args.add;
}

// Reverses 256 values through LDS.
GLOBAL void reverse(Add args) {
    __attribute__((shared)) static float values[256];
    int thread = __builtin_amdgcn_workitem_id_x();
    values[thread] = args.in[thread];
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    args.out[thread] = values[255 - thread];
}
