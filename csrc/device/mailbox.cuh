// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The mailbox: how blocks of a launch hand values to later blocks of the same launch.
//
// A mailbox is a header and pairs, each of 32 bits and a tag. A launch takes the next tag, and a
// pair is stored and loaded by one 64-bit access: a pair that has the launch's tag has a value of
// the launch, without a fence. Whoever needs it polls. What the pair stands for besides itself
// (RouteTiles::publish) takes a fence before the store and one behind the load.
//
// Block order. A block that polls keeps its place on a multiprocessor, so a launch ends only if
// every block that is polled for begins without another one's end. Every wait here is for blocks of
// lower index: expand's for shrink, shrink's and expand's for the block that sorts, and, in the
// kernels of group.cuh and align.cuh, a block's for all before it. So it suffices that blocks begin
// in the order of their index, in grids of one dimension without clusters: whoever is polled for
// has begun by then, and depends on lower blocks alone, so that the lowest one can always go on.
// CUDA does not promise this order. GPUs keep to it, CUB's scans rely on it, too, and aril_load
// refuses a device on which a test launch finds another (order.cuh). Taking the number that enter()
// counts for the index would need no order, but costs a trip to L2 before a block's first load.
//
// Tags. They are 1 to 2^32 - 1, and come again after as many launches (3.5 days at 144 launches in
// 10 ms). Zero is that of pairs that were never stored. So that no pair is left of the launch that
// had the same tag before, the launches with the last tag and with the first one set all pairs of
// other tags to zero (clear_stale_words()).
//
// One launch at a time. A second launch on the same mailbox, unless it is ordered behind the
// first, takes blocks of one for the other's: tags differ within a launch then, the number of
// blocks in the header never ends at zero, and expand polls forever. Builds with ARIL_DEBUG assert
// that the blocks that enter are of one launch, and that no poll takes longer than seconds.
#pragma once

#include <stdint.h>
#ifdef ARIL_DEBUG
#include <cassert>
#endif

#include "../aril.h"
#include "../ptx/pdl.cuh"

namespace aril::detail {

// The beginning of a mailbox; ARIL_MAILBOX_HEADER bytes with what is left free.
struct MailboxHeader {
  unsigned long long launches;     // so far, below: the blocks of the next one that have come
  unsigned long long has_wrapped;  // whether tags have come again
  unsigned long long grid;         // whose blocks are coming; of builds with ARIL_DEBUG
};
constexpr int kMailboxWord = ARIL_MAILBOX_HEADER / 2;  // bytes before the header's own pair
static_assert(sizeof(MailboxHeader) <= kMailboxWord);

constexpr uint32_t kLastEpoch = ~0u;

// Two neighbouring pairs.
struct TaggedPair {
  float value0;
  uint32_t tag0;
  float value1;
  uint32_t tag1;
};

__device__ __forceinline__ uint64_t* tagged_words(void* mailbox) {
  return reinterpret_cast<uint64_t*>(static_cast<char*>(mailbox) + ARIL_MAILBOX_HEADER);
}

__device__ __forceinline__ void store_tagged(void* plane, float sum, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(plane),
               "l"((static_cast<uint64_t>(tag) << 32) | __float_as_uint(sum))
               : "memory");
}

// Two neighbours at once.
__device__ __forceinline__ void store_tagged2(void* plane, float value0, float value1,
                                              uint32_t tag) {
  const uint64_t high = static_cast<uint64_t>(tag) << 32;
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(plane),
               "l"(high | __float_as_uint(value0)), "l"(high | __float_as_uint(value1))
               : "memory");
}

__device__ __forceinline__ TaggedPair load_tagged(const void* plane) {
  uint64_t first, second;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(plane)
               : "memory");
  return {__uint_as_float(static_cast<uint32_t>(first)), static_cast<uint32_t>(first >> 32),
          __uint_as_float(static_cast<uint32_t>(second)), static_cast<uint32_t>(second >> 32)};
}

// Counts a block in, and gives the launch's tag. Every block of the grid calls, one thread each,
// before it lets dependents begin.
__device__ __forceinline__ uint32_t next_epoch(void* mailbox) {
  MailboxHeader* const header = static_cast<MailboxHeader*>(mailbox);
#ifdef ARIL_DEBUG
  unsigned long long grid;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(grid));
  const unsigned long long coming = atomicCAS(&header->grid, 0ull, grid + 1);
  assert((coming == 0 || coming == grid + 1) && "one mailbox is used by two launches at once");
#endif
  const unsigned long long before = atomicAdd(&header->launches, 1ull);
  const uint32_t tag = static_cast<uint32_t>(before >> 32) + 1;
  if (static_cast<uint32_t>(before) == gridDim.x - 1) {
#ifdef ARIL_DEBUG
    atomicExch(&header->grid, 0ull);
#endif
    const uint32_t launches = tag == kLastEpoch ? 0 : tag;
    atomicExch(&header->launches, static_cast<unsigned long long>(launches) << 32);
    __threadfence();
  }
  return tag;
}

// As above; then lets dependents begin.
__device__ __forceinline__ uint32_t begin_epoch(void* mailbox) {
  const uint32_t tag = next_epoch(mailbox);
  launch_dependents();
  return tag;
}

// Clears words of earlier epochs from a mailbox of `bytes`, at the epochs where tags come again. By
// `threads` threads of one block of each launch, which all have the tag; this is number `thread`.
__device__ __forceinline__ void clear_stale_words(void* mailbox, uint64_t bytes, uint32_t tag,
                                                  int thread = threadIdx.x,
                                                  int threads = blockDim.x) {
  if (tag != kLastEpoch && tag != 1) return;
  // Launches before this one may poll for tags of theirs.
  wait_for_predecessors();
  MailboxHeader* const header = static_cast<MailboxHeader*>(mailbox);
  if (tag == 1 && header->has_wrapped == 0) return;
  unsigned long long* const first =
      reinterpret_cast<unsigned long long*>(static_cast<char*>(mailbox) + kMailboxWord);
  const uint64_t words = (bytes - kMailboxWord) / 8;
#pragma unroll 1
  for (uint64_t i = thread; i < words; i += threads) {
    const unsigned long long word = *const_cast<volatile unsigned long long*>(first + i);
    // What this launch stores meanwhile stays.
    if (static_cast<uint32_t>(word >> 32) != tag) atomicCAS(first + i, word, 0ull);
  }
  if (tag == kLastEpoch && thread == 0) header->has_wrapped = 1;
}

// The polls of a wait.
class PollLimit {
 public:
  __device__ __forceinline__ void count() {
#ifdef ARIL_DEBUG
    constexpr uint32_t kMost = 1u << 24;  // several seconds
    assert(++polls_ < kMost && "what is polled for never comes");
#endif
  }

#ifdef ARIL_DEBUG
 private:
  uint32_t polls_ = 0;
#endif
};

}  // namespace aril::detail
