// SPDX-License-Identifier: MIT OR Apache-2.0
#include "kernels/linear.cuh"

#include "common/launch.cuh"

namespace aril {
namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

size_t expand_smem_bytes(int max_rank) {
  constexpr int kLargestVec = 8;
  return ARIL_TOKENS_PER_TILE * sizeof(float) * ceil_div(max_rank, kLargestVec) * kLargestVec;
}

}  // namespace

int32_t load_linear() {
  for (const int32_t dtype : {ARIL_BF16, ARIL_F16, ARIL_F32}) {
    ARIL_TRY(dispatch(dtype, [](auto element) -> int32_t {
      using T = decltype(element);
      ARIL_TRY(load(detail::shrink_kernel<T>));
      ARIL_TRY(load(detail::expand_kernel<T>));
      return load(detail::embedding_kernel<T>);
    }));
  }
  return 0;
}

}  // namespace aril

extern "C" int32_t aril_linear_shrink(const aril_linear_args* args, void* stream) {
  return aril::dispatch(args->dtype, [&](auto element) {
    const int rank_tiles = aril::ceil_div(args->weights.max_rank, ARIL_RANKS_PER_TILE);
    const dim3 grid(args->max_tiles, args->num_splits, args->num_slices * rank_tiles);
    return aril::launch(aril::detail::shrink_kernel<decltype(element)>, grid, aril::detail::kThreads, 0, stream, *args);
  });
}

extern "C" int32_t aril_linear_expand(const aril_linear_args* args, void* stream) {
  return aril::dispatch(args->dtype, [&](auto element) {
    int out_tiles = 0;
    for (int slice = 0; slice < args->num_slices; ++slice) {
      out_tiles += aril::ceil_div(args->out_features[slice], ARIL_OUT_PER_TILE);
    }
    return aril::launch(aril::detail::expand_kernel<decltype(element)>, dim3(args->max_tiles, out_tiles),
                        aril::detail::kThreads, aril::expand_smem_bytes(args->weights.max_rank), stream, *args);
  });
}

extern "C" int32_t aril_embedding(const aril_embedding_args* args, void* stream) {
  return aril::dispatch(args->dtype, [&](auto element) {
    const dim3 grid(args->max_tiles, aril::ceil_div(args->hidden, ARIL_OUT_PER_TILE));
    return aril::launch(aril::detail::embedding_kernel<decltype(element)>, grid, aril::detail::kThreads,
                        aril::expand_smem_bytes(args->weights.max_rank), stream, *args);
  });
}
