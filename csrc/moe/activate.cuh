// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The activation of experts in bf16 and f16: out = activation(gate_up + deltas) in one launch with
// the shrink of both slices (shrink.cuh).
//
// A warp has the same features of gate and up for the up to 8 routes of a tile. It sums the deltas
// in shared memory, adds y, and applies the activation with one feature per lane. B goes straight
// to registers, kAhead steps ahead. Routes of the base model have no deltas. If the inputs are
// complete, y alone waits for predecessors.
//
// Bound: the bytes of B of the (slot, expert) pairs that occur, y, and out.
#pragma once

#include "../device/activation.cuh"
#include "../device/product.cuh"
#include "../device/reduction.cuh"
#include "../ptx/async.cuh"
#include "block.cuh"
#include "tile_queue.cuh"

namespace aril::detail {

// activation(gate, up), or activation(up, 1) without a gate. NaN gives NaN. Explicit roundings keep
// the compiler from contracting differently in different kernels, so that all give the same bits.
template <typename T>
__device__ __forceinline__ float activation_of(const aril_experts_args& p, float x, float up) {
  switch (p.activation) {
    case ARIL_GELU:
      return 0.5f * x * __fadd_rn(1.0f, erff(x * 0.707106781f)) * up;
    case ARIL_GELU_TANH:
      x = 0.5f * x * __fadd_rn(1.0f, tanhf(0.797884561f * fmaf(0.044715f * x * x, x, x)));
      return x * up;
    case ARIL_RELU2:
      x = x < 0.0f ? 0.0f : x;
      return x * x * up;
    case ARIL_SILU:
      return silu_mul<T>(x, up);
    default:  // ARIL_SWIGLU_OAI
      x = x > p.limit ? p.limit : x;
      up = up > p.limit ? p.limit : up;
      up = up < -p.limit ? -p.limit : up;
      return x * sigmoid<T>(p.alpha * x) * (up + 1.0f);
  }
}

// Shared memory of a warp.
struct ActivateStage {
  static constexpr int kRows = 8, kSteps = 4;

  // The deltas, then with y added, by slice; rows are padded against bank conflicts.
  float sums[2][kRows][ARIL_OUT_UNIT + 4];
  uint4 terms[kSteps][32];  // of v, for as many steps as there is room
};
static_assert(sizeof(ActivateStage) == ARIL_ACTIVATE_WARP_BYTES);

// Adds a lane's deltas of both terms to eight adjacent outputs.
__device__ __forceinline__ void add_terms(float* sums, const float (&deltas)[4][4]) {
  float4* const quads = reinterpret_cast<float4*>(sums);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto& d = deltas;
    quads[i] = quads[i] + make_float4(d[2 * i][0] + d[2 * i][2], d[2 * i][1] + d[2 * i][3],
                                      d[2 * i + 1][0] + d[2 * i + 1][2],
                                      d[2 * i + 1][1] + d[2 * i + 1][3]);
  }
}

