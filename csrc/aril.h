// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The C ABI of aril's kernels: one function per operation, one plain struct of arguments per
// function.
//
// Every function returns 0, a positive cudaError_t, or a negative ARIL_ERR_*, and on anything but 0
// has enqueued nothing. None allocates, synchronizes, or touches a stream other than the one given,
// and all but aril_load may be captured in a CUDA graph. Strides are in elements. Slots and token
// ids in device memory are not trusted: those out of range have no adapter.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Limits and tiles, shared by the kernels and by the plans made on the host.
#define ARIL_MAX_SLICES 8        // modules fused into one layer
#define ARIL_MAX_SLOTS 8192      // rows of a descriptor table
#define ARIL_MAX_RANK 512        // of a factor
#define ARIL_TOKENS_PER_TILE 16  // tokens of one slot that a block works on together
#define ARIL_WIDE_TILE 64        // in an operation on more tokens than
#define ARIL_FEW_TOKENS 512      // these
#define ARIL_STAGED_RANK 128     // up to which B is brought to shared memory
#define ARIL_LANE_FEATURES 256   // input features of a lane of shrink's sums; see kernels/tile.cuh
#define ARIL_LANES_PER_GROUP 4   // lanes that are summed up before anything is added to them
#define ARIL_GROUPS_PER_SPAN 4   // groups likewise
#define ARIL_CORE 8              // rows and columns of a core of a factor, and
#define ARIL_RANK_TILE 8         // ranks
#define ARIL_OUT_TILE 64         // and outputs that stand together
#define ARIL_OUTS_FEW 256   // outputs that a block of expand has a multiple of, with few tokens
#define ARIL_OUTS_WIDE 128  // and with more
#define ARIL_EXCHANGE_HEADER 128   // bytes, before the sums
#define ARIL_FACTOR_ALIGNMENT 128  // bytes, of each factor

#define ARIL_ERR_NO_KERNEL (-1)  // this build has no code for the device
#define ARIL_ERR_ARGUMENT (-2)   // an argument is outside its limits

enum aril_dtype { ARIL_BF16 = 0, ARIL_F16 = 1, ARIL_F32 = 2 };

// One module of one slot. A table is [num_slots][num_entries] of these. Rank 0: the slot has no
// such module.
//
// Factors stand in cores of 8 by 8 elements, row-major, padded with zeros. A [rank, in_features] is
// [in / 256][rank / 8][32] cores of [8 ranks][8 features]. B [out_features, rank] is
// [out / 64][rank / 8][2 i][4 j] cores of [8 n][8 ranks], where the output of the 64 is
// 32 i + 8 (n / 2) + 2 j + n % 2: so four products side by side leave a lane eight neighbouring
// outputs. An embedding's A [vocab, rank] has rows padded to 8 ranks.
typedef struct aril_descriptor {
  const void* a;
  const void* b;
  int32_t rank;
  float scaling;
} aril_descriptor;

// Tokens of one slot that a block works on together: [begin, begin + count) of aril_routing.tokens.
// Slot -1: those that have none.
typedef struct aril_tile {
  int32_t slot;
  int32_t begin;
  int32_t count;
} aril_tile;

// Tiles of one size.
typedef struct aril_tiles {
  aril_tile* all;  // `count` are set
  int32_t* count;  // [1]
} aril_tiles;

// A batch grouped by slot, in device memory at addresses that stay; written by aril_route, read by
// every operation.
typedef struct aril_routing {
  int32_t* tokens;        // [max_tokens] by slot, those that have none behind the others
  float* scales;          // [max_tokens] by token: the factor on its adapter's scaling
  int32_t* indptr;        // [num_slots + 1] where each slot's tokens begin in `tokens`
  aril_tiles tiles;       // of up to ARIL_TOKENS_PER_TILE
  aril_tiles wide_tiles;  // of up to ARIL_WIDE_TILE
} aril_routing;

typedef struct aril_route_args {
  const int32_t* token_slots;  // [num_tokens]
  const float* token_scales;   // [num_tokens], or null for ones
  int32_t num_tokens;
  int32_t num_slots;
  aril_routing routing;
} aril_route_args;

// The slots' factors of one layer: `table` is that of the first of the layer's entries.
typedef struct aril_weights {
  const aril_descriptor* table;
  int32_t num_slots;
  int32_t num_entries;  // from one slot's row of the table to the next
  int32_t max_rank;     // larger ranks in the table are taken for no adapter
} aril_weights;

// y[t, slice] += scales[t] * scaling * B (A x[t]), by shrink alone, expand alone, or both. If it
// overwrites, y is set to that, and to zero where there is no adapter.
typedef struct aril_linear_args {
  int32_t dtype;
  int32_t num_tokens;       // rows of x and y
  int32_t max_tiles;        // the most that the routing can have, of the size for num_tokens
  int32_t lanes_per_split;  // a group's or a span's: how blocks share out a token's input, with
                            // more than ARIL_FEW_TOKENS or in f32. Same bits.
  int32_t outs_per_block;   // of expand: a multiple of ARIL_OUTS_FEW or ARIL_OUTS_WIDE. Same bits.
  int32_t overwrites;       // 0 or 1
  int32_t in_features;
  int32_t num_slices;
  int32_t out_features[ARIL_MAX_SLICES];
  const void* x;  // [num_tokens, in_features]
  int64_t x_stride;
  void* y;  // [num_tokens, sum of out_features]
  int64_t y_stride;
  // From shrink to expand, both aligned to 16 bytes; ranks are max_rank padded to ARIL_RANK_TILE.
  // The exchange is for few tokens in bf16 and f16: a header, zero when it is first used, then
  // [groups, num_tokens, num_slices, ranks] pairs of a float and a tag. Nothing else may write it.
  // The planes are for the others: [splits, num_tokens, num_slices, ranks].
  void* exchange;
  float* planes;
  aril_weights weights;
  aril_routing routing;
} aril_linear_args;

// y[t] += scales[t] * scaling * B A[token_ids[t]]
typedef struct aril_embedding_args {
  int32_t dtype;
  int32_t num_tokens;
  int32_t max_tiles;       // as above
  int32_t outs_per_block;  // as above
  int32_t vocab;
  int32_t hidden;
  const int32_t* token_ids;  // [num_tokens]
  void* y;                   // [num_tokens, hidden]
  int64_t y_stride;
  aril_weights weights;
  aril_routing routing;
} aril_embedding_args;

// What a status means; a string that lives forever.
const char* aril_status_string(int32_t status);

// Loads every kernel into the current context, so that no launch has to.
int32_t aril_load(void);
int32_t aril_route(const aril_route_args* args, void* stream);
int32_t aril_linear(const aril_linear_args* args, void* stream);
int32_t aril_linear_shrink(const aril_linear_args* args, void* stream);
int32_t aril_linear_expand(const aril_linear_args* args, void* stream);
int32_t aril_embedding(const aril_embedding_args* args, void* stream);

#ifdef __cplusplus
}
#endif
