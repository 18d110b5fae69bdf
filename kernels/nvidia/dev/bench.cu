// Checks the tile kernels against double precision and times them: graphs of calls rotated over caches that overflow the L2.
//
//   ./build DIR [PART...] && DIR/bench1 [check] [time] [name filter]

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "plan.h"
#include "reference.cuh"

using namespace pa;

#define OK(call)                                                                                    \
    do {                                                                                            \
        cudaError_t error = (call);                                                                 \
        if (error != cudaSuccess) {                                                                 \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
            exit(1);                                                                                \
        }                                                                                           \
    } while (0)

struct Problem {
    std::string name;
    std::vector<int> contexts;
    int query_len = 1, kv_heads = 1, group = 16, window = 0, capacity = 0, max_partitions = 1 << 30, cluster = 1;
    bool hnd = false;
    double peer_us = 0;
};

template <class V>
V* device(const std::vector<V>& host) {
    V* at;
    OK(cudaMalloc(&at, std::max<size_t>(host.size(), 1) * sizeof(V)));
    OK(cudaMemcpy(at, host.data(), host.size() * sizeof(V), cudaMemcpyHostToDevice));
    return at;
}

static std::vector<void*> owned;
static char* allocate(size_t bytes) {
    void* at;
    OK(cudaMalloc(&at, std::max<size_t>(bytes, 16)));
    owned.push_back(at);
    return static_cast<char*>(at);
}
static void release_all() {
    for (void* at : owned) OK(cudaFree(at));
    owned.clear();
}

static double read_rate_bytes_per_us = 4.4e6;
static int sms = 132;

template <class T>
struct Call {
    TileParams p{};
    int slots, row_blocks, rows, plan_rows, tasks;
    bool whole;  // every row fits a cluster

    // A plain launch waits for the kernel before it to end; an overlapped one starts while that drains.
    void launch(cudaStream_t stream, bool overlapped = true) const {
        cudaLaunchAttribute attributes[2]{};
        attributes[0].id = cudaLaunchAttributeClusterDimension;
        attributes[0].val.clusterDim.x = p.cluster, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
        attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[1].val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{};
        config.stream = stream, config.attrs = attributes, config.numAttrs = 1 + overlapped;
        config.gridDim = dim3(slots, p.kv_heads, row_blocks), config.blockDim = T::THREADS, config.dynamicSmemBytes = T::SMEM_BYTES;
        OK(cudaLaunchKernelEx(&config, tile_kernel<T>, p));
        if (whole) return;
        // A batch of partials is 32 with four warps, 64 with eight.
        const int warps = slots > 32 * p.cluster * plan_rows ? 8 : 4;
        config.attrs = attributes + 1, config.numAttrs = 1;
        config.gridDim = dim3(rows, plan_rows, p.kv_heads), config.blockDim = warps * 32, config.dynamicSmemBytes = 0;
        OK(cudaLaunchKernelEx(&config, warps == 8 ? reduce_kernel<T, 8> : reduce_kernel<T, 4>, p));
    }

    // Clusters of `size` that the GPU runs at once.
    static int most_clusters(int size) {
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = size, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
        cudaLaunchConfig_t config{};
        config.attrs = &attribute, config.numAttrs = 1;
        config.gridDim = dim3(size * 66), config.blockDim = T::THREADS, config.dynamicSmemBytes = T::SMEM_BYTES;
        int clusters = 0;
        OK(cudaOccupancyMaxActiveClusters(&clusters, tile_kernel<T>, &config));
        return clusters;
    }
};

template <class T>
struct Case {
    using Kv = typename T::Kv;
    Problem problem;
    std::vector<Call<T>> calls;
    dev::RefScale scale{};
    int64_t kv_bytes = 0;
    int pages = 0;

