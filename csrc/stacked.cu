// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_stack, aril_stacked_expand and aril_stacked_silu_mul.
#include "host/launch.cuh"
#include "linear/stacked.cuh"

namespace aril {
namespace {

using detail::ceil_div;
using detail::Divisor;
using detail::kStackedOuts;

constexpr Kernel<aril_stack_args> kStack = {detail::stack_kernel, 0};

// All kernels for elements of T, by whether ranks take several steps.
template <typename T>
struct Kernels {
  Kernel<aril_stacked_args, Divisor> expand[2] = {{detail::stacked_expand_kernel<T, 1>, 0},
                                                  {detail::stacked_expand_kernel<T, 2>, 0}};
  Kernel<aril_stacked_silu_mul_args, Divisor> silu_mul[2] = {
      {detail::stacked_silu_mul_kernel<T, 1>, 0}, {detail::stacked_silu_mul_kernel<T, 2>, 0}};

  int32_t load() const {
    const auto& [a, b] = *this;
    return load_table(a, b);
  }
};

bool has_steps(const aril_stacked_args& args) { return args.rank > detail::kRanksPerStep; }

bool is_valid(const aril_stacked_args& args) {
  return are_set(args.modules, args.v) && are_set(args.y, args.num_slices) && args.positions >= 1 &&
         args.rank >= ARIL_RANK_TILE && args.rank % ARIL_RANK_TILE == 0;
}

// Calls `f` with a value of a 16-bit element type.
template <typename F>
int32_t dispatch_16_bits(int32_t dtype, const F& f) {
  return dispatch(dtype, [&](auto element) -> int32_t {
    if constexpr (sizeof(element) == sizeof(float)) {
      return ARIL_ERR_ARGUMENT;
    } else {
      return f(element);
    }
  });
}

}  // namespace

int32_t load_stacked() {
  ARIL_TRY(load(kStack));
  ARIL_TRY(Kernels<__nv_bfloat16>().load());
  return Kernels<__half>().load();
}

}  // namespace aril

extern "C" int32_t aril_stack(const aril_stack_args* args, void* stream) {
  using namespace aril;
  ARIL_CHECK(are_set(args->layers, args->modules, args->weights.table) && args->num_layers >= 1 &&
             args->num_blocks >= 1 && args->position >= 0 && args->position < args->positions &&
             args->rank >= ARIL_RANK_TILE && args->rank % ARIL_RANK_TILE == 0);
  return launch(kStack, args->num_blocks, detail::kStackThreads, 0, stream, *args);
}

extern "C" int32_t aril_stacked_expand(const aril_stacked_args* args, void* stream) {
  using namespace aril;
  ARIL_CHECK(is_valid(*args));
  return dispatch_16_bits(args->dtype, [&](auto element) {
    const bool steps = has_steps(*args);
    int blocks = 0;
    for (int slice = 0; slice < args->num_slices; ++slice) {
      blocks += ceil_div(args->out_features[slice], steps ? kStackedOuts<2> : kStackedOuts<1>);
    }
    return launch(Kernels<decltype(element)>().expand[steps], args->max_tiles * blocks,
                  detail::kStackedThreads, 0, stream, *args, Divisor(blocks));
  });
}

extern "C" int32_t aril_stacked_silu_mul(const aril_stacked_silu_mul_args* args, void* stream) {
  using namespace aril;
  ARIL_CHECK(is_valid(args->layer) && are_set(args->out) && args->layer.num_slices == 2);
  return dispatch_16_bits(args->layer.dtype, [&](auto element) {
    const int blocks = ceil_div(args->layer.out_features[0], detail::kStackedFeatures);
    return launch(Kernels<decltype(element)>().silu_mul[has_steps(args->layer)],
                  args->layer.max_tiles * blocks, detail::kStackedThreads, 0, stream, *args,
                  Divisor(blocks));
  });
}
