// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The mailbox: how blocks pass values to later blocks of the same launch; and how those of an
// activation of experts tell the combine, the next launch, that they have ended.
//
// A mailbox is a header and tagged words of 64 bits: a 32-bit value, and the epoch that stored it.
// Each launch begins a new epoch. A word is stored and loaded by one 64-bit access, so a reader
// that finds the current epoch has the current value, without a fence. Readers poll. A value that
// announces other memory (RouteTiles::publish) needs a fence before the store and after the load.
//
// Block order. A polling block keeps its place on a multiprocessor, so a launch completes only if
// every polled block can start while others run. All waits are for blocks of lower index: expand
// waits for shrink, shrink and expand wait for the block that sorts routes, and the kernels of
// moe/group wait for all earlier blocks. So it suffices that blocks start in the order of their
// index, in one-dimensional grids without clusters: the lowest running block never waits. CUDA does
// not promise this order. GPUs keep it, CUB's scans rely on it, too, and aril_load refuses a device
// that breaks it in a test launch (block_order.cuh). Using the count of begin_epoch() as the
// block's index would need no order, but would delay a block's first load by a round trip to L2.
//
// Epochs. They are 1 to 2^32 - 1 and then repeat (after 3.5 days at 144 launches in 10 ms). Words
// that were never stored have epoch 0. The launches of the last and of the first epoch clear all
// words of other epochs (clear_stale_words()), so no word survives until its epoch repeats.
//
// One launch at a time. If two launches use one mailbox without an order between them, blocks of
// one are counted for the other: the epoch changes within a launch, the count in the header never
// returns to zero, and expand polls for words that never come. Builds with ARIL_DEBUG assert that
// blocks of one launch begin an epoch.
//
// Limits. A launch that polls longer than seconds for a word, because blocks started in another
// order or two launches used the mailbox, traps: an error instead of a wait without end. A whole
// warp polls together, so that lanes that have their word do not delay the others.
#pragma once

#include <stdint.h>
#ifdef ARIL_DEBUG
#include <cassert>
#endif

#include "../aril.h"
#include "../ptx/pdl.cuh"

namespace aril::detail {

// The first bytes of a mailbox. ARIL_MAILBOX_HEADER bytes are reserved: behind the counts, a word
// that announces sorted routes, and words that announce the ends of an activation's blocks.
struct MailboxHeader {
  unsigned long long epochs;  // high half: epochs so far; low half: blocks that began the next one
  unsigned long long has_wrapped;  // whether epochs have repeated
  unsigned long long grid;  // the launch whose blocks are arriving; builds with ARIL_DEBUG only
};
constexpr int kHeaderWord = 64;  // offset of the header's own tagged words
constexpr int kEndWords = 128;   // of those of an activation
static_assert(sizeof(MailboxHeader) <= kHeaderWord);
static_assert(kEndWords + ARIL_ACTIVATION_BLOCKS * ARIL_WORD_BYTES == ARIL_MAILBOX_HEADER);

constexpr uint32_t kLastEpoch = ~0u;

// Two adjacent words.
struct TaggedPair {
  float value0;
  uint32_t epoch0;
  float value1;
  uint32_t epoch1;
};

__device__ __forceinline__ uint64_t* tagged_words(void* mailbox) {
  return reinterpret_cast<uint64_t*>(static_cast<char*>(mailbox) + ARIL_MAILBOX_HEADER);
}

__device__ __forceinline__ void store_tagged(void* word, float value, uint32_t epoch) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(word),
               "l"((static_cast<uint64_t>(epoch) << 32) | __float_as_uint(value))
               : "memory");
}

// Stores two adjacent words, aligned to 16 bytes.
__device__ __forceinline__ void store_tagged2(void* words, float value0, float value1,
                                              uint32_t epoch) {
  const uint64_t high = static_cast<uint64_t>(epoch) << 32;
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(words),
               "l"(high | __float_as_uint(value0)), "l"(high | __float_as_uint(value1))
               : "memory");
}

// Loads two adjacent words, aligned to 16 bytes.
__device__ __forceinline__ TaggedPair load_tagged(const void* words) {
  uint64_t first, second;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(words)
               : "memory");
  return {__uint_as_float(static_cast<uint32_t>(first)), static_cast<uint32_t>(first >> 32),
          __uint_as_float(static_cast<uint32_t>(second)), static_cast<uint32_t>(second >> 32)};
}

// Counts a block in. One thread of every block of the grid calls it and passes the result to
// epoch_of(), before the block allows dependents to launch. What the thread does in between does
// not wait for the count.
__device__ __forceinline__ unsigned long long count_block(void* mailbox) {
  MailboxHeader* const header = static_cast<MailboxHeader*>(mailbox);
#ifdef ARIL_DEBUG
  unsigned long long grid;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(grid));
  const unsigned long long coming = atomicCAS(&header->grid, 0ull, grid + 1);
  assert((coming == 0 || coming == grid + 1) && "one mailbox is used by two launches at once");
#endif
  return atomicAdd(&header->epochs, 1ull);
}

