// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_sharded_shrink and aril_sharded_expand: launches the kernels that the plan
// (src/plan/sharded.rs) has chosen, and refuses a plan that does not fit them.
#include "host/launch.cuh"
#include "linear/sharded.cuh"

namespace aril {
namespace {

using detail::ceil_div;
using Sharded = Kernel<aril_sharded_args, int>;

// All kernels for elements of T.
template <typename T>
struct Kernels {
  Sharded shrink = {detail::sharded_shrink_kernel<T>, detail::kShardedSmemBytes};
  // By is_staged().
  Sharded expand[2] = {{detail::sharded_expand_kernel<T, false>, kMaxSmem},
                       {detail::sharded_expand_kernel<T, true>, kMaxSmem}};

  int32_t load() const {
    const auto& [a, b] = *this;
    return load_table(a, b);
  }
};

template <>
struct Kernels<float> {
  Sharded shrink = {detail::sharded_shrink_f32_kernel, 0};
  Sharded expand = {detail::sharded_expand_f32_kernel, 0};

  int32_t load() const {
    const auto& [a, b] = *this;
    return load_table(a, b);
  }
};

template <typename T>
int32_t shrink(const aril_sharded_args& args, void* stream) {
  constexpr bool kIsF32 = sizeof(T) == sizeof(float);
  const int rank_tiles = ceil_div(args.width, ARIL_RANK_TILE);
  ARIL_CHECK(args.plan.shrink_blocks == args.plan.max_tiles * args.num_slices * rank_tiles);
  return launch(Kernels<T>().shrink, dim3(args.plan.shrink_blocks),
                kIsF32 ? detail::kF32Threads : detail::kShardedThreads,
                kIsF32 ? 0 : detail::kShardedSmemBytes, stream, args, rank_tiles);
}

template <typename T>
int32_t expand(const aril_sharded_args& args, void* stream) {
  const aril_sharded_plan& plan = args.plan;
  static_assert(detail::kF32Threads == ARIL_OUTS_SMALL_M);
  int blocks = 0;
  for (int slice = 0; slice < args.num_slices; ++slice) {
    blocks += ceil_div(args.num_outs[slice], ARIL_OUTS_SMALL_M);
  }
  ARIL_CHECK(plan.expand_blocks == plan.max_tiles * blocks);
  if constexpr (sizeof(T) == sizeof(float)) {
    return launch(Kernels<T>().expand, dim3(plan.expand_blocks), detail::kF32Threads, 0, stream,
                  args, blocks);
  } else {
    const bool staged = detail::is_staged(args.weights);
    ARIL_CHECK(plan.smem_bytes >=
               detail::small_m_expand_smem_bytes(args.weights, ARIL_OUTS_SMALL_M, staged));
    return launch(Kernels<T>().expand[staged], dim3(plan.expand_blocks), detail::kSmallMThreads,
                  plan.smem_bytes, stream, args, blocks);
  }
}

}  // namespace

int32_t load_sharded() {
  ARIL_TRY(Kernels<__nv_bfloat16>().load());
  ARIL_TRY(Kernels<__half>().load());
  return Kernels<float>().load();
}

}  // namespace aril

extern "C" int32_t aril_sharded_shrink(const aril_sharded_args* args, void* stream) {
  ARIL_CHECK(aril::are_set(args->x) && aril::are_set(args->v));
  return aril::dispatch(
      args->dtype, [&](auto element) { return aril::shrink<decltype(element)>(*args, stream); });
}

extern "C" int32_t aril_sharded_expand(const aril_sharded_args* args, void* stream) {
  ARIL_CHECK(aril::are_set(args->v) && aril::are_set(args->y, args->num_slices));
  return aril::dispatch(
      args->dtype, [&](auto element) { return aril::expand<decltype(element)>(*args, stream); });
}
