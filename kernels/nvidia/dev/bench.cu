// Checks the tile kernels against double precision and times them: graphs of calls rotated over caches that overflow the L2.
//
//   nvcc -std=c++17 -O1 -arch=sm_90 -o bench bench.cu -ldl    (KERNELS, NVRTC, ARCH, JOBS and DEFINES, more options for NVRTC, in the environment: see compile.h)
//   bench compile DIR [filter]    where NVRTC is: what the cases below need and DIR lacks
//   bench file DIR FILE    times the problems of a file: see run_file
//   bench compile|compare DIR CONTENDERS FILE    the contenders of a file on the problems of another: see compare
//   bench check|time|sweep|once DIR [filter]    where the GPU is; `once` launches a timed case three times, for a profiler

#include <cuda.h>

#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "compile.h"
#include "plan.h"
#include "reference.cuh"

using namespace dev;

#define OK(call)                                                                                      \
    do {                                                                                              \
        const auto error = (call);                                                                    \
        if (int(error) != 0) {                                                                        \
            fprintf(stderr, "%s:%d: %s: error %d\n", __FILE__, __LINE__, #call, int(error));          \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

static std::string mode, folder, filter;
static std::map<std::string, Unit> wanted;

template <class F>
static F* entry(const char* name) {
    void* at = nullptr;
    cudaDriverEntryPointQueryResult result;
    OK(cudaGetDriverEntryPointByVersion(name, &at, 12000, cudaEnableDefault, &result));
    return reinterpret_cast<F*>(at);
}

struct Problem {
    std::string name;
    std::vector<int> contexts;
    int query_len = 1, kv_heads = 1, group = 16, page = 128, window = 0, capacity = 0, max_partitions = 1 << 30;
    bool hnd = false, sinks = false;
    float q_factor = 1;
    double peak = 0;  // powers of two that token 5 of every row has above all others
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

// A compiled kernel; loaded once.
static CUfunction load(const std::string& root, const Variant::Macros& macros, int shared_bytes) {
    static std::map<std::string, CUfunction> loaded;
    static auto module_load = entry<decltype(cuModuleLoad)>("cuModuleLoad");
    static auto get = entry<decltype(cuModuleGetFunction)>("cuModuleGetFunction");
    static auto set = entry<decltype(cuFuncSetAttribute)>("cuFuncSetAttribute");
    static auto attribute = entry<decltype(cuFuncGetAttribute)>("cuFuncGetAttribute");
    const std::string file = folder + "/" + Variant::file(root, macros);
    CUfunction& f = loaded[file];
    if (!f) {
        CUmodule module;
        OK(module_load(&module, file.c_str()));
        OK(get(&f, module, "kernel"));
        int spilled = 0;
        OK(attribute(&spilled, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, f));
        if (spilled) printf("%s: %d bytes of local memory\n", file.c_str(), spilled);
        if (shared_bytes > 48 << 10) OK(set(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes));
        if (root != "reduce") OK(set(f, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1));
    }
    return f;
}

// Blocks of the reducer that share a row's channels: four where rows are so few that SMs would be idle.
static int reducer_split(int warps, int64_t rows, int head_dim) {
    const bool divides = head_dim == 64 || head_dim == 128 || head_dim == 256 || head_dim == 512;
    return warps > 1 && divides && 2 * rows <= sms ? 4 : 1;
}

struct Call {
    Variant v;
    CUfunction tile{}, reduce{};
    pa::CudaTileArgs p{};
    int sequences, most_rows, slots, tasks, reduce_warps, reduce_split;
    bool whole;  // no row has several tasks

    CUlaunchConfig config(dim3 grid, int threads, int shared, CUlaunchAttribute* attributes, bool overlapped, CUstream stream) const {
        attributes[0].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[0].value.programmaticStreamSerializationAllowed = 1;
        attributes[1].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[1].value.clusterDim.x = v.cluster, attributes[1].value.clusterDim.y = attributes[1].value.clusterDim.z = 1;
        CUlaunchConfig c{};
        c.gridDimX = grid.x, c.gridDimY = grid.y, c.gridDimZ = grid.z, c.blockDimX = threads, c.blockDimY = c.blockDimZ = 1;
        c.sharedMemBytes = shared, c.hStream = stream, c.attrs = overlapped ? attributes : attributes + 1, c.numAttrs = overlapped;
        return c;
    }

    // A plain launch waits for the kernel before it to end; an overlapped one starts while that drains.
    void launch(CUstream stream, bool overlapped = true) const {
        static auto start = entry<decltype(cuLaunchKernelEx)>("cuLaunchKernelEx");
        CUlaunchAttribute attributes[2]{};
        const int blocks = (most_rows * v.group + v.rows() - 1) / v.rows();
        CUlaunchConfig c = config(dim3(slots * (v.per_head ? 1 : p.kv_heads) * v.cluster, 1, blocks), v.threads(), v.shared_bytes(), attributes, overlapped, stream);
        c.numAttrs += v.cluster > 1;
        void* args[] = {(void*)&p};
        OK(start(&c, tile, args, nullptr));
        if (whole) return;
        pa::ReduceArgs r{};
        r.reduce = p.reduce, r.partial = static_cast<const float*>(p.partial), r.statistics = (const float*)p.statistics, r.sinks = p.sinks, r.query_start = p.query_start;
        r.out = p.out, r.lse = p.lse, r.out_row = p.out_row, r.out_head = p.out_head, r.query_len = p.query_len;
        r.q_heads = p.kv_heads * v.group, r.kv_heads = p.kv_heads, r.rows = p.rows, r.q_rows = p.q_rows, r.per_head = v.per_head;
        const int rows = v.reducer_rows();
        const bool few = reduce_warps == 1;
        const dim3 grid = few ? dim3((most_rows * r.q_heads + rows - 1) / rows, 1, sequences) : dim3(most_rows * reduce_split, r.q_heads, sequences);
        c = config(grid, few ? 256 : reduce_warps * 32, 0, attributes, overlapped, stream);
        void* reduce_args[] = {&r};
        OK(start(&c, reduce, reduce_args, nullptr));
    }

    // Clusters that the GPU runs at once.
    int most_clusters() const {
        static auto query = entry<decltype(cuOccupancyMaxActiveClusters)>("cuOccupancyMaxActiveClusters");
        CUlaunchAttribute attributes[2]{};
        CUlaunchConfig c = config(dim3(v.cluster * 66), v.threads(), v.shared_bytes(), attributes, false, nullptr);
        c.numAttrs = 1;
        int clusters = 0;
        OK(query(&clusters, tile, &c));
        return clusters;
    }
};

// Median, least and most microseconds a call of each list of calls, replayed in turn as graphs of at least ten calls.
static std::vector<std::vector<double>> time_graphs(const std::vector<std::vector<Call>>& lists, int replays = 30) {
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<cudaGraph_t> graphs(lists.size());
    std::vector<cudaGraphExec_t> execs(lists.size());
    for (size_t l = 0; l < lists.size(); l++) {
        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (size_t i = 0; i < std::max<size_t>(10, lists[l].size()); i++) lists[l][i % lists[l].size()].launch(stream);
        OK(cudaStreamEndCapture(stream, &graphs[l]));
        OK(cudaGraphInstantiate(&execs[l], graphs[l], 0));
    }
    cudaEvent_t from, to;
    OK(cudaEventCreate(&from));
    OK(cudaEventCreate(&to));
    std::vector<std::vector<double>> us(lists.size());
    for (int i = 0; i < replays + 3; i++) {
        for (size_t l = 0; l < lists.size(); l++) {
            OK(cudaEventRecord(from, stream));
            OK(cudaGraphLaunch(execs[l], stream));
            OK(cudaEventRecord(to, stream));
            OK(cudaStreamSynchronize(stream));
            float ms;
            OK(cudaEventElapsedTime(&ms, from, to));
            if (i >= 3) us[l].push_back(ms * 1e3 / std::max<size_t>(10, lists[l].size()));
        }
    }
    for (size_t l = 0; l < lists.size(); l++) {
        std::sort(us[l].begin(), us[l].end());
        us[l] = {us[l][us[l].size() / 2], us[l].front(), us[l].back()};
        OK(cudaGraphExecDestroy(execs[l]));
        OK(cudaGraphDestroy(graphs[l]));
    }
    OK(cudaStreamDestroy(stream));
    return us;
}

struct Case {
    Variant v;
    Problem problem;
    Form form;
    std::vector<Call> calls;
    std::vector<Row> rows;
    std::vector<int> lens, row_queries;  // of the plan's rows
    int64_t kv_bytes = 0;
    int pages = 0;

    // Caches like [P, 2, S, H, D] (or [P, 2, H, S, D]), pages listed in a shuffled order, some listed by no one. With per-head tables every
    // head of a sequence has pages and a context of its own; ragged, a sequence's rows are query_len less its number, from 1 on.
    Case(const Variant& v, const Problem& problem, int caches, bool poisoned) : v(v), problem(problem) {
        const int S = v.page, D = v.head_dim, H = problem.kv_heads, B = int(problem.contexts.size()), R = v.per_head ? B * H : B;
        form = {v.kv, v.query == 2 ? F32 : v.query, D, S, v.group, v.per_head, v.window, v.softcap, v.scales, v.layout, v.kv_bits()};
        std::vector<int> starts = {0};
        for (int b = 0; b < B; b++) {
            const int len = v.ragged ? 1 + (problem.query_len + b * 7) % problem.query_len : problem.query_len;
            for (int i = 0; i < len; i++) rows.push_back({b, i, len});
            starts.push_back(int(rows.size()));
            for (int h = 0; h < (v.per_head ? H : 1); h++) lens.push_back(std::max(problem.contexts[b] - 100 * h, 0)), row_queries.push_back(len);
        }
        int64_t need = 0, widest = 1;
        for (int c : lens) {
            need += (c + S - 1) / S, widest = std::max<int64_t>(widest, (c + S - 1) / S);
            kv_bytes += int64_t(c) * (v.per_head ? 1 : H) * D * 2 * v.kv_bits() / 8;
        }
        pages = int(need + need / 16 + 3);
        std::vector<int> order(pages);
        for (int i = 0; i < pages; i++) order[i] = i;
        for (int i = pages - 1; i > 0; i--) std::swap(order[i], order[hash(i + 77) % (i + 1)]);
        std::vector<int> tables(R * (widest + 2), -1), first(int64_t(pages) * H, 0), end(int64_t(pages) * H, 0);
        int next = 0;
        for (int r = 0; r < R; r++) {
            const int c = lens[r], oldest = v.window ? std::max(c - row_queries[r] - problem.window + 1, 0) : 0;
            for (int i = 0; i * S < c; i++) {
                const int page = order[next++];
                if ((i + 1) * S <= oldest) continue;
                tables[r * (widest + 2) + i] = page;
                for (int h = 0; h < H; h++) {
                    if (v.per_head && h != r % H) continue;
                    first[page * H + h] = std::max(oldest - i * S, 0), end[page * H + h] = std::min(c - i * S, S);
                }
            }
        }
        Call call;
        pa::CudaTileArgs& p = call.p;
        auto keep = [](auto* at) { owned.push_back((void*)at); return at; };
        p.block_tables = keep(device(tables)), p.context_lens = keep(device(lens));
        if (v.ragged) p.query_start = keep(device(starts));
        p.table_row = p.max_pages = int(widest + 2), p.plan_rows = R, p.q_rows = int(rows.size()), p.pages = pages, p.kv_heads = H, p.query_len = problem.query_len;
        p.window = problem.window;
        const int heads = H * v.group;
        p.q_row = p.out_row = int64_t(heads) * D, p.q_head = p.out_head = D;
        const bool hnd = problem.hnd || v.layout == HND, rows_first = hnd || v.layout == NHD;
        const int unit = v.kv == MXFP4 ? 2 : 1;  // strides count bytes there
        p.key_stride = {2l * H * S * D / unit, long(hnd || !rows_first ? S : 1) * D / unit, long(hnd ? 1 : H) * D / unit};
        p.value_stride = p.key_stride;
        const int per_token = v.scales == 3 ? D / 32 : 1;
        p.k_scale_stride = p.v_scale_stride = {long(H) * S * per_token, long(S) * per_token, per_token};
        const double scores = getenv("SCORES") ? atof(getenv("SCORES")) : 1.0;  // how much larger than of about 1
        p.scale_log2 = float(scores * 1.4426950408889634 / sqrt(double(D))), p.softcap = 3.0f;
        std::vector<float> sinks;
        for (int h = 0; h < heads; h++) sinks.push_back(2.0f * noise(h + 5000));
        p.sinks = problem.sinks ? keep(device(sinks)) : nullptr;
        call.sequences = B, call.most_rows = problem.query_len;
        choose(call, v, problem.capacity);
        const int64_t q_count = int64_t(rows.size()) * heads * D;
        p.q = allocate(q_count * v.query_bytes());
        fill<<<64, 256>>>(form.query, (void*)p.q, q_count, 99, 1.5f * problem.q_factor, problem.peak > 0);
        std::vector<float> k_scales, v_scales;
        const int64_t scales = v.scales == 2 ? int64_t(pages) * H * S : 1;
        std::vector<uint8_t> k_blocks, v_blocks;
        for (int64_t i = 0; v.scales == 3 && i < int64_t(pages) * H * S * per_token; i++) {
            k_blocks.push_back(124 + hash(i) % 3), v_blocks.push_back(124 + hash(i + (1ll << 32)) % 6);
        }
        for (int64_t i = 0; i < scales; i++) {
            const uint32_t signs = hash(i + (1ll << 40));
            k_scales.push_back((signs % 16 ? 1.0f : -1.0f) * (0.5f + 0.2f * noise(i)));
            v_scales.push_back((signs % 17 ? 1.0f : -1.0f) * expf(noise(i + (1ll << 32))));
        }
        for (int i = 0; i < caches; i++) {
            p.out = allocate(q_count * v.query_bytes()), p.lse = (float*)allocate(int64_t(rows.size()) * heads * 4);
            OK(cudaMemset(p.out, 0xff, q_count * v.query_bytes()));
            OK(cudaMemset(p.lse, 0xff, int64_t(rows.size()) * heads * 4));
            const int64_t count = int64_t(pages) * 2 * S * H * D;
            p.key = allocate(count * v.kv_bits() / 8), p.value = static_cast<const char*>(p.key) + int64_t(S) * H * D * v.kv_bits() / 8;
            fill<<<2048, 256>>>(v.kv, (void*)p.key, count, i + 1, 1.0f);
            if (v.scales == 3) {
                p.k_scale = keep(device(k_blocks)), p.v_scale = keep(device(v_blocks));
            } else if (v.scales) p.k_scale = keep(device(k_scales)), p.v_scale = keep(device(v_scales));
            if (problem.peak > 0) peak<<<R, 128>>>(form, p, problem.peak);
            if (poisoned) poison<<<pages, 256>>>(form, p, keep(device(first)), keep(device(end)));
            calls.push_back(call);
        }
        OK(cudaGetLastError());
    }

    // The kernels of a variant that differs in nothing the caches know of, its plan and its room for partial results.
    void choose(Call& call, const Variant& v, int capacity) const {
        const int H = problem.kv_heads, R = int(lens.size());
        call.v = v;
        call.tile = load(v.root(), v.tile_macros(), v.shared_bytes());
        const int fit = v.cluster > 1 ? call.most_clusters() : sms;
        const int most = capacity ? capacity : std::max(fit / (v.per_head ? 1 : H), 1);
        Plan plan = dev::plan(lens, row_queries, problem.window, v.tile, v.free ? R : most, v.free ? 1 : problem.max_partitions);
        call.slots = int(plan.work.size());
        call.reduce_warps = call.slots > 32 * R ? 8 : call.slots > 8 * R ? 4 : 1;
        call.reduce_split = reducer_split(call.reduce_warps, rows.size() * H * v.group, v.head_dim);
        call.reduce = load("reduce", v.reduce_macros(call.reduce_warps, call.reduce_split), 0);
        pa::CudaTileArgs& p = call.p;
        p.work = device(plan.work), p.reduce = device(plan.reduce);
        owned.push_back((void*)p.work), owned.push_back((void*)p.reduce);
        if (v.free) p.work = nullptr, p.reduce = nullptr;
        p.rows = (problem.query_len * v.group + v.rows() - 1) / v.rows() * v.rows();
        p.settled = true;
        call.whole = true;
        for (auto r : plan.reduce) call.whole = call.whole && r.count <= 1;
        call.tasks = 0;
        for (auto w : plan.work) call.tasks += w.row >= 0;
        const int64_t states = int64_t(call.slots) * (v.per_head ? 1 : H) * p.rows;
        p.partial = (float*)allocate(states * (v.head_dim + 2) * 4);
        p.statistics = static_cast<float*>(p.partial) + states * v.head_dim;
        OK(cudaMemset(p.partial, 0xff, states * (v.head_dim + 2) * 4));
    }

    // Errors of the output: the largest over the largest |reference|, the largest of a row, both in L2, over the row's own; the largest of the LSE. NaN and
    // unwritten elements count as infinite.
    struct Errors {
        double largest, row, lse;
    };
    Errors error() { return error(calls[0]); }
    Errors error(const Call& call) {
        const pa::CudaTileArgs& p = call.p;
        const int heads = problem.kv_heads * v.group, D = v.head_dim;
        // Twice: the second call meets what the first has left in the workspace.
        for (int i = 0; i < 2; i++) call.launch(nullptr);
        OK(cudaDeviceSynchronize());
        const int longest = std::max(*std::max_element(problem.contexts.begin(), problem.contexts.end()), 1);
        const int64_t n = int64_t(rows.size()) * heads;
        double* scratch = (double*)allocate(n * longest * 8);
        double *out = (double*)allocate(n * D * 8), *lse = (double*)allocate(n * 8);
        const Row* at = device(rows);
        owned.push_back((void*)at);
        reference<<<dim3(rows.size(), heads), 256>>>(form, p, at, scratch, longest, out, lse);
        OK(cudaDeviceSynchronize());
        std::vector<double> want(n * D), want_lse(n);
        std::vector<uint8_t> raw(n * D * v.query_bytes());
        std::vector<float> got_lse(n);
        OK(cudaMemcpy(want.data(), out, n * D * 8, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(want_lse.data(), lse, n * 8, cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(raw.data(), p.out, raw.size(), cudaMemcpyDeviceToHost));
        OK(cudaMemcpy(got_lse.data(), p.lse, n * 4, cudaMemcpyDeviceToHost));
        double worst = 0, most = 1e-30, worst_lse = 0, worst_row = 0, wrong = 0, right = 0;
        for (int64_t i = 0; i < n * D; i++) {
            float got;
            if (v.query == 2) memcpy(&got, &raw[i * 4], 4);
            if (v.query == F16) got = __half2float(reinterpret_cast<__half*>(raw.data())[i]);
            if (v.query == BF16) got = __bfloat162float(reinterpret_cast<__nv_bfloat16*>(raw.data())[i]);
            const double e = fabs(double(got) - want[i]);
            worst = e <= 1e30 ? std::max(worst, e) : INFINITY;
            most = std::max(most, fabs(want[i]));
            wrong += e * e, right += want[i] * want[i];
            if (i % D == D - 1) worst_row = std::max(worst_row, wrong == 0 ? 0 : sqrt(wrong / right)), wrong = right = 0;
        }
        for (int64_t i = 0; i < n; i++) {
            if (std::isinf(want_lse[i]) && got_lse[i] == want_lse[i]) continue;
            const double e = fabs(double(got_lse[i]) - want_lse[i]);
            worst_lse = e <= 1e30 ? std::max(worst_lse, e) : INFINITY;
        }
        return {worst / most, worst_row, worst_lse};
    }

    std::vector<double> time() const { return time_graphs({calls})[0]; }
};

static int failures = 0;

// True where a case is only to be compiled or is filtered out.
static bool skipped(const Variant& v, const Problem& problem) {
    if ((v.name + " " + problem.name).find(filter) == std::string::npos) return true;
    if (mode != "compile") return false;
    auto want = [](const char* root, const Variant::Macros& macros) {
        const std::string file = folder + "/" + Variant::file(root, macros);
        wanted[file] = {root, file, macros};
    };
    want(v.root(), v.tile_macros());
    for (int warps : {1, 4, 8}) {
        for (int split : {1, 4}) {
            if (split == 1 || reducer_split(warps, 1, v.head_dim) > 1) want("reduce", v.reduce_macros(warps, split));
        }
    }
    return true;
}

static void check(const Variant& v, const Problem& problem, double bound) {
    if (skipped(v, problem)) return;
    Case c(v, problem, 1, true);
    const auto [error, row, lse] = c.error();
    const bool good = error <= bound && row <= bound && lse <= 2e-2;
    failures += !good;
    printf("%-4s %-22s %-26s tasks %4d  error %.2e  row %.2e  lse %.2e\n", good ? "ok" : "BAD", v.name.c_str(), problem.name.c_str(), c.calls[0].tasks,
           error, row, lse);
    fflush(stdout);
    release_all();
}

static double measure(const Variant& v, const Problem& problem) {
    if (skipped(v, problem)) return 0;
    int64_t bytes = 0;
    for (int c : problem.contexts) bytes += int64_t(c) * problem.kv_heads * v.head_dim * 2 * v.kv_bits() / 8;
    const int caches = bytes < 150e6 ? std::max(1, std::min(64, int(300e6 / std::max<int64_t>(bytes, 1000000)) + 1)) : std::min<int>(10, std::max<int>(2, 20e9 / bytes));
    Case c(v, problem, caches, false);
    if (mode == "once") {
        for (int i = 0; i < 3; i++) c.calls[i % caches].launch(nullptr);
        OK(cudaDeviceSynchronize());
        return release_all(), 0;
    }
    const auto us = c.time();
    const double error = bytes < 20e6 ? c.error().largest : 0.0;
    if (!(error < 2e-2)) failures++;
    printf("%-24s %-20s c%-2d t%4d %7.2f us (%.2f-%.2f) %6.3f TB/s %5.1f%% peer %6.2f %4.2fx err %.1e\n", problem.name.c_str(), v.name.c_str(),
           v.cluster, c.calls[0].tasks, us[0], us[1], us[2], bytes / us[0] / 1e6, 100 * bytes / read_rate_bytes_per_us / us[0], problem.peer_us,
           problem.peer_us / us[0], error);
    fflush(stdout);
    release_all();
    return us[0];
}

// Variants of a problem on the same caches, replayed in turn: the first one's time, the others' over it. Each has a folder of kernels and a
// capacity; outputs are prefilled with NaN and compared with the first one's.
struct Contender {
    std::string name, folder;
    Variant v;
    int capacity;
};

static void contend(const Problem& problem, const std::vector<Contender>& contenders) {
    int64_t bytes = 0;
    for (int c : problem.contexts) bytes += int64_t(c) * problem.kv_heads * 128 * 2 * contenders[0].v.kv_bits() / 8;
    const double rotated = getenv("ROTATE") ? atof(getenv("ROTATE")) : 400e6;  // bytes of caches, at least
    const int caches = std::max(3, std::min(400, int(rotated / std::max<int64_t>(bytes, 1000000)) + 1));
    folder = contenders[0].folder;
    Case c(contenders[0].v, problem, caches, false);
    std::vector<std::vector<Call>> lists;
    std::vector<double> errors;
    std::vector<uint16_t> first;
    for (const Contender& x : contenders) {
        folder = x.folder;
        Call chosen = c.calls[0];
        c.choose(chosen, x.v, x.capacity);
        std::vector<Call> calls;
        for (Call call : c.calls) {
            pa::CudaTileArgs p = chosen.p;
            p.key = call.p.key, p.value = call.p.value, p.k_scale = call.p.k_scale, p.v_scale = call.p.v_scale, p.out = call.p.out, p.lse = call.p.lse;
            call = chosen, call.p = p;
            calls.push_back(call);
        }
        lists.push_back(calls);
        const size_t n = c.rows.size() * problem.kv_heads * x.v.group * x.v.head_dim;
        std::vector<uint16_t> out(n);
        double worst = 0, most = 1e-30;
        for (size_t i : {size_t(0), calls.size() - 1}) {
            OK(cudaMemset(calls[i].p.out, 0xff, n * 2));
            for (int again = 0; again < 2; again++) calls[i].launch(nullptr);
            OK(cudaMemcpy(out.data(), calls[i].p.out, n * 2, cudaMemcpyDeviceToHost));
            std::vector<uint16_t> want = i == 0 ? (first.empty() ? first = out : first) : out;
            auto value = [](uint16_t x) { uint32_t bits = uint32_t(x) << 16; float y; memcpy(&y, &bits, 4); return double(y); };
            for (size_t j = 0; j < n; j++) {
                const double e = fabs(value(out[j]) - value(want[j]));
                worst = e <= 1e30 ? std::max(worst, e) : INFINITY, most = std::max(most, fabs(value(want[j])));
            }
        }
        errors.push_back(worst / most);
        if (!(errors.back() < 1e-2)) failures++;
    }
    const auto us = time_graphs(lists, bytes > 400e6 ? 15 : 30);
    printf("%-30s %-4s %7.2f %5.1f%%", problem.name.c_str(), contenders[0].v.kv == FP8 ? "fp8" : "bf16", us[0][0], 100 * bytes / read_rate_bytes_per_us / us[0][0]);
    for (size_t i = 1; i < us.size(); i++) printf("  %s %5.3f%s", contenders[i].name.c_str(), us[i][0] / us[0][0], errors[i] < 1e-2 ? "" : " BAD");
    printf("\n");
    fflush(stdout);
    release_all();
}

static __global__ void read_kernel(const uint4* at, int64_t n, uint4* out) {
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
    fill<<<2048, 256>>>(BF16, at, bytes / 2, 3, 1.0f);
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

#include "cases.h"

int main(int argc, char** argv) {
    if (argc < 3) return fprintf(stderr, "usage: bench compile|check|time|sweep|once DIR [filter]\n"), 2;
    mode = argv[1], folder = argv[2], filter = argc > 3 ? argv[3] : "";
    const std::string path = filter;
    if (mode == "file" || argc > 4) filter = "";
    if (mode == "compile") {
        if (argc > 4) {
            compare(argv[3], argv[4]);
        } else {
            run_checks(), run_times(), run_sweep();
        }
        return compile_all(wanted, getenv("KERNELS") ? getenv("KERNELS") : "kernels", getenv("ARCH") ? getenv("ARCH") : "sm_90a");
    }
    cudaDeviceProp properties;
    OK(cudaGetDeviceProperties(&properties, 0));
    OK(cudaFree(nullptr));
    sms = properties.multiProcessorCount;
    if (mode == "check") {
        run_checks();
    } else {
        read_rate_bytes_per_us = measure_read_rate();
        int driver = 0;
        OK(cudaDriverGetVersion(&driver));
        printf("%s, %d SMs, driver CUDA %d, read %.3f TB/s\n", properties.name, sms, driver, read_rate_bytes_per_us / 1e6);
        mode == "compare" ? compare(argv[3], argv[4]) : mode == "sweep" ? run_sweep() : mode == "file" ? run_file(path) : run_times();
    }
    printf("%d failures\n", failures);
    return failures != 0;
}
