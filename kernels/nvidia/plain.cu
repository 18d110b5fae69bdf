// One tile kernel without tensor cores, specialized by macros:
//   PA_HEAD_DIM      a multiple of 4; of 32 for MXFP4
//   PA_KERNEL, PA_PAGE, PA_GROUP, PA_TILE, PA_PER_HEAD, PA_RAGGED, PA_WINDOW, PA_SOFTCAP   as in tile.cu
//   PA_QUERY         0 BF16, 1 F16, 2 F32; PA_KV 0 BF16, 1 F16, 2 FP8 (E4M3), 3 MXFP4, 4 F32
//   PA_SCALES        0 none, 1 one factor, 2 one a token, 3 blocks of 32 (E8M0)
//   PA_LAYOUT        0 Shuffled, 1 Vllm, 2 Nhd, 3 Hnd
//   PA_ROWS          query rows a block: 8, from head_dim 256 on 4
//   PA_SHARED_BYTES  what the host reserves
#include "plain.cuh"

namespace pa {

template <int> struct Output;
template <> struct Output<0> : PlainBf16, Bf16 {};
template <> struct Output<1> : PlainF16, F16 {};
template <> struct Output<2> : PlainF32, F32 {};
template <int> struct Element;
template <> struct Element<0> { using Type = PlainBf16; };
template <> struct Element<1> { using Type = PlainF16; };
template <> struct Element<2> { using Type = PlainE4m3; };
template <> struct Element<3> { using Type = PlainMxfp4; };
template <> struct Element<4> { using Type = PlainF32; };

using Specialized = PlainTraits<Element<PA_KV>::Type, Output<PA_QUERY>, PA_HEAD_DIM, PA_PAGE, PA_GROUP, PA_TILE, PA_ROWS, Scale(PA_SCALES),
                                Layout(PA_LAYOUT), Options<PA_SCALES, PA_WINDOW, PA_SOFTCAP, PA_RAGGED, PA_PER_HEAD>>;
static_assert(Specialized::SMEM_BYTES == PA_SHARED_BYTES, "the host's formula for shared memory is not this one");

}  // namespace pa

extern "C" __global__ void __launch_bounds__(pa::Specialized::THREADS) PA_KERNEL(const __grid_constant__ pa::CudaTileArgs args) {
    pa::plain_tile<pa::Specialized>(args);
}
