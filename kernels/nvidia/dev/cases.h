// The variants and shapes that the bench runs.
#pragma once

static Variant decode(int kv, int warps = 8) {
    Variant v;
    v.name = kv == BF16 ? "bf16" : kv == F16 ? "f16" : "fp8";
    v.kv = kv, v.scales = kv == FP8, v.chunk = kv == FP8 ? 32 : 16, v.groups = warps;
    return v;
}

static Variant verify(int kv) {
    Variant v = decode(kv);
    v.name += " verify";
    v.row_warps = 4, v.groups = 2, v.stages = kv == FP8 ? 4 : 3, v.chunk = 64, v.warpgroup = true;
    return v;
}

template <class F>
static Variant with(Variant v, const char* name, F change) {
    change(v);
    v.name += name;
    return v;
}

// A scale a token, and the shape for it.
static Variant token(Variant v) {
    v.name += " token", v.scales = 2;
    return v;
}

static Problem shape(const std::string& name, int batch, int query_len, int context, double peer) {
    Problem p;
    p.name = name, p.contexts.assign(batch, context), p.query_len = query_len, p.peer_us = peer;
    return p;
}

static Problem ragged(const char* name, int query_len, int kv_heads, int window = 0, bool hnd = false, int capacity = 0) {
    Problem p;
    p.name = name, p.contexts = {1, 700, 0, 5000, 129, 2, 16, 1025, 33}, p.query_len = query_len, p.kv_heads = kv_heads;
    p.window = window, p.hnd = hnd, p.capacity = capacity;
    return p;
}

// Rows of one task and of several, some empty; with everything that a task may have.
static void check_clusters(const Variant& v, double bound) {
    check(v, ragged("q1 h1 g16 few slots", 1, 1, 0, false, 12), bound);
    Problem one = ragged("q2 h2 g5 one task a row", 2, 2);
    one.max_partitions = 1, one.capacity = int(one.contexts.size());
    auto small = [](Variant& v) { v.page = 16, v.group = 5; };
    check(with(v, " p16", small), one, bound);
    one.name = "q2 h2 g5 w300 one task a row", one.window = 300, one.sinks = true;
    check(with(with(v, " p16", small), " all", [](Variant& v) { v.window = v.softcap = v.ragged = v.free = true, v.scales = v.kv == FP8 ? 2 : 0; }), one, bound);
    one.name = "q4 h2 g16 one task a row", one.query_len = 4, one.window = 0;
    check(with(v, " per head", [](Variant& v) { v.per_head = v.free = true; }), one, bound);
}

