// Merges partial results, specialized by macros:
//   PA_KERNEL   the entry's name
//   PA_HEAD_DIM, PA_QUERY (the output: 0 BF16, 1 F16, 2 F32), PA_RAGGED, PA_PER_HEAD   as the tile's
//   PA_WARPS    of a row: 1 for up to 8 partials, 4 up to 32, else 8
//   PA_SPLIT    blocks that share a row's channels: 1, or with more warps 4 where rows are few
// Grid: x query rows of a sequence times PA_SPLIT (token major), y query heads (with one warp a row four to a block), z sequences.
#include "reduce.cuh"

namespace pa {

template <int> struct Element;
template <> struct Element<0> { using Type = Bf16; };
template <> struct Element<1> { using Type = F16; };
template <> struct Element<2> { using Type = F32; };

}  // namespace pa

extern "C" __global__ void __launch_bounds__(PA_WARPS == 1 ? 128 : PA_WARPS * 32) PA_KERNEL(const __grid_constant__ pa::ReduceArgs args) {
    pa::reduce<pa::Element<PA_QUERY>::Type, PA_HEAD_DIM, PA_RAGGED, PA_PER_HEAD, PA_WARPS, PA_WARPS == 1 ? 4 : 1, PA_SPLIT>(args);
}
