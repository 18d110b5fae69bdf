// What a bench variant is: the macros of the tile and of its reducer, and what the host must know to launch them.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace dev {

enum Kind { BF16 = 0, F16 = 1, FP8 = 2, MXFP4 = 3, F32 = 4 };
enum Layout { SHUFFLED = 0, VLLM = 1, NHD = 2, HND = 3 };

struct Variant {
    std::string name;
    int kv = BF16, query = BF16 /* 2: F32 */, layout = NHD, head_dim = 128, page = 128, group = 16, scales = 0;
    bool per_head = false, ragged = false, window = false, softcap = false;
    int tile = 256, m_tiles = 1, row_warps = 1, groups = 8, stages = 3, chunk = 16, cluster = 1;
    bool warpgroup = false, plain = false, free = false;  // free: each row is one task, without a plan

    // A warpgroup on FP8, with helper warps.
    bool narrow() const { return kv == FP8 && warpgroup; }
    int threads() const { return plain ? 128 : (row_warps * 32 + (narrow() ? 128 : 0)) * groups; }
    int rows() const { return plain ? (head_dim < 256 ? 8 : 4) : 16 * m_tiles * row_warps; }
    int kv_bits() const { return kv == F32 ? 32 : kv == FP8 ? 8 : kv == MXFP4 ? 4 : 16; }
    int query_bytes() const { return query == 2 ? 4 : 2; }
    const char* root() const { return plain ? "plain" : "tile"; }

    // Dynamic shared memory: traits.cuh's formula.
    int shared_bytes() const {
        if (plain) return rows() * head_dim * 4 + 4 * rows() * (head_dim + 2) * 4;
        const int scale = scales == 2 ? narrow() ? 512 : chunk * 4 : 0, stage = 2 * chunk * head_dim * kv_bits() / 8 + 2 * scale;
        const int beside = narrow() ? 4 * chunk * head_dim : 0;
        const int ring = groups * ((beside + stages * stage + 1023) / 1024 * 1024) + (warpgroup ? rows() * head_dim * 2 : 0);
        const int row = head_dim + (kv == FP8 && !warpgroup ? head_dim / 8 : 8), merge = groups * rows() * (row + 2) * 4;
        const int sent = cluster > 1 ? (rows() * head_dim / 32 + cluster - 1) / cluster * cluster * 136 + 16 : 0;
        return std::max(ring, merge) + sent;
    }

    // Merged out of registers: partial results are F16.
    bool f16_partials() const { return !plain && cluster == 1 && (kv < FP8 || narrow()) && m_tiles == 1 && head_dim / 8 % (4 * groups) == 0; }

    // Rows that a block of the reducer has where partial results are few.
    int reducer_rows() const {
        const int channels = f16_partials() ? 8 : 4, pieces = (head_dim + channels - 1) / channels;
        int lanes = 1;
        while (lanes < pieces && lanes < 32) lanes *= 2;
        return 256 / lanes;
    }

    using Macros = std::vector<std::pair<std::string, int>>;

    Macros tile_macros() const {
        if (plain) {
            return {{"HEAD_DIM", head_dim}, {"PAGE", page}, {"GROUP", group}, {"QUERY", query}, {"KV", kv}, {"SCALES", scales}, {"LAYOUT", layout},
                    {"PER_HEAD", per_head}, {"RAGGED", ragged}, {"WINDOW", window}, {"SOFTCAP", softcap}, {"TILE", tile}, {"ROWS", rows()},
                    {"SHARED_BYTES", shared_bytes()}};
        }
        return {{"HEAD_DIM", head_dim}, {"PAGE", page}, {"GROUP", group}, {"QUERY", query}, {"KV", kv}, {"SCALES", scales}, {"LAYOUT", layout},
                {"PER_HEAD", per_head}, {"RAGGED", ragged}, {"WINDOW", window}, {"SOFTCAP", softcap}, {"TILE", tile}, {"M_TILES", m_tiles},
                {"ROW_WARPS", row_warps}, {"GROUPS", groups}, {"STAGES", stages}, {"CHUNK", chunk}, {"CLUSTER", cluster},
                {"WARPGROUP", warpgroup}, {"PARTIAL", f16_partials()}, {"SHARED_BYTES", shared_bytes()}};
    }
    Macros reduce_macros(int warps, int split) const {
        return {{"HEAD_DIM", head_dim}, {"QUERY", query}, {"RAGGED", ragged}, {"PER_HEAD", per_head}, {"WARPS", warps}, {"SPLIT", split},
                {"PARTIAL", f16_partials()}};
    }
    static std::string file(const std::string& root, const Macros& macros) {
        std::string name = root;
        for (const auto& [key, value] : macros) name += "-" + std::to_string(value);
        return name + ".cubin";
    }
};

}  // namespace dev
