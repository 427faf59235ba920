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

// Fills the ring with boxes of one matrix, stage by stage: W by one thread, x by another, so that no
// box of W has to wait for x.
struct Producer {
  const CUtensorMap& map;
  uint64_t policy;
  int boxes, box_bytes, stages, stage_bytes;  // of a stage
  int first_box, num_boxes, first_row, pass_rows;
  unsigned char* place;  // in the first stage
  int stage = 0, box = 0, row = 0;
  uint32_t parity = 1;  // as if stages had been given back before

  __device__ __forceinline__ static Producer of_weights(const ForwardParams& p, const Share& share,
                                                        unsigned char* ring) {
    return {p.w[share.slice],
            kEvictFirst,
            p.grid.stage_boxes,
            p.grid.pass_units * kUnitBoxBytes,
            p.grid.stages,
            p.smem.stage_bytes,
            share.first_box,
            share.num_boxes,
            share.begin * kUnitRows,
            p.grid.pass_units * kUnitRows,
            ring};
  }

  __device__ __forceinline__ static Producer of_input(const ForwardParams& p, const Share& share,
                                                      int token_tiles, unsigned char* ring) {
    return {p.x,
            kEvictLast,
            p.grid.stage_boxes,
            token_tiles * kTokenBoxBytes,
            p.grid.stages,
            p.smem.stage_bytes,
            share.first_box,
            share.num_boxes,
            0,
            0,
            ring + p.grid.stage_boxes * p.grid.pass_units * kUnitBoxBytes};
  }

  // The next item, as soon as its stage is free.
  __device__ __forceinline__ void copy(ForwardShared& shared) {
    shared.empty[stage].wait(parity);
    Arrival& full = shared.full[stage];
    full.expect(boxes * box_bytes);
    unsigned char* to = place + stage * stage_bytes;
    copy_box(to, map, (first_box + box) * kBoxFeatures, first_row + row, full, policy);
    if (boxes > 1) {
      copy_box(to + box_bytes, map, (first_box + box + 1) * kBoxFeatures, first_row + row, full,
               policy);
    }
    box += boxes;
    if (box >= num_boxes) {
      box = 0;
      row += pass_rows;
    }
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ int num_items(const ForwardParams& p, const Share& share) {
  return ceil_div(p.grid.units, p.grid.pass_units) * ceil_div(share.num_boxes, p.grid.stage_boxes);
}

__device__ __forceinline__ void produce_weights(const ForwardParams& p, ForwardShared& shared,
                                                Producer producer, int total) {
  const int ahead = min(total, p.grid.stages);
#pragma unroll 1
  for (int item = 0; item < ahead; ++item) producer.copy(shared);
  // Dependents may count themselves in only behind this block.
  if (p.args.weights.table != nullptr) {
    shared.tag = begin_epoch(p.args.exchange);
    arrive(shared.tagged);
  }
  const int last_call = max(total - p.grid.trigger, ahead);
#pragma unroll 1
  for (int item = ahead; item < total; ++item) {
    if (item == last_call) let_dependents_begin();
    producer.copy(shared);
  }
  if (last_call >= total) let_dependents_begin();
}

__device__ __forceinline__ void produce_input(ForwardShared& shared, Producer producer, int total) {
  wait_for_predecessors();
#pragma unroll 1
  for (int item = 0; item < total; ++item) producer.copy(shared);
}

// A warp's sums: of lane (g = lane / 4, q = lane % 4) rows g, g, g + 8, g + 8 of a unit, of tokens
// 2q, 2q + 1 of a tile.
template <int kTiles>
using UnitSums = float[kUnitsPerWarp][kTiles][4];

// Adds the products of a box of features.
template <typename T, int kTiles>
__device__ __forceinline__ void multiply_box(UnitSums<kTiles>& sums, const unsigned char* w,
                                             const unsigned char* x) {
  const int lane = threadIdx.x % 32, row = lane % 16, token = lane % 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 columns[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      columns[tile] = load_cores(x + tile * kTokenBoxBytes + token * 128 +
                                 (((half * 4 + lane / 8) ^ token) << 4));
    }
#pragma unroll
    for (int unit = 0; unit < kUnitsPerWarp; ++unit) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint4 rows = load_cores(w + unit * kUnitBoxBytes + row * 128 +
                                      (((half * 4 + k * 2 + lane / 16) ^ (row % 8)) << 4));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
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
  arrive_cluster(cluster_address(&arrival, other));
}

// Adds a unit's bias, deltas and, if it accumulates, y to its sums, rounds once, and stores.
// `deltas` are those of the unit's first row and of the first token, or null.
template <typename T, int kTiles>
__device__ __forceinline__ void store_unit(const aril_forward_args& args,
                                           const float (&sums)[kTiles][4], int slice, int unit,
                                           int first_token, const float* deltas, int delta_pitch) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  int slice_begin = 0;
#pragma unroll 1
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

// Adds the other team's sums to those of this warp's unit, in sums[0], and hands over the rest.
template <int kTiles>
__device__ __forceinline__ void add_teams(UnitSums<kTiles>& sums, int team, int warp, int other,
                                          ForwardShared& shared, float4* handover, int pass) {
  static_assert(kUnitsPerWarp == kTeams, "a unit for each team");
  const int lane = threadIdx.x % 32;
  if (pass > 0) shared.taken[warp].wait((pass - 1) % 2);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float(&first)[4] = sums[0][tile], (&second)[4] = sums[1][tile];
    handover[(other * kTiles + tile) * 32 + lane] =
        team == 0 ? make_float4(second[0], second[1], second[2], second[3])
                  : make_float4(first[0], first[1], first[2], first[3]);
  }
  arrive(shared.handover[other]);
  shared.handover[warp].wait(pass % 2);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float4 others = handover[(warp * kTiles + tile) * 32 + lane];
    const float add[] = {others.x, others.y, others.z, others.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sums[0][tile][e] = (team == 0 ? sums[0][tile][e] : sums[1][tile][e]) + add[e];
    }
  }
  arrive(shared.taken[other]);
}

