// SPDX-License-Identifier: MIT OR Apache-2.0
#include "host/launch.cuh"
#include "linear/embedding.cuh"
#include "linear/f32.cuh"
#include "linear/high_rank.cuh"
#include "linear/large_m.cuh"
#include "linear/small_m.cuh"

namespace aril {
namespace {

using detail::ceil_div;
using detail::EmbeddingPath;

enum Part { kShrink = 1, kExpand = 2, kBoth = kShrink | kExpand };

int out_blocks(const aril_linear_args& args, int outs_per_block) {
  int blocks = 0;
  for (int slice = 0; slice < args.num_slices; ++slice) {
    blocks += ceil_div(args.out_features[slice], outs_per_block);
  }
  return blocks;
}

template <typename T>
int32_t small_m(const aril_linear_args& args, int parts, void* stream) {
  const int columns = args.num_slices * detail::rank_tiles(args.weights);
  detail::SmallMGrid grid = {};
  grid.columns = ceil_div(columns, detail::kSmallMRankTiles);
  grid.groups = ceil_div(args.in_features, detail::kSlabFeatures);
  grid.outs = out_blocks(args, args.outs_per_block);
  grid.shrink = parts & kShrink ? args.max_tiles * grid.columns * grid.groups : 0;
  grid.apart = parts == kExpand;
  const int expand = parts & kExpand ? args.max_tiles * grid.outs : 0;
  const int rows = args.num_tokens < ARIL_TOKENS_PER_TILE ? args.num_tokens : ARIL_TOKENS_PER_TILE;
  const int shrink_bytes = detail::small_m_shrink_smem_bytes(rows);
  const bool staged = detail::is_staged(args.weights);
  const int expand_bytes =
      detail::small_m_expand_smem_bytes(args.weights, args.outs_per_block, staged);
  const auto kernel = staged ? detail::small_m_kernel<T, true> : detail::small_m_kernel<T, false>;
  return launch(kernel, dim3(grid.shrink + expand), detail::kSmallMThreads,
                shrink_bytes > expand_bytes ? shrink_bytes : expand_bytes, stream, args, grid);
}

template <typename T, int kColumns>
int32_t large_m_shrink_as(const aril_linear_args& args, int columns, void* stream) {
  int warpgroups, smem_bytes;
  ARIL_TRY(detail::wide_shrink_blocks<kColumns>(columns, warpgroups, smem_bytes));
  const int blocks = ceil_div(columns, kColumns * warpgroups);
  return launch(detail::large_m_shrink_kernel<T, kColumns>,
                dim3(args.max_tiles * blocks, detail::num_splits(args)),
                warpgroups * detail::kWarpgroupThreads, smem_bytes, stream, args, blocks);
}

template <typename T>
int32_t large_m_shrink(const aril_linear_args& args, void* stream) {
  const int columns = args.num_slices * detail::rank_tiles(args.weights);
  if (columns <= 2) return large_m_shrink_as<T, 2>(args, columns, stream);
  if (columns <= 4) return large_m_shrink_as<T, 4>(args, columns, stream);
  return large_m_shrink_as<T, detail::kMaxColumns>(args, columns, stream);
}

template <typename T>
int32_t large_m_expand(const aril_linear_args& args, void* stream) {
  const int blocks = out_blocks(args, args.outs_per_block);
  const dim3 grid(args.max_tiles * blocks);
  if (!detail::is_staged(args.weights)) {
    return launch(detail::high_rank_expand_kernel<T>, grid, detail::kSmallMThreads,
                  detail::small_m_expand_smem_bytes(args.weights, args.outs_per_block, false),
                  stream, args, blocks);
  }
  int ring_bytes, smem_bytes;
  ARIL_TRY(detail::large_m_expand_smem(args.weights, ring_bytes, smem_bytes));
  return launch(detail::large_m_expand_kernel<T>, grid, detail::kExpandThreads, smem_bytes, stream,
                args, blocks, ring_bytes);
}

int32_t f32(const aril_linear_args& args, int parts, void* stream) {
  if (parts & kShrink) {
    ARIL_TRY(launch(detail::shrink_f32_kernel,
                    dim3(args.max_tiles * args.num_slices, detail::num_splits(args)),
                    detail::kF32Threads, 0, stream, args, args.num_slices));
  }
  if (!(parts & kExpand)) return 0;
  const int blocks = out_blocks(args, detail::kF32Threads);
  return launch(detail::expand_f32_kernel, dim3(args.max_tiles * blocks), detail::kF32Threads, 0,
                stream, args, blocks);
}

int32_t linear(const aril_linear_args& args, int parts, void* stream) {
  return dispatch(args.dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    if constexpr (sizeof(T) == sizeof(float)) {
      return f32(args, parts, stream);
    } else {
      if (!detail::is_large_m(args.num_tokens)) return small_m<T>(args, parts, stream);
      if (parts & kShrink) ARIL_TRY(large_m_shrink<T>(args, stream));
      return parts & kExpand ? large_m_expand<T>(args, stream) : 0;
    }
  });
}

template <typename T>
int32_t embedding(const aril_embedding_args& args, void* stream) {
  const bool staged = detail::is_staged(args.weights);
  if constexpr (sizeof(T) == sizeof(float)) {
    const int blocks = ceil_div(args.hidden, detail::kF32Threads);
    return launch(detail::embedding_f32_kernel, dim3(args.max_tiles * blocks), detail::kF32Threads,
                  0, stream, args, blocks);
  } else {
    const int blocks = ceil_div(args.hidden, args.outs_per_block);
    const dim3 grid(args.max_tiles * blocks);
    if (detail::is_large_m(args.num_tokens) && staged) {
      int ring_bytes, smem_bytes;
      ARIL_TRY(detail::large_m_expand_smem(args.weights, ring_bytes, smem_bytes));
      return launch(detail::embedding_kernel<T, EmbeddingPath::kLargeM>, grid,
                    detail::kExpandThreads, smem_bytes, stream, args, blocks, ring_bytes);
    }
    const auto kernel = detail::is_large_m(args.num_tokens)
                            ? detail::embedding_kernel<T, EmbeddingPath::kLargeMHighRank>
                        : staged ? detail::embedding_kernel<T, EmbeddingPath::kSmallM>
                                 : detail::embedding_kernel<T, EmbeddingPath::kSmallMHighRank>;
    return launch(kernel, grid, detail::kSmallMThreads,
                  detail::small_m_expand_smem_bytes(args.weights, args.outs_per_block, staged),
                  stream, args, blocks, 0);
  }
}

template <typename T>
int32_t load_kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    ARIL_TRY(load(detail::shrink_f32_kernel));
    ARIL_TRY(load(detail::expand_f32_kernel));
    return load(detail::embedding_f32_kernel);
  } else {
    int bytes;
    ARIL_TRY(max_smem_bytes(bytes));
    ARIL_TRY((load(detail::small_m_kernel<T, true>, bytes)));
    ARIL_TRY((load(detail::small_m_kernel<T, false>, bytes)));
    ARIL_TRY((load(detail::large_m_shrink_kernel<T, 2>, bytes)));
    ARIL_TRY((load(detail::large_m_shrink_kernel<T, 4>, bytes)));
    ARIL_TRY((load(detail::large_m_shrink_kernel<T, detail::kMaxColumns>, bytes)));
    ARIL_TRY(load(detail::large_m_expand_kernel<T>, bytes));
    ARIL_TRY(load(detail::high_rank_expand_kernel<T>, bytes));
    ARIL_TRY((load(detail::embedding_kernel<T, EmbeddingPath::kSmallM>, bytes)));
    ARIL_TRY((load(detail::embedding_kernel<T, EmbeddingPath::kSmallMHighRank>, bytes)));
    ARIL_TRY((load(detail::embedding_kernel<T, EmbeddingPath::kLargeM>, bytes)));
    return load(detail::embedding_kernel<T, EmbeddingPath::kLargeMHighRank>, bytes);
  }
}

}  // namespace

int32_t load_linear() {
  for (const int32_t dtype : {ARIL_BF16, ARIL_F16, ARIL_F32}) {
    ARIL_TRY(dispatch(dtype, [](auto element) { return load_kernels<decltype(element)>(); }));
  }
  return 0;
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
