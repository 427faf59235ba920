// SPDX-License-Identifier: MIT OR Apache-2.0
//
// How blocks of the fused linear hand v over to each other, in L2: two sums and the tag of the
// launch that they belong to, written and read as one. So there is nothing to reset, and no fence.
//
// A tag is the number of launches that have used the exchange, plus one: 52 bits, which do not come
// again. The header holds it, and in its lower 12 bits the blocks of this launch that have come.
#pragma once

#include "../common/pdl.cuh"
#include "forward_layout.cuh"

namespace aril::detail {

#if __CUDA_ARCH__ >= 900

// Counts a block in, one thread for each, and gives the launch's tag.
__device__ __forceinline__ uint64_t begin_epoch(void* exchange) {
  constexpr int kArrivalBits = 12;
  auto* header = static_cast<unsigned long long*>(exchange);
  const unsigned long long before = atomicAdd(header, 1ull);
  const unsigned long long epoch = before >> kArrivalBits;
  if ((before & ((1ull << kArrivalBits) - 1)) == gridDim.x - 1) {
    atomicExch(header, (epoch + 1) << kArrivalBits);
    __threadfence();
  }
  return epoch + 1;
}

// Sums of two neighbouring ranks.
struct TaggedPair {
  float2 sums;
  uint64_t tag;
};

// Where the sums of a part of the input features are.
struct ExchangePlanes {
  char* first;
  int64_t slice_bytes, token_bytes, part_bytes;

  __device__ __forceinline__ explicit ExchangePlanes(const aril_forward_args& args)
      : first(static_cast<char*>(args.exchange) + ARIL_EXCHANGE_HEADER),
        slice_bytes(int64_t{ceil_div(args.weights.max_rank, kPairRanks)} * kPairRanks / 2 * 16),
        token_bytes(args.num_slices * slice_bytes),
        part_bytes(args.num_tokens * token_bytes) {}

  __device__ __forceinline__ char* at(int part, int token, int slice, int rank) const {
    return first + part * part_bytes + token * token_bytes + slice * slice_bytes + rank / 2 * 16;
  }
};

__device__ __forceinline__ void store_pair(void* entry, float2 sums, uint64_t tag) {
  const uint64_t bits =
      static_cast<uint64_t>(__float_as_uint(sums.y)) << 32 | __float_as_uint(sums.x);
  asm volatile(
      "{\n"
      ".reg .b128 entry;\n"
      "mov.b128 entry, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], entry;\n"
      "}\n" ::"l"(entry),
      "l"(bits), "l"(tag)
      : "memory");
}

__device__ __forceinline__ TaggedPair load_pair(const void* entry) {
  uint64_t bits, tag;
  asm volatile(
      "{\n"
      ".reg .b128 entry;\n"
      "ld.relaxed.gpu.global.b128 entry, [%2];\n"
      "mov.b128 {%0, %1}, entry;\n"
      "}\n"
      : "=l"(bits), "=l"(tag)
      : "l"(entry)
      : "memory");
  return {make_float2(__uint_as_float(static_cast<uint32_t>(bits)),
                      __uint_as_float(static_cast<uint32_t>(bits >> 32))),
          tag};
}

#endif

// The blocks of 32 rows that a block of a cluster stores: of those from `first` on, every
// `splits`th, by their number in the layer.
struct OwnBlocks {
  int first, splits;

  __device__ __forceinline__ OwnBlocks(int first_block, int splits, int split)
      : first(first_block + (splits == 1 ? 0 : (first_block % 2) ^ split)), splits(splits) {}

  __device__ __forceinline__ int index_of(int block) const { return (block - first) / splits; }
};

}  // namespace aril::detail
