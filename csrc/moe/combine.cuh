// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The combine of experts in bf16 and f16, in one launch with the shrink (shrink.cuh): out[t] = sum
// over the token's routes of weight * (y[row] + delta), or only the deltas, added to a y that the
// base model has combined.
//
// A warp of expand has a token and some outputs, so no output is written twice and none needs to be
// zeroed. The ranks of a token's routes, one after the other, form one product: v is multiplied by
// the route's factor and weight before it is converted to terms. If the slot's experts share B, the
// v of all routes are summed instead, and multiplied once. Which of the two happens, and in which
// order sums are added, depends on the token's own routes and adapter alone. y comes last: if the
// inputs are complete, it alone waits for predecessors.
//
// Bound: the bytes of B of a token's (slot, expert) pairs, and y.
//
// combine_expand() is one long body: moving a gather out of it changes the machine code.
#pragma once

#include "../device/product.cuh"
#include "../device/reduction.cuh"
#include "../ptx/async.cuh"
#include "block.cuh"

namespace aril::detail {

// Shared memory of a warp.
struct CombineStage {
  static constexpr int kSteps = 8;    // of v, gathered at once
  static constexpr int kRoutes = 32;  // read at once, one per lane

  struct Route {
    int row;
    float weight;
    float factor;  // on v
    // The route's ranks in the product. With a shared B the first route has all of them.
    int rank_tiles;
    int last_step;  // including the routes before
    const char* b;
  } routes[kRoutes];
  uint4 terms[kSteps][4];
  float sums[ARIL_OUT_UNIT];
};
static_assert(sizeof(CombineStage) == ARIL_COMBINE_WARP_BYTES);

// The sum over all g of the values of lanes (g, q), in each of them.
__device__ __forceinline__ float sum_of_rows(float value) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

// Loads up to kRoutes routes of a token, from its `first_k`-th on, to shared memory: one per lane.
// Sets whether the slot's experts share B; the bits of the routes that are present, that have
// deltas, and that have ranks in the product; and the steps of all.
__device__ __forceinline__ void load_routes(const aril_experts_args& p, CombineStage& stage,
                                            int token, int first_k, int lane, bool& shares_b,
                                            unsigned& here, unsigned& adapted, unsigned& with_ranks,
                                            int& all_steps) {
  constexpr unsigned kAll = 0xffffffffu;
  int slot = p.routing.slots[token];
  if (slot >= p.weights.num_slots) slot = -1;
  const aril_descriptor common = module_of(p.weights, slot, 0);
  shares_b = common.rank > 0 && common.b != nullptr;
  int row = kNowhere;
  float weight = 0.0f;
  aril_descriptor own = {};
  if (first_k + lane < p.top_k.top_k) {
    const int route = token * p.top_k.top_k + first_k + lane;
    const unsigned expert = id_of(p.top_k, route);
    if (expert < static_cast<unsigned>(p.top_k.num_experts)) {
      row = row_of(p.top_k, p.num_tokens, route);
      own = module_of(p.weights, row == kNowhere ? -1 : slot, 1 + expert);
      weight = p.factor;
      if (p.weighted) weight *= weight_of(p.top_k, route);
    }
  }
  const float factor =
      own.rank > 0 ? route_factor(own.scaling, p.routing.scales[token], true, weight) : 0.0f;
  here = __ballot_sync(kAll, row != kNowhere);
  adapted = __ballot_sync(kAll, own.rank > 0);
  const bool has_common = lane == 0 && adapted != 0;
  const int rank_tiles =
      ceil_div(shares_b ? (has_common ? common.rank : 0) : own.rank, ARIL_RANK_TILE);
  with_ranks = __ballot_sync(kAll, rank_tiles > 0);
  int last_step = ceil_div(rank_tiles, 2);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(kAll, last_step, distance);
    if (lane >= distance) last_step += before;
  }
  all_steps = __shfl_sync(kAll, last_step, 31);
  // Waits until all lanes are done with the routes before.
  __syncwarp();
  stage.routes[lane] = {row,       weight,
                        factor,    rank_tiles,
                        last_step, static_cast<const char*>(shares_b ? common.b : own.b)};
  __syncwarp();
}