// A warp's place among the multipliers.
template <int kTokenTiles>
struct Multiplier {
  static constexpr int kGroups = token_groups(kTokenTiles), kTiles = kTokenTiles / kGroups;
  int warp, team, other;   // `other` has the same units and tokens in the other team
  int first_unit;          // of the pass; the warp stores the one of its team's number from there
  int group, first_tile;   // of tokens

  __device__ __forceinline__ explicit Multiplier(int pass_units) {
    // Read again by every caller: what follows from it is not worth a register in between.
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int in_team = team_warps(pass_units, kTokenTiles);
    warp = thread / 32;
    team = warp / in_team;
    other = team == 0 ? warp + in_team : warp - in_team;
    first_unit = warp % in_team / kGroups * kUnitsPerWarp;
    group = warp % kGroups;
    first_tile = group * kTiles;
  }
};

// One warp's units, pass after pass.
template <typename T, int kTokenTiles>
__device__ __forceinline__ void multiply_units(const ForwardParams& p, ForwardShared& shared,
                                               unsigned char* dynamic) {
  const Share& share = shared.share;
  const int lane = threadIdx.x % 32, units = p.grid.pass_units, boxes = p.grid.stage_boxes;
  using Place = Multiplier<kTokenTiles>;
  constexpr int kGroups = Place::kGroups, kTiles = Place::kTiles;
  const bool has_deltas = p.args.weights.table != nullptr;
  const int items = ceil_div(share.num_boxes, boxes);
  int stage = 0;
  uint32_t parity = 0;
  // A stage is given back one stage late: nothing orders an arrival behind the loads of fragments
  // but the products that need them, and those are surely under way a stage later.
  Arrival* done = nullptr;
  for (int first = 0, pass = 0; first < p.grid.units; first += units, ++pass) {
    UnitSums<kTiles> sums = {};
    const Place in_loop(units);
#pragma unroll 1
    for (int item = 0; item < items; ++item) {
      // Also for stages of the other team: a stage may change teams from round to round, and a parity
      // tells a round only from the one before it.
      shared.full[stage].wait(parity);
      // Steps of two boxes take turns, however many boxes a stage has.
      if (item * boxes / kStepBoxes % kTeams == in_loop.team) {
        __syncwarp();
        if (lane == 0 && done != nullptr) arrive(*done);
        done = &shared.empty[stage];
        const unsigned char* w = dynamic + stage * p.smem.stage_bytes + in_loop.first_unit * kUnitBoxBytes;
        const unsigned char* x = dynamic + stage * p.smem.stage_bytes +
                                 boxes * units * kUnitBoxBytes +
                                 in_loop.first_tile * kTokenBoxBytes;
        multiply_box<T, kTiles>(sums, w, x);
        if (boxes > 1) {
          multiply_box<T, kTiles>(sums, w + units * kUnitBoxBytes, x + kTokenTiles * kTokenBoxBytes);
        }
      }
      if (++stage == p.grid.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    const Place self(units);
    add_teams<kTiles>(sums, self.team, self.warp, self.other, shared,
                      reinterpret_cast<float4*>(dynamic + p.smem.handover), pass);
    if (lane == 0 && done != nullptr) arrive(*done);
    done = nullptr;
    if (p.splits > 1 && first == 0) wait_for_cluster();
    wait_for_predecessors();
    const int in_pass = self.first_unit + self.team, in_cluster = first + in_pass;
    const int unit = share.begin + in_cluster;
    const bool stores = p.splits == 1 || unit / 2 % 2 == share.split;
    const bool live = in_pass < units && in_cluster < p.grid.units;
    if (p.splits > 1 && live) {
      const int index = in_cluster * kGroups + self.group;
      float4* inbox = reinterpret_cast<float4*>(dynamic + p.smem.inbox) + index * kTiles * 32;
      exchange_sums(sums[0], stores, share.split ^ 1, inbox, shared.inbox[index]);
    }
    const float* deltas = nullptr;
    if (has_deltas) {
      shared.deltas_full.wait(pass % 2);
      const OwnBlocks own((share.begin + first) / 2, p.splits, share.split);
      deltas = reinterpret_cast<const float*>(dynamic + p.smem.deltas) +
               (own.index_of(unit / 2) * kBlockRows + unit % 2 * kUnitRows) * p.smem.delta_pitch +
               self.first_tile * kTokenTile;
    }
    if (stores && live && unit < share.end) {
      store_unit<T>(p.args, sums[0], share.slice, unit, self.first_tile * kTokenTile, deltas,
                    p.smem.delta_pitch);
    }
    if (has_deltas) arrive(shared.deltas_empty);
  }
}

#endif

}  // namespace aril::detail
