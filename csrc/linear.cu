// SPDX-License-Identifier: MIT OR Apache-2.0
#include "common/launch.cuh"
#include "kernels/expand.cuh"
#include "kernels/shrink.cuh"
#include "kernels/shrink_mma.cuh"

namespace aril {
namespace {

using detail::ceil_div;

size_t expand_smem_bytes(int max_rank) {
  constexpr int kLargestVec = 8;
  return ARIL_TOKENS_PER_TILE * sizeof(float) * ceil_div(max_rank, kLargestVec) * kLargestVec;
}

template <typename T>
int32_t shrink(const aril_linear_args& args, void* stream) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const int rank_tiles = ceil_div(args.weights.max_rank, ARIL_RANKS_PER_TILE);
    const dim3 grid(args.max_tiles, detail::num_splits(args), args.num_slices * rank_tiles);
    return launch(detail::shrink_f32_kernel, grid, detail::kShrinkThreads, 0, stream, args);
  } else {
    const int column_tiles = args.num_slices * ceil_div(args.weights.max_rank, detail::kColumns);
    const dim3 grid(args.max_tiles, detail::num_splits(args),
                    ceil_div(column_tiles, detail::kColumnTiles));
    return args.lanes_per_split < ARIL_SUM_LANES
               ? launch(detail::shrink_lanes_kernel<T>, grid, detail::kLanesThreads, 0, stream,
                        args)
               : launch(detail::shrink_rows_kernel<T>, grid, detail::kRowsThreads, 0, stream, args);
  }
}

template <typename T>
int32_t load_kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    ARIL_TRY(load(detail::shrink_f32_kernel));
  } else {
    ARIL_TRY(load(detail::shrink_lanes_kernel<T>));
    ARIL_TRY(load(detail::shrink_rows_kernel<T>));
  }
  ARIL_TRY(load(detail::expand_kernel<T>));
  return load(detail::embedding_kernel<T>);
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
  return aril::dispatch(args->dtype, [&](auto element) {
    int out_tiles = 0;
    for (int slice = 0; slice < args->num_slices; ++slice) {
      out_tiles += aril::ceil_div(args->out_features[slice], ARIL_OUT_PER_TILE);
    }
    return aril::launch(aril::detail::expand_kernel<decltype(element)>,
                        dim3(args->max_tiles, out_tiles), aril::detail::kExpandThreads,
                        aril::expand_smem_bytes(args->weights.max_rank), stream, *args);
  });
}

extern "C" int32_t aril_embedding(const aril_embedding_args* args, void* stream) {
  return aril::dispatch(args->dtype, [&](auto element) {
    const dim3 grid(args->max_tiles, aril::ceil_div(args->hidden, ARIL_OUT_PER_TILE));
    return aril::launch(aril::detail::embedding_kernel<decltype(element)>, grid,
                        aril::detail::kExpandThreads,
                        aril::expand_smem_bytes(args->weights.max_rank), stream, *args);
  });
}
