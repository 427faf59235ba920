// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_linear, aril_linear_shrink, aril_linear_expand and aril_embedding: launches the kernels that
// the plan (src/plan/linear) has chosen, and refuses a plan that does not fit them.
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

enum Half { kShrink = 1, kExpand = 2, kBoth = kShrink | kExpand };

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

// Blocks of a tile.
int out_blocks(const aril_linear_args& args, int outs_per_block) {
  int blocks = 0;
  for (int slice = 0; slice < args.num_slices; ++slice) {
    blocks += ceil_div(args.out_features[slice], outs_per_block);
  }
  return blocks;
}

template <typename T>
int32_t small_m(const aril_linear_args& args, int halves, void* stream) {
  const aril_linear_plan& plan = args.plan;
  const bool staged = detail::is_staged(args.weights);
  const int rank_tiles = args.num_slices * detail::rank_tiles(args.weights);
  const int rank_blocks = ceil_div(rank_tiles, detail::kSmallMRankTiles);
  const int slabs = ceil_div(args.in_features, detail::kSlabFeatures);
  const auto shares = [&](int outs_per_block) {
    const detail::Divisor out_blocks(aril::out_blocks(args, outs_per_block));
    return detail::ExpandShares{plan.expand_blocks / out_blocks, out_blocks,
                                detail::Divisor(outs_per_block)};
  };
  detail::SmallMGrid grid = {};
  grid.rank_blocks = detail::Divisor(rank_blocks);
  grid.slabs = detail::Divisor(slabs);
  grid.num_slices = detail::Divisor(args.num_slices);
  grid.apart = halves == kExpand;
  grid.shrink_tiles = plan.shrink_tiles;
  grid.few_tiles = plan.few_tiles;
  grid.many = shares(plan.outs_per_block);
  grid.few = plan.takes_turns ? shares(plan.outs_per_block_of_few) : grid.many;
  grid.shrink = halves & kShrink ? grid.shrink_tiles * rank_blocks * slabs : 0;
  const int expand = halves & kExpand ? plan.expand_blocks : 0;
  const int rows = min(args.num_tokens, ARIL_TOKENS_PER_TILE);
  ARIL_CHECK(plan.takes_turns
                 ? grid.shrink_tiles >= 1 && grid.few.tiles >= grid.few_tiles &&
                       grid.many.tiles >= 1
                 : grid.shrink_tiles == plan.max_tiles && grid.many.tiles == plan.max_tiles);
  ARIL_CHECK(plan.smem_bytes >= detail::small_m_shrink_smem_bytes(rows) &&
             plan.smem_bytes >=
                 detail::small_m_expand_smem_bytes(args.weights, plan.outs_per_block, staged));
  return launch(Kernels<T>().small_m[plan.takes_turns != 0][staged], dim3(grid.shrink + expand),
                detail::kSmallMThreads, plan.smem_bytes, stream, args, grid);
}

template <int kRankTiles>
int32_t large_m_shrink_with(const Kernel<aril_linear_args, int, int>& kernel,
                            const aril_linear_args& args, void* stream) {
  const aril_linear_plan& plan = args.plan;
  ARIL_CHECK(plan.warpgroups >= 1 &&
             plan.warpgroups <= detail::shrink_threads<kRankTiles> / detail::kWarpgroupThreads &&
             plan.splits_per_block >= 1 &&
             plan.shrink_smem_bytes >=
                 detail::large_m_shrink_smem_bytes<kRankTiles>(plan.warpgroups));
  const int rank_tiles = args.num_slices * detail::rank_tiles(args.weights);
  const int blocks = ceil_div(rank_tiles, kRankTiles * plan.warpgroups);
  const dim3 grid(plan.max_tiles * blocks,
                  ceil_div(detail::num_splits(args), plan.splits_per_block));
  return launch(kernel, grid, plan.warpgroups * detail::kWarpgroupThreads, plan.shrink_smem_bytes,
                stream, args, blocks, plan.splits_per_block);
}

