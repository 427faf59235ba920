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

// All kernels for elements of T. Arrays of two are indexed by whether each block groups the
// routes for itself, unless they say otherwise.
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

int num_routes(const aril_experts_args& args) { return args.num_tokens * args.top_k.top_k; }

// Bytes that a block on route tiles needs, whose warps need so many each to expand.
int route_tiles_bytes(const aril_experts_args& args, int warp_bytes) {
  const int bytes = max(ARIL_EXPERTS_SHRINK_BYTES, detail::kExpertsWarps * warp_bytes);
  if (args.plan.grouped_by != ARIL_FIRST_OPERATION) return bytes;
  using Sort = detail::OneBlockSort<detail::kExpertsThreads>;
  return max(max(bytes, Sort::scratch_bytes(args.num_tokens, args.top_k)),
             ARIL_EXPERTS_SHRINK_BYTES + ARIL_LOCAL_TILES_BYTES);
}

// The launch on route tiles.
template <typename T>
int32_t on_route_tiles(const aril_experts_args& args, void* stream) {
  const Kernels<T> kernels;
  const aril_experts_plan& plan = args.plan;
  const bool in_each_block = plan.grouped_by == ARIL_EACH_OPERATION;
  const detail::ExpertsGrid grid = {plan.groups_routes, plan.shrink_blocks,
                                    ceil_div(args.in_features, detail::kSlabFeatures),
                                    plan.wide_shrink_blocks > 0};
  // The blocks take all pieces of a tile at once.
  const int expanded = args.form == ARIL_ADD || args.form == ARIL_WRITE ? args.num_slices : 1;
  ARIL_CHECK(plan.blocks == grid.first_shrink + plan.shrink_blocks + plan.expand_blocks &&
             plan.outs_per_block >= 1 &&
             plan.shrink_blocks * detail::kShrinkSets >=
                 args.num_slices * detail::rank_tiles(args.weights) * grid.slabs &&
             plan.expand_blocks * detail::kExpertsWarps >=
                 expanded * ceil_div(args.out_features, plan.outs_per_block));
  const auto launch_with = [&](const auto& kernel, int warp_bytes, const auto&... more) -> int32_t {
    ARIL_CHECK(plan.smem_bytes >= route_tiles_bytes(args, warp_bytes));
    return launch(kernel, dim3(plan.blocks), detail::kExpertsThreads, plan.smem_bytes, stream, args,
                  grid, more...);
  };
  switch (args.form) {
    case ARIL_ACTIVATE:
      return launch_with(kernels.activate[in_each_block], ARIL_ACTIVATE_WARP_BYTES);
    case ARIL_ADD_COMBINED:
    case ARIL_COMBINE:
      return launch_with(kernels.combine[in_each_block], ARIL_COMBINE_WARP_BYTES);
    default:
      break;
  }
  const detail::ExpandStages stages(detail::kWholeRankTiles<T>, args.weights.max_rank,
                                    plan.outs_per_block);
  return launch_with(kernels.experts[in_each_block], stages.of_warp, stages);
}

template <int kRankTiles>
int32_t large_m_shrink_with(const Kernel<aril_experts_args, int>& kernel,
                            const aril_experts_args& args, void* stream) {
  const aril_experts_plan& plan = args.plan;
  ARIL_CHECK(plan.warpgroups >= 1 &&
             plan.warpgroups <= detail::shrink_threads<kRankTiles> / detail::kWarpgroupThreads &&
             plan.wide_shrink_smem_bytes >=
                 detail::large_m_shrink_smem_bytes<kRankTiles>(plan.warpgroups));
  const int rank_tiles = args.num_slices * detail::rank_tiles(args.weights);
  return launch(kernel, dim3(plan.wide_shrink_blocks), plan.warpgroups * detail::kWarpgroupThreads,
                plan.wide_shrink_smem_bytes, stream, args,
                ceil_div(rank_tiles, kRankTiles * plan.warpgroups));
}

