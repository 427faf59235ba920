// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Loading kernels, launching them on the caller's stream, and finding the instance for a dtype.
//
// A kernel that was not loaded is loaded by its first launch, which fails during a capture. So each
// .cu file keeps its kernels in tables (structs of Kernel), launches only from them, and loads
// whole tables with load_table(). A table's members are bound by name there: forgetting one does
// not compile. The exception is fused_linear.cu: it loads the instances that its dispatch by tokens
// chooses from.
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

// Refuses what a plan cannot have meant.
#define ARIL_CHECK(condition)                   \
  do {                                          \
    if (!(condition)) return ARIL_ERR_ARGUMENT; \
  } while (0)

namespace aril {

constexpr int kMaxSmem = -1;  // max_smem_bytes()

// A kernel, and the most dynamic shared memory that its launches ask for.
template <typename... Params>
struct Kernel {
  void (*entry)(Params...);
  int smem_bytes;
};

// The most dynamic shared memory that a launch may ask for on the current device.
[[nodiscard]] inline int32_t max_smem_bytes(int& bytes) {
  int device;
  ARIL_TRY(cudaGetDevice(&device));
  ARIL_TRY(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  bytes -= ARIL_STATIC_BYTES;
  return 0;
}

// Loads a kernel's code to the device, and allows its dynamic shared memory.
template <typename... Params>
[[nodiscard]] inline int32_t load(const Kernel<Params...>& kernel) {
  int bytes = kernel.smem_bytes;
  if (bytes == kMaxSmem) ARIL_TRY(max_smem_bytes(bytes));
  return cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <typename K, int kCount>
[[nodiscard]] inline int32_t load(const K (&kernels)[kCount]) {
  for (const K& kernel : kernels) ARIL_TRY(load(kernel));
  return 0;
}

// Loads the members of a table, which a structured binding lists.
template <typename... Kernels>
[[nodiscard]] inline int32_t load_table(const Kernels&... kernels) {
  static_assert(sizeof...(kernels) > 0);
  int32_t status = 0;
  ((status = status == 0 ? load(kernels) : status), ...);
  return status;
}

// Whether none of these addresses is null, which no kernel asks.
template <typename... T>
[[nodiscard]] inline bool are_set(const T*... addresses) {
  return ((addresses != nullptr) && ...);
}

// The same of the outputs of a layer's slices.
[[nodiscard]] inline bool are_set(const aril_outputs (&y)[ARIL_MAX_SLICES], int num_slices) {
  for (int slice = 0; slice < num_slices; ++slice) {
    if (y[slice].first == nullptr) return false;
  }
  return num_slices <= ARIL_MAX_SLICES;
}

// Whether kernels may start while their predecessor drains (load.cu).
[[nodiscard]] bool start_early();

// The architecture that the current device's code was compiled for, such as 90 (load.cu).
[[nodiscard]] int32_t code_version(int32_t& version);

// Enqueues a kernel that may start while its predecessor drains (ptx/pdl.cuh), in clusters of so
// many blocks. Returns this launch's own status; an error that the caller has pending stays
// pending.
template <typename... Params>
[[nodiscard]] inline int32_t launch_clusters(const Kernel<Params...>& kernel, int cluster,
                                             dim3 grid, dim3 block, size_t smem_bytes, void* stream,
                                             const Params&... params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[3] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = start_early();
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  // The default policy starts no cluster beside a kernel that occupies most multiprocessors, if two
  // of its blocks fit on one.
  attributes[2].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
  attributes[2].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicyLoadBalancing;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 3 : 1;
  return cudaLaunchKernelEx(&config, kernel.entry, params...);
}

// The same without clusters.
template <typename... Params>
[[nodiscard]] inline int32_t launch(const Kernel<Params...>& kernel, dim3 grid, dim3 block,
                                    size_t smem_bytes, void* stream, const Params&... params) {
  return launch_clusters(kernel, 1, grid, block, smem_bytes, stream, params...);
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

}  // namespace aril
