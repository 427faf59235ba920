// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The fused linear's stream of W: the producers, and the multipliers of up to 32 tokens.
#pragma once

#include "../../device/vec.cuh"
#include "../../ptx/mma.cuh"
#include "layout.cuh"

namespace aril::detail {

#if __CUDA_ARCH__ >= 900

// Fills the ring with boxes of one matrix, stage by stage. W and x have a thread each, so that no
// load of W waits for x.
// A box of x has the batch's tokens alone. Rows of a stage beyond them keep what was there before:
// their sums are dropped.
struct Producer {
  const CUtensorMap* map;
  uint64_t policy;
  int boxes, box_bytes, box_stride, stages, stage_bytes;  // of a stage
  int first_box, num_boxes, first_row, pass_rows;
  unsigned char* place;  // in the first stage
  int stage = 0, box = 0, row = 0;
  uint32_t parity = 1;  // as if the stages had been released once

  __device__ __forceinline__ static Producer of_weights(const FusedParams& p, const Share& share,
                                                        unsigned char* ring) {
    return {&p.w[share.slice],
            kEvictFirst,
            p.grid.stage_boxes,
            p.grid.pass_strips * kStripBoxBytes,
            p.grid.pass_strips * kStripBoxBytes,
            p.grid.stages,
            p.smem.stage_bytes,
            share.first_box,
            share.num_boxes,
            share.begin * kStripRows,
            p.grid.pass_strips * kStripRows,
            ring};
  }

  __device__ __forceinline__ static Producer of_input(const FusedParams& p, const Share& share,
                                                      int token_tiles, unsigned char* ring) {
    return {&p.x,
            kEvictLast,
            p.grid.stage_boxes,
            p.args.num_tokens * kBoxFeatures * 2,
            token_tiles * kTokenBoxBytes,
            p.grid.stages,
            p.smem.stage_bytes,
            share.first_box,
            share.num_boxes,
            0,
            0,
            ring + p.grid.stage_boxes * p.grid.pass_strips * kStripBoxBytes};
  }

  // Loads the next item as soon as its stage is free.
  __device__ __forceinline__ void copy(FusedShared& shared) {
    shared.empty[stage].wait(parity);
    TransactionBarrier& full = shared.full[stage];
    full.expect(boxes * box_bytes);
    unsigned char* to = place + stage * stage_bytes;
    copy_box(to, *map, (first_box + box) * kBoxFeatures, first_row + row, full, policy);
    if (boxes > 1) {
      copy_box(to + box_stride, *map, (first_box + box + 1) * kBoxFeatures, first_row + row, full,
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

__device__ __forceinline__ int num_items(const FusedParams& p, const Share& share) {
  return p.grid.passes * share.num_items(p.grid);
}

__device__ __forceinline__ void produce_weights(const FusedParams& p, FusedShared& shared,
                                                unsigned char* ring) {
  Producer producer = Producer::of_weights(p, shared.share, ring);
  const int total = num_items(p, shared.share), ahead = min(total, p.grid.stages);
  const int first = min(total, p.grid.first_stages);
#pragma unroll 1
  for (int item = 0; item < first; ++item) producer.copy(shared);
  // Dependents count their blocks too.
  if (p.args.weights.table != nullptr) shared.counted.wait(0);
#pragma unroll 1
  for (int item = first; item < ahead; ++item) producer.copy(shared);
  const int last_call = max(total - p.grid.trigger, ahead);
#pragma unroll 1
  for (int item = ahead; item < total; ++item) {
    if (item == last_call) launch_dependents();
    producer.copy(shared);
  }
  if (last_call >= total) launch_dependents();
}

__device__ __forceinline__ void produce_input(const FusedParams& p, FusedShared& shared,
                                              int token_tiles, unsigned char* ring) {
  Producer producer = Producer::of_input(p, shared.share, token_tiles, ring);
  const int total = num_items(p, shared.share);
  wait_for_predecessors();
#pragma unroll 1
  for (int item = 0; item < total; ++item) producer.copy(shared);
}

// A warp's sums of a strip. Lane (g = lane / 4, q = lane % 4) has rows g, g, g + 8, g + 8 of tokens
// 2q, 2q + 1, 2q, 2q + 1 of each tile.
template <int kTiles>
using StripSums = float[kTiles][4];

// A warp's operands in a box of features, in registers: two strips and its team's half of the
// features, or one strip and both halves.
template <typename T, int kTokenTiles>
struct Operands {
  static constexpr bool kOneHalf = teams(kTokenTiles) > 1;
  uint4 w[2][2];                           // by strip or half, and by 16 features
  uint4 x[kOneHalf ? 1 : 2][kTokenTiles];  // by half, and by token tile

  __device__ __forceinline__ void load(const unsigned char* strips, const unsigned char* tokens,
                                       int team) {
    const int lane = threadIdx.x % 32, row = lane % 16, token = lane % 8;
#pragma unroll
    for (int half = 0; half < (kOneHalf ? 1 : 2); ++half) {
      const int piece = (kOneHalf ? team : half) * 4 + lane / 8;
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
        x[half][tile] =
            ldmatrix_x4(tokens + tile * kTokenBoxBytes + token * 128 + ((piece ^ token) << 4));
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int sum = 0; sum < 2; ++sum) {
        const int piece = (kOneHalf ? team : sum) * 4 + k * 2 + lane / 16;
        w[sum][k] = ldmatrix_x4(strips + (kOneHalf ? sum * kStripBoxBytes : 0) + row * 128 +
                                ((piece ^ (row % 8)) << 4));
      }
    }
  }

  __device__ __forceinline__ void multiply(StripSums<kTokenTiles>* sums) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
        for (int sum = 0; sum < 2; ++sum) {
          const uint4& b = x[kOneHalf ? 0 : sum][tile];
          mma_m16n8k16<T>(sums[sum][tile], w[sum][k], k == 0 ? b.x : b.z, k == 0 ? b.y : b.w);
        }
      }
    }
  }

