// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_silu_mul: reads the y of a layer of gate and up, fused with the layer's expand. Which kernel it
// launches, with which grid.
#include "host/launch.cuh"
#include "linear/silu_mul.cuh"

namespace aril {
namespace {

using detail::ceil_div;

// All kernels for elements of T.
template <typename T>
struct Kernels {
  // By whether the grid takes turns, and by is_staged().
  Kernel<aril_silu_mul_args, detail::SiluMulGrid> small_m_silu_mul[2][2] = {
      {{detail::small_m_silu_mul_kernel<T, false, false>, kMaxSmem},
       {detail::small_m_silu_mul_kernel<T, true, false>, kMaxSmem}},
      {{detail::small_m_silu_mul_kernel<T, false, true>, kMaxSmem},
       {detail::small_m_silu_mul_kernel<T, true, true>, kMaxSmem}}};
  Kernel<aril_silu_mul_args, int, int> large_m_silu_mul = {detail::large_m_silu_mul_kernel<T>,
                                                           kMaxSmem};
  Kernel<aril_silu_mul_args, int> high_rank_silu_mul = {detail::high_rank_silu_mul_kernel<T>,
                                                        kMaxSmem};

  int32_t load() const {
    const auto& [a, b, c] = *this;
    return load_table(a, b, c);
  }
};

template <>
struct Kernels<float> {
  Kernel<aril_silu_mul_args, int> silu_mul = {detail::silu_mul_f32_kernel, 0};

  int32_t load() const { return aril::load(silu_mul); }
};

// Grids of more blocks take turns.
constexpr int kMostSiluMulBlocks = 3000;
constexpr int kTurnsSiluMulBlocks = 594;

template <typename T>
int32_t small_m_silu_mul(const aril_silu_mul_args& args, bool staged, void* stream) {
  const aril_linear_args& layer = args.layer;
  const auto shares = [&](int outs_per_block) {
    const int blocks = ceil_div(layer.out_features[0], outs_per_block);
    return detail::ExpandShares{layer.max_tiles, detail::Divisor(blocks),
                                detail::Divisor(outs_per_block)};
  };
  detail::SiluMulGrid grid = {};
  grid.slabs = ceil_div(layer.in_features, detail::kSlabFeatures);
  grid.few_tiles = layer.max_tiles;
  grid.few = grid.many = shares(layer.outs_per_block);
  int blocks = layer.max_tiles * grid.many.out_blocks;
  const bool takes_turns = layer.max_few_tiles < layer.max_tiles && blocks > kMostSiluMulBlocks;
  if (takes_turns) {
    grid.few_tiles = layer.max_few_tiles;
    grid.few = shares(layer.outs_per_block_of_few);
    const int many =
        max(layer.max_few_tiles, ceil_div(kTurnsSiluMulBlocks, grid.many.out_blocks.value));
    blocks = max(grid.few_tiles * grid.few.out_blocks,
                 min(many, layer.max_tiles) * grid.many.out_blocks);
    grid.few.tiles = blocks / grid.few.out_blocks;
    grid.many.tiles = blocks / grid.many.out_blocks;
  }
  return launch(Kernels<T>().small_m_silu_mul[takes_turns][staged], dim3(blocks),
                detail::kSmallMThreads, detail::small_m_silu_mul_smem_bytes(layer, staged), stream,
                args, grid);
}

template <typename T>
int32_t silu_mul(const aril_silu_mul_args& args, void* stream) {
  const aril_linear_args& layer = args.layer;
  if constexpr (sizeof(T) == sizeof(float)) {
    const int blocks = ceil_div(layer.out_features[0], detail::kF32Threads);
    return launch(Kernels<T>().silu_mul, dim3(layer.max_tiles * blocks), detail::kF32Threads, 0,
                  stream, args, blocks);
  } else {
    const Kernels<T> kernels;
    const bool staged = detail::is_staged(layer.weights);
    if (!detail::is_large_m(layer)) return small_m_silu_mul<T>(args, staged, stream);
    const int blocks = ceil_div(layer.out_features[0], layer.outs_per_block);
    const dim3 grid(layer.max_tiles * blocks);
    int smem_bytes;
    ARIL_TRY(detail::large_m_silu_mul_smem(layer.weights, smem_bytes));
    if (staged && smem_bytes > 0) {
      return launch(kernels.large_m_silu_mul, grid, detail::kExpandThreads, smem_bytes, stream,
                    args, blocks, smem_bytes);
    }
    return launch(kernels.high_rank_silu_mul, grid, detail::kSmallMThreads,
                  detail::small_m_silu_mul_smem_bytes(layer, false), stream, args, blocks);
  }
}

}  // namespace

int32_t load_consumers() {
  ARIL_TRY(Kernels<__nv_bfloat16>().load());
  ARIL_TRY(Kernels<__half>().load());
  return Kernels<float>().load();
}

}  // namespace aril

extern "C" int32_t aril_silu_mul(const aril_silu_mul_args* args, void* stream) {
  return aril::dispatch(args->layer.dtype, [&](auto element) {
    return aril::silu_mul<decltype(element)>(*args, stream);
  });
}
