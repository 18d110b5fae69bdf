// One tile kernel, specialized by macros:
//   PA_KERNEL        the entry's name
//   PA_HEAD_DIM      64, 128, 192, 256 (FP8: 128, 256)
//   PA_PAGE          tokens a page
//   PA_GROUP         query heads a KV head
//   PA_QUERY         0 BF16, 1 F16; PA_KV 0 BF16, 1 F16, 2 FP8 (E4M3)
//   PA_SCALES        0 none, 1 one factor, 2 one a token
//   PA_LAYOUT        2 Nhd, 3 Hnd: both are strides here
//   PA_PER_HEAD, PA_RAGGED, PA_WINDOW, PA_SOFTCAP   0 or 1
//   PA_TILE          tokens of the plan's tile
//   PA_M_TILES, PA_ROW_WARPS, PA_GROUPS, PA_STAGES, PA_CHUNK, PA_CLUSTER, PA_WARPGROUP   the shape: see traits.cuh
//   PA_PARTIAL       what the host takes partial results for: 0 F32, 1 F16
//   PA_SHARED_BYTES  what the host reserves
#include "tile.cuh"

namespace pa {

template <int> struct Element;
template <> struct Element<0> { using Type = Bf16; };
template <> struct Element<1> { using Type = F16; };
template <> struct Element<2> { using Type = E4m3; };

using Specialized = Traits<Element<PA_KV>::Type, Element<PA_QUERY>::Type, PA_HEAD_DIM, PA_PAGE, PA_GROUP, PA_TILE,
                           Shape<PA_M_TILES, PA_ROW_WARPS, PA_GROUPS, PA_STAGES, PA_CHUNK, PA_CLUSTER, PA_WARPGROUP>,
                           Options<PA_SCALES, PA_WINDOW, PA_SOFTCAP, PA_RAGGED, PA_PER_HEAD>>;
static_assert(Specialized::SMEM_BYTES == PA_SHARED_BYTES, "the host's formula for shared memory is not this one");
static_assert(Specialized::DIRECT == PA_PARTIAL, "the host takes partial results for another type");
static_assert(PA_QUERY < 2 && PA_KV < 3 && PA_LAYOUT >= 2, "not this tile's");

}  // namespace pa

extern "C" __global__ void __launch_bounds__(pa::Specialized::ALL_THREADS, pa::Specialized::NARROW ? pa::Specialized::BLOCKS_AN_SM : 1) PA_KERNEL(const __grid_constant__ pa::CudaTileArgs args) {
    pa::tile<pa::Specialized>(args);
}