  // A bit of each load.
  __device__ __forceinline__ uint32_t bits() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= w[i / 2][i % 2].x;
#pragma unroll
    for (int i = 0; i < (kOneHalf ? 1 : 2) * kTokenTiles; ++i)
      bits |= x[i / kTokenTiles][i % kTokenTiles].x;
    return bits;
  }
};

// Adds the other block's sums of a strip if this block stores it, and sends its own otherwise.
// Either way the two blocks' sums are the first to be added to each other. A block waits for every
// strip that it stores, so it still runs when the other one sends.
template <int kTiles>
__device__ __forceinline__ void exchange_sums(float (&sums)[kTiles][4], bool stores, int other,
                                              float4* inbox, TransactionBarrier& arrival) {
  const int lane = threadIdx.x % 32;
  if (stores) {
    arrival.wait(0);
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
  const uint32_t barrier = cluster_address(&arrival, other);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    store_cluster(to + tile * kStripSumsBytes,
                  make_float4(sums[tile][0], sums[tile][1], sums[tile][2], sums[tile][3]), barrier);
  }
}

// Adds the bias, the deltas and, if it accumulates, y to a strip's sums, rounds once, and stores.
// `deltas` begin at the strip's first row; null if there are none.
template <typename T, int kTiles>
__device__ __forceinline__ void store_strip(const aril_forward_args& args,
                                            const float (&sums)[kTiles][4], const Share& share,
                                            int strip, const float* deltas, int delta_pitch) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int num_rows = args.out_features[share.slice];
  const aril_outputs outputs = args.y[share.slice];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = strip * kStripRows + g + 8 * half;
    if (row >= num_rows) continue;
    const float bias = args.bias == nullptr
                           ? 0.0f
                           : to_float(static_cast<const T*>(args.bias)[share.first_out + row]);
    T* y = static_cast<T*>(outputs.first) + row;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = tile * kTokenTile + 2 * q + i;
        if (token >= args.num_tokens) continue;
        float sum = sums[tile][2 * half + i];
        if (args.bias != nullptr) sum += bias;
        if (deltas != nullptr) sum += deltas[(g + 8 * half) * delta_pitch + token];
        T& to = y[token * outputs.stride];
        if (args.accumulates) sum += to_float(to);
        to = from_float<T>(sum);
      }
    }
  }
}

// Exchanges strips with the other team: adds its sums to this warp's own strip, in sums[0].
template <int kTiles>
__device__ __forceinline__ void add_teams(StripSums<kTiles> (&sums)[2], int team, int warp,
                                          int other, FusedShared& shared, float4* handover,
                                          int pass) {
  const int lane = threadIdx.x % 32;
  if (pass > 0) shared.taken[warp].wait((pass - 1) % 2);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float (&first)[4] = sums[0][tile], (&second)[4] = sums[1][tile];
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
  int warp, team, other;  // `other`: the warp of the other team with the same strips
  int first_strip;        // of the pass; the warp stores strip first_strip + team

  __device__ __forceinline__ explicit Multiplier(int pass_strips) {
    // Volatile: recomputed by every caller, which costs less than registers held in between.
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    const int in_team = team_warps(pass_strips, kTokenTiles);
    warp = thread / 32;
    team = teams(kTokenTiles) > 1 && warp >= in_team ? 1 : 0;
    other = team == 0 ? warp + in_team : warp - in_team;
    first_strip = (warp - team * in_team) * strips_per_warp(kTokenTiles);
  }
};

