// Page ids of a tile, and the addresses that follow from them.
#pragma once

#include "lds.h"
#include "task.h"

namespace pa {

template <class T>
struct Pages {
    const Call &call;
    const Task<T> &task;
    Lds<T> lds;

    // The id of the tile's page that this thread stages, clamped to the cache; 0 for pages that no row attends, which are not looked up.
    PA_DEVICE int load_id(int tile) const {
        int id = 0;
        if (thread() < Lds<T>::PAGES) {
            const u32 page = u32(tile) * T::TOKENS / T::PAGE + thread();
            const u32 first = page * T::PAGE;
            const bool attended = first < u32(task.context) && first + T::PAGE > u32(task.first_token);
            if (attended && page < call.max_pages) {
                const u32 last = call.args.pages - 1;
                const u32 entry = load<u32>(task.table + page, 0);
                id = entry < last ? entry : last;
            }
        }
        return id;
    }

    PA_DEVICE void stage_id(int tile, int id) const {
        if (thread() < Lds<T>::PAGES) lds.page_id(tile, thread()) = id;
    }

    // Where tokens `token + own ..` of a tile lie: `token` and `SPAN` are the same in all lanes and `own`, this lane's part, is less than
    // SPAN. A span that pages do not cut has one id for all lanes, in scalar registers.
    template <int SPAN>
    PA_DEVICE const u8 *page(const void *cache, const Paged &stride, int bytes, int tile, int token, int own) const {
        const bool whole = T::PAGE >= SPAN;
        const int index = (whole ? token : token + own) % T::TOKENS / T::PAGE;
        const int id = whole ? uniform(lds.page_id(tile, index)) : lds.page_id(tile, index);
        return at(cache, (long(id) * stride.page + task.rows.head * stride.head) * bytes);
    }
    // The part of a token's place in its page that all lanes share, and this lane's own.
    template <int SPAN>
    PA_DEVICE int shared_place(int tile, int token) const {
        if constexpr (T::PAGE > T::TOKENS) return (u32(tile) * T::TOKENS + token) % T::PAGE;
        return T::PAGE >= SPAN ? token % T::PAGE : 0;
    }
    template <int SPAN>
    PA_DEVICE int own_place(int own) const {
        return T::PAGE >= SPAN ? own : own % T::PAGE;
    }
};

}  // namespace pa
