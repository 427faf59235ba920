// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_group and aril_experts: which kernels an operation launches, with which grids.
#include "host/launch.cuh"
#include "moe/activate.cuh"
#include "moe/combine.cuh"
#include "moe/expand.cuh"
#include "moe/f32.cuh"
#include "moe/group/grid.cuh"
#include "moe/large_m.cuh"

namespace aril {
namespace {

using detail::ceil_div;
using detail::kMaxRankTiles;

// All kernels for elements of T. Arrays of two are indexed by fit_each_block(), unless they say
// otherwise.
template <typename T>
struct Kernels {
  using OnRouteTiles = Kernel<aril_experts_args, detail::ExpertsGrid>;
  using Shrink = Kernel<aril_experts_args, int>;

  Kernel<aril_experts_args, detail::ExpertsGrid, detail::ExpandStages> experts[2] = {
      {detail::experts_kernel<T, false>, kMaxSmem}, {detail::experts_kernel<T, true>, kMaxSmem}};
  OnRouteTiles activate[2] = {{detail::activate_kernel<T, false>, kMaxSmem},
                              {detail::activate_kernel<T, true>, kMaxSmem}};
  OnRouteTiles combine[2] = {{detail::combine_kernel<T, false>, kMaxSmem},
                             {detail::combine_kernel<T, true>, kMaxSmem}};
  // Of 2, 4 and kMaxRankTiles rank tiles for a warpgroup.
  Shrink shrink2 = {detail::experts_large_m_shrink_kernel<T, 2>, kMaxSmem};
  Shrink shrink4 = {detail::experts_large_m_shrink_kernel<T, 4>, kMaxSmem};
  Shrink shrink8 = {detail::experts_large_m_shrink_kernel<T, kMaxRankTiles>, kMaxSmem};
  // By whether x has a row per route, so that B may be shared.
  Kernel<aril_experts_args, int> large_m_expand[2] = {
      {detail::experts_large_m_expand_kernel<T, false>, kMaxSmem},
      {detail::experts_large_m_expand_kernel<T, true>, kMaxSmem}};

  int32_t load() const {
    const auto& [a, b, c, d, e, f, g] = *this;
    return load_table(a, b, c, d, e, f, g);
  }
};

template <>
struct Kernels<float> {
  Kernel<aril_experts_args> experts = {detail::experts_f32_kernel, 0};
  Kernel<aril_experts_args> activate = {detail::activate_f32_kernel, 0};
  Kernel<aril_experts_args> combine = {detail::combine_f32_kernel, 0};

  int32_t load() const {
    const auto& [a, b, c] = *this;
    return load_table(a, b, c);
  }
};

struct GroupKernels {
  Kernel<aril_group_args> group = {detail::group_kernel, detail::kGroupSmemBytes};

