// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_linear, aril_linear_shrink, aril_linear_expand and aril_embedding: which kernel an operation
// launches, with which grid.
#include "host/launch.cuh"
#include "linear/embedding.cuh"
#include "linear/f32.cuh"
#include "linear/high_rank.cuh"
#include "linear/large_m_expand.cuh"
#include "linear/large_m_shrink.cuh"
#include "linear/small_m.cuh"

namespace aril {
namespace {

using detail::ceil_div;
using detail::EmbeddingPath;
using detail::kMaxRankTiles;

enum Part { kShrink = 1, kExpand = 2, kBoth = kShrink | kExpand };

// All kernels for elements of T.
template <typename T>
struct Kernels {
  using LargeM = Kernel<aril_linear_args, int, int>;
  using Embedding = Kernel<aril_embedding_args, int, int>;

  // By whether the grid takes turns, and by is_staged().
  Kernel<aril_linear_args, detail::SmallMGrid> small_m[2][2] = {
      {{detail::small_m_kernel<T, false, false>, kMaxSmem},
       {detail::small_m_kernel<T, true, false>, kMaxSmem}},
      {{detail::small_m_kernel<T, false, true>, kMaxSmem},
       {detail::small_m_kernel<T, true, true>, kMaxSmem}}};
  // Of 2, 4 and kMaxRankTiles rank tiles for a warpgroup.
  LargeM shrink2 = {detail::large_m_shrink_kernel<T, 2>, kMaxSmem};
  LargeM shrink4 = {detail::large_m_shrink_kernel<T, 4>, kMaxSmem};
  LargeM shrink8 = {detail::large_m_shrink_kernel<T, kMaxRankTiles>, kMaxSmem};
  LargeM large_m_expand = {detail::large_m_expand_kernel<T>, kMaxSmem};
  Kernel<aril_linear_args, int> high_rank_expand = {detail::high_rank_expand_kernel<T>, kMaxSmem};
  // By EmbeddingPath.
  Embedding embedding[4] = {
      {detail::embedding_kernel<T, EmbeddingPath::kSmallM>, kMaxSmem},
      {detail::embedding_kernel<T, EmbeddingPath::kSmallMHighRank>, kMaxSmem},
      {detail::embedding_kernel<T, EmbeddingPath::kLargeM>, kMaxSmem},
      {detail::embedding_kernel<T, EmbeddingPath::kLargeMHighRank>, kMaxSmem}};

  int32_t load() const {
    const auto& [a, b, c, d, e, f, g] = *this;
    return load_table(a, b, c, d, e, f, g);
  }
};

template <>
struct Kernels<float> {
  Kernel<aril_linear_args, int> shrink = {detail::shrink_f32_kernel, 0};
  Kernel<aril_linear_args, int> expand = {detail::expand_f32_kernel, 0};
  Kernel<aril_embedding_args, int> embedding = {detail::embedding_f32_kernel, 0};