static void check_family(int kv, double bound) {
    const Variant d = decode(kv), w = verify(kv);
    auto group = [](int n) { return [n](Variant& v) { v.group = n; }; };
    check(d, ragged("q1 h1 g16", 1, 1), bound);
    for (int cluster : {2, 4, 8, 16}) check_clusters(with(d, " cluster", [&](Variant& v) { v.cluster = cluster; }), bound);
    check_clusters(with(d, " cluster of halves", [](Variant& v) { v.groups = 4, v.chunk = 16, v.cluster = 16; }), bound);
    for (int cluster : {2, 16}) check_clusters(with(d, " cluster 64 rows", [&](Variant& v) { v.row_warps = 4, v.groups = 2, v.chunk = 32, v.cluster = cluster; }), bound);
    check(with(d, " g8", group(8)), ragged("q1 h2 g8", 1, 2), bound);
    check(with(d, " g40", group(40)), ragged("q2 h1 g40 many blocks", 2, 1), bound);
    check(d, ragged("q1 one task a row", 1, 1, 0, true, 9), bound);
    check(with(d, " p16 g5", [](Variant& v) { v.page = 16, v.tile = 64, v.group = 5; }), ragged("q1 h4 g5 hnd", 1, 4, 0, true), bound);
    check(with(d, " d256 p16", [&](Variant& v) { v.head_dim = 256, v.page = 16, v.groups = 4; }), ragged("q1 h1 g16", 1, 1), bound);
    check(with(d, " p24 g5", [](Variant& v) { v.page = 24, v.tile = 64, v.group = 5; }), ragged("q1 h2 g5", 1, 2), bound);
    check(with(d, " window p16 g4", [](Variant& v) { v.page = 16, v.window = true, v.group = 4; }), ragged("q3 h2 g4 w100", 3, 2, 100), bound);
    check(with(d, " window", [](Variant& v) { v.window = true; }), ragged("q1 h2 g16 w1", 1, 2, 1), bound);
    check(with(d, " ragged", [](Variant& v) { v.ragged = true; }), ragged("q4 h2 g16", 4, 2), bound);
    check(with(d, " per head", [](Variant& v) { v.per_head = true, v.group = 4; }), ragged("q2 h4 g4", 2, 4), bound);
    auto everything = [&](Variant& v) {
        v.window = v.softcap = true;
        if (kv == FP8) v = token(v);
    };
    Problem sinks = ragged("q4 h1 g16 w600", 4, 1, 600);
    sinks.sinks = true;
    check(with(d, " all", everything), sinks, bound);
    // Rows so few that blocks of the reducer share their channels.
    Problem few = sinks;
    few.name = "q1 h1 g16 few rows w600", few.contexts = {5000, 1300}, few.query_len = 1;
    check(with(d, " all", everything), few, bound);
    few.name = "q1 h1 g16 few rows", few.contexts = {16000, 3}, few.window = 0;
    for (int capacity : {132, 40}) {
        few.capacity = capacity;
        check(d, few, bound);
    }
    check(w, ragged("q4 h1 g16", 4, 1), bound);
    check(with(w, " g7", group(7)), ragged("q5 h2 g7", 5, 2), bound);
    check(with(w, " ragged per head", [](Variant& v) { v.ragged = v.per_head = true; }), ragged("q5 h2 g16", 5, 2), bound);
    sinks.name = "q4 h1 g16 w300", sinks.window = 300;
    check(with(w, " all p16", [&](Variant& v) { everything(v), v.page = 16; }), sinks, bound);
}

// What the walks of FP8 by warpgroups must get right beyond the family's cases.
static void check_fp8_verify(double bound) {
    const Variant w = verify(FP8);
    for (const Variant& v : {w, token(w)}) {
        Problem p = ragged("q4 h1 g16 x32", 4, 1);
        p.q_factor = 32;
        check(v, p, bound);
        // A tail that weighs as much as the peak before it, and is next to nothing beside it.
        for (int context : {5000, 200000}) {
            p = shape("q4 peak then " + std::to_string(context), 1, 4, context, 0);
            for (double shift : {-2.0, 0.0, 2.0}) {
                p.peak = log2(double(context)) + shift;
                check(v, p, bound);
            }
        }
        check(with(v, " cap", [](Variant& v) { v.softcap = true; }), ragged("q4 h1 g16", 4, 1), bound);
    }
    Problem all = ragged("q4 h1 g16 w300", 4, 1, 300);
    all.sinks = true;
    check(with(w, " window cap p16", [](Variant& v) { v.window = v.softcap = true, v.page = 16; }), all, bound);
    check(with(w, " p24", [](Variant& v) { v.page = 24; }), ragged("q4 h1 g16", 4, 1), bound);
    check(with(w, " window", [](Variant& v) { v.window = true; }), ragged("q4 h1 g16 w70", 4, 1, 70), bound);
    check(with(w, " g5", [](Variant& v) { v.group = 5; }), ragged("q7 h2 g5 hnd", 7, 2, 0, true), bound);
    check(with(w, " q16", [](Variant& v) { v.query = F16; }), ragged("q4 h1 g16", 4, 1), bound);
    check(with(w, " none", [](Variant& v) { v.scales = 0; }), ragged("q4 h1 g16", 4, 1), bound);
    for (int group : {1, 3, 8}) check(with(w, "", [&](Variant& v) { v.group = group, v.name += " g" + std::to_string(group); }), ragged("q4 h1", 4, 1), bound);
}

