// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The fused linear's kernel; layout.cuh has the design.
#pragma once

#include "delta.cuh"
#include "multiply.cuh"

namespace aril::detail {

#if __CUDA_ARCH__ >= 900
// Initialises the block's share, and the barriers that the W producer uses, by its warp.
__device__ __forceinline__ void init_ring(const FusedParams& p, FusedShared& shared,
                                          int multipliers, int lane) {
  if (lane < p.grid.stages) {
    shared.full[lane].init(kProducers);
    shared.empty[lane].init(multipliers);
  }
  if (lane == 31) shared.counted.init();
  if (lane == 0) shared.share.init(p);
  fence_async_proxy();
  __syncwarp();
}

// Initialises the barriers between the other roles, by one warp.
__device__ __forceinline__ void init_handovers(FusedShared& shared, int multipliers,
                                               int token_tiles, int lane) {
  if (lane < kMaxTeams * kMaxStrips) {
    shared.handover[lane].init(32);
    shared.taken[lane].init(32);
  }
  const bool has_inbox = lane < kMaxSplitStrips;
  if (has_inbox) shared.inbox[lane].init();
  if (lane == 31) {
    shared.deltas_full.init(32 * kDeltaWarps);
    shared.deltas_empty.init(32 * multipliers);
  }
  __syncwarp();
  if (has_inbox) shared.inbox[lane].expect(kStripSumsBytes * token_tiles);
}

// The barriers are initialised. The W producer's warp passes by; the others wait for it and for
// each other.
__device__ __forceinline__ void arrive_at_start() {
  asm volatile("bar.arrive 2, %0;" ::"r"(blockDim.x) : "memory");
}
__device__ __forceinline__ void wait_for_start() {
  __syncwarp();
  asm volatile("bar.sync 2, %0;" ::"r"(blockDim.x) : "memory");
}
#endif

template <typename T, int kTokenTiles>
__global__ void __launch_bounds__(32 * fused_warps(kMaxStrips, kTokenTiles), 1)
    fused_linear_kernel(const __grid_constant__ FusedParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char unaligned[];
  __shared__ FusedShared shared;
  unsigned char* const dynamic = unaligned + (-shared_address(unaligned) & 1023);
  const int multipliers = multiplier_warps(p.grid.pass_strips, kTokenTiles);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == multipliers) {
    init_ring(p, shared, multipliers, lane);
    arrive_at_start();
    if (p.splits > 1) arrive_at_cluster();
    if (lane == 0) produce_weights(p, shared, dynamic);
    __syncwarp();
    if (p.splits > 1) wait_for_cluster();
    return;
  }
  auto& batch = *reinterpret_cast<DeltaShared*>(dynamic + p.smem.batch);
  Delta<T, kTokenTiles> delta(p, shared, batch, dynamic,
                              threadIdx.x - 32 * (multipliers + kProducers));
  if (warp == 0) init_handovers(shared, multipliers, kTokenTiles, lane);
  if (warp >= multipliers + kProducers) delta.prepare();
  wait_for_start();
  if (p.splits > 1) arrive_at_cluster();
  if (warp < multipliers) {
    multiply_strips<T, kTokenTiles>(p, shared, dynamic);
    return;
  }
  if (warp < multipliers + kProducers) {
    if (lane == 0) produce_input(p, shared, kTokenTiles, dynamic);
  } else {
    delta.run();
  }
  __syncwarp();
  if (p.splits > 1) wait_for_cluster();
#endif
}

}  // namespace aril::detail
