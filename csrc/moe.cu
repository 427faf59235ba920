// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_group and aril_experts: launches the kernels that the plan (src/plan/experts.rs) has chosen,
// and refuses a plan that does not fit them.
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
int32_t on_route_tiles(const aril_experts_args& args, void* stream) {
  const Kernels<T> kernels;
  const bool in_each_block = detail::fit_each_block(args.num_tokens, args.top_k);
  ARIL_CHECK(args.activation_blocks == 0 ||
             (in_each_block && args.activation_blocks <= ARIL_ACTIVATION_BLOCKS));
  ARIL_CHECK(args.inputs_complete != 2 || args.activation_blocks > 0);
  const detail::ExpertsGrid grid = {in_each_block ? 0 : args.groups_routes, args.shrink_blocks,
                                    ceil_div(args.in_features, detail::kSlabFeatures),
                                    args.wide_shrink_blocks > 0};
  // The blocks take all pieces of a tile at once.
  const int expanded = args.form == ARIL_ADD || args.form == ARIL_WRITE ? args.num_slices : 1;
  ARIL_CHECK(args.outs_per_block >= 1 &&
             args.shrink_blocks * detail::kShrinkSets >=
                 args.num_slices * detail::rank_tiles(args.weights) * grid.slabs &&
             args.expand_blocks * detail::kExpertsWarps >=
                 expanded * ceil_div(args.out_features, args.outs_per_block));
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
  const detail::ExpandStages stages(detail::kWholeRankTiles<T>, args.weights.max_rank,
                                    args.outs_per_block);
  return launch_with(kernels.experts[in_each_block], stages.of_warp, stages);
}

template <int kRankTiles>
int32_t large_m_shrink_with(const Kernel<aril_experts_args, int>& kernel,
                            const aril_experts_launch& launch, void* stream) {
  ARIL_CHECK(launch.warpgroups >= 1 &&
             launch.warpgroups <= detail::shrink_threads<kRankTiles> / detail::kWarpgroupThreads &&
             launch.shrink_smem_bytes >=
                 detail::large_m_shrink_smem_bytes<kRankTiles>(launch.warpgroups));
  const aril_experts_args& args = launch.args;
  const int rank_tiles = args.num_slices * detail::rank_tiles(args.weights);
  return aril::launch(kernel, dim3(args.wide_shrink_blocks),
                      launch.warpgroups * detail::kWarpgroupThreads, launch.shrink_smem_bytes,
                      stream, args, ceil_div(rank_tiles, kRankTiles * launch.warpgroups));
}

// Both ways of more than ARIL_ONE_BLOCK_ROUTES routes; the device decides which does the work.
template <typename T>
int32_t on_wide_or_route_tiles(const aril_experts_launch& launch, void* stream) {
  const Kernels<T> kernels;
  const aril_experts_args& args = launch.args;
  ARIL_CHECK(launch.rank_tiles == 2 || launch.rank_tiles == 4 ||
             launch.rank_tiles == kMaxRankTiles);
  ARIL_CHECK(launch.expand_smem_bytes >= detail::large_m_expand_smem_bytes(args.weights));
  ARIL_TRY(launch.rank_tiles == 2 ? large_m_shrink_with<2>(kernels.shrink2, launch, stream)
           : launch.rank_tiles == 4
               ? large_m_shrink_with<4>(kernels.shrink4, launch, stream)
               : large_m_shrink_with<kMaxRankTiles>(kernels.shrink8, launch, stream));
  ARIL_TRY(on_route_tiles<T>(args, stream));
  return aril::launch(kernels.large_m_expand[args.from_tokens == 0], dim3(args.wide_expand_blocks),
                      detail::kExpandThreads, launch.expand_smem_bytes, stream, args,
                      launch.expand_smem_bytes);
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
  ARIL_CHECK(args.num_slots <= ARIL_MAX_SLOTS);
  ARIL_CHECK(args.num_tokens == 0 || are_set(args.top_k.ids));
  if (detail::fit_one_block(args.num_tokens, args.top_k)) return 0;
  return launch(GroupKernels().group, dim3(args.top_k.num_experts + 2), detail::kGroupThreads,
                detail::kGroupSmemBytes, stream, args);
}

int32_t experts(const aril_experts_launch& launch, void* stream) {
  const aril_experts_args& args = launch.args;
  const bool has_out = args.form == ARIL_ACTIVATE || args.form == ARIL_COMBINE;
  ARIL_CHECK(are_set(args.x, args.y, args.top_k.ids) && (!has_out || are_set(args.out)));
  return dispatch(args.dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    if constexpr (sizeof(T) == sizeof(float)) {
      return experts_f32(args, stream);
    } else {
      return args.wide_shrink_blocks > 0 ? on_wide_or_route_tiles<T>(launch, stream)
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

extern "C" int32_t aril_experts(const aril_experts_launch* launch, void* stream) {
  return aril::experts(*launch, stream);
}
