// The cache writes, specialized by macros: PA_KERNEL, the entry's name; PA_HEAD_DIM; PA_PAGE; PA_QUERY, the dtype of k, and PA_VALUE, of v; PA_KV;
// PA_SCALES; PA_LAYOUT; PA_LATEST, whether tokens may share a slot. Attention behind it may start at once: it waits for what is written here.
#include "../common/write.h"
#include "ptx.cuh"

PA_ENTRY(pa::WRITE_THREADS) PA_KERNEL(pa::WriteArgs args) {
    pa::launch_next_kernel();
    pa::write<PA_HEAD_DIM, PA_PAGE, PA_QUERY, PA_VALUE, PA_KV, PA_SCALES, PA_LAYOUT, PA_LATEST>(args);
}
