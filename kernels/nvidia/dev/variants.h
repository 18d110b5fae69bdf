// The variants and shapes that the bench runs.
#pragma once

// The build can be cut into parts, one program each, that compile side by side.
#ifndef PART
#define PART 0
#endif
#define HAS_PART(n) (PART == 0 || PART == n)

//                       M-tiles, row warps, groups, stages, chunk, CTAs an SM, warpgroup
using Decode8 = Shape<1, 1, 8, 3, 16, 1>;
using Decode6 = Shape<1, 1, 6, 2, 32, 1>;
using Decode8Fp8 = Shape<1, 1, 8, 3, 32, 1>;
using Decode6Fp8 = Shape<1, 1, 6, 2, 64, 1>;
using Verify = Shape<2, 2, 4, 3, 32, 1>;  // two M-tiles a warp, for what no warpgroup takes
using Warpgroup3 = Shape<1, 4, 3, 2, 64, 1, true>;
using VerifyFp8 = Shape<1, 4, 2, 3, 64, 1>;

using Plain = Options<>;
using PerToken = Options<false, false, false, Scales::PER_TOKEN>;
using Everything = Options<true, true, true, Scales::PER_TOKEN>;
using Windowed = Options<true>;

template <class Kv, class S, class O = Plain, int PAGE = 128, int TILE = 256, class Q = Bf16>
using Tile = Traits<Kv, Q, 128, PAGE, TILE, S, O>;

inline Problem shape(const char* name, int batch, int query_len, int context, double peer) {
    Problem p;
    p.name = name, p.contexts.assign(batch, context), p.query_len = query_len, p.peer_us = peer;
    return p;
}

inline Problem ragged(const char* name, int query_len, int kv_heads, int group, int window = 0, bool hnd = false, int capacity = 0, int cluster = 1) {
    Problem p;
    p.name = name, p.contexts = {1, 700, 0, 5000, 129, 2, 16, 1025, 33}, p.query_len = query_len, p.kv_heads = kv_heads, p.group = group;
    p.window = window, p.hnd = hnd, p.capacity = capacity, p.cluster = cluster;
    return p;
}

template <class Kv, class D, class V>
void check_family(const char* name, double bound) {
    auto label = [&](const char* what) { return std::string(name) + " " + what; };
    check<Tile<Kv, D>>(label("decode").c_str(), ragged("q1 h1 g16", 1, 1, 16), bound);
    for (int cluster : {1, 2, 8, 16}) {
        check<Tile<Kv, D>>(label("cluster").c_str(), ragged("q1 h1 g16", 1, 1, 16, 0, false, 0, cluster), bound);
        check<Tile<Kv, V, Plain, 128, 64>>(label("cluster").c_str(), ragged("q4 h2 g16", 4, 2, 16, 0, false, 0, cluster), bound);
    }
    check<Tile<Kv, D>>(label("decode").c_str(), ragged("q1 h2 g8", 1, 2, 8), bound);
    check<Tile<Kv, D>>(label("decode").c_str(), ragged("q2 h1 g40 many blocks", 2, 1, 40), bound);
    check<Tile<Kv, D>>(label("decode").c_str(), ragged("q1 one task a row", 1, 1, 16, 0, true, 9), bound);
    check<Tile<Kv, D, Plain, 16, 64>>(label("p16").c_str(), ragged("q1 h4 g5 hnd", 1, 4, 5, 0, true), bound);
    check<Tile<Kv, D, Plain, 24, 64>>(label("p24").c_str(), ragged("q1 h2 g5", 1, 2, 5), bound);
    check<Tile<Kv, D, Windowed, 16>>(label("window").c_str(), ragged("q3 h2 g4 w100", 3, 2, 4, 100), bound);
    check<Tile<Kv, D, Windowed>>(label("window").c_str(), ragged("q1 h2 g16 w1", 1, 2, 16, 1), bound);
    check<Tile<Kv, D, Everything>>(label("all").c_str(), ragged("q4 h1 g16 w600", 4, 1, 16, 600), bound);
    check<Tile<Kv, V>>(label("verify").c_str(), ragged("q4 h1 g16", 4, 1, 16), bound);
    check<Tile<Kv, V>>(label("verify").c_str(), ragged("q5 h2 g7", 5, 2, 7), bound);
    check<Tile<Kv, V, Everything, 16>>(label("verify all p16").c_str(), ragged("q4 h1 g16 w300", 4, 1, 16, 300), bound);
}

inline void run_checks(const std::string&) {
#if HAS_PART(1)
    check_family<Bf16, Decode8, Warpgroup3>("bf16", 8e-3);
#endif
#if HAS_PART(2)
    check_family<F16, Decode8, Warpgroup3>("f16", 8e-3);
#endif
#if HAS_PART(3)
    check_family<E4m3, Decode8Fp8, VerifyFp8>("fp8", 8e-3);
#endif
#if HAS_PART(4)
    check<Tile<Bf16, Decode8, Plain, 128, 256, F16>>("bf16 q16", ragged("q1 h1 g16", 1, 1, 16), 8e-3);
    check<Tile<F16, Decode8, Plain, 128, 256, F16>>("f16 q16", ragged("q1 h1 g16", 1, 1, 16), 4e-3);
    check<Tile<E4m3, Decode8Fp8, PerToken>>("fp8 token", ragged("q1 h1 g16", 1, 1, 16), 8e-3);
#endif
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

// Rows that fit a cluster each, and so need no reducer.
template <class T>
void measure_whole(const char* variant, Problem p, int cluster) {
    p.cluster = p.max_partitions = cluster;
    measure<T>(variant, p);
}

inline void run_times(const std::string& filter) {
    for (const Timed& t : MINIMAX20) {
        if (std::string(t.name).find(filter) == std::string::npos) continue;
        const Problem bf16 = shape(t.name, t.batch, t.query_len, t.context, t.bf16_peer);
        const Problem fp8 = shape(t.name, t.batch, t.query_len, t.context, t.fp8_peer);
        if (t.query_len == 1) {
#if HAS_PART(4)
            measure<Tile<Bf16, Decode8>>("bf16", bf16);
            measure<Tile<Bf16, Decode8, Plain, 16>>("bf16 page 16", bf16);
            if (t.context == 8192 && t.batch <= 4) measure<Tile<Bf16, Decode6>>("bf16 6w c32", bf16);
            if (t.context == 8192 && t.batch <= 4) measure_whole<Tile<Bf16, Decode8>>("bf16 whole", bf16, 16);
            if (t.context == 8192 && t.batch == 32) measure_whole<Tile<Bf16, Decode8>>("bf16 whole", bf16, 2);
#endif
#if HAS_PART(5)
            measure<Tile<E4m3, Decode8Fp8>>("fp8", fp8);
            if (t.context == 8192 && t.batch <= 4) measure<Tile<E4m3, Decode6Fp8>>("fp8 6w c64", fp8);
            measure<Tile<E4m3, Decode8Fp8, PerToken>>("fp8 token", fp8);
#endif
        } else {
#if HAS_PART(6)
            measure<Tile<Bf16, Warpgroup3>>("bf16 wg x3", bf16);
            measure<Tile<E4m3, VerifyFp8>>("fp8 1x4x2 c64", fp8);
            measure<Tile<E4m3, VerifyFp8, PerToken>>("fp8 token", fp8);
#endif
        }
    }
}
