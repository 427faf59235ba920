// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_sharded_shrink and aril_sharded_expand: which kernel an operation launches, with which grid.
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
  return launch(Kernels<T>().shrink, dim3(args.max_tiles * args.num_slices * rank_tiles),
                kIsF32 ? detail::kF32Threads : detail::kShardedThreads,
                kIsF32 ? 0 : detail::kShardedSmemBytes, stream, args, rank_tiles);
}

int out_blocks(const aril_sharded_args& args, int outs_per_block) {
  int blocks = 0;
  for (int slice = 0; slice < args.num_slices; ++slice) {
    blocks += ceil_div(args.num_outs[slice], outs_per_block);
  }
  return blocks;
}

template <typename T>
int32_t expand(const aril_sharded_args& args, void* stream) {
  if constexpr (sizeof(T) == sizeof(float)) {
    const int blocks = out_blocks(args, detail::kF32Threads);
    return launch(Kernels<T>().expand, dim3(args.max_tiles * blocks), detail::kF32Threads, 0,
                  stream, args, blocks);
  } else {
    const bool staged = detail::is_staged(args.weights);
    const int blocks = out_blocks(args, ARIL_OUTS_SMALL_M);
    return launch(Kernels<T>().expand[staged], dim3(args.max_tiles * blocks),
                  detail::kSmallMThreads,
                  detail::small_m_expand_smem_bytes(args.weights, ARIL_OUTS_SMALL_M, staged),
                  stream, args, blocks);
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
  return aril::dispatch(args->dtype, [&](auto element) {
    return aril::shrink<decltype(element)>(*args, stream);
  });
}

extern "C" int32_t aril_sharded_expand(const aril_sharded_args* args, void* stream) {
  ARIL_CHECK(aril::are_set(args->v) && aril::are_set(args->y, args->num_slices));
  return aril::dispatch(args->dtype, [&](auto element) {
    return aril::expand<decltype(element)>(*args, stream);
  });
}
