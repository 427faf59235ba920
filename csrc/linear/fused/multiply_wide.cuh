// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The fused linear's multipliers of more than 32 tokens: one warpgroup, whose warps have 16 tokens
// each. The tokens are the rows of wgmma, and W's rows its columns, so that shared memory is read
// once for all of them. Without wgmma (other devices than sm_90a) mma.sync takes its place.
#pragma once

#include "../../device/vec.cuh"
#include "../../ptx/mma.cuh"
#include "../../ptx/wgmma.cuh"
#include "layout.cuh"

namespace aril::detail {

#if __CUDA_ARCH__ >= 900

constexpr int kWideTiles = 8;  // of tokens
constexpr int kStripColumns = kStripRows / 8;
constexpr int kWideColumns = kMaxStrips * kStripColumns;

// The warpgroup's sums of a pass, by 8 rows of W. Lane (g = lane / 4, q = lane % 4) of a warp has
// tokens g, g, g + 8, g + 8 of the warp, and rows 2q, 2q + 1, 2q, 2q + 1 of the 8.
using WideSums = float[kWideColumns][4];

// Adds the products of a box of features to the sums of its halves. Sums beyond the pass's strips
// are of other memory, and never read. Returns bits of what was loaded to registers.
template <typename T>
__device__ __forceinline__ uint32_t multiply_box(WideSums (&sums)[2], const unsigned char* w,
                                                 const unsigned char* x, int strips) {
  uint32_t bits = 0;
#if __CUDA_ARCH_FEAT_SM90_ALL
  const uint64_t rows = swizzled_descriptor(x), columns = swizzled_descriptor(w);
#pragma unroll
  for (int k = 0; k < kBoxFeatures / 16; ++k) {
    wgmma_k16<T>(sums[k / 2], rows + 2 * k, columns + 2 * k, true);
  }
#else
  const int lane = threadIdx.x % 32, token = threadIdx.x / 32 * 16 + lane % 16, row = lane % 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 a[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int piece = half * 4 + k * 2 + lane / 16;
      a[k] = ldmatrix_x4(x + token * 128 + ((piece ^ (token % 8)) << 4));
      bits |= a[k].x;
    }
#pragma unroll
    for (int column = 0; column < kWideColumns; ++column) {
      if (column >= strips * kStripColumns) break;
      const int piece = half * 4 + lane / 8;
      const uint4 b = ldmatrix_x4(w + (column * 8 + row) * 128 + ((piece ^ row) << 4));
      bits |= b.x;
      mma_m16n8k16<T>(sums[half][column], a[0], b.x, b.y);
      mma_m16n8k16<T>(sums[half][column], a[1], b.z, b.w);
    }
  }
#endif
  return bits;
}

// Begins and ends products that a stage of the ring is read by.
__device__ __forceinline__ void begin_products(WideSums (&sums)[2]) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  fence_operands(sums[0]);
  fence_operands(sums[1]);
  wgmma_fence();
#endif
}
__device__ __forceinline__ void end_products(WideSums (&sums)[2]) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  wgmma_commit();
  wgmma_wait();
  fence_operands(sums[0]);
  fence_operands(sums[1]);
#endif
}

// The strips of a pass that a block has, and where the sums that blocks of a cluster exchange are.
struct WidePass {
  const FusedParams& p;
  const Share& share;
  const int first;  // strip of the cluster

  __device__ __forceinline__ int strip(int in_pass) const { return share.begin + first + in_pass; }
  __device__ __forceinline__ bool has(int in_pass) const {
    return in_pass < p.grid.pass_strips && first + in_pass < p.grid.strips;
  }
  __device__ __forceinline__ bool stores(int in_pass) const {
    return p.splits == 1 || strip(in_pass) / 2 % 2 == share.split;
  }
  // This thread's piece of a strip's first column; those of the next are kPieces further.
  static constexpr int kPieces = kWideTiles / 2 * 32;
  __device__ __forceinline__ float4* inbox(unsigned char* dynamic, int in_pass) const {
    const int unit = strip(in_pass) / 2;
    const OwnUnits storing(share.begin / 2, p.splits, unit % 2);
    const int place = storing.index_of(unit) * 2 + strip(in_pass) % 2;
    return reinterpret_cast<float4*>(dynamic + p.smem.inbox) + place * kStripColumns * kPieces +
           threadIdx.x;
  }
};

// Sends the strips that the other block of the cluster stores, and adds its sums to the others. As
// in exchange_sums(), a block still runs when the other one sends.
__device__ __forceinline__ void exchange_pass(const WidePass& pass, WideSums& sums,
                                              FusedShared& shared, unsigned char* dynamic) {
  const int other = pass.share.split ^ 1;
#pragma unroll
  for (int in_pass = 0; in_pass < kMaxStrips; ++in_pass) {
    if (!pass.has(in_pass) || pass.stores(in_pass)) continue;
    const uint32_t to = cluster_address(pass.inbox(dynamic, in_pass), other);
    const uint32_t barrier = cluster_address(&shared.inbox[pass.first + in_pass], other);
#pragma unroll
    for (int column = 0; column < kStripColumns; ++column) {
      const float (&sent)[4] = sums[in_pass * kStripColumns + column];
      store_cluster(to + column * WidePass::kPieces * 16,
                    make_float4(sent[0], sent[1], sent[2], sent[3]), barrier);
    }
  }
#pragma unroll
  for (int in_pass = 0; in_pass < kMaxStrips; ++in_pass) {
    if (!pass.has(in_pass) || !pass.stores(in_pass)) continue;
    shared.inbox[pass.first + in_pass].wait(0);
    const float4* const inbox = pass.inbox(dynamic, in_pass);
#pragma unroll
    for (int column = 0; column < kStripColumns; ++column) {
      float (&own)[4] = sums[in_pass * kStripColumns + column];
      const float4 others = inbox[column * WidePass::kPieces];
      own[0] += others.x;
      own[1] += others.y;
      own[2] += others.z;
      own[3] += others.w;
    }
  }
}

