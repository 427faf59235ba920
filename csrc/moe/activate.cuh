// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The activation of experts in bf16 and f16, of the base's gate_up and the deltas of both its
// slices: one launch, with the shrink of experts.cuh.
//
// A warp of expand has the same features of gate and of up, of up to 8 routes of a tile. It brings
// their y to shared memory, adds the deltas there, and takes the activation with a lane for each
// feature. Routes of the base have all but the deltas.
#pragma once

#include "expand.cuh"

namespace aril::detail {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / __fadd_rn(1.0f, expf(-x)); }

// What the activation makes of gate and up; where there is no gate, of up and 1. NaN gives NaN.
// What could be rounded in two ways says in which, so that all kernels have the same bits.
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
      return x * sigmoid(x) * up;
    default:  // ARIL_SWIGLU_OAI
      x = x > p.limit ? p.limit : x;
      up = up > p.limit ? p.limit : up;
      up = up < -p.limit ? -p.limit : up;
      return x * sigmoid(p.alpha * x) * (up + 1.0f);
  }
}

// A warp's: y with the deltas added, by slice, of rows that are no multiple of the banks apart; and
// the terms of v that there is room for.
struct ActivateStage {
  static constexpr int kRows = 8, kSteps = 4;

  float sums[2][kRows][kOutsPerUnit + 4];
  uint4 terms[kSteps][32];
};

