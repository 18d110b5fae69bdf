#define GLOBAL extern "C" __attribute__((global))
#define ID (__builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x())

GLOBAL void add(const float* a, const float* b, float* out, unsigned n) {
    unsigned i = ID;
    if (i < n) out[i] = a[i] + b[i];
}

// Writes `distance` floats past the lane's own: out of bounds where that leaves the allocation.
GLOBAL void stray(float* out, unsigned distance) { out[ID + distance] = 1.0f; }

__attribute__((shared)) float shared_memory[256];

// Reads a neighbouring wave's element without a barrier.
GLOBAL void race(float* out) {
    unsigned i = __builtin_amdgcn_workitem_id_x();
    shared_memory[i] = i;
    __builtin_amdgcn_s_waitcnt(0);
    out[i] = shared_memory[i ^ 64];
}

GLOBAL void forever(unsigned* out) {
    while (__atomic_load_n(out, __ATOMIC_RELAXED) == 0) {
    }
}

GLOBAL __attribute__((amdgpu_flat_work_group_size(1, 64))) void narrow(float* out) { out[ID] = 2.0f; }
