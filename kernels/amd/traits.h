// What a specialization is: the compiler's -D macros as one struct of constants, and what follows from them.
#pragma once

#include "gcn.h"

#if !defined(__gfx942__) && !defined(__gfx950__)
#error "the tile is written for gfx942 and gfx950"
#endif

// Off only to predict the times of schedules that are not ours, whose next K comes after P.
#if !defined(PA_TEST_KEYS_EARLY)
#define PA_TEST_KEYS_EARLY 1
#endif
// Off only where the constants of predicted times are held to the kernels that they were fitted with.
#if !defined(PA_TEST_WIDE_MFMA)
#define PA_TEST_WIDE_MFMA 1
#endif

namespace pa {

enum class Query { BF16, F16, F32 };
enum class Scales { NONE, SCALAR, PER_TOKEN, BLOCK };
enum class Layout { SHUFFLED, VLLM, NHD, HND };

struct Traits {
#if defined(__gfx950__)
    static constexpr bool GFX950 = true;
#else
    static constexpr bool GFX950 = false;
#endif
    static constexpr int HEAD_DIM = PA_HEAD_DIM;
    static constexpr int PAGE = PA_PAGE;
    static constexpr int GROUP = PA_GROUP;
    static constexpr int M_TILES = PA_M_TILES;
    static constexpr bool SINGLE_QUERY = PA_SINGLE_QUERY;
    static constexpr Query QUERY = Query(PA_QUERY);
    // What is multiplied: what the cache stores, but BF16 for an MXFP4 cache.
    static constexpr bool MXFP4 = PA_KV == 3;
    static constexpr Element KV = MXFP4 ? Element::BF16 : Element(PA_KV);
    static constexpr Scales SCALES = Scales(PA_SCALES);
    static constexpr Layout LAYOUT = Layout(PA_LAYOUT);
    static_assert(MXFP4 == (LAYOUT == Layout::NHD || LAYOUT == Layout::HND), "V lies along tokens, but along dims in an MXFP4 cache");
    static constexpr bool PER_HEAD = PA_PER_HEAD;
    static constexpr bool RAGGED = PA_RAGGED;
    static constexpr bool WINDOW = PA_WINDOW;
    static constexpr bool SOFTCAP = PA_SOFTCAP;
    static constexpr bool DIRECT_OUTPUT = PA_DIRECT_OUTPUT;

    // The schedule's switches (src/registry/flags.rs says where each is on). That V of the last tile comes right after Q K^T
    // (DECODE_LAST_V_AFTER_QK) switches nothing: V of every tile is on its way before Q K^T.
    static constexpr bool MTP_FUSED = PA_BF16_MTP_FUSED;
    static constexpr bool STREAMS_KEYS = PA_BF16_DECODE_NT_KV;
    static constexpr bool STREAMS_VALUES = PA_BF16_DECODE_NT_KV || PA_FP8_DECODE_NT_V;
    static constexpr bool QUERY_EARLY = PA_DECODE_Q_EARLY;
    static constexpr bool LEAN = PA_FP8_MTP4_LEAN;
    static constexpr bool QUERY_REREAD = PA_FP8_MTP4_Q_LDS;
    static constexpr bool PAGES_AHEAD = PA_FP8_MTP4_PAGES_AHEAD;
    // Per-token scales: those of the next tile on their way through LDS, the first tile's issued before K; else each lane loads those that it
    // multiplies with, when the tile begins.
    static constexpr bool SCALES_STAGED = PA_FP8_LOOP_SCALES_LATE;
    static constexpr bool SCALES_BEFORE_KEYS = PA_FP8_SCALES_AFTER_Q;
    static constexpr bool STAGED_PAGES = PA_MXFP4_STAGED_PAGES;
    static constexpr bool PACKED_ABSMAX = PA_PACKED_Q_ABSMAX;
    static constexpr bool PACK_NO_OLD = PA_FP8_PACK_NO_OLD;
    static_assert(!QUERY_EARLY || M_TILES == 1, "Q of one M-tile waits in registers");
    static_assert(!PACKED_ABSMAX || QUERY != Query::F32, "packed magnitudes are of 16 bits");
    // Whether a tile before the last may have tokens that some row does not attend, or is taken to.
    static constexpr bool MASKS_INTERIOR = WINDOW || !SINGLE_QUERY || (HEAD_DIM == 256 && !PA_HEAD256_INTERIOR_UNMASKED);

    // Two tile groups take a task's tiles in turn, each in a copy of the LDS of its own.
    static constexpr int GROUPS = PA_DUAL_GROUP ? 2 : 1;
    static constexpr int THREADS = GROUPS * GROUP_THREADS;
    static_assert(GROUPS == 1 || (SINGLE_QUERY && M_TILES == 1 && !WINDOW && SCALES != Scales::PER_TOKEN), "rows of one M-tile that end together");
    static PA_DEVICE int group() {
        if constexpr (GROUPS == 1) return 0;
        return pa::group();
    }