// Multiplies one warp's strips, pass after pass.
template <typename T, int kTokenTiles>
__device__ __forceinline__ void multiply_strips(const FusedParams& p, FusedShared& shared,
                                                unsigned char* dynamic) {
  const Share& share = shared.share;
  const int lane = threadIdx.x % 32, strips = p.grid.pass_strips, boxes = p.grid.stage_boxes;
  using Place = Multiplier<kTokenTiles>;
  constexpr int kTeams = teams(kTokenTiles);
  const bool has_deltas = p.args.weights.table != nullptr;
  const int items = share.num_items(p.grid);
  const uint32_t zero = p.splits >> 8;  // which the compiler does not know
  int stage = 0;
  uint32_t parity = 0;
  for (int first = 0, pass = 0; first < p.grid.strips; first += strips, ++pass) {
    float sums[2][kTokenTiles][4] = {};
    const Place in_loop(strips);
#pragma unroll 1
    for (int item = 0; item < items; ++item) {
      shared.full[stage].wait(parity);
      __syncwarp();
      const unsigned char* w =
          dynamic + stage * p.smem.stage_bytes + in_loop.first_strip * kStripBoxBytes;
      const unsigned char* x =
          dynamic + stage * p.smem.stage_bytes + boxes * strips * kStripBoxBytes;
      Operands<T, kTokenTiles> box;
      box.load(w, x, in_loop.team);
      uint32_t bits = box.bits();
      if (boxes > 1) {
        box.multiply(sums);
        w += strips * kStripBoxBytes;
        x += kTokenTiles * kTokenBoxBytes;
        box.load(w, x, in_loop.team);
        bits |= box.bits();
      }
      // Releases the stage. The barrier's address depends on the operands: without that, the
      // arrival overtakes their loads.
      if (lane == 0) arrive(shared.empty[stage + (bits & zero)]);
      box.multiply(sums);
      if (++stage == p.grid.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    const Place self(strips);
    if constexpr (kTeams > 1) {
      // The delta's warps have used this memory.
      if (has_deltas) shared.deltas_full.wait(pass % 2);
      add_teams<kTokenTiles>(sums, self.team, self.warp, self.other, shared,
                             reinterpret_cast<float4*>(dynamic + p.smem.handover), pass);
    } else {
#pragma unroll
      for (int e = 0; e < 4 * kTokenTiles; ++e) sums[0][e / 4][e % 4] += sums[1][e / 4][e % 4];
    }
    if (p.splits > 1 && first == 0) wait_for_cluster();
    wait_for_predecessors();
    const int in_pass = self.first_strip + self.team, in_cluster = first + in_pass;
    const int strip = share.begin + in_cluster;
    const bool stores = p.splits == 1 || strip / 2 % 2 == share.split;
    const bool live = in_pass < strips && in_cluster < p.grid.strips;
    if (p.splits > 1 && live) {
      const OwnUnits storing(share.begin / 2, p.splits, strip / 2 % 2);
      const int place = storing.index_of(strip / 2) * 2 + strip % 2;
      float4* inbox = reinterpret_cast<float4*>(dynamic + p.smem.inbox) + place * kTokenTiles * 32;
      exchange_sums(sums[0], stores, share.split ^ 1, inbox, shared.inbox[in_cluster]);
    }
    const float* deltas = nullptr;
    if (has_deltas) {
      shared.deltas_full.wait(pass % 2);
      const OwnUnits own((share.begin + first) / 2, p.splits, share.split);
      deltas =
          reinterpret_cast<const float*>(dynamic + p.smem.deltas) +
          (own.index_of(strip / 2) * ARIL_OUT_UNIT + strip % 2 * kStripRows) * p.smem.delta_pitch;
    }
    if (stores && live && strip < share.end) {
      store_strip<T>(p.args, sums[0], share, strip, deltas, p.smem.delta_pitch);
    }
    if (has_deltas) {
      // The teams' sums may be overwritten by bulk copies.
      if constexpr (kTeams > 1) fence_async_proxy();
      arrive(shared.deltas_empty);
    }
  }
}

#endif

}  // namespace aril::detail