// Adds output `out` of the base model's rows of the present routes to `sum`, with their weights.
template <typename T>
__device__ __forceinline__ float add_base(const aril_experts_args& p, const CombineStage& stage,
                                          float sum, unsigned here, int count, int out,
                                          bool has_out) {
  constexpr int kAtOnce = 8;
  for (int k = 0; k < count; k += kAtOnce) {
    T values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      values[i] = from_float<T>(0.0f);
      if (here >> (k + i) & 1 && has_out) {
        const int64_t row = stage.routes[k + i].row;
        values[i] = static_cast<const T*>(p.y)[row * p.y_stride + out];
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float weight = p.rows_weighted ? p.factor : stage.routes[k + i].weight;
      if (here >> (k + i) & 1) sum = fmaf(weight, to_float(values[i]), sum);
    }
  }
  return sum;
}

template <typename T, bool kEachBlock>
__device__ __forceinline__ void combine_expand(const aril_experts_args& p, const ExpertsGrid& grid,
                                               uint32_t epoch, unsigned char* shared) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kSteps = CombineStage::kSteps, kRoutes = CombineStage::kRoutes;
  constexpr int kAhead = kSteps / 4;  // steps whose B is in flight
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const bool combines = p.form == ARIL_COMBINE;
  const PartialLayout layout = partial_layout(p);
  const uint64_t* const partial = tagged_words(p.mailbox) + 2 * q;
  CombineStage& stage = reinterpret_cast<CombineStage*>(shared)[warp];
  const int num_tokens = routed_tokens(p.routing, p.num_tokens);
  const ExpandShare share(p, grid, num_tokens);
  const int rounds = ceil_div(p.top_k.top_k, kRoutes);
  for (int token = share.first; token < num_tokens; token += share.stride) {
    bool shares_b = false;
    // Bits of the routes in shared memory: those present, those with deltas, those with ranks.
    unsigned here = 0, adapted = 0, with_ranks = 0;
    int all_steps = 0;
    const auto load = [&](int first_k) {
      load_routes(p, stage, token, first_k, lane, shares_b, here, adapted, with_ranks, all_steps);
    };

    for (int first = share.begin; first < share.end; first += ARIL_OUT_UNIT) {
      const int out = first + lane;
      const bool has_out = out < share.end;
      const auto target = [&]() -> T& {
        return combines ? static_cast<T*>(p.out)[token * p.out_stride + out]
                        : static_cast<T*>(p.y)[token * p.y_stride + out];
      };
      float sum = 0.0f;
      float deltas[4][4] = {};
      bool has_any = false;
      // All deltas, then all of y.
#pragma unroll 1
      for (int i = 0; i < 2 * rounds; ++i) {
        const bool adds_y = i >= rounds;
        const int first_k = (adds_y ? i - rounds : i) * kRoutes;
        const bool is_loaded = rounds == 1 && (adds_y || first > share.begin);
        if (!is_loaded) load(first_k);
        const int count = min(p.top_k.top_k - first_k, kRoutes);
        has_any = has_any || adapted != 0;
        if (adds_y) {
          wait_for_predecessors();
          launch_dependents();
          if (combines) sum = add_base<T>(p, stage, sum, here, count, out, has_out);
          continue;
        }
        const int first_route = token * p.top_k.top_k + first_k;
#if __CUDA_ARCH__ >= 900
        // With few tokens, v and y wait for a chain of loads. (H200, 1 to 8 tokens: 0.7 us less; 128
        // tokens would take 8 us more.)
        if (kEachBlock && !is_loaded) {
          for (unsigned left = with_ranks; left != 0; left &= left - 1) {
            const CombineStage::Route& route = stage.routes[__ffs(left) - 1];
            for (int out = first; out < share.end; out += ARIL_OUT_UNIT) {
              const char* const b = unit_at(route.b, out, route.rank_tiles, 0);
              for (int i = lane; i < route.rank_tiles * 4; i += 32) {
                prefetch_l2(b + i / 4 * kBTileBytes + i % 4 * 128);
              }
            }
          }
        }
#endif

        // B, step by step, route by route.
        UnitCores cores[kAhead];
        unsigned routes = with_ranks;  // those not completely fetched
        int fetched = 0;               // steps of the first of them
        const auto fetch = [&](UnitCores& cores) {
          if (routes == 0) return;
          const CombineStage::Route& route = stage.routes[__ffs(routes) - 1];
          const int tiles = route.rank_tiles;
          const char* from = unit_at(route.b, first, tiles, fetched) + lane * 4;
          cores.load(from, 2 * fetched + 1 < tiles);
          if (2 * ++fetched < tiles) return;
          fetched = 0;
          routes &= routes - 1;
        };
#pragma unroll
        for (int k = 0; k < kAhead; ++k) fetch(cores[k]);
        // y is loaded last. It is there already, unless the launch waits for it alone.
        if (p.plan.inputs == ARIL_INPUTS_IN_FRONT) {
          if (!combines) {
            if (has_out) prefetch_l2(&target());
          } else if (lane < count && (here >> lane & 1)) {
            prefetch_l2(static_cast<const T*>(p.y) + stage.routes[lane].row * p.y_stride + first);
          }
        }

        // Gathers the terms of kSteps steps: of each route alone, or of the sum of all routes.
        const auto gather_apart = [&](int first_step) {
          const int last_step = stage.routes[lane].last_step;
          int index = 0;
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
            const int before = __popc(__ballot_sync(kAll, last_step <= first_step + i));
            if (g == i) index = before;
          }
          const bool has_step = index < kRoutes;
          const CombineStage::Route& route = stage.routes[has_step ? index : 0];
          const int step = first_step + g - (route.last_step - ceil_div(route.rank_tiles, 2));
          const float4 v =
              poll_v(partial + step * kRanksPerStep, layout, grid.slabs,
                     has_step ? first_route + index : -1, 2 * step + 1 < route.rank_tiles, epoch);
          stage.terms[g][q] = stacked_terms(v * route.factor);
        };
        const auto gather_together = [&](int first_step) {
          for (int i = 0; i < kSteps && first_step + i < all_steps; ++i) {
            const int step = first_step + i;
            float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int k = g; k < kRoutes; k += 8) {
              if (k - g >= count) break;
              const bool is_adapted = adapted >> k & 1;
              const float4 v = poll_v(partial + step * kRanksPerStep, layout, grid.slabs,
                                      is_adapted ? first_route + k : -1,
                                      2 * step + 1 < stage.routes[0].rank_tiles, epoch) *
                               stage.routes[k].factor;
              total = total + make_float4(sum_of_rows(v.x), sum_of_rows(v.y), sum_of_rows(v.z),
                                          sum_of_rows(v.w));
            }
            if (g == 0) stage.terms[i][q] = stacked_terms(total);
          }
        };

        for (int done = 0; done < all_steps; done += kAhead) {
          // If all terms fit, they are kept for the outputs that follow.
          if (done % kSteps == 0 && !(is_loaded && all_steps <= kSteps)) {
            __syncwarp();
            if (shares_b) {
              gather_together(done);
            } else {
              gather_apart(done);
            }
            __syncwarp();
          }
#pragma unroll
          for (int k = 0; k < kAhead; ++k) {
            if (done + k >= all_steps) break;
            // Only row 0, and row 8 with its low terms, are set.
            uint4 terms[1] = {};
            if (g == 0) terms[0] = stage.terms[(done + k) % kSteps][q];
            cores[k].template multiply<T>(deltas, terms);
            fetch(cores[k]);
          }
        }
      }
      if (has_any) {
        if (!combines && has_out) sum = to_float(target());
        __syncwarp();
        if (g == 0) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            stage.sums[8 * q + i] = deltas[i / 2][i % 2] + deltas[i / 2][2 + i % 2];
          }
        }
        __syncwarp();
        sum += stage.sums[lane];
      }
      if (has_out && (combines || has_any)) target() = from_float<T>(sum);
    }
  }
  // Some warps wait even if there is no token, for the kernels behind.
  wait_for_predecessors();
}

template <typename T, bool kEachBlock>
__global__ void __launch_bounds__(kExpertsThreads, kExpertsBlocks)
    combine_kernel(const __grid_constant__ aril_experts_args p,
                   const __grid_constant__ ExpertsGrid grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  experts_block<T, kEachBlock>(p, grid, shared, [&](uint32_t epoch) {
    combine_expand<T, kEachBlock>(p, grid, epoch, shared);
  });
}

}  // namespace aril::detail
