// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The fused linear's kernel; forward_layout.cuh has the design.
#pragma once

#include "forward_base.cuh"
#include "forward_delta.cuh"

namespace aril::detail {

template <typename T, typename Shape>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ unsigned char unaligned[];
  __shared__ ForwardShared shared;
  __shared__ DeltaShared batch;
  unsigned char* const dynamic = unaligned + (-shared_address(unaligned) & 1023);
  const bool has_deltas = p.args.weights.table != nullptr;
  const ForwardSmem smem(Shape::kTokenTiles, p.grid, p.splits, p.args.num_slices,
                         has_deltas ? p.args.weights.max_rank : 0);
  const int multipliers = Shape::warps(p.grid.pass_units), warp = threadIdx.x / 32;
  if (threadIdx.x < p.grid.stages) {
    shared.full[threadIdx.x].init();
    shared.empty[threadIdx.x].init(multipliers);
  } else if (threadIdx.x >= 32 && threadIdx.x < 32 + 2 * kMaxUnits) {
    shared.inbox[threadIdx.x - 32].init();
  } else if (threadIdx.x == 31) {
    shared.tagged.init();
    shared.deltas_full.init(kDeltaWarps);
    shared.deltas_empty.init(multipliers);
  }
  publish_shared();
  __syncthreads();
  if (p.splits > 1) arrive_at_cluster();

  const Share share(p);
  if (warp < multipliers) {
    multiply_units<T, Shape>(p, shared, share, smem, dynamic);
    return;
  }
  if (warp == multipliers) {
    if (threadIdx.x % 32 == 0) {
      Producer<Shape::kTokenTiles>{p, shared, share, dynamic, smem.stage_bytes}.run();
    }
  } else {
    const int thread = threadIdx.x - 32 * (multipliers + 1);
    Delta<T>(p, shared, batch, share, smem, dynamic, thread, Shape::kTokenTiles * kTokenTile).run();
  }
  __syncwarp();
  if (p.splits > 1) wait_for_cluster();
#endif
}

}  // namespace aril::detail
