// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Launching on the caller's stream, and finding the instance for a run-time dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../aril.h"

#define ARIL_TRY(expression)                  \
  do {                                        \
    const int32_t aril_status = (expression); \
    if (aril_status != 0) return aril_status; \
  } while (0)

namespace aril {

// Enqueues `kernel`, to begin while its predecessor ends (pdl.cuh). The status is the launch's own:
// an error that the caller has pending stays his.
template <typename... Params>
[[nodiscard]] inline int32_t launch(void (*kernel)(Params...), dim3 grid, dim3 block,
                                    size_t smem_bytes, void* stream, const Params&... params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

// Calls `f` with a value of the element type that `dtype` names.
template <typename F>
[[nodiscard]] inline int32_t dispatch(int32_t dtype, F&& f) {
  switch (dtype) {
    case ARIL_BF16:
      return f(__nv_bfloat16{});
    case ARIL_F16:
      return f(__half{});
    case ARIL_F32:
      return f(float{});
    default:
      return ARIL_ERR_ARGUMENT;
  }
}

// Brings a kernel's code to the device, and allows it `smem_bytes` of dynamic shared memory.
template <typename... Params>
[[nodiscard]] inline int32_t load(void (*kernel)(Params...), int smem_bytes = 0) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
}

constexpr int kStaticBytes = 12 << 10;  // of shared memory that kernels have by themselves

// What a launch may ask for on this device, beside that.
[[nodiscard]] inline int32_t max_smem_bytes(int& bytes) {
  int device;
  ARIL_TRY(cudaGetDevice(&device));
  ARIL_TRY(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  bytes -= kStaticBytes;
  return 0;
}

}  // namespace aril
