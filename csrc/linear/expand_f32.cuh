// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Expand of a token tile in f32, with FMA: a thread computes an output.
#pragma once

#include "../device/descriptor.cuh"
#include "../device/f32.cuh"
#include "../device/token_tile.cuh"

namespace aril::detail {

// Adds B v to a block's outputs. `rows` gives v, as for small_m_expand().
template <typename V>
__device__ __forceinline__ void expand_f32(const TokenTile& tile, const aril_descriptor& module,
                                           const float* scales, const BlockOuts<float>& outs,
                                           int num_tokens, const V& rows) {
  __shared__ float2 v[ARIL_MAX_RANK / 2];
  if (!outs.begin(tile, module, num_tokens)) return;
  const int rank_tiles = ceil_div(module.rank, ARIL_RANK_TILE);
  const int out = outs.first + static_cast<int>(threadIdx.x);
  const float* b = f32_b_row(module.b, rank_tiles, out);
  for (int t = 0; t < tile.count; ++t) {
    const int token = tile.token(t, num_tokens);
    if (token < 0 || rows.lacks(token)) continue;
    __syncthreads();
    load_v_f32(v, rank_tiles, rows, token);
    __syncthreads();
    if (out >= outs.num_outs) continue;
    const float scale = module.scaling * scales[token];
    const float delta = delta_f32(b, rank_tiles, v);
    float& y = outs.y[token * outs.y_stride + out];
    y = (outs.overwrites ? 0.0f : y) + scale * delta;
  }
}

}  // namespace aril::detail
