// SPDX-License-Identifier: MIT OR Apache-2.0
#include "common/launch.cuh"
#include "kernels/align.cuh"
#include "kernels/experts.cuh"
#include "kernels/experts_f32.cuh"
#include "kernels/group.cuh"

namespace aril {
namespace {

using detail::ceil_div;

template <typename T, int kHalves>
int32_t experts(const aril_experts_args& args, void* stream) {
  detail::ExpertsGrid grid = {};
  grid.first_shrink = args.groups_routes && detail::are_few(args.num_tokens, args.top_k);
  grid.shrink_blocks = args.shrink_blocks;
  grid.rank_tiles = ceil_div(args.weights.max_rank, ARIL_RANK_TILE);
  grid.groups = ceil_div(args.in_features, detail::kGroupFeatures);
  grid.outs = ceil_div(args.out_features, args.outs_per_block);
  const int blocks = grid.first_shrink + args.shrink_blocks + args.expand_blocks;
  const size_t of_sort = sizeof(detail::RouteSort<detail::kExpertsThreads>);
  const size_t of_expand =
      (detail::rank_steps(args.weights) + args.outs_per_block / detail::kOutsPerUnit) *
      detail::kExpertsThreads * sizeof(detail::LaneTerms<kHalves>);
  const size_t smem_bytes = max(grid.first_shrink > 0 ? of_sort : 0, of_expand);
  return launch(detail::experts_kernel<T, kHalves>, dim3(blocks), detail::kExpertsThreads,
                smem_bytes, stream, args, grid);
}

template <typename T>
int32_t load_kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return load(detail::experts_f32_kernel);
  } else {
    int bytes;
    ARIL_TRY(max_smem_bytes(bytes));
    ARIL_TRY((load(detail::experts_kernel<T, 1>, bytes)));
    return load(detail::experts_kernel<T, 2>, bytes);
  }
}

}  // namespace

int32_t load_experts() {
  ARIL_TRY(load(detail::group_kernel));
  ARIL_TRY(load(detail::align_kernel, ARIL_MAX_SLOTS * static_cast<int>(sizeof(int32_t))));
  for (const int32_t dtype : {ARIL_BF16, ARIL_F16, ARIL_F32}) {
    ARIL_TRY(dispatch(dtype, [](auto element) { return load_kernels<decltype(element)>(); }));
  }
  return 0;
}

}  // namespace aril

extern "C" int32_t aril_group(const aril_group_args* args, void* stream) {
  if (aril::detail::are_few(args->num_tokens, args->top_k)) return 0;
  return aril::launch(aril::detail::group_kernel, dim3(args->top_k.num_experts + 2),
                      aril::detail::kGroupThreads, 0, stream, *args);
}

extern "C" int32_t aril_align(const aril_align_args* args, void* stream) {
  if (args->num_slots > ARIL_MAX_SLOTS) return ARIL_ERR_ARGUMENT;
  if (args->top_k.num_experts > ARIL_MAX_EXPERTS) return ARIL_ERR_ARGUMENT;
  const size_t smem_bytes = args->num_slots * sizeof(int32_t);
  return aril::launch(aril::detail::align_kernel, dim3(max(args->top_k.num_experts, 1)),
                      aril::detail::kAlignThreads, smem_bytes, stream, *args);
}

extern "C" int32_t aril_experts(const aril_experts_args* args, void* stream) {
  return aril::dispatch(args->dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    if constexpr (sizeof(T) == sizeof(float)) {
      return aril::launch(aril::detail::experts_f32_kernel, dim3(args->shrink_blocks),
                          aril::detail::kF32Threads, 0, stream, *args);
    } else {
      return aril::detail::are_few(args->num_tokens, args->top_k)
                 ? aril::experts<T, 1>(*args, stream)
                 : aril::experts<T, 2>(*args, stream);
    }
  });
}
