// SPDX-License-Identifier: MIT OR Apache-2.0
//
// aril_route.
#include "host/launch.cuh"
#include "routing/route.cuh"

namespace aril {
namespace {

constexpr Kernel<aril_route_args> kRoute = {
    detail::route_kernel, (ARIL_MAX_SLOTS + 1) * static_cast<int>(sizeof(int32_t))};

}  // namespace

int32_t load_routing() { return load(kRoute); }

}  // namespace aril

extern "C" int32_t aril_route(const aril_route_args* args, void* stream) {
  ARIL_CHECK(args->num_slots <= ARIL_MAX_SLOTS);
  ARIL_CHECK(args->num_tokens == 0 || aril::are_set(args->token_slots));
  const size_t smem_bytes = (args->num_slots + 1) * sizeof(int32_t);
  return aril::launch(aril::kRoute, 1, aril::detail::kRouteThreads, smem_bytes, stream, *args);
}
