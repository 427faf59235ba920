// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The C ABI of aril's kernels: one function per operation, one plain struct of arguments per
// function.
//
// Every function returns 0, a positive cudaError_t, or a negative ARIL_ERR_*, and on an ARIL_ERR_*
// has enqueued nothing. A cudaError_t is the driver's refusal of a launch. An operation of one
// launch has enqueued nothing then. Of several launches are a linear layer in f32 or on more than
// ARIL_SMALL_M, whose last launch alone writes y, so that y stays as it was; and experts with
// wide_shrink_blocks, of whose three launches either the second one or the third writes y, so that
// y has all of the result or nothing of it. Planes and mailbox may be used again in either case.
//
// None allocates, synchronizes, or touches a stream other than the one given, and all but aril_load
// may be captured in a CUDA graph. Strides are in elements. Slots and token ids in device memory
// are not trusted: those out of range have no adapter.
//
// A mailbox is what the blocks of a launch hand over to each other: a header, and pairs of 32
// bits and a tag. It is all zero when it is first used, and nothing else may write it. One launch
// uses it at a time: those that share it are on one stream, or in the order of events. Between
// launches the first 32 bits of the header are zero; any other value says that two launches have
// used it at once, and every launch from then on may wait forever or take wrong sums. To reset it,
// set all of it to zero while no launch that uses it is enqueued or running. Builds with
// ARIL_DEBUG, which build.rs makes in cargo's profile `dev`, find two launches at once and waits
// without an end, and end with cudaErrorAssert.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Limits and tiles, shared by the kernels and by the plans made on the host.
#define ARIL_MAX_SLICES 8        // modules fused into one layer
#define ARIL_MAX_SLOTS 8192      // rows of a descriptor table
#define ARIL_MAX_RANK 512        // of a factor
#define ARIL_MAX_EXPERTS 1024    // of a layer
#define ARIL_TOKENS_PER_TILE 16  // tokens of one slot that a block works on together
#define ARIL_WIDE_TILE 64        // in an operation on more tokens than
#define ARIL_SMALL_M 512      // these
#define ARIL_ROUTES_PER_TILE 8   // of one slot to one expert that a warp works on together
#define ARIL_EACH_BLOCK_ROUTES 64    // that every block of an operation sorts for itself
#define ARIL_ONE_BLOCK_ROUTES 1024     // that the first operation on them sorts
#define ARIL_STAGED_RANK 128     // up to which B is brought to shared memory
#define ARIL_K_TILE 256   // input features of a lane of shrink's sums; see device/descriptor.cuh
#define ARIL_K_TILES_PER_SLAB 4   // lanes that are summed up before anything is added to them
#define ARIL_K_SLABS_PER_SPAN 4   // groups likewise
#define ARIL_CORE 8              // rows and columns of a core of a factor, and
#define ARIL_RANK_TILE 8         // ranks
#define ARIL_OUT_TILE 64         // and outputs that stand together
#define ARIL_OUT_UNIT 32         // outputs that a warp takes at once
#define ARIL_OUTS_SMALL_M 256    // outputs that a block of expand has a multiple of, with few tokens
#define ARIL_OUTS_LARGE_M 128    // and with more
#define ARIL_WARPS 8             // of a block that works on small tiles
#define ARIL_MAX_COLUMNS 8       // tiles of ranks that a warpgroup works on with wide tiles
#define ARIL_MAILBOX_HEADER 128  // bytes, before the sums
#define ARIL_WORD_BYTES 8        // of 32 bits and their tag
#define ARIL_GROUP_WORDS 4       // that aril_group hands over for each expert, and two more
#define ARIL_FACTOR_ALIGNMENT 128  // bytes, of each factor
#define ARIL_FORWARD_TOKENS 64     // of aril_linear_forward
#define ARIL_FORWARD_UNIT_ROWS 16  // rows of W that a warp multiplies at once
#define ARIL_FORWARD_BLOCK_ROWS 32 // the rows of a slice are padded to
#define ARIL_FORWARD_UNITS 6       // that a thread block multiplies at a time
#define ARIL_FORWARD_SPLIT_UNITS 12  // that a cluster of two thread blocks has at most
#define ARIL_FORWARD_PARTS 4       // of the input features, whose sums of A x are handed over
#define ARIL_FORWARD_ALIGNMENT 16  // bytes, of the rows of W and x

