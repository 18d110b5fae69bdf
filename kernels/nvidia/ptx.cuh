// The PTX instructions the tile is made of, one function each.
#pragma once

namespace pa {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

constexpr u32 FULL_WARP = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }

__device__ __forceinline__ u32 smem_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// 2^x; 2^-inf is 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rcp_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh to about 1e-6 of itself: tanh.approx is good to 2^-11 only, too coarse times a softcap of 50, and a rational of exp2 cancels near 0, where a
// polynomial serves.
__device__ __forceinline__ float tanh_fast(float x) {
    const float square = x * x;
    const float series = x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315 + square * (62.0f / 2835)))));
    const float rational = 1.0f - 2.0f * rcp_fast(exp2_fast(x * (2.0f * LOG2E)) + 1.0f);
    return square < 0.0625f ? series : rational;
}

// Copies 16 bytes to shared memory, or zeros without reading where `owned` is false. Read ONCE, they do not push the rest out of the L2.
template <bool ONCE>
__device__ __forceinline__ void copy16(u32 dst, const void* src, bool owned) {
    if constexpr (ONCE) {
        u64 policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src), "r"(owned ? 16 : 0),
                     "l"(policy)
                     : "memory");
    } else {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(owned ? 16 : 0) : "memory");
    }
}

// Copies 4 bytes, or a zero.
__device__ __forceinline__ void copy4(u32 dst, const void* src, bool owned) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(owned ? 4 : 0) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `LEFT` of this thread's groups are under way.
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void barrier_named(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// SMs of the GPU, or a few more.
__device__ __forceinline__ u32 sm_count() {
    u32 r;
    asm("mov.u32 %0, %%nsmid;" : "=r"(r));
    return r;
}

// Counts towards a barrier that others wait at.
__device__ __forceinline__ void barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// A warpgroup's registers a thread from here on.
template <int REGISTERS>
__device__ __forceinline__ void claim_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}
template <int REGISTERS>
__device__ __forceinline__ void release_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

// Programmatic dependent launch: waits for the kernel before this one; without that launch attribute it returns at once.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel behind this one be launched: its threads start up to their own wait.
__device__ __forceinline__ void launch_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The barrier of the cluster's threads, in halves. The arrival orders nothing of its own accord; who has waited sees what others released before it.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// An mbarrier of one arrival, released to the cluster's threads that wait for this one.
__device__ __forceinline__ void mbarrier_init(u32 barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n fence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
#endif
}

// That arrival: the barrier's phase ends when `bytes` have been sent.
__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1;}" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// Waits for the end of the first phase; what was sent up to it is seen.
__device__ __forceinline__ void mbarrier_wait(u32 barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0; @!p bra again;}" ::"r"(barrier)
                 : "memory");
#endif
}

// Sends to the shared memory of CTA `rank` of the cluster, where this CTA's has `address`, and counts the bytes at that CTA's `barrier`.
__device__ __forceinline__ void send_cluster(u32 address, u32 barrier, int rank, float4 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .b32 a, b; mapa.shared::cluster.u32 a, %0, %2; mapa.shared::cluster.u32 b, %1, %2; "
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [a], {%3,%4,%5,%6}, [b];}" ::"r"(address),
                 "r"(barrier), "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
#endif
}
__device__ __forceinline__ void send_cluster(u32 address, u32 barrier, int rank, float2 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .b32 a, b; mapa.shared::cluster.u32 a, %0, %2; mapa.shared::cluster.u32 b, %1, %2; "
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [a], {%3,%4}, [b];}" ::"r"(address),
                 "r"(barrier), "r"(rank), "f"(x.x), "f"(x.y)
                 : "memory");
#endif
}

// A record of two integers, in one load.
template <class Record>
__device__ __forceinline__ Record load_record(const Record* p) {
    static_assert(sizeof(Record) == 8, "two integers");
    const int2 x = *reinterpret_cast<const int2*>(p);
    return {x.x, x.y};
}

// A record of one or four integers as it is in the L2: what the L1 holds may be older than the wait for the kernel before.
template <class Record>
__device__ __forceinline__ Record reload_record(const Record* p) {
    int4 x = {};
    if constexpr (sizeof(Record) == 4) {
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x.x) : "l"(p) : "memory");
        return static_cast<Record>(x.x);
    } else {
        static_assert(sizeof(Record) == 16, "one or four integers");
        asm volatile("ld.relaxed.gpu.global.v4.s32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
        return {x.x, x.y, x.z, x.w};
    }
}
// An integer so where `real`, else what is there. Loads that follow each other are issued so, whatever is done with them.
__device__ __forceinline__ void reload_where(int& x, const int* p, bool real) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.relaxed.gpu.global.s32 %0, [%1];}" : "+r"(x) : "l"(p), "r"(int(real)) : "memory");
}

// Loads 8 or 16 bytes where `real`, else leaves what is there. Loads that follow each other are issued so, whatever is done with them.
__device__ __forceinline__ void load_where(u32 (&x)[2], const void* at, bool real) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p ld.global.v2.u32 {%0, %1}, [%2];}" : "+r"(x[0]), "+r"(x[1]) : "l"(at), "r"(int(real)) : "memory");
}
__device__ __forceinline__ void load_where(u32 (&x)[4], const void* at, bool real) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])
                 : "l"(at), "r"(int(real))
                 : "memory");
}

// Brings a line into the L2 and its page into the TLBs: a hint, which neither faults nor orders anything.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Orders this thread's writes to shared memory before what the tensor cores read of it after the next barrier.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_shared16(u32 (&r)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ u32 load_shared4(u32 address) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void store_shared8(u32 address, u32 x, u32 y) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store_shared4(u32 address, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }

__device__ __forceinline__ void store_shared16(u32 address, const u32 (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

__device__ __forceinline__ float2 load_shared_float2(u32 address) {
    float2 r;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(address) : "memory");
    return r;
}

}  // namespace pa