template <typename T>
int32_t large_m_shrink(const aril_linear_args& args, void* stream) {
  const Kernels<T> kernels;
  switch (args.plan.rank_tiles) {
    case 2:
      return large_m_shrink_with<2>(kernels.shrink2, args, stream);
    case 4:
      return large_m_shrink_with<4>(kernels.shrink4, args, stream);
    case kMaxRankTiles:
      return large_m_shrink_with<kMaxRankTiles>(kernels.shrink8, args, stream);
    default:
      return ARIL_ERR_ARGUMENT;
  }
}

template <typename T>
int32_t large_m_expand(const aril_linear_args& args, void* stream) {
  const aril_linear_plan& plan = args.plan;
  const int blocks = out_blocks(args, plan.outs_per_block);
  ARIL_CHECK(plan.expand_blocks == plan.max_tiles * blocks);
  if (!detail::is_staged(args.weights)) {
    ARIL_CHECK(plan.smem_bytes >=
               detail::small_m_expand_smem_bytes(args.weights, plan.outs_per_block, false));
    return launch(Kernels<T>().high_rank_expand, dim3(plan.expand_blocks), detail::kSmallMThreads,
                  plan.smem_bytes, stream, args, blocks);
  }
  ARIL_CHECK(plan.smem_bytes >= detail::large_m_expand_smem_bytes(args.weights));
  return launch(Kernels<T>().large_m_expand, dim3(plan.expand_blocks), detail::kExpandThreads,
                plan.smem_bytes, stream, args, blocks, plan.smem_bytes);
}

int32_t f32(const aril_linear_args& args, int halves, void* stream) {
  const Kernels<float> kernels;
  const int tiles = args.plan.max_tiles;
  if (halves & kShrink) {
    ARIL_TRY(launch(kernels.shrink, dim3(tiles * args.num_slices, detail::num_splits(args)),
                    detail::kF32Threads, 0, stream, args, args.num_slices));
  }
  if (!(halves & kExpand)) return 0;
  const int blocks = out_blocks(args, detail::kF32Threads);
  return launch(kernels.expand, dim3(tiles * blocks), detail::kF32Threads, 0, stream, args, blocks);
}

int32_t linear(const aril_linear_args& args, int halves, void* stream) {
  ARIL_CHECK(!(halves & kShrink) || are_set(args.x));
  ARIL_CHECK(!(halves & kExpand) || are_set(args.y, args.num_slices));
  return dispatch(args.dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    if constexpr (sizeof(T) == sizeof(float)) {
      return f32(args, halves, stream);
    } else {
      if (!detail::is_large_m(args)) return small_m<T>(args, halves, stream);
      if (halves & kShrink) ARIL_TRY(large_m_shrink<T>(args, stream));
      return halves & kExpand ? large_m_expand<T>(args, stream) : 0;
    }
  });
}

template <typename T>
int32_t embedding(const aril_embedding_args& args, void* stream) {
  const aril_embedding_plan& plan = args.plan;
  if constexpr (sizeof(T) == sizeof(float)) {
    const int blocks = ceil_div(args.hidden, detail::kF32Threads);
    return launch(Kernels<T>().embedding, dim3(plan.max_tiles * blocks), detail::kF32Threads, 0,
                  stream, args, blocks);
  } else {
    const bool staged = detail::is_staged(args.weights);
    const bool is_large_m = detail::is_large_m(args);
    const int path = (is_large_m ? static_cast<int>(EmbeddingPath::kLargeM) : 0) + !staged;
    const int blocks = ceil_div(args.hidden, plan.outs_per_block);
    const int least = is_large_m && staged ? detail::large_m_expand_smem_bytes(args.weights)
                                           : detail::small_m_expand_smem_bytes(
                                                 args.weights, plan.outs_per_block, staged);
    ARIL_CHECK(plan.smem_bytes >= least && plan.blocks == plan.max_tiles * blocks);
    return launch(Kernels<T>().embedding[path], dim3(plan.blocks), detail::kExpandThreads,
                  plan.smem_bytes, stream, args, blocks, plan.smem_bytes);
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
  ARIL_CHECK(aril::are_set(args->token_ids) && aril::are_set(args->y));
  return aril::dispatch(
      args->dtype, [&](auto element) { return aril::embedding<decltype(element)>(*args, stream); });
}
