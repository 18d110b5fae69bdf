// Merges partial results, specialized by macros:
//   PA_KERNEL   the entry's name
//   PA_HEAD_DIM, PA_QUERY (the output: 0 BF16, 1 F16, 2 F32), PA_RAGGED, PA_PER_HEAD   as the tile's
//   PA_PARTIAL  0 F32, 1 F16
//   PA_WARPS    of a row: 1 for up to 8 partials (see reduce_few), 4 up to 32, else 8 (see reduce_many)
//   PA_SPLIT    blocks that share a row's channels: 1, or with more warps 4 where rows are few
#include "reduce.cuh"

namespace pa {

template <int> struct Element;
template <> struct Element<0> { using Type = Bf16; };
template <> struct Element<1> { using Type = F16; };
template <> struct Element<2> { using Type = F32; };

using Out = Element<PA_QUERY>::Type;
constexpr int REDUCER_THREADS = PA_WARPS == 1 ? 256 : PA_WARPS * 32;

}  // namespace pa

extern "C" __global__ void __launch_bounds__(pa::REDUCER_THREADS) PA_KERNEL(const __grid_constant__ pa::ReduceArgs args) {
    if constexpr (PA_WARPS == 1) {
        pa::reduce_few<pa::Out, PA_PARTIAL, PA_HEAD_DIM, PA_RAGGED, PA_PER_HEAD, pa::REDUCER_THREADS>(args);
    } else {
        pa::reduce_many<pa::Out, PA_PARTIAL, PA_HEAD_DIM, PA_RAGGED, PA_PER_HEAD, PA_WARPS, PA_SPLIT>(args);
    }
}