template <typename T, typename Tiles>
__device__ __forceinline__ void activate_expand(const aril_experts_args& p, const ExpertsGrid& grid,
                                                uint32_t epoch, const Tiles& tiles,
                                                unsigned char* shared) {
  constexpr int kRows = ActivateStage::kRows;
  // Steps whose B is in flight, as far as registers allow.
#if __CUDA_ARCH__ >= 900
  constexpr int kAhead = std::is_same_v<T, __nv_bfloat16> ? 4 : 2;
#else
  constexpr int kAhead = 2;
#endif
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const PartialLayout layout = partial_layout(p);
  const uint64_t* const partial = tagged_words(p.mailbox) + 2 * q;
  ActivateStage& stage = reinterpret_cast<ActivateStage*>(shared)[warp];
  const int last = tiles.count(true);
  const ExpandShare share(p, grid, last);

  for (int i = share.first; i < last; i += share.stride) {
    const int4 tile = tiles.tile(i);
    if (tile.y > p.top_k.num_experts) continue;
    // What a lane has of a slice.
    struct Slice {
      const char* b;
      int rank_tiles;
      int v_row;
      float factor;
    } slices[2];
    int lane_row = -1;
#pragma unroll
    for (int slice = 0; slice < 2; ++slice) {
      TileLoads loads;
      loads.tile = tile;
      loads.load_all<TileLoads::kOfToken>(p, tiles, min(slice, p.num_slices - 1), g);
      lane_row = loads.route.row;
      Slice& own = slices[slice];
      own.b = static_cast<const char*>(loads.own.b);
      own.rank_tiles = slice < p.num_slices ? ceil_div(loads.rank(p), ARIL_RANK_TILE) : 0;
      own.v_row = loads.v_row(p);
      own.factor = loads.factor(p);
    }
    const int first_steps = ceil_div(slices[0].rank_tiles, 2);
    const int steps = first_steps + ceil_div(slices[1].rank_tiles, 2);

    for (int first = share.begin; first < share.end; first += ARIL_OUT_UNIT) {
      const int feature = first + lane;
      const bool has_feature = feature < share.end;
      // B, step by step, slice by slice.
      UnitCores cores[kAhead];
      int fetched = 0;
      const auto fetch = [&](UnitCores& cores) {
        if (fetched >= steps) return;
        const bool is_second = fetched >= first_steps;
        const int tiles = is_second ? slices[1].rank_tiles : slices[0].rank_tiles;
        const int step = is_second ? fetched - first_steps : fetched;
        const char* b = is_second ? slices[1].b : slices[0].b;
        const char* from = unit_at(b, first, tiles, step) + lane * 4;
        cores.load(from, 2 * step + 1 < tiles);
        ++fetched;
      };
#pragma unroll
      for (int k = 0; k < kAhead; ++k) fetch(cores[k]);
      // y is loaded last. It is there already, unless the launch waits for it alone.
      if (p.plan.inputs == ARIL_INPUTS_IN_FRONT) {
        const int t = lane % kRows, slice = lane / kRows;
        const int64_t row = __shfl_sync(0xffffffffu, lane_row, t * 4);
        if (t < tile.w && slice < p.num_slices) {
          prefetch_l2(static_cast<const T*>(p.y) + row * p.y_stride +
                      (p.interleaved ? first * p.num_slices : slice * p.out_features + first));
        }
      }

      // The features before are finished.
      __syncwarp();
#pragma unroll
      for (int t = 0; t < kRows; ++t) {
        // y - 0 = y, for a y of -0 too.
        stage.sums[0][t][lane] = stage.sums[1][t][lane] = -0.0f;
      }
      __syncwarp();

      float deltas[4][4] = {};
      for (int done = 0; done < steps; done += kAhead) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (done + k >= steps) break;
          const bool is_second = done + k >= first_steps;
          const int step = is_second ? done + k - first_steps : done + k;
          const int tiles = is_second ? slices[1].rank_tiles : slices[0].rank_tiles;
          uint4 terms[1];
          const bool has_room = done + k < ActivateStage::kSteps;
          if (first > share.begin && has_room) {
            terms[0] = stage.terms[done + k][lane];
          } else {
            const int v_row = is_second ? slices[1].v_row : slices[0].v_row;
            const float factor = is_second ? slices[1].factor : slices[0].factor;
            terms[0] = stacked_terms(
                poll_v(partial + is_second * layout.slice_stride + step * kRanksPerStep, layout,
                       grid.slabs, v_row, 2 * step + 1 < tiles, epoch) *
                factor);
            if (has_room) stage.terms[done + k][lane] = terms[0];
          }
          cores[k].template multiply<T>(deltas, terms);
          fetch(cores[k]);
          if (2 * step + 2 < tiles) continue;
          add_terms(&stage.sums[is_second][g][8 * q], deltas);
          set_zero(deltas);
        }
      }
      __syncwarp();
      const bool is_gated = p.num_slices > 1;
      wait_for_predecessors();
      T bases[kRows][2];
      const int at = p.interleaved ? feature * p.num_slices : feature;
      const int to_second = p.interleaved ? 1 : p.out_features;
#pragma unroll
      for (int t = 0; t < kRows; ++t) {
        const int64_t row = __shfl_sync(0xffffffffu, lane_row, t * 4);
        bases[t][0] = bases[t][1] = from_float<T>(0.0f);
        if (t < tile.w && has_feature) {
          const T* const y = static_cast<const T*>(p.y) + row * p.y_stride + at;
          bases[t][0] = y[0];
          if (is_gated) bases[t][1] = y[to_second];
        }
      }
#pragma unroll
      for (int t = 0; t < kRows; ++t) {
        stage.sums[0][t][lane] += to_float(bases[t][0]);
        stage.sums[1][t][lane] += to_float(bases[t][1]);
      }

#pragma unroll 2
      for (int t = 0; t < tile.w; ++t) {
        const int64_t row = __shfl_sync(0xffffffffu, lane_row, t * 4);
        const float up = stage.sums[p.up_slice][t][lane];
        const float x = is_gated ? stage.sums[1 - p.up_slice][t][lane] : up;
        const float value = activation_of<T>(p, x, is_gated ? up : 1.0f);
        if (has_feature)
          static_cast<T*>(p.out)[row * p.out_stride + feature] = from_float<T>(value);
      }
    }
  }
  // Some warps wait even if no route is here, for the kernels behind.
  wait_for_predecessors();
}

template <typename T, bool kEachBlock>
__global__ void __launch_bounds__(kExpertsThreads, kExpertsBlocks)
    activate_kernel(const __grid_constant__ aril_experts_args p,
                    const __grid_constant__ ExpertsGrid grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  experts_block<T, kEachBlock>(p, grid, shared,
                               [&](const uint32_t& epoch, const auto& tiles, const WarpSharing&) {
                                 activate_expand<T>(p, grid, epoch, tiles, shared);
                                 if constexpr (kEachBlock) {
                                   if (p.plan.activation_blocks == 0) return;
                                   const int first = grid.first_shrink + grid.shrink_blocks;
                                   announce_end(p.mailbox, first, epoch);
                                 }
                               });
}

}  // namespace aril::detail