#define ARIL_ERR_NO_KERNEL (-1)  // this build has no code for the device
#define ARIL_ERR_ARGUMENT (-2)   // an argument is outside its limits
// The device does not begin the blocks of a launch in the order of their index.
#define ARIL_ERR_BLOCK_ORDER (-3)

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
  int32_t* slots;         // [max_tokens] by token: -1 for those that have none
  int32_t* num_tokens;    // [1] that were routed: operations may be on more
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
  int32_t k_tiles_per_split;  // a group's or a span's: how blocks share out a token's input, with
                            // more than ARIL_SMALL_M or in f32. Same bits.
  int32_t outs_per_block;   // of expand: a multiple of ARIL_OUTS_SMALL_M or ARIL_OUTS_LARGE_M. Same bits.
  int32_t overwrites;       // 0 or 1
  int32_t in_features;
  int32_t num_slices;
  int32_t out_features[ARIL_MAX_SLICES];
  const void* x;  // [num_tokens, in_features]
  int64_t x_stride;
  void* y;  // [num_tokens, sum of out_features]
  int64_t y_stride;
  // From shrink to expand, both aligned to 16 bytes; ranks are max_rank padded to ARIL_RANK_TILE.
  // The mailbox is for few tokens in bf16 and f16: [groups, num_tokens, num_slices, ranks] pairs
  // of a float. The partials are for the others: [splits, num_tokens, num_slices, ranks].
  void* mailbox;
  uint64_t mailbox_bytes;  // all of it: as many at each of the launches that share it
  float* partials;
  aril_weights weights;
  aril_routing routing;
} aril_linear_args;

// Where W's slices are, as the copy engine reads them, and how thread blocks share them out. Written
// by aril_forward_maps.
typedef struct aril_forward_map {
  uint64_t tensor_maps[ARIL_MAX_SLICES][16];
  int32_t splits;
  int32_t units;
} aril_forward_map;

// The weights of a base layer, in slices of any addresses. Addresses and strides in bytes are
// multiples of ARIL_FORWARD_ALIGNMENT.
typedef struct aril_base_weights {
  int32_t dtype;  // ARIL_BF16 or ARIL_F16
  int32_t in_features;
  int32_t splits;  // thread blocks that share a row's input features, 1 or a cluster of 2. Part of
                   // the order of sums, so it must be a function of the layer's shape alone.
  int32_t units;   // of ARIL_FORWARD_UNIT_ROWS rows of a slice, that a cluster has; of two blocks
                   // up to ARIL_FORWARD_SPLIT_UNITS. Any choice gives the same bits.
  int32_t num_slices;
  int32_t out_features[ARIL_MAX_SLICES];
  const void* slices[ARIL_MAX_SLICES];  // [out_features, in_features], row-major
  int64_t strides[ARIL_MAX_SLICES];
} aril_base_weights;

// y[t] = x[t] W^T + bias + scales[t] * scaling * B (A x[t]), in one launch, for all num_tokens
// rows; from compute capability 9.0 on. A token's bits depend on its x and y, its slot's factors
// and the layer alone.
typedef struct aril_forward_args {
  int32_t dtype;        // of everything; ARIL_BF16 or ARIL_F16
  int32_t num_tokens;   // rows of x and y, up to ARIL_FORWARD_TOKENS
  int32_t accumulates;  // 0 or 1: adds to y
  int32_t polls;        // how often a thread block looks for a sum of another one, before it
                        // computes the sum itself. Any number gives the same bits.
  int32_t withholds;    // 0; 1 in tests: no thread block hands over its sums
  int32_t in_features;  // a multiple of 8
  int32_t num_slices;
  int32_t out_features[ARIL_MAX_SLICES];
  const aril_forward_map* map;  // in host memory, of a layer of this shape; read by the call
  const void* x;                // [num_tokens, in_features], aligned as W is
  int64_t x_stride;
  const void* bias;  // [sum of out_features], or null
  void* y;           // [num_tokens, sum of out_features]
  int64_t y_stride;
  // ARIL_FORWARD_PARTS of [num_tokens, num_slices, ranks] words behind the header; ranks are
  // max_rank padded to 16. Aligned to 16 bytes. Null if there is no table.
  void* mailbox;
  uint64_t mailbox_bytes;  // as for aril_linear
  aril_weights weights;    // a null table: no token has an adapter
  aril_routing routing;    // of which the tiles are not read
} aril_forward_args;

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

