// SPDX-License-Identifier: MIT OR Apache-2.0
#include <limits.h>
#include <stdlib.h>

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

int env(const char* n, int d) { const char* e = getenv(n); return e ? atoi(e) : d; }
int shrink_few_smem_bytes(const aril_linear_args& args, int columns) {
  const int num_lanes = ceil_div(args.in_features, ARIL_LANE_FEATURES);
  const int lanes = args.lanes_per_split < num_lanes ? args.lanes_per_split : num_lanes;
  const int rows = ARIL_TOKENS_PER_TILE + ARIL_RANK_TILE * columns;
  return lanes * ARIL_LANE_FEATURES * rows * static_cast<int>(sizeof(__half));
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
    if (detail::tokens_per_tile(args.num_tokens) == ARIL_WIDE_TILE) {
      return launch(detail::shrink_wide_kernel<T>, grid, detail::kWideThreads,
                    detail::kWideSmemBytes, stream, args, blocks);
    }
    const int smem_bytes = shrink_few_smem_bytes(
        args, columns < detail::kColumnsPerBlock ? columns : detail::kColumnsPerBlock);
    if (smem_bytes > kMaxSmemBytes) return ARIL_ERR_ARGUMENT;
    return launch(detail::shrink_few_kernel<T>, grid, detail::kFewThreads, smem_bytes, stream,
                  args, blocks);
  }
}

// How expand shares out a layer's outputs.
struct ExpandPlan {
  int outs_per_block, out_blocks, slots;
};

ExpandPlan expand_plan(int num_tokens, int max_tiles, int max_rank, int num_slices, const int32_t* out_features) {
  ExpandPlan plan = {};
  const bool wide = detail::tokens_per_tile(num_tokens) == ARIL_WIDE_TILE;
  const int rank = ceil_div(max_rank, 8) * 8;
  for (int outs = wide ? 2048 : 1024; outs >= env("MINO", 256); outs /= 2) {
    if (getenv("OPB")) outs = atoi(getenv("OPB"));
    plan.outs_per_block = outs;
    plan.out_blocks = 0;
    for (int s = 0; s < num_slices; ++s) plan.out_blocks += ceil_div(out_features[s], outs);
    if (getenv("OPB")) break;
    if (!wide && outs * rank * 2 > env("RING", 32) << 10 && outs > 256) continue;
    if (plan.out_blocks * static_cast<int64_t>(max_tiles) >= env("MINB", 264)) break;
  }
  if (plan.outs_per_block < 128) plan.outs_per_block = 128;
  int slots = plan.outs_per_block / 256;
  const int cap = (env("RING", 32) << 10) / (rank * 128 * 4);
  slots = slots < cap ? slots : cap;
  plan.slots = slots < 1 ? 1 : slots < 2 && wide ? 2 : slots > 16 ? 16 : slots;
  return plan;
}

int expand_smem_bytes(const aril_weights& weights, int tokens, int slots, bool staged) {
  const int v = tokens * ceil_div(weights.max_rank, detail::kRanksPerStep) *
                detail::kRanksPerStep * detail::kTerms;
  const int b = detail::kExpandWarps * slots * detail::kOutTiles * ARIL_OUT_TILE * rank_tiles(weights) * ARIL_RANK_TILE;
  return (v + (staged ? b : 0)) * static_cast<int>(sizeof(__half));
}

// Launches the instance of expand for the batch's tiles and the ranks: `Kernels<T, kTokens,
// kStaged>::kernel`.
template <template <typename, int, bool> typename Kernels, typename T, typename Args>
int32_t launch_expand(const Args& args, const ExpandPlan& plan, void* stream) {
  const dim3 grid(args.max_tiles * plan.out_blocks);
  const auto launch_as = [&](auto kernel, int tokens, bool staged) {
    return launch(kernel, grid, detail::kExpandThreads,
                  expand_smem_bytes(args.weights, tokens, plan.slots, staged), stream, args, plan.out_blocks,
                  plan.outs_per_block, plan.slots);
  };
  if (args.weights.max_rank > detail::kMaxStagedRank) {
    return launch_as(Kernels<T, ARIL_TOKENS_PER_TILE, false>::kernel, ARIL_TOKENS_PER_TILE, false);
  }
  return detail::tokens_per_tile(args.num_tokens) == ARIL_WIDE_TILE
             ? launch_as(Kernels<T, ARIL_WIDE_TILE, true>::kernel, ARIL_WIDE_TILE, true)
             : launch_as(Kernels<T, ARIL_TOKENS_PER_TILE, true>::kernel, ARIL_TOKENS_PER_TILE, true);
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

extern "C" int32_t aril_linear(const aril_linear_args* args, void* stream) {
  ARIL_TRY(aril_linear_shrink(args, stream));
  return aril_linear_expand(args, stream);
}

extern "C" int32_t aril_linear_expand(const aril_linear_args* args, void* stream) {
  return aril::dispatch(args->dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    if constexpr (sizeof(T) == sizeof(float)) {
      int out_blocks = 0;
      for (int slice = 0; slice < args->num_slices; ++slice) {
        out_blocks += aril::ceil_div(args->out_features[slice], aril::detail::kF32Threads);
      }
      return aril::launch(aril::detail::expand_f32_kernel, dim3(args->max_tiles * out_blocks),
                          aril::detail::kF32Threads, 0, stream, *args, out_blocks);
    } else {
      return aril::launch_expand<aril::LinearExpand, T>(*args, aril::expand_plan(args->num_tokens, args->max_tiles, args->weights.max_rank, args->num_slices, args->out_features), stream);
    }
  });
}

extern "C" int32_t aril_embedding(const aril_embedding_args* args, void* stream) {
  return aril::dispatch(args->dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    if constexpr (sizeof(T) == sizeof(float)) {
      const int out_blocks = aril::ceil_div(args->hidden, aril::detail::kF32Threads);
      return aril::launch(aril::detail::embedding_f32_kernel, dim3(args->max_tiles * out_blocks),
                          aril::detail::kF32Threads, 0, stream, *args, out_blocks);
    } else {
      return aril::launch_expand<aril::Embedding, T>(*args, aril::expand_plan(args->num_tokens, args->max_tiles, args->weights.max_rank, 1, &args->hidden), stream);
    }
  });
}