static Variant plain(int kv, int query, int layout) {
    static const char* const kinds[] = {"bf16", "f16", "fp8", "mxfp4", "f32"};
    static const char* const layouts[] = {"shuffled", "vllm", "nhd", "hnd"};
    static const char* const queries[] = {"bf16", "f16", "f32"};
    Variant v;
    v.name = std::string("plain ") + queries[query] + " on " + kinds[kv] + " " + layouts[layout];
    v.plain = true, v.kv = kv, v.query = query, v.layout = layout, v.scales = kv == MXFP4 ? 3 : 0, v.group = 4, v.tile = 64;
    return v;
}

static void check_plain() {
    const double bounds[] = {8e-3, 4e-3, 2e-5};
    for (int layout : {SHUFFLED, VLLM, NHD, HND}) {
        for (int kv : {BF16, F16, FP8, F32, MXFP4}) {
            if (kv == MXFP4 && layout < NHD) continue;
            const int query = kv == BF16 ? BF16 : kv == F16 ? F16 : 2;
            check(plain(kv, query, layout), ragged("q3 h2 g4", 3, 2), bounds[query]);
            check(with(plain(kv, query, layout), " free", [](Variant& v) { v.free = true; }), ragged("q3 h2 g4", 3, 2), bounds[query]);
        }
    }
    auto sized = [&](int head_dim, int page, int kv, int layout) {
        const std::string name = " d" + std::to_string(head_dim) + " p" + std::to_string(page);
        check(with(plain(kv, 2, layout), name.c_str(), [&](Variant& v) { v.head_dim = head_dim, v.page = page; }), ragged("q1 h2 g4", 1, 2), 2e-5);
    };
    sized(80, 16, F32, VLLM), sized(512, 32, BF16, NHD), sized(1024, 8, F32, NHD), sized(576, 16, F16, HND), sized(64, 24, MXFP4, NHD), sized(100, 16, F32, NHD);
    Problem all = ragged("q4 h2 g4 w300", 4, 2, 300);
    all.sinks = true;
    for (int scales : {1, 2}) {
        auto everything = [&](Variant& v) { v.window = v.softcap = v.ragged = v.per_head = true, v.scales = scales, v.page = 16; };
        check(with(plain(FP8, 2, scales == 1 ? NHD : SHUFFLED), scales == 1 ? " all" : " all token", everything), all, 2e-5);
    }
}

static void run_checks() {
    check_plain();
    check_family(BF16, 8e-3);
    check_family(F16, 8e-3);
    check_family(FP8, 8e-3);
    check_fp8_verify(8e-3);
    check(with(decode(BF16), " q16", [](Variant& v) { v.query = F16; }), ragged("q1 h1 g16", 1, 1), 8e-3);
    check(with(decode(F16), " q16", [](Variant& v) { v.query = F16; }), ragged("q1 h1 g16", 1, 1), 4e-3);
    check(token(decode(FP8)), ragged("q1 h1 g16", 1, 1), 8e-3);
    check(token(verify(FP8)), ragged("q4 h1 g16", 4, 1), 8e-3);
}

struct Timed {
    const char* name;
    int batch, query_len, context;
    double bf16_peer, fp8_peer;
};

static const Timed MINIMAX20[] = {
    {"b1-q1-ctx8192", 1, 1, 8192, 9.48, 10.63},     {"b4-q1-ctx8192", 4, 1, 8192, 14.14, 14.28},
    {"b8-q1-ctx8192", 8, 1, 8192, 15.62, 16.97},    {"b32-q1-ctx8192", 32, 1, 8192, 39.02, 39.23},
    {"b4-q1-ctx32768", 4, 1, 32768, 27.31, 25.84},  {"b3-q1-ctx225280", 3, 1, 225280, 87.52, 83.94},
    {"b3-q4-ctx8192", 3, 4, 8192, 16.07, 16.66},    {"b3-q4-ctx32768", 3, 4, 32768, 27.24, 29.48},
    {"b8-q4-ctx32768", 8, 4, 32768, 46.78, 56.95},  {"b3-q4-ctx225280", 3, 4, 225280, 94.83, 122.88},
};

static Variant cut(int kv, int warps, int stages, int chunk, int tile, int cluster) {
    return with(decode(kv), "", [&](Variant& v) {
        v.groups = warps, v.stages = stages, v.chunk = chunk, v.tile = tile, v.cluster = cluster;
        v.name += " w" + std::to_string(warps) + " s" + std::to_string(stages) + " c" + std::to_string(chunk) + " t" + std::to_string(tile);
    });
}