// What a router chose, in device memory. Route token * top_k + k is a token's k-th choice.
typedef struct aril_top_k {
  const int32_t*
      ids;  // [num_tokens, top_k]; a route to any that is not in 0..num_experts is not here
  const float* weights;  // [num_tokens, top_k], or null for ones
  const int32_t*
      rows;  // [num_tokens * top_k] in matrices of routes, or null for the route itself;
             // a route whose row is not in 0..num_tokens * top_k is not here and has none
  int32_t top_k;
  int32_t num_experts;
} aril_top_k;

// A route that has a row.
typedef struct aril_route_entry {
  int32_t route;
  int32_t row;
  float scale;   // the token's
  float weight;  // the router's
} aril_route_entry;

// Routes of one slot to one expert that a block works on together: [begin, begin + count) of
// aril_groups.routes. Expert num_experts: routes that are here without a slot; num_experts + 1:
// those that are not here but have a row; both with slot -1.
typedef struct aril_route_tile {
  int32_t slot;
  int32_t expert;
  int32_t begin;
  int32_t count;
} aril_route_tile;

// A layer's routes grouped by expert and slot, in device memory, for the operations on its experts.
// Written by aril_group, or, up to ARIL_ONE_BLOCK_ROUTES, by the first of them; up to ARIL_EACH_BLOCK_ROUTES
// by nobody.
typedef struct aril_groups {
  aril_route_entry* routes;     // [max_routes] by expert and slot
  aril_route_tile* tiles;       // [max_routes] of up to ARIL_ROUTES_PER_TILE, in the same order
  int32_t* num_tiles;           // [2] of those with a slot, which come first; of all
  aril_route_tile* wide_tiles;  // [max_routes] of up to ARIL_WIDE_TILE, if there are many routes
  int32_t* num_wide_tiles;      // [2] likewise
  void* mailbox;  // for aril_group alone: [num_experts + 2] of ARIL_GROUP_WORDS words of counts
} aril_groups;

typedef struct aril_group_args {
  int32_t num_tokens;
  aril_top_k top_k;
  aril_routing routing;
  aril_groups groups;
} aril_group_args;

// Puts routes that have a slot in blocks of one slot and one expert, for a grouped GEMM that takes
// the two for its expert. They stand by expert, slot and number, and what they leave of the last
// block of a slot and expert is num_tokens * top_k. Routes without a slot, and those that are not
// here, are left out.
typedef struct aril_align_args {
  int32_t num_tokens;
  int32_t num_slots;   // larger slots are none
  int32_t block_size;  // routes of a block
  int32_t max_blocks;  // the most that there can be
  aril_top_k top_k;    // of which the weights are not read
  aril_routing routing;
  int32_t* sorted_routes;  // [max_blocks * block_size], of which num_padded are set
  int32_t* block_experts;  // [max_blocks] slot * num_experts + expert; -1 behind the last
  int32_t* block_slots;    // [max_blocks] slot; -1 behind the last
  int32_t* num_padded;     // [1] routes of all blocks
  int32_t* places;         // [num_tokens * top_k] for the kernel alone, of any content
  // Aligned to 16 bytes: pairs of a count, as many as num_experts, and one more if that is odd.
  void* mailbox;
} aril_align_args;

// What is made of the deltas of a layer's routes. A delta is scales[token] * scaling * B (A x), of
// the factors that the token's slot has for the expert; if `weighted`, times the router's weight.
enum aril_experts_form {
  ARIL_ADD = 0,       // y[row] += delta
  ARIL_WRITE = 1,     // y[row] = delta, zero where there is none, for all routes that have a row
  ARIL_ACTIVATE = 2,  // out[row] = activation(y[row] + delta), for all routes that are here
  // y[t] += factor * sum of delta, over the routes of token t that are here.
  ARIL_ADD_COMBINED = 3,
  // out[t] = factor * sum of y[row] + delta, likewise, for all tokens that were routed; y[row] is
  // weighted as the delta is, unless its rows are already.
  ARIL_COMBINE = 4
};

// Of gate, times up; where there is no gate, of up.
enum aril_activation {
  ARIL_GELU = 0,       // x * (1 + erf(x / sqrt(2))) / 2
  ARIL_GELU_TANH = 1,  // x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2
  ARIL_RELU2 = 2,      // max(x, 0)^2
  ARIL_SILU = 3,       // x * sigmoid(x)
  // x * sigmoid(alpha * x), times up + 1, of x up to `limit` and up from -limit to limit
  ARIL_SWIGLU_OAI = 4
};