    // Tokens of a tile, its waves, and the tokens of one wave's scores in 16s.
    static constexpr int TOKENS = 256;
    static constexpr int WAVES = 4;
    static constexpr int WAVE_TOKENS = TOKENS / WAVES;
    static constexpr int SUBTILES = WAVE_TOKENS / 16;
    static constexpr int ROWS = M_TILES * 16;

    // Elements of a 16-byte unit; `multiply` sums over a step of four units.
    static constexpr bool FP8 = KV == Element::FP8;
    static constexpr int BYTES = FP8 ? 1 : 2;
    static constexpr int UNIT = 16 / BYTES;
    static constexpr int STEP = 4 * UNIT;
    static constexpr bool PER_TOKEN = SCALES == Scales::PER_TOKEN;
    static_assert(!PER_TOKEN || FP8, "per-token scales belong to an FP8 cache");
    static_assert(!SCALES_STAGED || (PER_TOKEN && PAGE >= 64), "a wave stages the scales of one page");
    // Whether the task's last tile is a copy of the loop's body, with masks and without the loads of a next tile. Of an FP8 tile, whose
    // body is the same but for a branch around each mask, there is one copy.
    static constexpr bool PEELED = !FP8;
    static_assert(PAGE % UNIT == 0 && HEAD_DIM % 64 == 0);

    static constexpr int KEY_STEPS = HEAD_DIM / STEP;
    static constexpr int KEY_STEP_REGISTERS = SUBTILES * 4;
    static constexpr int KEY_REGISTERS = KEY_STEPS * KEY_STEP_REGISTERS;
    static constexpr int WAVE_DIMS = HEAD_DIM / WAVES;
    static constexpr int DIM_TILES = WAVE_DIMS / 16;
    static constexpr int VALUE_STEPS = TOKENS / STEP;
    static constexpr int VALUE_STEP_REGISTERS = DIM_TILES * 4;
    static constexpr int VALUE_REGISTERS = VALUE_STEPS * VALUE_STEP_REGISTERS;
    // O and the scores of all M-tiles, and per-token scales.
    static constexpr int ROW_REGISTERS = M_TILES * (DIM_TILES + SUBTILES) * 4 + (PER_TOKEN ? 2 * SUBTILES * 4 : 0);

    // K of a tile comes in chunks of dims, V in chunks of tokens: all of it where registers hold it (then the next K is loaded a tile ahead,
    // and V is loaded once for all M-tiles), else 64 registers' worth at a time and the next 64 on their way. A group of two has half the
    // registers: less V at a time, or one step after the other, and the other group computes meanwhile.
    static constexpr bool VALUES_HELD = VALUE_REGISTERS <= (GROUPS == 1 ? 128 : 96) && VALUE_REGISTERS + ROW_REGISTERS <= 300;
    static constexpr bool KEYS_HELD = KEY_REGISTERS <= 128 && KEY_REGISTERS + VALUE_REGISTERS + ROW_REGISTERS <= (GROUPS == 1 ? 360 : 200);
    static constexpr int KEY_CHUNK = KEYS_HELD ? KEY_STEPS : 64 / GROUPS / KEY_STEP_REGISTERS;
    static constexpr int KEY_CHUNKS = KEY_STEPS / KEY_CHUNK;
    static constexpr bool CHUNKS_AHEAD = VALUE_STEP_REGISTERS <= 64 / GROUPS;
    static constexpr int VALUE_CHUNK = VALUES_HELD ? VALUE_STEPS : CHUNKS_AHEAD ? 64 / GROUPS / VALUE_STEP_REGISTERS : 1;
    static constexpr int VALUE_CHUNKS = VALUE_STEPS / VALUE_CHUNK;
    static_assert(KEY_STEPS % KEY_CHUNK == 0 && VALUE_STEPS % VALUE_CHUNK == 0);

    // Addresses of K and V are bases in scalar registers and a lane's offset where vector registers are scarce.
    static constexpr bool SCALAR_BASES = LEAN;
    static_assert(!SCALAR_BASES || PAGE >= STEP);

    // Steps that one matrix instruction sums over: gfx950 has one of 128 FP8 products.
    static constexpr int MOST_WIDTH = PA_TEST_WIDE_MFMA && GFX950 && FP8 ? 2 : 1;
    static constexpr int KEY_WIDTH = KEY_CHUNK % MOST_WIDTH == 0 ? MOST_WIDTH : 1;
    static constexpr int VALUE_WIDTH = VALUE_CHUNK % MOST_WIDTH == 0 ? MOST_WIDTH : 1;

    // Tiles whose page ids are in LDS. Those of the tile after the next come while V of this one may still be loaded, where it is not held.
    static constexpr int PAGE_SLOTS = HEAD_DIM > 256 ? 4 : 2;
    static_assert(MXFP4 || VALUES_HELD || PAGE_SLOTS == 4);

