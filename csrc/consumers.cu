// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_silu_mul: reads the y of a layer of gate and up, fused with the layer's expand. Launches the
// kernel that the plan (src/plan/linear) has chosen, and refuses a plan that does not fit it.
#include "host/launch.cuh"
#include "linear/silu_mul.cuh"

namespace aril {
namespace {

using detail::ceil_div;

// All kernels for elements of T.
template <typename T>
struct Kernels {
  Kernel<aril_silu_mul_args, int, int> large_m_silu_mul = {detail::large_m_silu_mul_kernel<T>,
                                                           kMaxSmem};
  // By whether the tiles are wide.
  Kernel<aril_silu_mul_args, int> plain_silu_mul[2] = {
      {detail::plain_silu_mul_kernel<T, false>, kMaxSmem},
      {detail::plain_silu_mul_kernel<T, true>, kMaxSmem}};

  int32_t load() const {
    const auto& [a, b] = *this;
    return load_table(a, b);
  }
};

template <>
struct Kernels<float> {
  Kernel<aril_silu_mul_args, int> silu_mul = {detail::silu_mul_f32_kernel, 0};

  int32_t load() const { return aril::load(silu_mul); }
};

template <typename T>
int32_t silu_mul(const aril_silu_mul_args& args, void* stream) {
  const aril_linear_args& layer = args.layer;
  const aril_linear_plan& plan = layer.plan;
  const Kernels<T> kernels;
  if constexpr (sizeof(T) == sizeof(float)) {
    const int blocks = ceil_div(layer.out_features[0], detail::kF32Threads);
    return launch(kernels.silu_mul, dim3(plan.max_tiles * blocks), detail::kF32Threads, 0, stream,
                  args, blocks);
  } else {
    const bool is_large_m = detail::is_large_m(layer);
    const int blocks = ceil_div(layer.out_features[0], plan.outs_per_block);
    ARIL_CHECK(plan.expand_blocks == plan.max_tiles * blocks);
    if (plan.wide) {
      ARIL_CHECK(is_large_m && detail::is_staged(layer.weights) &&
                 plan.smem_bytes >= detail::large_m_silu_mul_smem_bytes(layer.weights));
      return launch(kernels.large_m_silu_mul, dim3(plan.expand_blocks), detail::kExpandThreads,
                    plan.smem_bytes, stream, args, blocks, plan.smem_bytes);
    }
    ARIL_CHECK(plan.smem_bytes >= detail::plain_silu_mul_smem_bytes(layer.weights));
    return launch(kernels.plain_silu_mul[is_large_m], dim3(plan.expand_blocks),
                  detail::kSmallMThreads, plan.smem_bytes, stream, args, blocks);
  }
}

}  // namespace

int32_t load_consumers() {
  ARIL_TRY(Kernels<__nv_bfloat16>().load());
  ARIL_TRY(Kernels<__half>().load());
  return Kernels<float>().load();
}

}  // namespace aril

extern "C" int32_t aril_silu_mul(const aril_silu_mul_args* args, void* stream) {
  const aril_linear_args& layer = args->layer;
  ARIL_CHECK(aril::are_set(layer.y, layer.num_slices) && aril::are_set(args->out));
  return aril::dispatch(
      layer.dtype, [&](auto element) { return aril::silu_mul<decltype(element)>(*args, stream); });
}