// A projection of the experts of a layer.
typedef struct aril_experts_args {
  int32_t dtype;
  int32_t num_tokens;
  int32_t max_tiles;      // of ARIL_TOKENS_PER_TILE tokens
  int32_t shrink_blocks;  // each of 8 warps, of which all pieces of a tile have one at the least
  int32_t expand_blocks;  // likewise. Same bits.
  // That a warp of expand has, ARIL_OUT_TILE, or more of them if max_rank is at most 16; from
  // ARIL_ACTIVATE on the least that a warp has, ARIL_OUT_UNIT. Same bits.
  int32_t outs_per_block;
  // If more than ARIL_ONE_BLOCK_ROUTES may be added or written by wide tiles, which the device decides,
  // any number of blocks, and the outputs that one of expand has, a multiple of ARIL_OUTS_LARGE_M.
  // Otherwise 0. Same bits.
  int32_t wide_shrink_blocks;
  int32_t wide_expand_blocks;
  int32_t wide_outs_per_block;
  int32_t form;           // aril_experts_form
  int32_t weighted;       // 0 or 1
  int32_t rows_weighted;  // of ARIL_COMBINE: 1 if y's rows are multiplied by the weights already
  // 1: more than ARIL_EACH_BLOCK_ROUTES, up to ARIL_ONE_BLOCK_ROUTES, of which there are no groups yet.
  int32_t groups_routes;
  int32_t from_tokens;  // 1: x is [num_tokens, in_features]; 0: [num_tokens * top_k, in_features]
  int32_t in_features;
  int32_t num_slices;
  int32_t out_features;  // of each slice
  int32_t interleaved;   // 1: output i of slice s stands at i * num_slices + s
  int32_t up_slice;      // of ARIL_ACTIVATE; if there is another, that is gate
  int32_t activation;    // of ARIL_ACTIVATE: aril_activation, and
  float alpha, limit;    // of ARIL_SWIGLU_OAI
  float factor;          // of ARIL_ADD_COMBINED and ARIL_COMBINE
  const void* x;
  int64_t x_stride;
  // [num_tokens * top_k, num_slices * out_features]; of ARIL_ADD_COMBINED [num_tokens, ..]
  void* y;
  int64_t y_stride;
  // Of ARIL_ACTIVATE [num_tokens * top_k, out_features], of ARIL_COMBINE [num_tokens,
  // out_features].
  void* out;
  int64_t out_stride;
  // As for aril_linear: [groups, rows, num_slices, ranks], pairs behind the header. Rows are the
  // routes, and, if from_tokens, the tokens behind them. The partials are for wide tiles.
  void* mailbox;
  uint64_t mailbox_bytes;  // all of it: as many at each of the launches that share it
  float* partials;
  // The table is that of what the experts share; then come num_experts times those of an expert,
  // num_slices entries each. What is shared has A's address if all experts have the same A, B's
  // likewise, and rank 0 if they share nothing.
  aril_weights weights;
  aril_routing routing;
  aril_top_k top_k;
  aril_groups groups;
} aril_experts_args;

// What a status means; a string that lives forever.
const char* aril_status_string(int32_t status);

// Loads every kernel into the current context, so that no launch has to, and runs a short kernel on
// a stream of its own, which it waits for: ARIL_ERR_BLOCK_ORDER if it shows that other launches
// could wait forever. A capture on another thread goes on undisturbed.
int32_t aril_load(void);
int32_t aril_route(const aril_route_args* args, void* stream);
int32_t aril_linear(const aril_linear_args* args, void* stream);
int32_t aril_linear_shrink(const aril_linear_args* args, void* stream);
int32_t aril_linear_expand(const aril_linear_args* args, void* stream);
// Fills `map`, which is valid for as long as the weights stay where they are. Enqueues nothing.
int32_t aril_forward_maps(const aril_base_weights* weights, aril_forward_map* map);
int32_t aril_linear_forward(const aril_forward_args* args, void* stream);
int32_t aril_embedding(const aril_embedding_args* args, void* stream);
int32_t aril_group(const aril_group_args* args, void* stream);
int32_t aril_align(const aril_align_args* args, void* stream);
int32_t aril_experts(const aril_experts_args* args, void* stream);

#ifdef __cplusplus
}
#endif
