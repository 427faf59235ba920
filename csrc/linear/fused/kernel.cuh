// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The fused linear's kernel; layout.cuh has the design.
#pragma once

#include "delta.cuh"
#include "multiply.cuh"

namespace aril::detail {

#if __CUDA_ARCH__ >= 900
// Initialises the ring's barriers and the block's share, by one warp.
__device__ __forceinline__ void init_ring(const FusedParams& p, FusedShared& shared,
                                          int multipliers, int lane) {
  if (lane < p.grid.stages) {
    shared.full[lane].init(kProducers);
    shared.empty[lane].init(multipliers);
  }
  if (lane == 0) shared.share.init(p);
  fence_async_proxy();
}

// Initialises the barriers between the roles, by one warp.
__device__ __forceinline__ void init_handovers(const FusedParams& p, FusedShared& shared,
                                               DeltaShared& batch, int multipliers, int delta_warps,
                                               int lane) {
  if (lane < kMaxTeams * kMaxUnits) {
    shared.handover[lane].init(32);
    shared.taken[lane].init(32);
  }
  if (lane < kMaxTokenGroups * kMaxSplitUnits) shared.inbox[lane].init(32);
  if (lane == 31) {
    shared.tagged.init();
    shared.deltas_full.init(32 * delta_warps);
    shared.deltas_empty.init(32 * multipliers);
  }
  if (p.args.weights.table != nullptr) {
    static_assert(sizeof(batch.tokens) == 32 * sizeof(uint4));
    reinterpret_cast<uint4*>(batch.tokens)[lane] = make_uint4(~0u, ~0u, ~0u, ~0u);  // -1
    if (lane < delta_warps) {
      for (auto& pair : batch.a[lane]) pair.init();
      for (auto& chunk : batch.b[lane]) chunk.init();
    }
  }
  fence_async_proxy();
}
#endif

template <typename T, int kTokenTiles, bool kSmall>
__global__ void __launch_bounds__(32 * fused_warps(kMaxUnits, kTokenTiles, kSmall), kSmall ? 2 : 1)
    fused_linear_kernel(const __grid_constant__ FusedParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char unaligned[];
  __shared__ FusedShared shared;
  unsigned char* const dynamic = unaligned + (-shared_address(unaligned) & 1023);
  const int multipliers = multiplier_warps(p.grid.pass_units, kTokenTiles);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto& batch = *reinterpret_cast<DeltaShared*>(dynamic + p.smem.batch);
  if (warp == 0) init_ring(p, shared, multipliers, lane);
  if (warp == 1) {
    init_handovers(p, shared, batch, multipliers, delta_warps(kTokenTiles, kSmall), lane);
  }
  __syncthreads();
  if (p.splits > 1) arrive_at_cluster();
  if (warp < multipliers) {
    multiply_units<T, kTokenTiles>(p, shared, dynamic);
    return;
  }
  if (warp < multipliers + kProducers) {
    const int total = num_items(p, shared.share);
    if (lane == 0 && warp == multipliers) {
      produce_weights(p, shared, Producer::of_weights(p, shared.share, dynamic), total);
    } else if (lane == 0) {
      produce_input(shared, Producer::of_input(p, shared.share, kTokenTiles, dynamic), total);
    }
  } else {
    const int thread = threadIdx.x - 32 * (multipliers + kProducers);
    Delta<T, kTokenTiles, kSmall>(p, shared, batch, dynamic, thread).run();
  }
  __syncwarp();
  if (p.splits > 1) wait_for_cluster();
#endif
}

}  // namespace aril::detail
