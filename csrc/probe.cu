// SPDX-License-Identifier: MIT OR Apache-2.0
#include "common/launch.cuh"

namespace aril {

int32_t load_routing();
int32_t load_linear();
int32_t load_forward();
int32_t load_experts();

}  // namespace aril

extern "C" const char* aril_status_string(int32_t status) {
  switch (status) {
    case ARIL_ERR_NO_KERNEL:
      return "this build has no code for the device";
    case ARIL_ERR_ARGUMENT:
      return "an argument is outside its limits";
    default:
      return cudaGetErrorString(static_cast<cudaError_t>(status));
  }
}

extern "C" int32_t aril_load(void) {
  const int32_t status = aril::load_routing();
  const bool no_code =
      status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction;
  if (no_code) return ARIL_ERR_NO_KERNEL;
  ARIL_TRY(status);
  ARIL_TRY(aril::load_linear());
  ARIL_TRY(aril::load_forward());
  return aril::load_experts();
}