// The launch's epoch. The last block makes room for the next launch.
__device__ __forceinline__ uint32_t epoch_of(void* mailbox, unsigned long long before) {
  MailboxHeader* const header = static_cast<MailboxHeader*>(mailbox);
  const uint32_t epoch = static_cast<uint32_t>(before >> 32) + 1;
  if (static_cast<uint32_t>(before) == gridDim.x - 1) {
#ifdef ARIL_DEBUG
    atomicExch(&header->grid, 0ull);
#endif
    const uint32_t epochs = epoch == kLastEpoch ? 0 : epoch;
    atomicExch(&header->epochs, static_cast<unsigned long long>(epochs) << 32);
    __threadfence();
  }
  return epoch;
}

// Both at once.
__device__ __forceinline__ uint32_t next_epoch(void* mailbox) {
  return epoch_of(mailbox, count_block(mailbox));
}

// The same, then allows dependents to launch.
__device__ __forceinline__ uint32_t begin_epoch(void* mailbox) {
  const uint32_t epoch = next_epoch(mailbox);
  launch_dependents();
  return epoch;
}

// Clears the words of earlier epochs from a mailbox of `bytes` if this is the last or the first
// epoch. `threads` threads of one block of every launch call it; `thread` is the caller's number.
__device__ __forceinline__ void clear_stale_words(void* mailbox, uint64_t bytes, uint32_t epoch,
                                                  int thread = threadIdx.x,
                                                  int threads = blockDim.x) {
  if (epoch != kLastEpoch && epoch != 1) return;
  // Earlier launches may still poll for words of theirs.
  wait_for_predecessors();
  MailboxHeader* const header = static_cast<MailboxHeader*>(mailbox);
  if (epoch == 1 && header->has_wrapped == 0) return;
  unsigned long long* const first =
      reinterpret_cast<unsigned long long*>(static_cast<char*>(mailbox) + kHeaderWord);
  const uint64_t words = (bytes - kHeaderWord) / 8;
#pragma unroll 1
  for (uint64_t i = thread; i < words; i += threads) {
    const unsigned long long word = *const_cast<volatile unsigned long long*>(first + i);
    // Keeps what this launch stores meanwhile.
    if (static_cast<uint32_t>(word >> 32) != epoch) atomicCAS(first + i, word, 0ull);
  }
  if (epoch == kLastEpoch && thread == 0) header->has_wrapped = 1;
}

// Counts the polls of a warp's wait that have found nothing, and ends the launch, and its context,
// with an error if they are more than a launch in order can need. The warp polls as a whole, or its
// first lane alone, which counts. The count is in shared memory: kernels poll where registers are
// shortest.
class PollLimit {
 public:
  __device__ __forceinline__ PollLimit() {
    if (threadIdx.x % 32 == 0) *count_of_warp(threadIdx.x) = 0;
  }

  __device__ __forceinline__ void count() {
    constexpr uint32_t kMost = 1u << 24;  // several seconds
    unsigned thread;
    // Volatile: read again for each poll, rather than kept in a register.
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    if (thread % 32 != 0) return;
    volatile uint32_t* const count = count_of_warp(thread);
    const uint32_t polls = *count + 1;
    *count = polls;
    if (__builtin_expect(polls < kMost, true)) return;
#ifdef ARIL_DEBUG
    assert(false && "what is polled for never comes");
#endif
    __trap();
  }

 private:
  __device__ __forceinline__ static volatile uint32_t* count_of_warp(unsigned thread) {
    __shared__ uint32_t counts[32];
    return counts + thread / 32;
  }
};

__device__ __forceinline__ uint64_t* end_words(void* mailbox) {
  return reinterpret_cast<uint64_t*>(static_cast<char*>(mailbox) + kEndWords);
}

// Announces that a block of an activation has ended, `first` being the number of the first one. All
// of its threads call it. The epoch is in shared memory. Before sm_90 no launch starts so early that
// it would ask.
__device__ __forceinline__ void announce_end(void* mailbox, int first, const uint32_t& epoch) {
#if __CUDA_ARCH__ >= 900
  // Each thread fences what it has stored before one thread announces.
  __threadfence();
  __syncthreads();
  unsigned block;
  // Volatile: read here, rather than kept in a register.
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  const uint32_t now = *const_cast<const volatile uint32_t*>(&epoch);
  if (threadIdx.x == 0) store_tagged(end_words(mailbox) + (block - first), 1.0f, now);
#endif
}

// Waits until the blocks of the activation in the epoch before this one have announced their ends.
// All of them have started before this launch. A whole warp calls it.
__device__ __forceinline__ void wait_for_activation(void* mailbox, int blocks, uint32_t epoch) {
#if __CUDA_ARCH__ >= 900
  // In these epochs a block of this launch may clear the words.
  if (epoch == kLastEpoch || epoch == 1) return wait_for_predecessors();
  PollLimit polls;
  for (int first = 0; first < blocks; first += 32) {
    const int block = min(first + static_cast<int>(threadIdx.x) % 32, blocks - 1);
    const volatile uint64_t* const word = end_words(mailbox) + block;
    while (!__all_sync(0xffffffffu, *word >> 32 == epoch - 1)) polls.count();
  }
  // Orders the loads of x after the announcements.
  __threadfence();
#endif
}

}  // namespace aril::detail