// Stores two neighbouring outputs of a token, at once if they are aligned, or the first one alone.
template <typename T>
__device__ __forceinline__ void store_outs(T* y, float first, float second, bool two,
                                           bool aligned) {
  struct alignas(2 * sizeof(T)) Outs {
    T first, second;
  };
  const Outs outs = {from_float<T>(first), from_float<T>(second)};
  if (two && aligned) {
    *reinterpret_cast<Outs*>(y) = outs;
    return;
  }
  y[0] = outs.first;
  if (two) y[1] = outs.second;
}

// As store_strip(). `aligned`: pairs of the slice's outputs are, if the first one's number is even.
template <typename T>
__device__ __forceinline__ void store_wide_strip(const aril_forward_args& args,
                                                 const float (*sums)[4], const Share& share,
                                                 int strip, const float* deltas, int delta_pitch,
                                                 bool aligned) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int num_rows = args.out_features[share.slice];
  const aril_outputs outputs = args.y[share.slice];
#pragma unroll
  for (int column = 0; column < kStripColumns; ++column) {
    const int at = column * 8 + 2 * q, row = strip * kStripRows + at;
    if (row >= num_rows) continue;
    const bool two = row + 1 < num_rows;
    float bias[2] = {};
    if (args.bias != nullptr) {
      const T* const from = static_cast<const T*>(args.bias) + share.first_out + row;
      bias[0] = to_float(from[0]);
      if (two) bias[1] = to_float(from[1]);
    }
    float add[4] = {};
    if (deltas != nullptr) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        add[e] = deltas[(at + e % 2) * delta_pitch + warp * 16 + g + e / 2 * 8];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = warp * 16 + g + half * 8;
      if (token >= args.num_tokens) continue;
      T* const y = static_cast<T*>(outputs.first) + token * outputs.stride + row;
      float outs[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        outs[i] = sums[column][2 * half + i];
        if (args.bias != nullptr) outs[i] += bias[i];
        if (deltas != nullptr) outs[i] += add[2 * half + i];
        if (args.accumulates && (i == 0 || two)) outs[i] += to_float(y[i]);
      }
      store_outs(y, outs[0], outs[1], two, aligned);
    }
  }
}

// Multiplies all strips of a block, pass after pass.
template <typename T>
__device__ __forceinline__ void multiply_wide(const FusedParams& p, FusedShared& shared,
                                              unsigned char* dynamic) {
  const Share& share = shared.share;
  const int lane = threadIdx.x % 32, strips = p.grid.pass_strips, boxes = p.grid.stage_boxes;
  const bool has_deltas = p.args.weights.table != nullptr;
  const int items = share.num_items(p.grid);
  const aril_outputs outputs = p.args.y[share.slice];
  const bool aligned =
      (reinterpret_cast<uintptr_t>(outputs.first) | outputs.stride * sizeof(T)) % (2 * sizeof(T)) ==
      0;
  const uint32_t zero = p.splits >> 8;  // which the compiler does not know
  int stage = 0;
  uint32_t parity = 0;
  for (int first = 0, number = 0; first < p.grid.strips; first += strips, ++number) {
    WideSums sums[2] = {};
#pragma unroll 1
    for (int item = 0; item < items; ++item) {
      const unsigned char* w = dynamic + stage * p.smem.stage_bytes;
      const unsigned char* x = w + boxes * strips * kStripBoxBytes;
      shared.full[stage].wait(parity);
      __syncwarp();
      begin_products(sums);
      uint32_t bits = multiply_box<T>(sums, w, x, strips);
      if (boxes > 1) {
        bits |= multiply_box<T>(sums, w + strips * kStripBoxBytes, x + kWideTiles * kTokenBoxBytes,
                                strips);
      }
      end_products(sums);
      // As in multiply_strips(), the arrival must not overtake loads of operands.
      if (lane == 0) arrive(shared.empty[stage + (bits & zero)]);
      if (++stage == p.grid.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
#pragma unroll
    for (int e = 0; e < 4 * kWideColumns; ++e) sums[0][e / 4][e % 4] += sums[1][e / 4][e % 4];
    if (p.splits > 1 && first == 0) wait_for_cluster();
    wait_for_predecessors();
    const WidePass pass = {p, share, first};
    if (p.splits > 1) exchange_pass(pass, sums[0], shared, dynamic);
    const OwnUnits own((share.begin + first) / 2, p.splits, share.split);
    if (has_deltas) shared.deltas_full.wait(number % 2);
#pragma unroll
    for (int in_pass = 0; in_pass < kMaxStrips; ++in_pass) {
      const int strip = pass.strip(in_pass);
      if (!pass.has(in_pass) || !pass.stores(in_pass) || strip >= share.end) continue;
      const float* deltas = nullptr;
      if (has_deltas) {
        deltas =
            reinterpret_cast<const float*>(dynamic + p.smem.deltas) +
            (own.index_of(strip / 2) * ARIL_OUT_UNIT + strip % 2 * kStripRows) * p.smem.delta_pitch;
      }
      store_wide_strip<T>(p.args, sums[0] + in_pass * kStripColumns, share, strip, deltas,
                          p.smem.delta_pitch, aligned);
    }
    if (has_deltas) arrive(shared.deltas_empty);
  }
}

#endif

}  // namespace aril::detail
