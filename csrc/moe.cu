// SPDX-License-Identifier: MIT OR Apache-2.0
#include "host/launch.cuh"
#include "moe/activate.cuh"
#include "moe/combine.cuh"
#include "moe/expand.cuh"
#include "moe/f32.cuh"
#include "moe/group/align.cuh"
#include "moe/group/grid.cuh"
#include "moe/large_m.cuh"

namespace aril {
namespace {

using detail::ceil_div;

template <typename T, bool kEachBlock>
int32_t experts_of(aril_experts_args args, void* stream) {
  const detail::ExpertsGrid grid = {kEachBlock ? 0 : args.groups_routes, args.shrink_blocks,
                                    ceil_div(args.weights.max_rank, ARIL_RANK_TILE),
                                    ceil_div(args.in_features, detail::kSlabFeatures),
                                    args.wide_shrink_blocks > 0};
  const auto launch_with = [&](auto kernel, int of_warp, const auto&... more) {
    const int blocks = grid.first_shrink + args.shrink_blocks + args.expand_blocks;
    int bytes = max(detail::kExpertsShrinkBytes, detail::kExpertsWarps * of_warp);
    if (!kEachBlock && detail::fit_one_block(args.num_tokens, args.top_k)) {
      // For all operations on so many, whether they sort or not: for others the multiprocessors
      // would divide their memory anew.
      using Sort = detail::OneBlockSort<detail::kExpertsThreads>;
      bytes = max(max(bytes, Sort::scratch_bytes(args.num_tokens, args.top_k)),
                  detail::kExpertsShrinkBytes + static_cast<int>(sizeof(detail::LocalTiles)));
    }
    return launch(kernel, dim3(blocks), detail::kExpertsThreads, bytes, stream, args, grid,
                  more...);
  };
  switch (args.form) {
    case ARIL_ACTIVATE:
      return launch_with(detail::activate_kernel<T, kEachBlock>, sizeof(detail::ActivateStage));
    case ARIL_ADD_COMBINED:
    case ARIL_COMBINE:
      return launch_with(detail::combine_kernel<T, kEachBlock>, sizeof(detail::CombineStage));
    default:
      break;
  }
  const auto stages = [&] {
    return detail::ExpandStages(detail::kWholeRankTiles<T>, args.weights.max_rank,
                                args.outs_per_block);
  };
  int max_bytes;
  ARIL_TRY(max_smem_bytes(max_bytes));
  if (detail::kExpertsWarps * stages().of_warp > max_bytes) {
    args.outs_per_block = ARIL_OUT_TILE;
    const int pieces = args.num_slices * ceil_div(args.out_features, ARIL_OUT_TILE);
    args.expand_blocks = max(args.expand_blocks, ceil_div(pieces, detail::kExpertsWarps));
  }
  return launch_with(detail::experts_kernel<T, kEachBlock>, stages().of_warp, stages());
}

template <typename T>
int32_t experts(const aril_experts_args& args, void* stream) {
  return detail::fit_each_block(args.num_tokens, args.top_k) ? experts_of<T, true>(args, stream)
                                                             : experts_of<T, false>(args, stream);
}

int32_t experts_f32(const aril_experts_args& args, void* stream) {
  const auto kernel = args.form == ARIL_ACTIVATE ? detail::activate_f32_kernel
                      : args.form == ARIL_ADD_COMBINED || args.form == ARIL_COMBINE
                          ? detail::combine_f32_kernel
                          : detail::experts_f32_kernel;
  const int blocks = max(args.shrink_blocks, args.wide_shrink_blocks);
  return launch(kernel, dim3(blocks), detail::kF32Threads, 0, stream, args);
}

template <typename T, int kColumns>
int32_t large_m_shrink_as(const aril_experts_args& args, int columns, void* stream) {
  int warpgroups, smem_bytes;
  ARIL_TRY(detail::wide_shrink_blocks<kColumns>(columns, warpgroups, smem_bytes));
  return launch(detail::experts_large_m_shrink_kernel<T, kColumns>, dim3(args.wide_shrink_blocks),
                warpgroups * detail::kWarpgroupThreads, smem_bytes, stream, args,
                ceil_div(columns, kColumns * warpgroups));
}

template <typename T>
int32_t experts_large_m(const aril_experts_args& args, void* stream) {
  const int columns = args.num_slices * detail::rank_tiles(args.weights);
  ARIL_TRY(columns <= 2   ? (large_m_shrink_as<T, 2>(args, columns, stream))
           : columns <= 4 ? (large_m_shrink_as<T, 4>(args, columns, stream))
                          : (large_m_shrink_as<T, detail::kMaxColumns>(args, columns, stream)));
  ARIL_TRY(experts<T>(args, stream));
  int ring_bytes, smem_bytes;
  ARIL_TRY(detail::large_m_expand_smem(args.weights, ring_bytes, smem_bytes));
  return launch(args.from_tokens ? detail::experts_large_m_expand_kernel<T, false>
                                 : detail::experts_large_m_expand_kernel<T, true>,
                dim3(args.wide_expand_blocks), detail::kExpandThreads, smem_bytes, stream, args,
                ring_bytes);
}

template <typename T>
int32_t load_kernels() {
  if constexpr (sizeof(T) == sizeof(float)) {
    ARIL_TRY(load(detail::activate_f32_kernel));
    ARIL_TRY(load(detail::combine_f32_kernel));
    return load(detail::experts_f32_kernel);
  } else {
    int bytes;
    ARIL_TRY(max_smem_bytes(bytes));
    ARIL_TRY((load(detail::experts_kernel<T, true>, bytes)));
    ARIL_TRY((load(detail::experts_kernel<T, false>, bytes)));
    ARIL_TRY((load(detail::activate_kernel<T, true>, bytes)));
    ARIL_TRY((load(detail::activate_kernel<T, false>, bytes)));
    ARIL_TRY((load(detail::combine_kernel<T, true>, bytes)));
    ARIL_TRY((load(detail::combine_kernel<T, false>, bytes)));
    ARIL_TRY((load(detail::experts_large_m_shrink_kernel<T, 2>, bytes)));
    ARIL_TRY((load(detail::experts_large_m_shrink_kernel<T, 4>, bytes)));
    ARIL_TRY((load(detail::experts_large_m_shrink_kernel<T, detail::kMaxColumns>, bytes)));
    ARIL_TRY((load(detail::experts_large_m_expand_kernel<T, false>, bytes)));
    return load(detail::experts_large_m_expand_kernel<T, true>, bytes);
  }
}

}  // namespace

int32_t load_experts() {
  ARIL_TRY(load(detail::group_kernel, detail::kGroupSmemBytes));
  ARIL_TRY(load(detail::align_kernel, ARIL_MAX_SLOTS * static_cast<int>(sizeof(int32_t))));
  for (const int32_t dtype : {ARIL_BF16, ARIL_F16, ARIL_F32}) {
    ARIL_TRY(dispatch(dtype, [](auto element) { return load_kernels<decltype(element)>(); }));
  }
  return 0;
}

}  // namespace aril

extern "C" int32_t aril_group(const aril_group_args* args, void* stream) {
  if (aril::detail::fit_one_block(args->num_tokens, args->top_k)) return 0;
  return aril::launch(aril::detail::group_kernel, dim3(args->top_k.num_experts + 2),
                      aril::detail::kGroupThreads, aril::detail::kGroupSmemBytes, stream, *args);
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
      return aril::experts_f32(*args, stream);
    } else {
      return args->wide_shrink_blocks > 0 ? aril::experts_large_m<T>(*args, stream)
                                          : aril::experts<T>(*args, stream);
    }
  });
}