// Slots of the plan (src/plan/budget.rs): with many rows tasks take turns, the longest first, two blocks to an SM.
static int best_slots(const Problem& p) {
    const int longest = *std::max_element(p.contexts.begin(), p.contexts.end()), rows = int(p.contexts.size());
    if (longest < 4096 && (p.query_len > 1 ? rows * 8 > sms * 7 : rows * 3 > sms * 4)) return rows;
    if (longest < 4096) return sms * (rows > sms / 2 ? 2 : 1);
    const int four = p.query_len > 1 ? sms : sms / 2, two = p.query_len > 1 ? sms * 9 / 20 : sms / 3;
    return sms * (rows > four ? 4 : rows > two ? 2 : 1);
}

// The shape for a problem on an H200: what docs/cuda-notes.md tabulates.
static Variant best(int kv, const Problem& p) {
    const int slots = best_slots(p);
    const bool beside = slots > 2 * sms || (slots > sms && int(p.contexts.size()) * 4 <= 3 * sms);
    if (p.query_len > 1) return with(verify(kv), "", [&](Variant& v) { v.groups = beside ? 1 : 2, v.tile = 128; });
    int64_t tokens = 0;
    for (int c : p.contexts) tokens += c;
    if (slots > sms) return cut(kv, 4, kv == FP8 ? 2 : 3, kv == FP8 ? 32 : 16, 128, 1);
    return cut(kv, kv == FP8 && tokens > 16384 ? 8 : 4, 3, 32, 128, 1);
}

static void time_best(int kv, Problem p) {
    p.capacity = best_slots(p);
    if (getenv("CAPACITY")) p.capacity = atoi(getenv("CAPACITY"));
    measure(best(kv, p), p);
    if (kv == FP8) measure(token(best(kv, p)), p);
}

static void time_problem(const Problem& bf16, const Problem& fp8) { time_best(BF16, bf16), time_best(FP8, fp8); }

// Lines of: name, FP8 or not, query rows, the best peer's time or 0, contexts; among these key=value of heads (of KV), group, page, parts (most
// tasks a row). Calls run(kv, problem).
template <class F>
static void each_problem(const std::string& path, F run) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        std::stringstream words(line);
        Problem p;
        int fp8 = 0;
        words >> p.name >> fp8 >> p.query_len >> p.peer_us;
        for (std::string word; words >> word;) {
            const size_t at = word.find('=');
            const std::string key = at == std::string::npos ? "" : word.substr(0, at);
            const int value = atoi(key.empty() ? word.c_str() : word.c_str() + at + 1);
            key == "heads" ? p.kv_heads = value : key == "group" ? p.group = value : key == "page" ? p.page = value : key == "parts" ? p.max_partitions = value : 0;
            if (key.empty()) p.contexts.push_back(value);
        }
        run(fp8 ? FP8 : BF16, p);
    }
}

static void run_file(const std::string& path) { each_problem(path, time_best); }

// Contenders: lines of a name, a folder beside the first argument's, and what differs from the best variant, key=value. `only` names the problems:
// a part of "decode bf16 NAME". `scales` are those of the first contender's caches: all of a problem's have the same.
static void compare(const std::string& contenders, const std::string& problems) {
    const std::string own = folder.substr(folder.rfind('/') + 1), beside = folder + "/../";
    std::ifstream file(contenders);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    each_problem(problems, [&](int kv, Problem p) {
        std::vector<Contender> all;
        for (const std::string& line : lines) {
            std::stringstream words(line);
            Contender x;
            words >> x.name >> x.folder;
            x.v = best(kv, p), x.capacity = std::min(best_slots(p), p.max_partitions > 1 ? INT_MAX : int(p.contexts.size()));
            x.v.page = p.page, x.v.group = p.group;
            bool wanted_here = mode == "compare" || x.folder == own;
            for (std::string word; words >> word;) {
                const std::string key = word.substr(0, word.find('=')), text = word.substr(word.find('=') + 1);
                const int value = atoi(text.c_str());
                if (key == "only") {
                    const std::string what = std::string(p.query_len > 1 ? "verify " : "decode ") + (kv == FP8 ? "fp8 " : "bf16 ") + p.name;
                    wanted_here = wanted_here && what.find(text) != std::string::npos;
                }
                if (key == "slots") x.capacity = value;
                if (key == "sms") x.capacity = value * sms;
                if (key == "groups") x.v.groups = value;
                if (key == "stages") x.v.stages = value;
                if (key == "chunk") x.v.chunk = value;
                if (key == "tile") x.v.tile = value;
                if (key == "cluster") x.v.cluster = value;
                if (key == "free") x.v.free = value;
                if (key == "warps") x.v.row_warps = value;
                if (key == "warpgroup") x.v.warpgroup = value;
                if (key == "scales") x.v.scales = value;
            }
            x.folder = beside + x.folder;
            if (wanted_here) all.push_back(x);
        }
        if (mode != "compile") return contend(p, all);
        for (const Contender& x : all) skipped(x.v, p);
    });
}