    // Caches like [P, 2, S, H, D] (or [P, 2, H, S, D]), pages listed in a shuffled order, some listed by no one.
    Case(const Problem& problem, int caches, bool poisoned) : problem(problem) {
        const int S = T::PAGE_SIZE, D = T::HEAD_DIM, H = problem.kv_heads, B = int(problem.contexts.size()), Q = problem.query_len;
        int64_t need = 0, widest = 1;
        for (int c : problem.contexts) {
            need += (c + S - 1) / S, widest = std::max<int64_t>(widest, (c + S - 1) / S);
            kv_bytes += int64_t(c) * H * D * 2 * Kv::BYTES;
        }
        pages = int(need + need / 16 + 3);
        std::vector<int> order(pages);
        for (int i = 0; i < pages; i++) order[i] = i;
        for (int i = pages - 1; i > 0; i--) std::swap(order[i], order[dev::hash(i + 77) % (i + 1)]);
        std::vector<u32> tables(B * (widest + 2), 0xffffffffu), lens;
        std::vector<int> first(pages, 0), end(pages, 0);
        int next = 0;
        for (int b = 0; b < B; b++) {
            const int c = problem.contexts[b], oldest = problem.window ? std::max(c - Q - problem.window + 1, 0) : 0;
            lens.push_back(c);
            for (int i = 0; i * S < c; i++) {
                const int page = order[next++];
                if ((i + 1) * S <= oldest) continue;
                tables[b * (widest + 2) + i] = page;
                first[page] = std::max(oldest - i * S, 0), end[page] = std::min(c - i * S, S);
            }
        }
        Call<T> call;
        OK(cudaFuncSetAttribute(tile_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::SMEM_BYTES));
        OK(cudaFuncSetAttribute(tile_kernel<T>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
        const int C = problem.cluster, fit = C > 1 ? call.most_clusters(C) * C : sms * T::MIN_CTAS;
        dev::Plan plan = dev::plan(problem.contexts, Q, problem.window, T::TILE_TOKENS,
                                   problem.capacity ? problem.capacity : std::max(fit / H, 1), problem.max_partitions);
        while (plan.work.size() % C) plan.work.push_back({-1, 0, 0, 0});
        TileParams& p = call.p;
        auto keep = [](auto* at) { owned.push_back((void*)at); return at; };
        p.work_info = keep(device(plan.work)), p.reduce_info = keep(device(plan.reduce));
        p.tables = keep(device(tables)), p.context_lens = keep(device(lens));
        p.table_stride = p.max_pages = widest + 2, p.plan_rows = B, p.capacity = int(plan.work.size()), p.num_pages = pages, p.kv_heads = H, p.group = problem.group, p.query_len = Q;
        p.window = problem.window, p.heads_per_row = 1, p.cluster = C;
        const int heads = H * problem.group;
        p.q_token_stride = p.out_token_stride = int64_t(heads) * D, p.q_head_stride = p.out_head_stride = D;
        const int64_t row = D * Kv::BYTES;
        p.k_token_stride = p.v_token_stride = problem.hnd ? row : row * H;
        p.k_head_stride = p.v_head_stride = problem.hnd ? row * S : row;
        p.k_page_stride = p.v_page_stride = 2 * row * H * S;
        p.scale_page_stride = int64_t(H) * S, p.scale_head_stride = S;
        scale.softmax = 1.0 / sqrt(double(D)), scale.softcap = 3.0, scale.k = T::FP8 && !T::PER_TOKEN ? 0.75 : 1.0;
        scale.v = T::FP8 && !T::PER_TOKEN ? 1.25 : 1.0;
        p.scale_log2 = float(scale.softmax * scale.k * (T::Opt::SOFTCAP ? 1.0 / scale.softcap : LOG2E));
        p.softcap_log2 = float(scale.softcap * LOG2E), p.v_scale = float(scale.v);
        std::vector<float> sinks;
        for (int h = 0; h < heads; h++) sinks.push_back(2.0f * dev::noise(h + 5000));
        p.sinks = keep(device(sinks));
        call.rows = Q * problem.group, call.plan_rows = B, call.slots = int(plan.work.size());
        call.row_blocks = (call.rows + T::ROWS - 1) / T::ROWS;
        call.whole = true;
        for (auto r : plan.reduce) call.whole = call.whole && (r.count == 0 || r.first_slot / C == (r.first_slot + r.count - 1) / C);
        call.tasks = 0;
        for (auto w : plan.work) call.tasks += w.row >= 0;
        const int64_t q_count = int64_t(B) * Q * heads * D;
        p.partial_o = (float*)allocate(int64_t(call.slots) * H * call.rows * D * 4);
        p.partial_ml = (float2*)allocate(int64_t(call.slots) * H * call.rows * 8);
        p.q = allocate(q_count * 2);
        dev::fill<typename T::Query><<<64, 256>>>((void*)p.q, q_count, 99, 1.5f);
        std::vector<float> k_scales, v_scales;
        for (int64_t i = 0; T::PER_TOKEN && i < int64_t(pages) * H * S; i++) {
            k_scales.push_back(0.5f + 0.2f * dev::noise(i)), v_scales.push_back(expf(dev::noise(i + (1ll << 32))));
        }
        for (int i = 0; i < caches; i++) {
            p.out = allocate(q_count * 2), p.lse = (float*)allocate(int64_t(B) * Q * heads * 4);
            OK(cudaMemset(p.out, 0xff, q_count * 2));
            OK(cudaMemset(p.lse, 0xff, int64_t(B) * Q * heads * 4));
            const int64_t count = int64_t(pages) * 2 * S * H * D;
            p.k = allocate(count * Kv::BYTES), p.v = static_cast<const char*>(p.k) + row * H * S;
            dev::fill<Kv><<<2048, 256>>>((void*)p.k, count, i + 1, 1.0f);
            if (T::PER_TOKEN) p.k_scales = keep(device(k_scales)), p.v_scales = keep(device(v_scales));
            if (poisoned) {
                const int *f = keep(device(first)), *e = keep(device(end));
                dev::poison<Kv><<<pages, 256>>>(p, f, e, S, D, (float*)p.k_scales, (float*)p.v_scales);
            }
            calls.push_back(call);
        }
        OK(cudaGetLastError());
    }

    // Largest error of the output over the largest |reference|, and of the LSE; NaN and unwritten elements count as infinite.
    std::pair<double, double> error() {
        const TileParams& p = calls[0].p;
        const int B = int(problem.contexts.size()), Q = problem.query_len, heads = problem.kv_heads * problem.group, D = T::HEAD_DIM;
        // Twice: the second call meets what the first has left in the workspace.
        for (int i = 0; i < 2; i++) calls[0].launch(nullptr);
        OK(cudaDeviceSynchronize());
        const int longest = std::max(*std::max_element(problem.contexts.begin(), problem.contexts.end()), 1);
        const int64_t n = int64_t(B) * Q * heads;
        double* scratch = (double*)allocate(n * longest * 8);
        double *out = (double*)allocate(n * D * 8), *lse = (double*)allocate(n * 8);
        dev::reference<T><<<dim3(B * Q, heads), 256>>>(p, scale, scratch, longest, out, lse);
        OK(cudaDeviceSynchronize());
        std::vector<double> want(n * D), want_lse(n);
        std::vector<u16> raw(n * D);
        std::vector<float> got_lse(n);
        OK(cudaMemcpy(want.data(), out, n * D * 8, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(want_lse.data(), lse, n * 8, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(raw.data(), p.out, n * D * 2, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(got_lse.data(), p.lse, n * 4, cudaMemcpyDeviceToHost));
        double worst = 0, most = 1e-30, worst_lse = 0;
        for (int64_t i = 0; i < n * D; i++) {
            const u32 bits = u32(raw[i]) << 16;
            float got;
            memcpy(&got, &bits, 4);
            if (!Same<typename T::Query, Bf16>::value) got = __half2float(*reinterpret_cast<__half*>(&raw[i]));
            const double e = fabs(double(got) - want[i]);
            worst = e <= 1e30 ? std::max(worst, e) : INFINITY;
            most = std::max(most, fabs(want[i]));
        }
        for (int64_t i = 0; i < n; i++) {
            if (std::isinf(want_lse[i]) && got_lse[i] == want_lse[i]) continue;
            const double e = fabs(double(got_lse[i]) - want_lse[i]);
            worst_lse = e <= 1e30 ? std::max(worst_lse, e) : INFINITY;
        }
        return {worst / most, worst_lse};
    }

    // Median, least and most microseconds a call.
    std::vector<double> time(bool overlapped = true, int least_calls = 10, int replays = 30) {
        cudaStream_t stream;
        OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        const int count = std::max(least_calls, int(calls.size()));
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < count; i++) calls[i % calls.size()].launch(stream, overlapped);
        OK(cudaStreamEndCapture(stream, &graph));
        OK(cudaGraphInstantiate(&exec, graph, 0));
        cudaEvent_t from, to;
        OK(cudaEventCreate(&from));
        OK(cudaEventCreate(&to));
        std::vector<double> us;
        for (int i = 0; i < replays + 3; i++) {
            OK(cudaEventRecord(from, stream));
            OK(cudaGraphLaunch(exec, stream));
            OK(cudaEventRecord(to, stream));
            OK(cudaStreamSynchronize(stream));
            float ms;
            OK(cudaEventElapsedTime(&ms, from, to));
            if (i >= 3) us.push_back(ms * 1e3 / count);
        }
        std::sort(us.begin(), us.end());
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        OK(cudaStreamDestroy(stream));
        return {us[us.size() / 2], us.front(), us.back()};
    }
};

static int failures = 0;

template <class T>
void check(const char* variant, const Problem& problem, double bound) {
    Case<T> c(problem, 1, true);
    const auto [error, lse] = c.error();
    const bool good = error <= bound && lse <= 2e-2;
    failures += !good;
    printf("%-4s %-14s %-26s tasks %4d  error %.2e  lse %.2e\n", good ? "ok" : "BAD", variant, problem.name.c_str(), c.calls[0].tasks, error,
           lse);
    fflush(stdout);
    release_all();
}

template <class T>
void measure(const char* variant, const Problem& problem) {
    int64_t bytes = 0;
    for (int c : problem.contexts) bytes += int64_t(c) * problem.kv_heads * T::HEAD_DIM * 2 * T::Kv::BYTES;
    const int caches = bytes < 150e6 ? std::max(1, std::min(64, int(300e6 / std::max<int64_t>(bytes, 1000000)) + 1)) : std::min<int>(10, std::max<int>(2, 20e9 / bytes));
    Case<T> c(problem, caches, false);
    const auto us = c.time();
    const double apart = c.time(false)[0];
    const bool small = bytes < 100e6;
    const double error = small ? c.error().first : 0.0;
    if (!(error < 2e-2)) failures++;
    const double limit = bytes / read_rate_bytes_per_us;
    printf("%-16s %-14s c%-2d t%4d %7.2f us (%.2f-%.2f) %5.1f%% peer %6.2f %4.2fx err %.1e | apart %6.2f\n", problem.name.c_str(),
           variant, problem.cluster, c.calls[0].tasks, us[0], us[1], us[2], 100 * limit / us[0], problem.peer_us, problem.peer_us / us[0],
           error, apart);
    fflush(stdout);
    release_all();
}

__global__ void read_kernel(const uint4* at, int64_t n, uint4* out) {
    uint4 sum = {0, 0, 0, 0};
    const int64_t step = int64_t(gridDim.x) * blockDim.x;
    int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 x[8];
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = __ldcs(at + i + j * step);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x ^= x[j].x, sum.y ^= x[j].y, sum.z ^= x[j].z, sum.w ^= x[j].w;
    }
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x12345678) *out = sum;
}

static double measure_read_rate() {
    const int64_t bytes = int64_t(4) << 30;
    char* at = allocate(bytes);
    dev::fill<Bf16><<<2048, 256>>>(at, bytes / 2, 3, 1.0f);
    cudaEvent_t from, to;
    OK(cudaEventCreate(&from));
    OK(cudaEventCreate(&to));
    double best = 0;
    for (int ctas : {2, 4, 8}) {
        for (int i = 0; i < 6; i++) {
            OK(cudaEventRecord(from));
            read_kernel<<<sms * ctas, 256>>>((const uint4*)at, bytes / 16, (uint4*)at);
            OK(cudaEventRecord(to));
            OK(cudaEventSynchronize(to));
            float ms;
            OK(cudaEventElapsedTime(&ms, from, to));
            if (i > 0) best = std::max(best, bytes / (ms * 1e3));
        }
    }
    release_all();
    return best;
}

#include "variants.h"

int main(int argc, char** argv) {
    bool checks = argc == 1, times = argc == 1;
    std::string filter;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "check")) checks = true;
        else if (!strcmp(argv[i], "time")) times = true;
        else filter = argv[i];
    }
    cudaDeviceProp device;
    OK(cudaGetDeviceProperties(&device, 0));
    int driver = 0;
    OK(cudaDriverGetVersion(&driver));
    sms = device.multiProcessorCount;
    if (checks) run_checks(filter);
    if (times) {
        read_rate_bytes_per_us = measure_read_rate();
        printf("%s, %d SMs, driver CUDA %d, read %.3f TB/s\n", device.name, sms, driver, read_rate_bytes_per_us / 1e6);
        run_times(filter);
    }
    printf("%d failures\n", failures);
    return failures != 0;
}