  int32_t load() const {
    const auto& [a, b, c] = *this;
    return load_table(a, b, c);
  }
};

int out_blocks(const aril_linear_args& args, int outs_per_block) {
  int blocks = 0;
  for (int slice = 0; slice < args.num_slices; ++slice) {
    blocks += ceil_div(args.out_features[slice], outs_per_block);
  }
  return blocks;
}

// A grid of more blocks than the first takes turns: it has blocks of shrink, and of expand, for
// as many tiles as make the second. Measured on an H200 (benches/record/designs.md).
constexpr int kMostBlocks = 1500;
constexpr int kTurnsBlocks = 594;

template <typename T>
int32_t small_m(const aril_linear_args& args, int parts, void* stream) {
  const bool staged = detail::is_staged(args.weights);
  const int rank_tiles = args.num_slices * detail::rank_tiles(args.weights);
  const int rank_blocks = ceil_div(rank_tiles, detail::kSmallMRankTiles);
  const int slabs = ceil_div(args.in_features, detail::kSlabFeatures);
  const int shrink_blocks = rank_blocks * slabs;  // for a tile
  detail::SmallMGrid grid = {};
  grid.rank_blocks = detail::Divisor(rank_blocks);
  grid.slabs = detail::Divisor(slabs);
  grid.num_slices = detail::Divisor(args.num_slices);
  grid.apart = parts == kExpand;
  const auto shares = [&](int outs_per_block) {
    const detail::Divisor out_blocks(aril::out_blocks(args, outs_per_block));
    return detail::ExpandShares{args.max_tiles, out_blocks, detail::Divisor(outs_per_block)};
  };
  grid.few = grid.many = shares(args.outs_per_block);
  grid.few_tiles = grid.shrink_tiles = args.max_tiles;
  int expand = args.max_tiles * grid.many.out_blocks;
  const bool takes_turns =
      args.max_few_tiles < args.max_tiles && args.max_tiles * shrink_blocks + expand > kMostBlocks;
  if (takes_turns) {
    const auto tiles = [&](int blocks) {
      return min(max(args.max_few_tiles, ceil_div(kTurnsBlocks, blocks)), args.max_tiles);
    };
    grid.few_tiles = args.max_few_tiles;
    grid.shrink_tiles = tiles(shrink_blocks);
    grid.few = shares(args.outs_per_block_of_few);
    expand = max(grid.few_tiles * grid.few.out_blocks,
                 tiles(grid.many.out_blocks) * grid.many.out_blocks);
    grid.few.tiles = expand / grid.few.out_blocks;
    grid.many.tiles = expand / grid.many.out_blocks;
  }
  grid.shrink = parts & kShrink ? grid.shrink_tiles * shrink_blocks : 0;
  if (!(parts & kExpand)) expand = 0;
  const int rows = min(args.num_tokens, ARIL_TOKENS_PER_TILE);
  const int smem_bytes =
      max(detail::small_m_shrink_smem_bytes(rows),
          detail::small_m_expand_smem_bytes(args.weights, args.outs_per_block, staged));
  return launch(Kernels<T>().small_m[takes_turns][staged], dim3(grid.shrink + expand),
                detail::kSmallMThreads, smem_bytes, stream, args, grid);
}

template <int kRankTiles>
int32_t large_m_shrink_with(const Kernel<aril_linear_args, int, int>& kernel,
                            const aril_linear_args& args, int rank_tiles, void* stream) {
  int warpgroups, smem_bytes;
  // Where a warpgroup has room for a slice, blocks of one warpgroup are faster, though each reads
  // x, than large ones, which have a multiprocessor for themselves. Adapters of lower ranks than
  // the table's need few of these blocks. Measured on an H200 (benches/record/designs.md).
  const bool fits_slice = detail::rank_tiles(args.weights) <= kRankTiles;
  const int most_warpgroups = fits_slice ? 1 : detail::kMaxWarpgroups;
  ARIL_TRY(detail::large_m_shrink_blocks<kRankTiles>(rank_tiles, most_warpgroups, warpgroups,
                                                     smem_bytes));
  const int blocks = ceil_div(rank_tiles, kRankTiles * warpgroups);
  const dim3 grid(args.max_tiles * blocks,
                  ceil_div(detail::num_splits(args), args.splits_per_block));
  return launch(kernel, grid, warpgroups * detail::kWarpgroupThreads, smem_bytes, stream, args,
                blocks, args.splits_per_block);
}

template <typename T>
int32_t large_m_shrink(const aril_linear_args& args, void* stream) {
  const Kernels<T> kernels;
  const int rank_tiles = args.num_slices * detail::rank_tiles(args.weights);
  if (rank_tiles <= 2) return large_m_shrink_with<2>(kernels.shrink2, args, rank_tiles, stream);
  if (rank_tiles <= 4) return large_m_shrink_with<4>(kernels.shrink4, args, rank_tiles, stream);
  return large_m_shrink_with<kMaxRankTiles>(kernels.shrink8, args, rank_tiles, stream);
}

template <typename T>
int32_t large_m_expand(const aril_linear_args& args, void* stream) {
  const int blocks = out_blocks(args, args.outs_per_block);
  const dim3 grid(args.max_tiles * blocks);
  if (!detail::is_staged(args.weights)) {
    return launch(Kernels<T>().high_rank_expand, grid, detail::kSmallMThreads,
                  detail::small_m_expand_smem_bytes(args.weights, args.outs_per_block, false),
                  stream, args, blocks);
  }
  int smem_bytes;
  ARIL_TRY(detail::large_m_expand_smem<T>(args.weights, smem_bytes));
  return launch(Kernels<T>().large_m_expand, grid, detail::kExpandThreads, smem_bytes, stream, args,
                blocks, smem_bytes);
}

int32_t f32(const aril_linear_args& args, int parts, void* stream) {
  const Kernels<float> kernels;
  if (parts & kShrink) {
    ARIL_TRY(launch(kernels.shrink,
                    dim3(args.max_tiles * args.num_slices, detail::num_splits(args)),
                    detail::kF32Threads, 0, stream, args, args.num_slices));
  }
  if (!(parts & kExpand)) return 0;
  const int blocks = out_blocks(args, detail::kF32Threads);
  return launch(kernels.expand, dim3(args.max_tiles * blocks), detail::kF32Threads, 0, stream, args,
                blocks);
}

int32_t linear(const aril_linear_args& args, int parts, void* stream) {
  return dispatch(args.dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    if constexpr (sizeof(T) == sizeof(float)) {
      return f32(args, parts, stream);
    } else {
      if (!detail::is_large_m(args)) return small_m<T>(args, parts, stream);
      if (parts & kShrink) ARIL_TRY(large_m_shrink<T>(args, stream));
      return parts & kExpand ? large_m_expand<T>(args, stream) : 0;
    }
  });
}

template <typename T>
int32_t embedding(const aril_embedding_args& args, void* stream) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const int blocks = ceil_div(args.hidden, detail::kF32Threads);
    return launch(Kernels<T>().embedding, dim3(args.max_tiles * blocks), detail::kF32Threads, 0,
                  stream, args, blocks);
  } else {
    const bool staged = detail::is_staged(args.weights);
    const bool is_large_m = detail::is_large_m(args);
    const int path = (is_large_m ? static_cast<int>(EmbeddingPath::kLargeM) : 0) + !staged;
    const int blocks = ceil_div(args.hidden, args.outs_per_block);
    int smem_bytes = detail::small_m_expand_smem_bytes(args.weights, args.outs_per_block, staged);
    if (is_large_m && staged) {
      ARIL_TRY(detail::large_m_expand_smem<T>(args.weights, smem_bytes));
    }
    return launch(Kernels<T>().embedding[path], dim3(args.max_tiles * blocks),
                  detail::kExpandThreads, smem_bytes, stream, args, blocks, smem_bytes);
  }
}

}  // namespace

int32_t load_linear() {
  ARIL_TRY(Kernels<__nv_bfloat16>().load());
  ARIL_TRY(Kernels<__half>().load());
  return Kernels<float>().load();
}

}  // namespace aril

extern "C" int32_t aril_linear(const aril_linear_args* args, void* stream) {
  return aril::linear(*args, aril::kBoth, stream);
}

extern "C" int32_t aril_linear_shrink(const aril_linear_args* args, void* stream) {
  return aril::linear(*args, aril::kShrink, stream);
}

extern "C" int32_t aril_linear_expand(const aril_linear_args* args, void* stream) {
  return aril::linear(*args, aril::kExpand, stream);
}

extern "C" int32_t aril_embedding(const aril_embedding_args* args, void* stream) {
  return aril::dispatch(
      args->dtype, [&](auto element) { return aril::embedding<decltype(element)>(*args, stream); });
}
