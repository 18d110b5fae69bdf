// Page ids of a tile, and the addresses that follow from them. They lie in LDS, where one thread a page puts them, or with PAGES_AHEAD in scalar
// registers of every wave: those of a tile and of the next.
#pragma once

#include "lds.h"
#include "task.h"

namespace pa {

// One KV head of K, V or their scales.
struct HeadCache {
    const u8 *base;
    u64 page_bytes;

    PA_DEVICE HeadCache(const void *cache, const Paged &stride, int head, int bytes)
        : base(at(cache, head * stride.head * bytes)), page_bytes(opaque(stride.page * bytes)) {}
};

template <class T>
struct Pages {
    const Call &call;
    const Task<T> &task;
    Lds<T> lds;
    HeadCache key{call.key, call.args.key_stride, task.rows.head, T::BYTES};
    HeadCache value{call.args.value, call.args.value_stride, task.rows.head, T::BYTES};
    HeadCache key_scale{call.args.k_scale, call.args.k_scale_stride, task.rows.head, 4};
    HeadCache value_scale{call.args.v_scale, call.args.v_scale_stride, task.rows.head, 4};

    static constexpr int HELD = T::PAGES_AHEAD ? Lds<T>::PAGES : 1;
    u32 held[2][HELD];
    int held_tile;  // that of held[0]

    PA_DEVICE Pages(const Call &call, const Task<T> &task, Lds<T> lds) : call(call), task(task), lds(lds) {}

    // The entry of the tile's page that this thread stages; 0 for pages that no row attends, which are not looked up.
    PA_DEVICE u32 load_id(int tile) const {
        if constexpr (T::PAGES_AHEAD) return load_any(tile);
        u32 entry = 0;
        if (thread() < Lds<T>::PAGES) {
            const u32 page = u32(tile) * T::TOKENS / T::PAGE + thread();
            const u32 first = page * T::PAGE;
            const bool attended = first < u32(task.context) && (!T::WINDOW || first + T::PAGE > u32(task.first_token));
            if (attended && page < call.max_pages) entry = load<u32>(task.table + page, 0);
        }
        return entry;
    }

    // The entry of the tile's page of this lane's number, without a branch: past the context's last page, that one's. There are tokens.
    PA_DEVICE u32 load_any(int tile) const {
        const u32 page = u32(tile) * T::TOKENS / T::PAGE + opaque_lane(thread()) % HELD, last = u32(task.context - 1) / T::PAGE;
        return load<u32>(task.table, (page < last ? page : last) * 4);
    }

    // Ids are clamped to the cache here, where their load may be waited for. Tiles come in order; ids of the one before are kept.
    PA_DEVICE void stage_id(int tile, u32 entry) {
        entry = clamped_id(call.args, opaque_lane(entry));
        if constexpr (T::PAGES_AHEAD) {
            held_tile = tile - 1;
            PA_UNROLL for (int i = 0; i < HELD; i++) {
                held[0][i] = held[1][i];
                held[1][i] = __builtin_amdgcn_readlane(entry, i);
            }
        } else if (thread() < Lds<T>::PAGES) {
            lds.page_id(tile, thread()) = entry;
        }
    }

    // The id of a tile's page that is the same in all lanes.
    PA_DEVICE u32 id(int tile, u32 page) const {
        if constexpr (!T::PAGES_AHEAD) return uniform(lds.page_id(tile, page));
        u32 id = 0;
        PA_UNROLL for (int i = 0; i < HELD; i++) {
            const u32 one = tile == held_tile ? held[0][i] : held[1][i];
            id = page == u32(i) ? one : id;
        }
        return id;
    }

    // Bytes from page 0 to the page of tokens `token + own ..` of a tile: `token` and `SPAN` are the same in all lanes and `own`, this
    // lane's part, is less than SPAN. A span that pages do not cut has one page for all lanes, in scalar registers.
    template <int SPAN>
    PA_DEVICE u64 page(const HeadCache &cache, int tile, u32 token, u32 own) const {
        if constexpr (T::PAGE >= SPAN) return id(tile, token / T::PAGE) * cache.page_bytes;
        return u32(lds.page_id(tile, (token + own) / T::PAGE)) * cache.page_bytes;
    }
    // The part of a token's place in its page that all lanes share, and this lane's own.
    template <int SPAN>
    PA_DEVICE u32 shared_place(int tile, u32 token) const {
        if constexpr (T::PAGE > T::TOKENS) return (u32(tile) * T::TOKENS + token) % T::PAGE;
        return T::PAGE >= SPAN ? token % T::PAGE : 0;
    }
    template <int SPAN>
    PA_DEVICE u32 own_place(u32 own) const {
        return T::PAGE >= SPAN ? own : own % T::PAGE;
    }
};

}  // namespace pa
