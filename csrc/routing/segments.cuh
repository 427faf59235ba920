// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Groups the first tokens of a batch by slot, in their order, into segments (aril_segments), by two
// warps' votes.
#pragma once

#include "../aril.h"

namespace aril::detail {

// The tokens before this lane's, of its slot: those among these 32, and `first` further ones.
struct Peers {
  uint32_t mask;
  int before;

  __device__ __forceinline__ Peers(int slot, int lane, int first) {
    mask = __match_any_sync(0xffffffffu, slot);
    before = first + __popc(mask & ((1u << lane) - 1));
  }

  // The lanes whose tokens begin a segment.
  __device__ __forceinline__ uint32_t leaders(int slot) const {
    return __ballot_sync(0xffffffffu, slot >= 0 && before % ARIL_SEGMENT_TOKENS == 0);
  }
};

// Warp `warp`, 0 or 1, of a block groups its 32 tokens; the second one also looks at those of the
// first. `slot` is this lane's of its own token, `first_slot` that of the first warp's token. Both
// warps have seen that all of `to.tokens` is -1.
__device__ __forceinline__ void make_segments(aril_segments& to, int warp, int slot,
                                              int first_slot) {
  static_assert(ARIL_FORWARD_TOKENS == 64);
  const int lane = threadIdx.x % 32, token = warp * 32 + lane;
  const bool second = warp == 1;
  uint32_t first_leaders = 0, first_peers = 0;
  if (second) {
    first_leaders = Peers(first_slot, lane, 0).leaders(first_slot);
#pragma unroll 4
    for (int i = 0; i < 32; ++i) {
      if (__shfl_sync(0xffffffffu, first_slot, i) == slot) first_peers |= 1u << i;
    }
  }
  const Peers peers(slot, lane, __popc(first_peers));
  const uint32_t leaders = peers.leaders(slot);
  int segment = -1;
  if (slot >= 0) {
    // The last leader among its peers up to the token itself.
    const uint32_t mine = leaders & peers.mask & (2u << lane) - 1;
    const uint32_t in = mine != 0 ? leaders : first_leaders;
    const int leader = 31 - __clz(mine != 0 ? mine : first_leaders & first_peers);
    segment = __popc(in & ((1u << leader) - 1)) + (mine != 0 ? __popc(first_leaders) : 0);
    to.tokens[segment][peers.before % ARIL_SEGMENT_TOKENS] = static_cast<int8_t>(token);
    to.slots[segment] = slot;
  }
  to.segment_of[token] = static_cast<int8_t>(segment);
  to.begun[token] = static_cast<int8_t>(__popc(first_leaders) + __popc(leaders & (2u << lane) - 1));
}

}  // namespace aril::detail