  int32_t load() const {
    const auto& [a] = *this;
    return load_table(a);
  }
};

// The launch on route tiles.
template <typename T>
int32_t on_route_tiles(aril_experts_args args, void* stream) {
  const Kernels<T> kernels;
  const bool in_each_block = detail::fit_each_block(args.num_tokens, args.top_k);
  const detail::ExpertsGrid grid = {
      in_each_block ? 0 : args.groups_routes, args.shrink_blocks,
      ceil_div(args.in_features, detail::kSlabFeatures), args.wide_shrink_blocks > 0};
  const auto launch_with = [&](const auto& kernel, int warp_bytes, const auto&... more) {
    const int blocks = grid.first_shrink + args.shrink_blocks + args.expand_blocks;
    int bytes = max(detail::kExpertsShrinkBytes, detail::kExpertsWarps * warp_bytes);
    if (!in_each_block && detail::fit_one_block(args.num_tokens, args.top_k)) {
      // All operations on so many routes ask for the memory of the sort, whether they sort or not:
      // otherwise the multiprocessors would repartition their memory between launches.
      using Sort = detail::OneBlockSort<detail::kExpertsThreads>;
      bytes = max(max(bytes, Sort::scratch_bytes(args.num_tokens, args.top_k)),
                  detail::kExpertsShrinkBytes + static_cast<int>(sizeof(detail::LocalTiles)));
    }
    return launch(kernel, dim3(blocks), detail::kExpertsThreads, bytes, stream, args, grid,
                  more...);
  };
  switch (args.form) {
    case ARIL_ACTIVATE:
      return launch_with(kernels.activate[in_each_block], sizeof(detail::ActivateStage));
    case ARIL_ADD_COMBINED:
    case ARIL_COMBINE:
      return launch_with(kernels.combine[in_each_block], sizeof(detail::CombineStage));
    default:
      break;
  }
  const auto stages = [&] {
    return detail::ExpandStages(detail::kWholeRankTiles<T>, args.weights.max_rank,
                                args.outs_per_block);
  };
  // The plan chooses the outputs of a warp (outs_per_warp in src/plan/thresholds.rs) without a
  // device. Only the launch knows how much shared memory a block may use. If the stages do not fit,
  // a warp takes one output tile, which fits everywhere (have_room_everywhere() in moe/expand.cuh),
  // and there are blocks for all of them.
  int max_bytes;
  ARIL_TRY(max_smem_bytes(max_bytes));
  if (detail::kExpertsWarps * stages().of_warp > max_bytes) {
    args.outs_per_block = ARIL_OUT_TILE;
    const int items = args.num_slices * ceil_div(args.out_features, ARIL_OUT_TILE);
    args.expand_blocks = max(args.expand_blocks, ceil_div(items, detail::kExpertsWarps));
  }
  return launch_with(kernels.experts[in_each_block], stages().of_warp, stages());
}

template <int kRankTiles>
int32_t large_m_shrink_with(const Kernel<aril_experts_args, int>& kernel,
                            const aril_experts_args& args, int rank_tiles, void* stream) {
  int warpgroups, smem_bytes;
  ARIL_TRY(detail::large_m_shrink_blocks<kRankTiles>(rank_tiles, detail::kMaxWarpgroups, warpgroups,
                                                     smem_bytes));
  return launch(kernel, dim3(args.wide_shrink_blocks), warpgroups * detail::kWarpgroupThreads,
                smem_bytes, stream, args, ceil_div(rank_tiles, kRankTiles * warpgroups));
}

// Both ways of more than ARIL_ONE_BLOCK_ROUTES routes; the device decides which does the work.
template <typename T>
int32_t on_wide_or_route_tiles(const aril_experts_args& args, void* stream) {
  const Kernels<T> kernels;
  const int rank_tiles = args.num_slices * detail::rank_tiles(args.weights);
  ARIL_TRY(rank_tiles <= 2 ? large_m_shrink_with<2>(kernels.shrink2, args, rank_tiles, stream)
           : rank_tiles <= 4
               ? large_m_shrink_with<4>(kernels.shrink4, args, rank_tiles, stream)
               : large_m_shrink_with<kMaxRankTiles>(kernels.shrink8, args, rank_tiles, stream));
  ARIL_TRY(on_route_tiles<T>(args, stream));
  int smem_bytes;
  ARIL_TRY(detail::large_m_expand_smem<T>(args.weights, smem_bytes));
  return launch(kernels.large_m_expand[args.from_tokens == 0], dim3(args.wide_expand_blocks),
                detail::kExpandThreads, smem_bytes, stream, args, smem_bytes);
}

int32_t experts_f32(const aril_experts_args& args, void* stream) {
  const Kernels<float> kernels;
  const bool combines = args.form == ARIL_ADD_COMBINED || args.form == ARIL_COMBINE;
  const auto& kernel = args.form == ARIL_ACTIVATE ? kernels.activate
                       : combines                 ? kernels.combine
                                                  : kernels.experts;
  const int blocks = max(args.shrink_blocks, args.wide_shrink_blocks);
  return launch(kernel, dim3(blocks), detail::kF32Threads, 0, stream, args);
}

int32_t group(const aril_group_args& args, void* stream) {
  if (args.num_slots > ARIL_MAX_SLOTS) return ARIL_ERR_ARGUMENT;
  if (detail::fit_one_block(args.num_tokens, args.top_k)) return 0;
  return launch(GroupKernels().group, dim3(args.top_k.num_experts + 2), detail::kGroupThreads,
                detail::kGroupSmemBytes, stream, args);
}

int32_t experts(const aril_experts_args& args, void* stream) {
  return dispatch(args.dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    if constexpr (sizeof(T) == sizeof(float)) {
      return experts_f32(args, stream);
    } else {
      return args.wide_shrink_blocks > 0 ? on_wide_or_route_tiles<T>(args, stream)
                                         : on_route_tiles<T>(args, stream);
    }
  });
}

}  // namespace

int32_t load_moe() {
  ARIL_TRY(GroupKernels().load());
  ARIL_TRY(Kernels<__nv_bfloat16>().load());
  ARIL_TRY(Kernels<__half>().load());
  return Kernels<float>().load();
}

}  // namespace aril

extern "C" int32_t aril_group(const aril_group_args* args, void* stream) {
  return aril::group(*args, stream);
}

extern "C" int32_t aril_experts(const aril_experts_args* args, void* stream) {
  return aril::experts(*args, stream);
}
