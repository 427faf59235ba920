// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The fused linear's stream of W: the producer and the multipliers.
#pragma once

#include "../common/mma.cuh"
#include "../common/vec.cuh"
#include "forward_exchange.cuh"
#include "forward_layout.cuh"

namespace aril::detail {

#if __CUDA_ARCH__ >= 900

// Fills the ring, stage by stage. One thread.
template <int kTokenTiles>
struct Producer {
  const ForwardParams& p;
  ForwardShared& shared;
  const Share& share;
  unsigned char* ring;
  int stage_bytes;
  // The next item's pass and box, and those of x in the ring's first stages.
  int pass = 0, box = 0;

  __device__ __forceinline__ void advance() {
    box += p.grid.stage_boxes;
    if (box >= share.num_boxes) {
      box = 0;
      ++pass;
    }
  }

  __device__ __forceinline__ void copy_weights(unsigned char* stage, Arrival& full) const {
    full.expect(stage_bytes);
    const int row = (share.begin + pass * p.grid.pass_units) * kUnitRows;
    for (int i = 0; i < p.grid.stage_boxes; ++i) {
      copy_box(stage + i * p.grid.pass_units * kUnitBoxBytes, p.w[share.slice],
               (share.first_box + box + i) * kBoxFeatures, row, full, kEvictFirst);
    }
  }

  __device__ __forceinline__ void copy_input(unsigned char* stage, Arrival& full) const {
    stage += p.grid.stage_boxes * p.grid.pass_units * kUnitBoxBytes;
    for (int i = 0; i < p.grid.stage_boxes; ++i) {
      copy_box(stage + i * kTokenTiles * kTokenBoxBytes, p.x,
               (share.first_box + box + i) * kBoxFeatures, 0, full, kEvictLast);
    }
  }

  __device__ __forceinline__ void run() {
    const int passes = ceil_div(p.grid.units, p.grid.pass_units);
    const int total = passes * ceil_div(share.num_boxes, p.grid.stage_boxes);
    const int ahead = min(total, p.grid.stages);
    for (int item = 0; item < ahead; ++item) {
      copy_weights(ring + item * stage_bytes, shared.full[item]);
      advance();
    }
    const Producer behind_ring = *this;
    for (int item = ahead; item < min(total, ahead + p.grid.prefetch); ++item) {
      for (int i = 0; i < p.grid.stage_boxes; ++i) {
        prefetch_box(p.w[share.slice], (share.first_box + box + i) * kBoxFeatures,
                     (share.begin + pass * p.grid.pass_units) * kUnitRows);
      }
      advance();
    }
    // Dependents may count themselves in only behind this block.
    if (p.args.weights.table != nullptr) {
      shared.tag = begin_epoch(p.args.exchange);
      arrive(shared.tagged);
    }
    const int last_call = min(max(total - p.grid.trigger, ahead), total - 1);
    if (total == ahead) let_dependents_begin();
    wait_for_predecessors();
    pass = box = 0;
    for (int item = 0; item < ahead; ++item) {
      copy_input(ring + item * stage_bytes, shared.full[item]);
      advance();
    }
    pass = behind_ring.pass;
    box = behind_ring.box;
    int stage = 0;
    uint32_t parity = 0;
    for (int item = ahead; item < total; ++item) {
      shared.empty[stage].wait(parity);
      copy_weights(ring + stage * stage_bytes, shared.full[stage]);
      copy_input(ring + stage * stage_bytes, shared.full[stage]);
      advance();
      if (item == last_call) let_dependents_begin();
      if (++stage == p.grid.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
};

// A warp's sums: of lane (g = lane / 4, q = lane % 4) rows g, g, g + 8, g + 8 of a unit, of tokens
// 2q, 2q + 1 of a tile.
template <typename Shape>
using UnitSums = float[Shape::kUnits][Shape::kTiles][4];

// Adds the products of a box of features.
template <typename T, typename Shape>
__device__ __forceinline__ void multiply_box(UnitSums<Shape>& sums, const unsigned char* w,
                                             const unsigned char* x) {
  const int lane = threadIdx.x % 32, row = lane % 16, token = lane % 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 columns[Shape::kTiles];
#pragma unroll
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
      columns[tile] = load_cores(x + tile * kTokenBoxBytes + token * 128 +
                                 (((half * 4 + lane / 8) ^ token) << 4));
    }
#pragma unroll
    for (int unit = 0; unit < Shape::kUnits; ++unit) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint4 rows = load_cores(w + unit * kUnitBoxBytes + row * 128 +
                                      (((half * 4 + k * 2 + lane / 16) ^ (row % 8)) << 4));
#pragma unroll
        for (int tile = 0; tile < Shape::kTiles; ++tile) {
          const uint4& b = columns[tile];
          mma_m16n8k16<T>(sums[unit][tile], rows, k == 0 ? b.x : b.z, k == 0 ? b.y : b.w);
        }
      }
    }
  }
}