static const Timed LARGE16[] = {
    {"large-b64-q1-8192", 64, 1, 8192, 70.27, 61.46},      {"large-b128-q1-8192", 128, 1, 8192, 128.9, 115.16},
    {"large-b256-q1-8192", 256, 1, 8192, 241.19, 140.28},  {"large-b16-q1-65536", 16, 1, 65536, 128.35, 123.77},
    {"large-b16-q4-8192", 16, 4, 8192, 31.4, 35.15},       {"large-b32-q4-8192", 32, 4, 8192, 49.39, 59.43},
    {"large-b16-q4-32768", 16, 4, 32768, 77.91, 99.42},    {"large-b16-q4-65536", 16, 4, 65536, 136.95, 190.73},
};

// Lengths drawn uniformly, like workloads.json's but not the same draws.
static const Timed RANDOM[] = {
    {"random-b64-q1-1024-8192", 64, 1, 8192, 49.23, 51.56},   {"random-b64-q1-128-2048", 64, 1, 2048, 18.72, 17.79},
    {"random-b256-q1-1024-8192", 256, 1, 8192, 168.71, 127.6}, {"random-b256-q1-128-2048", 256, 1, 2048, 46.1, 34.47},
    {"random-b128-q1-1024-32768", 128, 1, 32768, 270.84, 329.72}, {"random-b64-q4-1024-8192", 64, 4, 8192, 61.96, 75.9},
    {"random-b256-q4-1024-8192", 256, 4, 8192, 261.87, 359.45},
};

static void run_times() {
    for (const Timed& t : MINIMAX20) time_problem(shape(t.name, t.batch, t.query_len, t.context, t.bf16_peer), shape(t.name, t.batch, t.query_len, t.context, t.fp8_peer));
    for (const Timed& t : LARGE16) time_problem(shape(t.name, t.batch, t.query_len, t.context, t.bf16_peer), shape(t.name, t.batch, t.query_len, t.context, t.fp8_peer));
    for (const Timed& t : RANDOM) {
        Problem a = shape(t.name, t.batch, t.query_len, t.context, t.bf16_peer);
        const int least = t.context == 2048 ? 128 : 1024;
        for (int i = 0; i < t.batch; i++) a.contexts[i] = least + int(hash(i + 12345) % uint32_t(t.context + 1 - least));
        Problem b = a;
        b.peer_us = t.fp8_peer;
        time_problem(a, b);
    }
}

static void run_sweep() {
    for (const Timed& t : MINIMAX20) {
        const Problem a = shape(t.name, t.batch, t.query_len, t.context, t.bf16_peer), b = shape(t.name, t.batch, t.query_len, t.context, t.fp8_peer);
        if (t.query_len > 1) {
            for (int tile : {64, 128, 192, 256}) {
                const std::string name = " t" + std::to_string(tile);
                measure(with(verify(BF16), name.c_str(), [&](Variant& v) { v.tile = tile; }), a);
                measure(with(verify(FP8), name.c_str(), [&](Variant& v) { v.tile = tile; }), b);
            }
        } else {
            measure(with(cut(BF16, 4, 3, 32, 256, 1), " p16", [](Variant& v) { v.page = 16; }), a);
        }
    }
}
