// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_silu_mul and aril_add_rms_norm: operations that read the y of a linear layer, fused with the
// layer's expand. Which kernel an operation launches, with which grid.
#include "host/launch.cuh"
#include "linear/add_rms_norm.cuh"
#include "linear/silu_mul.cuh"

namespace aril {
namespace {

using detail::ceil_div;

// How the blocks of a norm's grid share out tiles.
enum NormGrid { kAllTiles, kTurns, kWideTiles };

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

  // By whether B is staged, and by NormGrid.
  Kernel<aril_add_rms_norm_args, int, int, int> add_rms_norm[2][3] = {
      {{detail::add_rms_norm_kernel<T, false, false, false>, kMaxSmem},
       {detail::add_rms_norm_kernel<T, false, false, true>, kMaxSmem},
       {detail::add_rms_norm_kernel<T, false, true, false>, kMaxSmem}},
      {{detail::add_rms_norm_kernel<T, true, false, false>, kMaxSmem},
       {detail::add_rms_norm_kernel<T, true, false, true>, kMaxSmem},
       {detail::add_rms_norm_kernel<T, true, true, false>, kMaxSmem}}};

  int32_t load() const {
    const auto& [a, b, c, d] = *this;
    return load_table(a, b, c, d);
  }
};

template <>
struct Kernels<float> {
  Kernel<aril_silu_mul_args, int> silu_mul = {detail::silu_mul_f32_kernel, 0};

  Kernel<aril_add_rms_norm_args> add_rms_norm = {detail::add_rms_norm_f32_kernel, 0};

  int32_t load() const {
    const auto& [a, b] = *this;
    return load_table(a, b);
  }
};

// Grids of more blocks take turns; those of a norm then have about so many clusters.
constexpr int kMostSiluMulBlocks = 3000;
constexpr int kTurnsSiluMulBlocks = 594;
constexpr int kMostNormClusters = 64;
constexpr int kTurnsNormClusters = 48;

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

template <typename T>
int32_t add_rms_norm(const aril_add_rms_norm_args& args, void* stream) {
  const Kernels<T> kernels;
  const aril_linear_args& layer = args.layer;
  if constexpr (sizeof(T) == sizeof(float)) {
    return launch(kernels.add_rms_norm, dim3(layer.max_tiles), detail::kF32Threads, 0, stream,
                  args);
  } else {
    const bool wide = detail::is_large_m(layer);
    const int parts = wide ? ARIL_WIDE_TILE / ARIL_TOKENS_PER_TILE : 1;
    const int slabs = ceil_div(layer.in_features, detail::kSlabFeatures);
    bool has;
    ARIL_TRY(has_clusters(kernels.add_rms_norm[0][kAllTiles], has));
    const int blocks = has ? detail::kNormBlocks : 1;
    int max_bytes;
    ARIL_TRY(max_smem_bytes(max_bytes));
    const bool staged = detail::is_staged(layer.weights) &&
                        detail::add_rms_norm_smem_bytes(layer, blocks, true) <= max_bytes;
    NormGrid grid = wide ? kWideTiles : kAllTiles;
    int tiles = layer.max_tiles;
    if (!wide && tiles > kMostNormClusters && layer.max_few_tiles < tiles) {
      grid = kTurns;
      tiles = min(tiles, max(layer.max_few_tiles, kTurnsNormClusters));
    }
    return launch_clusters(kernels.add_rms_norm[staged][grid], blocks, dim3(tiles * parts * blocks),
                           detail::kSmallMThreads,
                           detail::add_rms_norm_smem_bytes(layer, blocks, staged), stream, args,
                           blocks, slabs, tiles);
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

extern "C" int32_t aril_add_rms_norm(const aril_add_rms_norm_args* args, void* stream) {
  return aril::dispatch(args->layer.dtype, [&](auto element) {
    return aril::add_rms_norm<decltype(element)>(*args, stream);
  });
}
