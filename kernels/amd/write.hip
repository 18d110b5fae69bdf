// Root of the cache writes. PA_KERNEL: its name; PA_HEAD_DIM; PA_PAGE; PA_QUERY: the dtype of k and v; PA_KV; PA_SCALES; PA_LAYOUT.
#include "../common/write.h"

PA_ENTRY(pa::WRITE_THREADS) PA_KERNEL(pa::WriteArgs args) { pa::write<PA_HEAD_DIM, PA_PAGE, PA_QUERY, PA_QUERY, PA_KV, PA_SCALES, PA_LAYOUT, false>(args); }