// Adds to eight neighbouring outputs what both terms of a row of v make of a lane's deltas.
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
                                                uint32_t tag, const Tiles& tiles,
                                                unsigned char* shared) {
  constexpr int kRows = ActivateStage::kRows;
  // Steps whose B is on its way, as far as registers go.
#if __CUDA_ARCH__ >= 900
  constexpr int kAhead = std::is_same_v<T, __nv_bfloat16> ? 4 : 2;
#else
  constexpr int kAhead = 2;
#endif
  constexpr int kTileBytes = ARIL_OUT_TILE * ARIL_RANK_TILE * 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const PartialLayout partials = partial_layout(p);
  const uint64_t* const plane = tagged_words(p.mailbox) + 2 * q;
  ActivateStage& stage = reinterpret_cast<ActivateStage*>(shared)[warp];
  const int last = tiles.count(true);
  const ExpandShare share(p, grid, last);

  for (int i = share.first; i < last; i += share.stride) {
    const int4 tile = tiles.tile(i);
    if (tile.y > p.top_k.num_experts) continue;
    // What the lane has of a slice.
    struct Part {
      const char* b;
      int rank_tiles;
      int v_row;
      float factor;
    } parts[2];
    int lane_row = -1;
#pragma unroll
    for (int slice = 0; slice < 2; ++slice) {
      TileLoads loads;
      loads.tile = tile;
      loads.load_all<TileLoads::kOfToken>(p, tiles, min(slice, p.num_slices - 1), g);
      lane_row = loads.route.row;
      Part& part = parts[slice];
      part.b = static_cast<const char*>(loads.own.b);
      part.rank_tiles = slice < p.num_slices ? ceil_div(loads.rank(p), ARIL_RANK_TILE) : 0;
      part.v_row = loads.v_row(p);
      part.factor = loads.factor(p);
    }
    const int first_steps = ceil_div(parts[0].rank_tiles, 2);
    const int steps = first_steps + ceil_div(parts[1].rank_tiles, 2);

    for (int first = share.begin; first < share.end; first += kOutsPerUnit) {
      const int feature = first + lane;
      const bool has_feature = feature < share.end;
      // B's cores, step by step, and slice by slice.
      uint32_t cores[kAhead][2][4];
      int fetched = 0;
      const auto fetch = [&](uint32_t(&cores)[2][4]) {
        if (fetched >= steps) return;
        const bool is_second = fetched >= first_steps;
        const int tiles = is_second ? parts[1].rank_tiles : parts[0].rank_tiles;
        const int step = is_second ? fetched - first_steps : fetched;
        const char* from = (is_second ? parts[1].b : parts[0].b) +
                           (int64_t{first / ARIL_OUT_TILE} * tiles + step * 2) * kTileBytes +
                           first % ARIL_OUT_TILE / kOutsPerUnit * (kTileBytes / 2) + lane * 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool is_there = half == 0 || 2 * step + 1 < tiles;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            cores[half][j] =
                is_there ? load_once(from + half * kTileBytes + j * kCoreElems * 2) : 0;
          }
        }
        ++fetched;
      };
#pragma unroll
      for (int k = 0; k < kAhead; ++k) fetch(cores[k]);

      // The features before are done with.
      __syncwarp();
      for (int slice = 0; slice < p.num_slices; ++slice) {
        T bases[kRows];
        const int at =
            p.interleaved ? feature * p.num_slices + slice : slice * p.out_features + feature;
#pragma unroll
        for (int t = 0; t < kRows; ++t) {
          const int64_t row = __shfl_sync(0xffffffffu, lane_row, t * 4);
          bases[t] = from_float<T>(0.0f);
          if (t < tile.w && has_feature) {
            bases[t] = static_cast<const T*>(p.y)[row * p.y_stride + at];
          }
        }
#pragma unroll
        for (int t = 0; t < kRows; ++t) stage.sums[slice][t][lane] = to_float(bases[t]);
      }
      __syncwarp();

      float deltas[4][4] = {};
      for (int done = 0; done < steps; done += kAhead) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (done + k >= steps) break;
          const bool is_second = done + k >= first_steps;
          const int step = is_second ? done + k - first_steps : done + k;
          const int tiles = is_second ? parts[1].rank_tiles : parts[0].rank_tiles;
          // A row of the operand has what v is rounded to, and the one 8 below it the rest.
          uint4 terms[1];
          const bool has_room = done + k < ActivateStage::kSteps;
          if (first > share.begin && has_room) {
            terms[0] = stage.terms[done + k][lane];
          } else {
            const int v_row = is_second ? parts[1].v_row : parts[0].v_row;
            const float factor = is_second ? parts[1].factor : parts[0].factor;
            const float4 v =
                load_v(plane + is_second * partials.slice_stride + step * kRanksPerStep, partials,
                       grid.groups, v_row, 2 * step + 1 < tiles, tag) *
                factor;
            to_bf16_terms(v.x, v.y, terms[0].x, terms[0].y);
            to_bf16_terms(v.z, v.w, terms[0].z, terms[0].w);
            if (has_room) stage.terms[done + k][lane] = terms[0];
          }
#pragma unroll
          for (int j = 0; j < 4; ++j)
            mma_terms<T>(deltas[j], terms, cores[k][0][j], cores[k][1][j]);
          fetch(cores[k]);
          if (2 * step + 2 < tiles) continue;
          add_terms(&stage.sums[is_second][g][8 * q], deltas);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) deltas[j][e] = 0.0f;
          }
        }
      }
      __syncwarp();

      const bool is_gated = p.num_slices > 1;
#pragma unroll 2
      for (int t = 0; t < tile.w; ++t) {
        const int64_t row = __shfl_sync(0xffffffffu, lane_row, t * 4);
        const float up = stage.sums[p.up_slice][t][lane];
        const float x = is_gated ? stage.sums[1 - p.up_slice][t][lane] : up;
        const float value = activation_of(p, x, is_gated ? up : 1.0f);
        if (has_feature)
          static_cast<T*>(p.out)[row * p.out_stride + feature] = from_float<T>(value);
      }
    }
  }
}

template <typename T, bool kEachBlock>
__global__ void __launch_bounds__(kExpertsThreads, kExpertsBlocks)
    activate_kernel(const __grid_constant__ aril_experts_args p,
                    const __grid_constant__ ExpertsGrid grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  experts_block<T, kEachBlock>(p, grid, shared,
                               [&](uint32_t tag, const auto& tiles, const Sharing&) {
                                 activate_expand<T>(p, grid, tag, tiles, shared);
                               });
}

}  // namespace aril::detail