// Both ways of more than ARIL_ONE_BLOCK_ROUTES routes; the device decides which does the work.
template <typename T>
int32_t on_wide_or_route_tiles(const aril_experts_args& args, void* stream) {
  const Kernels<T> kernels;
  const aril_experts_plan& plan = args.plan;
  ARIL_CHECK(plan.grouped_by == ARIL_GROUP_KERNEL);
  ARIL_CHECK(plan.rank_tiles == 2 || plan.rank_tiles == 4 || plan.rank_tiles == kMaxRankTiles);
  ARIL_CHECK(plan.wide_expand_smem_bytes >= detail::large_m_expand_smem_bytes(args.weights));
  ARIL_TRY(plan.rank_tiles == 2 ? large_m_shrink_with<2>(kernels.shrink2, args, stream)
           : plan.rank_tiles == 4
               ? large_m_shrink_with<4>(kernels.shrink4, args, stream)
               : large_m_shrink_with<kMaxRankTiles>(kernels.shrink8, args, stream));
  ARIL_TRY(on_route_tiles<T>(args, stream));
  return launch(kernels.large_m_expand[args.from_tokens == 0], dim3(plan.wide_expand_blocks),
                detail::kExpandThreads, plan.wide_expand_smem_bytes, stream, args,
                plan.wide_expand_smem_bytes);
}

int32_t experts_f32(const aril_experts_args& args, void* stream) {
  const Kernels<float> kernels;
  const bool combines = args.form == ARIL_ADD_COMBINED || args.form == ARIL_COMBINE;
  const auto& kernel = args.form == ARIL_ACTIVATE ? kernels.activate
                       : combines                 ? kernels.combine
                                                  : kernels.experts;
  const int blocks = max(args.plan.shrink_blocks, args.plan.wide_shrink_blocks);
  return launch(kernel, dim3(blocks), detail::kF32Threads, 0, stream, args);
}

int32_t group(const aril_group_args& args, void* stream) {
  ARIL_CHECK(args.num_slots <= ARIL_MAX_SLOTS);
  ARIL_CHECK(args.num_tokens == 0 || are_set(args.top_k.ids));
  if (args.num_tokens * args.top_k.top_k <= ARIL_ONE_BLOCK_ROUTES) return 0;
  return launch(GroupKernels().group, dim3(args.top_k.num_experts + 2), detail::kGroupThreads,
                detail::kGroupSmemBytes, stream, args);
}

// Whether the plan groups routes as kernels for so many do, and waits for what they can wait for.
bool is_plan(const aril_experts_args& args) {
  const aril_experts_plan& plan = args.plan;
  const bool announces = plan.activation_blocks > 0;
  const int most = plan.grouped_by == ARIL_EACH_OPERATION    ? ARIL_EACH_BLOCK_ROUTES
                   : plan.grouped_by == ARIL_FIRST_OPERATION ? ARIL_ONE_BLOCK_ROUTES
                                                             : INT32_MAX;
  return num_routes(args) <= most &&
         (!plan.groups_routes || plan.grouped_by == ARIL_FIRST_OPERATION) &&
         (!announces || (plan.grouped_by == ARIL_EACH_OPERATION &&
                         plan.activation_blocks <= ARIL_ACTIVATION_BLOCKS)) &&
         (plan.inputs == ARIL_INPUTS_IN_FRONT || args.form >= ARIL_ACTIVATE) &&
         (plan.inputs != ARIL_INPUTS_ANNOUNCED || (announces && args.form >= ARIL_ADD_COMBINED));
}

int32_t experts(const aril_experts_args& args, void* stream) {
  const bool has_out = args.form == ARIL_ACTIVATE || args.form == ARIL_COMBINE;
  ARIL_CHECK(are_set(args.x, args.y, args.top_k.ids) && (!has_out || are_set(args.out)));
  return dispatch(args.dtype, [&](auto element) -> int32_t {
    using T = decltype(element);
    if constexpr (sizeof(T) == sizeof(float)) {
      return experts_f32(args, stream);
    } else {
      ARIL_CHECK(is_plan(args));
      return args.plan.wide_shrink_blocks > 0 ? on_wide_or_route_tiles<T>(args, stream)
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
