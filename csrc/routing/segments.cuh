// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Groups the first tokens of a batch by slot, in their order, into segments (aril_segments), by the
// votes of a warp.
#pragma once

#include "../aril.h"

namespace aril::detail {

// `slot` is this lane's of its own token. The warp has seen that all of `to.tokens` is -1.
__device__ __forceinline__ void make_segments(aril_segments& to, int token, int slot) {
  static_assert(ARIL_FORWARD_TOKENS == 32);
  const uint32_t peers = __match_any_sync(0xffffffffu, slot), up_to = (2u << token) - 1;
  const int before = __popc(peers & up_to >> 1);
  const uint32_t leaders =
      __ballot_sync(0xffffffffu, slot >= 0 && before % ARIL_SEGMENT_TOKENS == 0);
  int segment = -1;
  if (slot >= 0) {
    // The last leader among its peers up to the token itself.
    const int leader = 31 - __clz(leaders & peers & up_to);
    segment = __popc(leaders & (1u << leader) - 1);
    to.tokens[segment][before % ARIL_SEGMENT_TOKENS] = static_cast<int8_t>(token);
    to.slots[segment] = slot;
  }
  to.segment_of[token] = static_cast<int8_t>(segment);
  to.begun[token] = static_cast<int8_t>(__popc(leaders & up_to));
}

}  // namespace aril::detail