    // Q that the cache's dtype cannot hold is split into two parts whose products add up (FP8: it is quantized instead).
    static constexpr bool SPLIT_QUERY = !FP8 && (QUERY == Query::F32 || (QUERY == Query::F16 && KV == Element::BF16));
    static constexpr int QUERY_PARTS = SPLIT_QUERY ? 2 : 1;
    // So is P where the output keeps what one part would lose.
    static constexpr int P_PARTS = !FP8 && QUERY == Query::F32 ? 2 : 1;
    // Rows of Q are scaled into the range of FP8, or of an F16 cache where Q is not F16.
    static constexpr bool ROW_SCALED = FP8 || (KV == Element::F16 && QUERY != Query::F16);
    // Q as operands stays in registers where few hold it.
    static constexpr int QUERY_REGISTERS = QUERY_PARTS * M_TILES * KEY_STEPS * 4;
    static constexpr bool QUERY_HELD = !QUERY_REREAD && QUERY_REGISTERS <= (M_TILES == 1 ? 32 : 24);

    // The order of a tile's loads (pipeline.h). Page 16 and head_dim 256 have an order without their schedule, in which all of V and the next K
    // come after P; elsewhere, loads are always ahead.
    static constexpr bool PAGE16 = GFX950 && PAGE == 16 && M_TILES == 1 && HEAD_DIM <= 128 && !MXFP4 && KV != Element::F16;
    static constexpr bool HEAD256 = HEAD_DIM == 256 && M_TILES == 1 && SINGLE_QUERY && !MXFP4;
    // V before Q K^T; the ids of the tile after the next before V; the next K right after Q K^T.
    static constexpr bool VALUES_AHEAD = PAGE16 ? PA_PAGE16_VPIPE : !HEAD256 || PA_HEAD256_PIPE;
    static constexpr bool IDS_FIRST = VALUES_AHEAD && (!PAGE16 || PER_TOKEN || PA_PAGE16_PAGES_FIRST);
    static constexpr bool KEYS_EARLY = PA_TEST_KEYS_EARLY && VALUES_AHEAD && (!PAGE16 || !FP8 || PER_TOKEN || PA_PAGE16_EARLY_K);
    static_assert(VALUES_AHEAD || (KEYS_HELD && VALUES_HELD));
    static_assert(!(PA_PAGE16_PAGES_FIRST || PA_PAGE16_EARLY_K) || VALUES_AHEAD, "what is ahead of V wants V ahead");
    // Tiles from a step's to the one whose ids it puts into LDS: those of the tile after the next take the place of its own.
    static constexpr int IDS_AHEAD = VALUES_AHEAD ? 2 : 1;

    // P and statistics of this many M-tiles lie in LDS side by side and share barriers.
    static constexpr int P_SLOTS = MTP_FUSED || LEAN ? M_TILES : 1;
    // Of all M-tiles' scores, K, V and O only three fit the registers of two workgroups a CU: the second half of V takes those of K, and the
    // next K those of scores that have become P.
    static constexpr bool TIGHT = MTP_FUSED && M_TILES == 4;
    static constexpr int VALUE_STEPS_EARLY = TIGHT ? VALUE_CHUNK / 2 : CHUNKS_AHEAD ? VALUE_CHUNK : 0;
    static_assert(!TIGHT || (KEYS_HELD && VALUES_HELD));
    // The scale is part of exp2's multiply-add, and maxima are taken over dot products: only a positive scale and no cap allow it.
    static constexpr bool SCALE_IN_EXP2 = MTP_FUSED || LEAN;
    static_assert(!SCALE_IN_EXP2 || (PA_POSITIVE_SCALE && !SOFTCAP));

    // FP8 P is p times this power of two, so that 1 is near the top of the format.
    static constexpr int P_EXPONENT = FP8 ? (GFX950 ? 8 : 7) : 0;
    // What that is in exp2's argument. Not half of a large score's last place, where rounding could make 16 of it.
    static constexpr float P_SHIFT = P_EXPONENT == 8 ? 0x1.fffffep2f : P_EXPONENT;

    // Off only to show that the tests of poisoned caches can fail.
#if defined(PA_TEST_NO_V_MASK)
    static constexpr bool MASKS_VALUES = false;
#else
    static constexpr bool MASKS_VALUES = true;
#endif

    // Two workgroups a CU where the registers of one allow it: 256, of which Q, P, addresses and temporaries take some 90. A lane also keeps the
    // last token, maximum and sum of its row of every M-tile, its first token with a window, its factor where rows are scaled apart.
    static constexpr int STATE_REGISTERS = M_TILES * (3 + WINDOW + ROW_SCALED);
    // Where O, scores and V take all 256 registers that arithmetic reads, maxima and sums lie in accumulation registers between tiles.
    static constexpr bool PARKS_STATES = M_TILES * HEAD_DIM >= 1024;
    static constexpr int REGISTERS = KEY_REGISTERS + VALUE_REGISTERS + ROW_REGISTERS + STATE_REGISTERS;
    static constexpr int WAVES_PER_EU = GROUPS == 2 || MTP_FUSED || LEAN || (KEYS_HELD && VALUES_HELD && REGISTERS <= 160) ? 2 : 1;
};

}  // namespace pa
