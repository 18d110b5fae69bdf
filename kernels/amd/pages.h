// Page ids of a tile, and the addresses that follow from them.
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

    PA_DEVICE Pages(const Call &call, const Task<T> &task, Lds<T> lds) : call(call), task(task), lds(lds) {}

    // The entry of the tile's page that this thread stages; 0 for pages that no row attends, which are not looked up.
    PA_DEVICE u32 load_id(int tile) const {
        u32 entry = 0;
        if (thread() < Lds<T>::PAGES) {
            const u32 page = u32(tile) * T::TOKENS / T::PAGE + thread();
            const u32 first = page * T::PAGE;
            const bool attended = first < u32(task.context) && (!T::WINDOW || first + T::PAGE > u32(task.first_token));
            if (attended && page < call.max_pages) entry = load<u32>(task.table + page, 0);
        }
        return entry;
    }

    // Ids are clamped to the cache here, where their load may be waited for.
    PA_DEVICE void stage_id(int tile, u32 entry) const {
        const u32 last = call.args.pages - 1;
        entry = opaque_lane(entry);
        if (thread() < Lds<T>::PAGES) lds.page_id(tile, thread()) = entry < last ? entry : last;
    }

    // Bytes from page 0 to the page of tokens `token + own ..` of a tile: `token` and `SPAN` are the same in all lanes and `own`, this
    // lane's part, is less than SPAN. A span that pages do not cut has one page for all lanes, in scalar registers.
    template <int SPAN>
    PA_DEVICE u64 page(const HeadCache &cache, int tile, u32 token, u32 own) const {
        const bool whole = T::PAGE >= SPAN;
        const int staged = lds.page_id(tile, (whole ? token : token + own) / T::PAGE);
        return (whole ? uniform(staged) : u32(staged)) * cache.page_bytes;
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
