// SPDX-License-Identifier: MIT OR Apache-2.0
#include "common/launch.cuh"
#include "kernels/expand_mma.cuh"
#include "kernels/f32.cuh"
#include "kernels/shrink_mma.cuh"

namespace aril {
namespace {

using detail::ceil_div;

// What a block may have on every device from sm_80 on.
constexpr int kMaxSmemBytes = 96 << 10;

int rank_tiles(const aril_weights& weights) { return ceil_div(weights.max_rank, ARIL_RANK_TILE); }

int shrink_few_smem_bytes(const aril_linear_args& args) {
  const int num_lanes = ceil_div(args.in_features, ARIL_LANE_FEATURES);
  const int lanes = args.lanes_per_split < num_lanes ? args.lanes_per_split : num_lanes;
  const int slots = lanes < detail::kFewSlots ? lanes : detail::kFewSlots;
  const int columns = args.num_slices * rank_tiles(args.weights);
  const int held = columns < detail::kColumnsPerBlock ? columns : detail::kColumnsPerBlock;
  const int rows = lanes * ARIL_TOKENS_PER_TILE + slots * ARIL_RANK_TILE * held;
  return rows * ARIL_LANE_FEATURES * static_cast<int>(sizeof(__half));
}

template <typename T>
int32_t shrink(const aril_linear_args& args, void* stream) {
  const int splits = detail::num_splits(args);
  if constexpr (sizeof(T) == sizeof(float)) {
    return launch(detail::shrink_f32_kernel, dim3(args.max_tiles * args.num_slices, splits),
                  detail::kF32Threads, 0, stream, args, args.num_slices);
  } else {
    const int columns = args.num_slices * rank_tiles(args.weights);
    const int blocks = ceil_div(columns, detail::kColumnsPerBlock);
    const dim3 grid(args.max_tiles * blocks, splits);
    if (detail::is_wide(args.num_tokens)) {
      return launch(detail::shrink_wide_kernel<T>, grid, detail::kWideThreads,
                    detail::kWideSmemBytes, stream, args, blocks);
    }
    const int smem_bytes = shrink_few_smem_bytes(args);
    if (smem_bytes > kMaxSmemBytes) return ARIL_ERR_ARGUMENT;
    return launch(detail::shrink_few_kernel<T>, grid, detail::kFewThreads, smem_bytes, stream, args,
                  blocks);
  }
}

int expand_smem_bytes(const aril_weights& weights, int tokens, int slots, bool staged) {
  const int v = tokens * ceil_div(weights.max_rank, detail::kRanksPerStep) * detail::kRanksPerStep *
                detail::kTerms;
  const int b =
      ARIL_EXPAND_WARPS * slots * ARIL_OUTS_PER_WARP * rank_tiles(weights) * ARIL_RANK_TILE;
  return (v + (staged ? b : 0)) * static_cast<int>(sizeof(__half));
}

// Launches the instance of expand for the batch's tiles and the ranks: `Kernels<T, kTokens,
// kStaged>::kernel`.
template <template <typename, int, bool> typename Kernels, typename T, typename Args>
int32_t launch_expand(const Args& args, int out_blocks, void* stream) {
  const dim3 grid(args.max_tiles * out_blocks);
  const auto launch_as = [&](auto kernel, int tokens, bool staged) {
    return launch(kernel, grid, detail::kExpandThreads,
                  expand_smem_bytes(args.weights, tokens, args.expand.slots, staged), stream, args,
                  out_blocks);
  };
  if (args.weights.max_rank > ARIL_STAGED_RANK) {
    return launch_as(Kernels<T, ARIL_TOKENS_PER_TILE, false>::kernel, ARIL_TOKENS_PER_TILE, false);
  }
  return detail::is_wide(args.num_tokens)
             ? launch_as(Kernels<T, ARIL_WIDE_TILE, true>::kernel, ARIL_WIDE_TILE, true)
             : launch_as(Kernels<T, ARIL_TOKENS_PER_TILE, true>::kernel, ARIL_TOKENS_PER_TILE,
                         true);
}

template <typename T, int kTokens, bool kStaged>
struct LinearExpand {
  static constexpr auto kernel = detail::expand_kernel<T, kTokens, kStaged>;
};

template <typename T, int kTokens, bool kStaged>
struct Embedding {
  static constexpr auto kernel = detail::embedding_kernel<T, kTokens, kStaged>;
};

template <template <typename, int, bool> typename Kernels, typename T>
int32_t load_expand() {
  ARIL_TRY(load(Kernels<T, ARIL_TOKENS_PER_TILE, false>::kernel, kMaxSmemBytes));
  ARIL_TRY(load(Kernels<T, ARIL_TOKENS_PER_TILE, true>::kernel, kMaxSmemBytes));
  return load(Kernels<T, ARIL_WIDE_TILE, true>::kernel, kMaxSmemBytes);
}

template <typename T>
int32_t load_kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    ARIL_TRY(load(detail::shrink_f32_kernel));
    ARIL_TRY(load(detail::expand_f32_kernel));
    return load(detail::embedding_f32_kernel);
  } else {
    ARIL_TRY(load(detail::shrink_wide_kernel<T>, detail::kWideSmemBytes));
    ARIL_TRY(load(detail::shrink_few_kernel<T>, kMaxSmemBytes));
    ARIL_TRY((load_expand<LinearExpand, T>()));
    return load_expand<Embedding, T>();
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

extern "C" int32_t aril_linear_shrink(const aril_linear_args* args, void* stream) {
  return aril::dispatch(
      args->dtype, [&](auto element) { return aril::shrink<decltype(element)>(*args, stream); });
}

extern "C" int32_t aril_linear_expand(const aril_linear_args* args, void* stream) {
  return aril::dispatch(args->dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    constexpr bool kF32 = sizeof(T) == sizeof(float);
    const int outs_per_block = kF32 ? aril::detail::kF32Threads : args->expand.outs_per_block;
    int out_blocks = 0;
    for (int slice = 0; slice < args->num_slices; ++slice) {
      out_blocks += aril::ceil_div(args->out_features[slice], outs_per_block);
    }
    if constexpr (kF32) {
      return aril::launch(aril::detail::expand_f32_kernel, dim3(args->max_tiles * out_blocks),
                          aril::detail::kF32Threads, 0, stream, *args, out_blocks);
    } else {
      return aril::launch_expand<aril::LinearExpand, T>(*args, out_blocks, stream);
    }
  });
}

extern "C" int32_t aril_embedding(const aril_embedding_args* args, void* stream) {
  return aril::dispatch(args->dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    constexpr bool kF32 = sizeof(T) == sizeof(float);
    const int outs_per_block = kF32 ? aril::detail::kF32Threads : args->expand.outs_per_block;
    const int out_blocks = aril::ceil_div(args->hidden, outs_per_block);
    if constexpr (kF32) {
      return aril::launch(aril::detail::embedding_f32_kernel, dim3(args->max_tiles * out_blocks),
                          aril::detail::kF32Threads, 0, stream, *args, out_blocks);
    } else {
      return aril::launch_expand<aril::Embedding, T>(*args, out_blocks, stream);
    }
  });
}