// Adds the sums that the other block of the cluster has of a unit, if this one stores it;
// otherwise sends them. Whoever adds, the two are added to each other first.
template <int kTiles>
__device__ __forceinline__ void exchange_sums(float (&sums)[kTiles][4], bool stores, int other,
                                              float4* inbox, Arrival& arrival) {
  const int lane = threadIdx.x % 32;
  if (stores) {
    wait_cluster(arrival, 0);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float4 others = inbox[tile * 32 + lane];
      sums[tile][0] += others.x;
      sums[tile][1] += others.y;
      sums[tile][2] += others.z;
      sums[tile][3] += others.w;
    }
    return;
  }
  const uint32_t to = cluster_address(inbox + lane, other);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    store_cluster(to + tile * 32 * 16,
                  make_float4(sums[tile][0], sums[tile][1], sums[tile][2], sums[tile][3]));
  }
  __syncwarp();
  if (lane == 0) arrive_cluster(cluster_address(&arrival, other));
}

// Adds a unit's bias, deltas and, if it accumulates, y to its sums, rounds once, and stores.
// `deltas` are those of the unit's first row and the first tile, or null.
template <typename T, int kTiles>
__device__ __forceinline__ void store_unit(const aril_forward_args& args,
                                           const float (&sums)[kTiles][4], int slice, int unit,
                                           int first_token, const float* deltas, int delta_pitch) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  int slice_begin = 0;
  for (int before = 0; before < slice; ++before) slice_begin += args.out_features[before];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = unit * kUnitRows + g + 8 * half;
    if (row >= args.out_features[slice]) continue;
    const int out = slice_begin + row;
    const float bias =
        args.bias == nullptr ? 0.0f : to_float(static_cast<const T*>(args.bias)[out]);
    T* y = static_cast<T*>(args.y) + out;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = tile * kTokenTile + 2 * q + i, token = first_token + at;
        if (token >= args.num_tokens) continue;
        float sum = sums[tile][2 * half + i];
        if (args.bias != nullptr) sum += bias;
        if (deltas != nullptr) sum += deltas[(g + 8 * half) * delta_pitch + at];
        T& to = y[token * args.y_stride];
        if (args.accumulates) sum += to_float(to);
        to = from_float<T>(sum);
      }
    }
  }
}

// One warp's units, pass after pass.
template <typename T, typename Shape>
__device__ __forceinline__ void multiply_units(const ForwardParams& p, ForwardShared& shared,
                                               const Share& share, const ForwardSmem& smem,
                                               unsigned char* dynamic) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_in_pass = warp / Shape::kTokenGroups * Shape::kUnits;
  const int first_tile = warp % Shape::kTokenGroups * Shape::kTiles;
  const int units = p.grid.pass_units, boxes = p.grid.stage_boxes;
  const bool has_deltas = p.args.weights.table != nullptr;
  int stage = 0;
  uint32_t parity = 0, pass_parity = 0;
  // A stage is given back one stage late: nothing orders an arrival behind the loads of fragments
  // but the products that need them, and those are surely under way a stage later.
  Arrival* done = nullptr;
  for (int first = 0; first < p.grid.units; first += units) {
    UnitSums<Shape> sums = {};
    for (int box = 0; box < share.num_boxes; box += boxes) {
      shared.full[stage].wait(parity);
      __syncwarp();
      if (lane == 0 && done != nullptr) arrive(*done);
      done = &shared.empty[stage];
      const unsigned char* w = dynamic + stage * smem.stage_bytes + first_in_pass * kUnitBoxBytes;
      const unsigned char* x = dynamic + stage * smem.stage_bytes + boxes * units * kUnitBoxBytes +
                               first_tile * kTokenBoxBytes;
      multiply_box<T, Shape>(sums, w, x);
      if (boxes > 1) {
        multiply_box<T, Shape>(sums, w + units * kUnitBoxBytes,
                               x + Shape::kTokenTiles * kTokenBoxBytes);
      }
      if (++stage == p.grid.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    if (p.splits > 1) wait_for_cluster();
    wait_for_predecessors();
    const OwnBlocks own((share.begin + first) / 2, p.splits, share.split);
#pragma unroll
    for (int i = 0; i < Shape::kUnits; ++i) {
      const int in_pass = first_in_pass + i, unit = share.begin + first + in_pass;
      const bool stores = p.splits == 1 || unit / 2 % 2 == share.split;
      if (in_pass < units && p.splits > 1) {
        float4* inbox = reinterpret_cast<float4*>(dynamic + smem.inbox) +
                        (in_pass * Shape::kTokenTiles + first_tile) * 32;
        exchange_sums(sums[i], stores, share.split ^ 1, inbox,
                      shared.inbox[in_pass * Shape::kTokenGroups + first_tile / Shape::kTiles]);
      }
    }
    if (has_deltas) shared.deltas_full.wait(pass_parity);
#pragma unroll
    for (int i = 0; i < Shape::kUnits; ++i) {
      const int in_pass = first_in_pass + i, unit = share.begin + first + in_pass;
      const bool stores = p.splits == 1 || unit / 2 % 2 == share.split;
      if (!stores || in_pass >= units || unit >= share.end) continue;
      const float* deltas =
          has_deltas ? reinterpret_cast<const float*>(dynamic + smem.deltas) +
                           (own.index_of(unit / 2) * kBlockRows + unit % 2 * kUnitRows) *
                               smem.delta_pitch +
                           first_tile * kTokenTile
                     : nullptr;
      store_unit<T>(p.args, sums[i], share.slice, unit, first_tile * kTokenTile, deltas,
                    smem.delta_pitch);
    }
    if (has_deltas) {
      __syncwarp();
      if (lane == 0) arrive(shared.deltas_empty);
      pass_parity ^= 1;
    }
  }
}

#endif

}  // namespace aril::detail
