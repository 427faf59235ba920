// SPDX-License-Identifier: MIT OR Apache-2.0
//
// The C ABI of aril's kernels: one function per operation, one plain struct of arguments per
// function. The tree: <operation>.cu at the top launches what src/plan has chosen, and refuses a
// plan that does not fit the kernels; linear/, moe/ and routing/ have the kernels; device/ what
// they share; ptx/ wrappers of instructions; host/ launching. No launch asks for the device.
//
// Words of csrc
//
// clang-format off
//   adapter, slot     An adapter's factors occupy a slot, a row of the descriptor table.
//   module            The factors A [rank, in] and B [out, rank] of one slice of one slot.
//   slice             One of several linear layers fused into one, such as q, k and v.
//   shrink, expand    v = A x, and y += scaling * B v.
//   route             A token's choice of one expert; token * top_k + k is its number.
//   present route     A route to an expert of this rank (0..num_experts).
//   group             The present routes of one expert, ordered by slot.
//   base              Tokens and routes without a slot: the base model alone.
//   tile              A fixed-size piece of a dimension, always named with it:
//     token tile      up to ARIL_TOKENS_PER_TILE tokens of one slot
//     route tile      up to ARIL_ROUTES_PER_TILE routes of one slot to one expert
//     wide tile       up to ARIL_WIDE_TILE tokens, or routes, likewise
//     rank tile       ARIL_RANK_TILE ranks
//     output tile     ARIL_OUT_TILE outputs
//     K tile          ARIL_K_TILE input features
//   slab, span        ARIL_K_TILES_PER_SLAB K tiles; ARIL_K_SLABS_PER_SPAN slabs
//   chunk             Two output tiles: what a stage of large_m's expand has of y and B.
//   unit              ARIL_OUT_UNIT outputs, half an output tile: what a warp expands at once.
//   strip             ARIL_FORWARD_STRIP_ROWS rows of W in the fused linear, half a unit.
//   panel             32 ranks of a unit of B: what a warp of the fused linear loads at once.
//   block             A thread block.
//   share             What a block, a warp or a tensor-parallel rank has of work or of a matrix.
//   turn              One of several tiles that a block takes one after the other.
//   round             The routes that the threads of a block, or of a warp, take at once.
//   ticket            How many blocks of the launch started before this one (device/mailbox.cuh).
//   small_m, large_m  Kernels on token or route tiles, for few rows; on wide tiles, for many.
//   high_rank         Kernels for ranks above ARIL_STAGED_RANK, whose B is read in place.
//   split             One of the ranges of input features that are summed apart (split-K): of v, or
//                     of x W^T in the fused linear.
//   part              The same of v in the fused linear: a quarter of the K tiles.
//   partial           The sums of a split, slab or part, from which expand adds up v.
//   mailbox           Tagged words through which blocks of a launch pass values (device/mailbox.cuh).
//   epoch             The number of a launch on a mailbox; it tags the words.
//   stack, position   Rows of W that hold A of some slots, and the place of a slot among them.
//   term              One of two bf16 numbers whose sum stands for a float (device/product.cuh).
//   core              8 x 8 elements of a factor, 16 bytes a row: the operand of ldmatrix and wgmma.
//   stage             A piece of a ring in shared memory that copies fill ahead.
//   lane, g, q        A thread of a warp; g = lane / 4 and q = lane % 4 place it in mma fragments.
// clang-format on
//
// Every function returns 0, a positive cudaError_t, or a negative ARIL_ERR_*. On an ARIL_ERR_* it
// has enqueued nothing. On a cudaError_t the driver refused a launch: an operation of one launch
// has enqueued nothing, and an operation of several leaves y either complete or untouched. (Linear
// layers in f32 or in large_m write y in their last launch only. Experts with
// wide_shrink_blocks write y in their second launch or in their third, never in both.) Partials and
// mailbox may be used again in all cases.
//
// No function allocates, synchronizes, or touches another stream than the given one, and all but
// aril_load can be captured in a CUDA graph. Strides are in elements. Slots and token ids in device
// memory are not trusted: those out of range have no adapter.
//
// A mailbox is zeroed before its first use, and written by the kernels alone. One launch uses it at
// a time: launches that share it are on one stream, or ordered by events. Between launches the
// first 32 bits of its header are zero; another value shows that two launches used it at once, and
// later launches may read wrong sums, or wait for sums that never come. To reset a mailbox, zero it
// while no launch on it is enqueued or running. A launch that waits for several seconds traps: the
// context is lost, and later calls in it return cudaErrorLaunchFailure. Builds with ARIL_DEBUG
// (build.rs defines it in cargo's profile `dev`) detect two launches at once, too, and fail with
// cudaErrorAssert.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Limits and tiles, shared by the kernels and by the plans made on the host.
#define ARIL_MAX_SLICES 8           // modules fused into one layer
#define ARIL_MAX_SLOTS 8192         // rows of a descriptor table
#define ARIL_MAX_RANK 512           // of a factor
#define ARIL_MAX_EXPERTS 1024       // of a layer
#define ARIL_TOKENS_PER_TILE 16     // rows of a token tile
#define ARIL_WIDE_TILE 64           // rows of a wide tile
#define ARIL_SMALL_M 512            // the most tokens of a small_m operation
#define ARIL_ROUTES_PER_TILE 8      // rows of a route tile
#define ARIL_EACH_BLOCK_ROUTES 64   // the most that every block groups for itself
#define ARIL_ONE_BLOCK_ROUTES 1024  // the most that the first operation groups for all
#define ARIL_STAGED_RANK 128        // the highest rank at which B is staged in shared memory
#define ARIL_K_TILE 256             // see device/reduction.cuh
#define ARIL_K_TILES_PER_SLAB 4     // likewise
#define ARIL_K_SLABS_PER_SPAN 4     // likewise
#define ARIL_CORE 8                 // rows and columns of a core
#define ARIL_RANK_TILE 8
#define ARIL_OUT_TILE 64
#define ARIL_OUT_UNIT 32
#define ARIL_OUTS_SMALL_M 256     // outputs of a block of expand are a multiple of this
#define ARIL_OUTS_LARGE_M 128     // the same, with wide tiles
#define ARIL_WARPS 8              // of a block on token or route tiles
#define ARIL_MAX_RANK_TILES 8     // of a warpgroup that shrinks wide tiles
#define ARIL_MAX_WARPGROUPS 3     // of a block that does
#define ARIL_STATIC_BYTES 12288   // of shared memory, kept for a kernel's static variables
#define ARIL_MAILBOX_HEADER 4224  // bytes, before the words
// Shared memory of a block on route tiles: of shrink, of a warp that expands within the activation
// or the combine, and of a block of shrink that finds tiles itself, beside the first.
#define ARIL_EXPERTS_SHRINK_BYTES 67584
#define ARIL_ACTIVATE_WARP_BYTES 4352
#define ARIL_COMBINE_WARP_BYTES 1664
#define ARIL_LOCAL_TILES_BYTES 10240
#define ARIL_ACTIVATION_BLOCKS 512     // the most of an activation that announce their ends
#define ARIL_WORD_BYTES 8              // a 32-bit value and its epoch
#define ARIL_GROUP_WORDS 4             // of aril_group for each of num_experts + 2 groups
#define ARIL_FACTOR_ALIGNMENT 128      // bytes, of each factor
#define ARIL_FORWARD_TOKENS 32         // of aril_linear_forward
#define ARIL_FORWARD_STRIP_ROWS 16     // of a strip of W
#define ARIL_FORWARD_STRIPS 6          // that a thread block multiplies at a time
#define ARIL_FORWARD_SPLIT_STRIPS 12   // that a cluster of two thread blocks has at most
#define ARIL_FORWARD_PARTS 4           // of the input features, whose sums of A x are handed over
#define ARIL_FORWARD_ALIGNMENT 16      // bytes, of the rows of W and x
#define ARIL_FORWARD_RINGS 3           // for up to 8, 16 and 32 tokens
#define ARIL_FORWARD_BOX_FEATURES 64   // input features of a box
#define ARIL_FORWARD_STAGES 24         // of a ring, at most
#define ARIL_FORWARD_DELTA_WARPS 8     // of a thread block, which compute deltas
#define ARIL_FORWARD_BATCH_BYTES 1632  // what they know of the batch (DeltaShared)
// Shared memory of a thread block beside its ring: static variables, and what alignment takes.
#define ARIL_FORWARD_STATIC_BYTES 1024
#define ARIL_FORWARD_ALIGNMENT_BYTES 1024
#define ARIL_SEGMENT_TOKENS 8  // of a segment
#define ARIL_PACK_FACTORS 72   // of a launch of aril_pack
// Kinds of a factor that is packed.
#define ARIL_PACK_A 0
#define ARIL_PACK_B 1
#define ARIL_PACK_EMBEDDING_A 2

#define ARIL_ERR_NO_KERNEL (-1)  // this build has no code for the device
#define ARIL_ERR_ARGUMENT (-2)   // an argument is outside its limits, or an operand null
// The device does not start the blocks of a launch in the order of their index.
#define ARIL_ERR_BLOCK_ORDER (-3)
// The device has too little shared memory for a fused linear of this shape and rank.
#define ARIL_ERR_SHARED_MEMORY (-4)

enum aril_dtype { ARIL_BF16 = 0, ARIL_F16 = 1, ARIL_F32 = 2 };

// A module. A table is [num_slots][num_entries] of these. Rank 0: the slot has no such module.
//
// Factors are stored in row-major cores of 8 x 8 elements, padded with zeros. A [rank, in] is
// [in / 256][rank / 8][32] cores of [8 ranks][8 features]. B [out, rank] is
// [out / 64][rank / 8][2 i][4 j] cores of [8 n][8 ranks], where (i, j, n) is output
// 32 i + 8 (n / 2) + 2 j + n % 2 of the 64: then four products side by side give a lane eight
// adjacent outputs. An embedding's A [vocab, rank] has rows padded to 8 ranks.
typedef struct aril_descriptor {
  const void* a;
  const void* b;
  int32_t rank;
  float scaling;
} aril_descriptor;

// A token tile, or a wide tile of tokens: [begin, begin + count) of aril_routing.tokens. Slot -1:
// tokens of the base.
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

// A row of a token tile.
typedef struct aril_row {
  int32_t token;
  float scale;  // of the token, as in aril_routing.scales
} aril_row;

// The first ARIL_FORWARD_TOKENS tokens of a batch in segments, up to ARIL_SEGMENT_TOKENS tokens of
// one slot. Segments are in the order of their first tokens.
typedef struct aril_segments {
  int8_t tokens[ARIL_FORWARD_TOKENS][ARIL_SEGMENT_TOKENS];  // of a segment; -1: none
  int32_t slots[ARIL_FORWARD_TOKENS];                       // of a segment
  int8_t segment_of[ARIL_FORWARD_TOKENS];                   // by token; -1: the base
  int8_t begun[ARIL_FORWARD_TOKENS];                        // by token: segments up to it
} aril_segments;

// A batch grouped by slot, in device memory at fixed addresses. aril_route writes it, every
// operation reads it.
typedef struct aril_routing {
  int32_t* tokens;      // [max_tokens] by slot; tokens of the base come last
  float* scales;        // [max_tokens] by token: multiplies the adapter's scaling
  int32_t* slots;       // [max_tokens] by token; -1: the base
  int32_t* num_tokens;  // [1] routed tokens; operations may have more
  int32_t* indptr;      // [num_slots + 1] where each slot's tokens begin in `tokens`
  aril_tiles tiles;     // token tiles
  aril_tiles wide_tiles;
  aril_segments* segments;  // [1], aligned to 16 bytes
  aril_row* rows;  // [token tiles][ARIL_TOKENS_PER_TILE], as many of a tile as it has tokens
} aril_routing;

// The batch may be in page-locked memory of the host.
typedef struct aril_route_args {
  const int32_t* token_slots;  // [num_tokens]
  const float* token_scales;   // [num_tokens], or null for ones
  int32_t num_tokens;
  int32_t num_slots;
  aril_routing routing;
} aril_route_args;

// The modules of one layer; `table` points to the layer's first entry.
typedef struct aril_weights {
  const aril_descriptor* table;
  int32_t num_slots;
  int32_t num_entries;  // of a row of the table
  int32_t max_rank;     // modules of a higher rank count as none
} aril_weights;

// The outputs of a slice, [num_tokens, out_features of the slice]: output i of token t is element
// t * stride + i. In a matrix of all slices, `first` is the slice's first column.
typedef struct aril_outputs {
  void* first;
  int64_t stride;
} aril_outputs;

// How a linear layer is launched (src/plan/linear). No choice changes the bits.
typedef struct aril_linear_plan {
  int32_t max_tiles;  // the most that the routing can have: token tiles, or wide tiles for large_m
  int32_t large_m;    // 0 or 1; 1 above ARIL_SMALL_M tokens
  // Of shrink in large_m and f32: a slab or a span.
  int32_t k_tiles_per_split;
  // Of shrink in large_m: the splits that a block reduces, one after the other; at least 1. Rank
  // tiles of a warpgroup, 2, 4 or ARIL_MAX_RANK_TILES; and warpgroups of a block, 1 but for
  // ARIL_MAX_RANK_TILES.
  int32_t splits_per_block;
  int32_t rank_tiles;
  int32_t warpgroups;
  int32_t shrink_smem_bytes;  // of such a block
  // Of expand, for all tiles; in small_m the launch adds those of shrink. f32 has its own.
  int32_t expand_blocks;
  int32_t outs_per_block;  // a multiple of ARIL_OUTS_SMALL_M or ARIL_OUTS_LARGE_M
  int32_t smem_bytes;      // of such a block
  // Of small_m. 0: all tiles have blocks. 1: some have, which take turns.
  int32_t takes_turns;
  int32_t shrink_tiles;  // that the grid has blocks of shrink for
  // With a routing of up to few_tiles tiles (at most max_tiles), a block of expand has
  // outs_per_block_of_few outputs (at most outs_per_block).
  int32_t few_tiles;
  int32_t outs_per_block_of_few;
  // Of aril_silu_mul: 0, or 1 in large_m up to ARIL_STAGED_RANK, the kernel of many tokens.
  int32_t wide;
} aril_linear_plan;

// y[slice][t] += scales[t] * scaling * B (A x[t]), by shrink alone, expand alone, or both. If it
// overwrites, y is set to the delta, or to zero where there is no adapter.
typedef struct aril_linear_args {
  int32_t dtype;
  int32_t num_tokens;  // rows of x and y
  aril_linear_plan plan;
  int32_t overwrites;  // 0 or 1
  int32_t in_features;
  int32_t num_slices;
  int32_t out_features[ARIL_MAX_SLICES];
  const void* x;  // [num_tokens, in_features]
  int64_t x_stride;
  aril_outputs y[ARIL_MAX_SLICES];
  // How shrink passes v to expand, both aligned to 16 bytes; ranks are max_rank padded to
  // ARIL_RANK_TILE. small_m in bf16 and f16 uses the mailbox, [slabs, num_tokens, num_slices,
  // ranks] words behind the header. The others use partials, [splits, num_tokens, num_slices,
  // ranks].
  void* mailbox;
  uint64_t mailbox_bytes;  // header included; the same at all launches that share it
  float* partials;
  aril_weights weights;
  aril_routing routing;
} aril_linear_args;

// How the halves of a fully sharded layer are launched (src/plan/sharded.rs).
typedef struct aril_sharded_plan {
  int32_t max_tiles;  // of token tiles, the most that the routing can have
  int32_t shrink_blocks;
  int32_t expand_blocks;
  int32_t smem_bytes;  // of a block of expand
} aril_sharded_plan;

// The halves of the delta of a fully sharded layer. Between them, the engine exchanges v with the
// other tensor-parallel ranks.
//
// Shrink: v[t, slice] = A x[t] for this rank's share of A, and zero beyond the adapter's rank and
// for tokens of the base. Expand: y[slice][t] += scales[t] * scaling * B v in this rank's share of
// the outputs. A row's bits depend on its x, v and y and its slot's factors alone.
typedef struct aril_sharded_args {
  int32_t dtype;
  int32_t num_tokens;  // rows of x and y
  aril_sharded_plan plan;
  // The ranks that share A's rows: of an adapter of rank r, each has ceil(r / tp_size) of them. 1
  // if every rank has all rows, for its share of the input features.
  int32_t tp_size;
  int32_t tp_rank;
  int32_t width;  // ranks of a slice in a row of v: ceil(max_rank / tp_size)
  int32_t in_features;
  int32_t num_slices;
  int32_t num_outs[ARIL_MAX_SLICES];  // B's rows
  const void* x;                      // [num_tokens, in_features]
  int64_t x_stride;
  // Of shrink [num_tokens, num_slices, width]; of expand [tp_size, num_tokens, num_slices, width].
  float* v;
  int64_t v_stride;                 // from a token to the next
  aril_outputs y[ARIL_MAX_SLICES];  // that B has rows for
  aril_weights weights;
  aril_routing routing;
} aril_sharded_args;

// A stack: A of some slots as further rows of the base weights W, so that the base GEMM of a layer
// stores v = A x, rounded to the element type, in further columns of y. The slots have positions.
// Row (slice * positions + position) * rank + r of a layer's stack is row r of A of the slot at the
// position, and zero beyond the module's rank.

// The module of a slot at a position.
typedef struct aril_stacked_module {
  const void* b;
  float scaling;
  int16_t slot;  // -1: none
  int16_t rank;  // 0: the slot has no such module
} aril_stacked_module;

// Where a linear layer's W has the rows of the stack, [num_slices * positions * rank, in_features].
typedef struct aril_stack_layer {
  void* rows;      // aligned to 16 bytes, as the stride is
  int64_t stride;  // elements
  int32_t in_features;
  int32_t num_slices;
  int32_t first_entry;  // of a row of the table
  int32_t first_block;  // ceil(in_features / ARIL_K_TILE) * num_slices of each layer before
} aril_stack_layer;

// Copies a slot into the stack. The slot leaves every other position. No module of the slot has a
// higher rank than the stack.
typedef struct aril_stack_args {
  int32_t slot;  // -1: empties the position
  int32_t position;
  int32_t positions;
  int32_t rank;  // a multiple of ARIL_RANK_TILE
  int32_t num_layers;
  int32_t num_blocks;              // of all layers
  const aril_stack_layer* layers;  // in device memory
  aril_stacked_module* modules;    // [num_entries][positions], aligned to 16 bytes
  aril_weights weights;            // the whole table, of 16-bit elements
} aril_stack_args;

// y[slice][t] += scales[t] * scaling * B v[t], for tokens whose slot is in the stack, in bf16 and
// f16. A row's bits depend on its v and y and its slot's factors alone. y is aligned to 16 bytes,
// and out_features are multiples of 8.
typedef struct aril_stacked_args {
  // What a thread block asks for first comes first: constant memory is cold, too.
  const aril_stacked_module* modules;  // of the layer, [num_slices][positions]
  int32_t positions;
  int32_t rank;
  int32_t max_tiles;   // of token tiles, the most that the routing can have
  int32_t num_tokens;  // rows of y
  aril_tiles tiles;
  const aril_row* rows;
  int32_t num_slices;
  int32_t dtype;
  const void* v;     // [num_tokens, num_slices * positions * rank]: columns of y
  int64_t v_stride;  // a multiple of 4
  int32_t out_features[ARIL_MAX_SLICES];
  aril_outputs y[ARIL_MAX_SLICES];
} aril_stacked_args;

// out[t] = silu(gate) * up of what aril_stacked_expand makes of y, for all routed tokens, in f32
// with one rounding. y is read.
typedef struct aril_stacked_silu_mul_args {
  aril_stacked_args layer;  // two slices of equal size
  void* out;                // [num_tokens, out_features of a slice], aligned to 16 bytes
  int64_t out_stride;
} aril_stacked_silu_mul_args;

// How a thread block of a fused linear divides its shared memory, for batches of some size. Offsets
// in bytes from a boundary of ARIL_FORWARD_ALIGNMENT_BYTES, behind the ring.
typedef struct aril_forward_ring {
  int32_t stage_boxes;   // of a stage, along the input features: 1 or 2
  int32_t stages;        // 0: the device has too little shared memory
  int32_t first_stages;  // that are requested at once, before A is found
  int32_t stage_bytes;
  int32_t inbox;     // sums of the other block of a cluster
  int32_t deltas;    // [rows of the block][delta_pitch] f32
  int32_t handover;  // with 17 to 32 tokens, sums of the other team of multipliers, in the memory
                     // of v and what follows
  int32_t v;         // two terms of [tokens], v_pitch bytes apart, in the memory of sums
  int32_t sums;      // of partials of v
  int32_t a;         // buffers of A and B
  int32_t batch;     // ARIL_FORWARD_BATCH_BYTES
  int32_t modules;   // [tokens][num_slices], and a count of each
  int32_t total;     // bytes
  int32_t delta_pitch;  // elements
  int32_t v_pitch;      // bytes
  int32_t v_ranks;      // of v, that there is room for at once
} aril_forward_ring;

// How thread blocks of a fused linear share out its rows and its features (src/plan/forward.rs).
typedef struct aril_forward_plan {
  // Thread blocks that share a row's input features, 1 or a cluster of 2. The order of sums depends
  // on it, so it must be a function of the layer's shape alone. No other choice changes the bits.
  int32_t splits;
  int32_t strips;  // of ARIL_FORWARD_STRIP_ROWS rows of a slice, that a cluster has; of two blocks
                   // up to ARIL_FORWARD_SPLIT_STRIPS
  int32_t passes;  // that a block takes its strips in, up to ARIL_FORWARD_STRIPS at a time
  int32_t clusters;       // of all slices
  int32_t trigger_boxes;  // boxes of features that a block has left to load when its dependents
                          // begin
  aril_forward_ring rings[ARIL_FORWARD_RINGS];  // for up to 8, 16 and 32 tokens
} aril_forward_plan;

// Where W's slices are, as the copy engine reads them. Written by aril_forward_maps.
typedef struct aril_forward_map {
  uint64_t tensor_maps[ARIL_MAX_SLICES][16];
  aril_forward_plan plan;
} aril_forward_map;

// The weights of a base layer, in slices of any addresses. Addresses and strides in bytes are
// multiples of ARIL_FORWARD_ALIGNMENT.
typedef struct aril_base_weights {
  int32_t dtype;  // ARIL_BF16 or ARIL_F16
  int32_t in_features;
  int32_t num_slices;
  int32_t out_features[ARIL_MAX_SLICES];
  const void* slices[ARIL_MAX_SLICES];  // [out_features, in_features], row-major
  int64_t strides[ARIL_MAX_SLICES];
  aril_forward_plan plan;
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
  aril_outputs y[ARIL_MAX_SLICES];
  // ARIL_FORWARD_PARTS of [num_tokens, num_slices, ranks] words behind the header; ranks are
  // max_rank padded to 16. Aligned to 16 bytes. Null if there is no table.
  void* mailbox;
  uint64_t mailbox_bytes;  // as for aril_linear
  aril_weights weights;    // a null table: no token has an adapter
  aril_routing routing;    // of which the tiles are not read
} aril_forward_args;

// out[t] = silu(gate) * up, where gate and up are the two slices of y[slice][t] + scales[t] *
// scaling * B v, with v of the last aril_linear_shrink; for all routed tokens, in f32 with one
// rounding.
typedef struct aril_silu_mul_args {
  // Two slices of equal size. y is read, x is not. The plan's outs_per_block is of each slice, a
  // multiple of ARIL_OUTS_LARGE_M, and expand_blocks and smem_bytes are the launch's.
  aril_linear_args layer;
  void* out;  // [num_tokens, out_features of a slice]
  int64_t out_stride;
} aril_silu_mul_args;

// How an operation on an embedding is launched (src/plan/linear).
typedef struct aril_embedding_plan {
  int32_t max_tiles;  // as above
  int32_t blocks;
  int32_t outs_per_block;  // as above
  int32_t smem_bytes;      // of a block
} aril_embedding_plan;

// y[t] += scales[t] * scaling * B A[token_ids[t]]
typedef struct aril_embedding_args {
  int32_t dtype;
  int32_t num_tokens;
  aril_embedding_plan plan;
  int32_t vocab;
  int32_t hidden;
  const int32_t* token_ids;  // [num_tokens]
  void* y;                   // [num_tokens, hidden]
  int64_t y_stride;
  aril_weights weights;
  aril_routing routing;
} aril_embedding_args;

// Trained rows of an embedding or of a head, which a slot has in the place of the base's:
// y[t] = the row of token_ids[t], if there is one; or y[t, id] = x[t] . the row of each id, in f32
// with one rounding. Scales make no difference. In the descriptor, `a` are the ids, ascending, each
// an int32_t in the place of two elements, `b` the rows, padded to ARIL_OUT_TILE features, and
// `rank` their number, which max_rank does not bound.
typedef struct aril_rows_args {
  int32_t dtype;
  int32_t num_tokens;
  int32_t hidden;            // features of a row
  int32_t outputs;           // of aril_replace_logits: columns of y
  int32_t max_tiles;         // of token tiles
  int32_t blocks;            // of a tile
  const int32_t* token_ids;  // of aril_replace_embeddings: [num_tokens]
  const void* x;             // of aril_replace_logits: [num_tokens, hidden]
  int64_t x_stride;
  void* y;  // [num_tokens, hidden] or [num_tokens, outputs]
  int64_t y_stride;
  aril_weights weights;
  aril_routing routing;
} aril_rows_args;

// The router's choice, in device memory.
typedef struct aril_top_k {
  const int32_t* ids;    // [num_tokens, top_k]; a route is present if its id is in 0..num_experts
  const float* weights;  // [num_tokens, top_k], or null for ones
  // [num_tokens * top_k] rows in matrices of routes, or null: a route's row is its number. A route
  // with a row outside 0..num_tokens * top_k has no row and is not present.
  const int32_t* rows;
  int32_t top_k;
  int32_t num_experts;
} aril_top_k;

// A route with a row.
typedef struct aril_route_entry {
  int32_t route;
  int32_t row;
  float scale;   // the token's
  float weight;  // the router's
} aril_route_entry;

// A route tile, or a wide tile of routes: [begin, begin + count) of aril_groups.routes. Expert
// num_experts: present routes of the base; num_experts + 1: routes that have a row but are not
// present; both with slot -1.
typedef struct aril_route_tile {
  int32_t slot;
  int32_t expert;
  int32_t begin;
  int32_t count;
} aril_route_tile;

// A layer's routes grouped by expert and slot, in device memory, for the operations on its experts.
// Up to ARIL_EACH_BLOCK_ROUTES nobody writes it, up to ARIL_ONE_BLOCK_ROUTES the first operation
// does, and beyond that aril_group.
typedef struct aril_groups {
  aril_route_entry* routes;     // [max_routes] by expert and slot
  aril_route_tile* tiles;       // [max_routes] route tiles, in the same order
  int32_t* num_tiles;           // [2] those with a slot, which come first; all
  aril_route_tile* wide_tiles;  // [max_routes], if aril_group writes them
  int32_t* num_wide_tiles;      // [2] likewise
  void* mailbox;                // of aril_group: [num_experts + 2][ARIL_GROUP_WORDS] words
} aril_groups;

typedef struct aril_group_args {
  int32_t num_tokens;
  int32_t num_slots;  // of aril_route
  aril_top_k top_k;
  aril_routing routing;
  aril_groups groups;
} aril_group_args;

// What an operation does with the deltas of routes. A delta is scales[token] * scaling * B (A x)
// with the module that the token's slot has for the expert, times the router's weight if
// `weighted`.
enum aril_experts_form {
  ARIL_ADD = 0,       // y[row] += delta
  ARIL_WRITE = 1,     // y[row] = delta, zero without one, for all routes with a row
  ARIL_ACTIVATE = 2,  // out[row] = activation(y[row] + delta), for all present routes
  // y[t] += factor * sum of the deltas of token t's present routes.
  ARIL_ADD_COMBINED = 3,
  // out[t] = factor * sum of y[row] + delta over token t's present routes, for all routed tokens.
  // y[row] is weighted as the delta is, unless rows_weighted.
  ARIL_COMBINE = 4
};

// activation(gate) * up, or activation(up) without a gate.
enum aril_activation {
  ARIL_GELU = 0,       // x * (1 + erf(x / sqrt(2))) / 2
  ARIL_GELU_TANH = 1,  // x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2
  ARIL_RELU2 = 2,      // max(x, 0)^2
  ARIL_SILU = 3,       // x * sigmoid(x)
  // min(x, limit) as x: x * sigmoid(alpha * x) * (clamp(up, -limit, limit) + 1)
  ARIL_SWIGLU_OAI = 4
};

// What groups the routes of a layer by expert and slot.
enum aril_grouped_by {
  ARIL_EACH_OPERATION = 0,   // each block for itself: up to ARIL_EACH_BLOCK_ROUTES routes
  ARIL_FIRST_OPERATION = 1,  // the first operation for all: up to ARIL_ONE_BLOCK_ROUTES
  ARIL_GROUP_KERNEL = 2      // aril_group
};

// What has completed when a launch on experts starts.
enum aril_inputs {
  ARIL_INPUTS_IN_FRONT = 0,  // nothing: it waits for the work in front of it
  // From ARIL_ACTIVATE on: all work before the kernel in front of it, which writes neither x nor
  // the routes. Then only y waits for that kernel.
  ARIL_INPUTS_COMPLETE = 1,
  // Of ARIL_ADD_COMBINED and ARIL_COMBINE: the same, but for the kernel in front of that one, an
  // activation of the same routes that announces the ends of its blocks. Then x waits for these.
  ARIL_INPUTS_ANNOUNCED = 2
};

// How an operation on experts is launched (src/plan/experts.rs). No choice changes the bits.
typedef struct aril_experts_plan {
  int32_t max_tiles;      // of tokens
  int32_t grouped_by;     // aril_grouped_by
  int32_t groups_routes;  // 1: this operation is the first, and groups the routes for all
  int32_t inputs;         // aril_inputs
  // In an activation that announces the ends of its blocks, and with ARIL_INPUTS_ANNOUNCED: the
  // activation's expand_blocks, up to ARIL_ACTIVATION_BLOCKS, of ARIL_EACH_OPERATION. Otherwise 0.
  int32_t activation_blocks;
  int32_t blocks;         // on route tiles: one if it groups the routes, then
  int32_t shrink_blocks;  // of 8 warps; at least one for all items of a tile; then
  int32_t expand_blocks;  // likewise
  // Of a warp of expand: ARIL_OUT_TILE, or a multiple of it if max_rank is at most 16. From
  // ARIL_ACTIVATE on the least that a warp has, ARIL_OUT_UNIT.
  int32_t outs_per_block;
  int32_t smem_bytes;  // of a block
  // If ARIL_GROUP_KERNEL's routes may be added or written on wide tiles (the device decides): any
  // number of blocks; of a block of shrink what aril_linear_plan has; and outputs of a block of
  // expand, a multiple of ARIL_OUTS_LARGE_M. Otherwise 0. f32 takes the larger of shrink's blocks.
  int32_t wide_shrink_blocks;
  int32_t rank_tiles;
  int32_t warpgroups;
  int32_t wide_shrink_smem_bytes;
  int32_t wide_expand_blocks;
  int32_t wide_outs_per_block;
  int32_t wide_expand_smem_bytes;
} aril_experts_plan;

// A projection of the experts of a layer.
typedef struct aril_experts_args {
  int32_t dtype;
  int32_t num_tokens;
  aril_experts_plan plan;
  int32_t form;           // aril_experts_form
  int32_t weighted;       // 0 or 1
  int32_t rows_weighted;  // of ARIL_COMBINE: 1 if y's rows already have the weights
  int32_t from_tokens;    // 1: x is [num_tokens, in_features]; 0: [num_tokens * top_k, in_features]
  int32_t in_features;
  int32_t num_slices;
  int32_t out_features;  // of each slice
  int32_t interleaved;   // 1: output i of slice s is column i * num_slices + s
  int32_t up_slice;      // of ARIL_ACTIVATE; the other one, if any, is gate
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
  // As for aril_linear: [slabs, rows, num_slices, ranks] words behind the header. Rows are the
  // routes, and, if from_tokens, then the tokens. Wide tiles use partials.
  void* mailbox;
  uint64_t mailbox_bytes;  // header included; the same at all launches that share it
  float* partials;
  // Entries: num_slices that all experts share, then num_slices for each expert. A shared module
  // has the greatest rank of the experts' modules, A's address if all experts have the same A, and
  // B's likewise, otherwise null.
  aril_weights weights;
  aril_routing routing;
  aril_top_k top_k;
  aril_groups groups;
} aril_experts_args;

// A factor, and where it is packed.
typedef struct aril_pack_factor {
  const void*
      source;    // [rows, cols]: A [rank, in], B [out, rank], or an embedding's A [vocab, rank]
  void* target;  // as aril_descriptor says, aligned to ARIL_FACTOR_ALIGNMENT
  int64_t row_stride;
  int64_t col_stride;
  int32_t rows;
  int32_t cols;
  int32_t core_rows;  // of the target: its elements, padding included, / ARIL_CORE
  int32_t kind;       // ARIL_PACK_A, _B or _EMBEDDING_A
  int32_t number;
  int32_t first_block;  // set by aril_pack
} aril_pack_factor;

// Packs factors, padding included. Elements are rounded to nearest, ties to even.
typedef struct aril_pack_args {
  int32_t dtype;         // of the targets
  int32_t source_dtype;  // of the sources
  int32_t num_factors;   // 1 to ARIL_PACK_FACTORS
  // Becomes the lowest number of a factor with an element that is not finite in `dtype`, if that is
  // less than what it holds.
  uint32_t* not_finite;
  aril_pack_factor factors[ARIL_PACK_FACTORS];
} aril_pack_args;

// Describes a status. The string lives forever.
const char* aril_status_string(int32_t status);

// Loads every kernel into the current context, so that no launch has to, and runs short kernels on
// a stream of its own and waits for them: ARIL_ERR_BLOCK_ORDER if waits in a mailbox may never end
// on this device. Captures on other threads are not disturbed.
int32_t aril_load(void);

// Whether kernels start while their predecessor drains: 1, or 0 once aril_load has found a device
// where one would then read an earlier routing (device/early_reads.cuh), or would not wait.
int32_t aril_kernels_start_early(void);

// The architecture that the code for the current device was compiled for, such as 90. Before 90 it
// has no aril_linear_forward.
int32_t aril_code_version(int32_t* version);

int32_t aril_route(const aril_route_args* args, void* stream);
int32_t aril_linear(const aril_linear_args* args, void* stream);
int32_t aril_linear_shrink(const aril_linear_args* args, void* stream);
int32_t aril_linear_expand(const aril_linear_args* args, void* stream);
int32_t aril_sharded_shrink(const aril_sharded_args* args, void* stream);
int32_t aril_sharded_expand(const aril_sharded_args* args, void* stream);
int32_t aril_silu_mul(const aril_silu_mul_args* args, void* stream);
int32_t aril_stack(const aril_stack_args* args, void* stream);
int32_t aril_stacked_expand(const aril_stacked_args* args, void* stream);
int32_t aril_stacked_silu_mul(const aril_stacked_silu_mul_args* args, void* stream);
// Fills `map`, which is valid for as long as the weights stay where they are. Enqueues nothing.
// ARIL_ERR_SHARED_MEMORY if the device has too little for a ring.
int32_t aril_forward_maps(const aril_base_weights* weights, aril_forward_map* map);
int32_t aril_linear_forward(const aril_forward_args* args, void* stream);
int32_t aril_embedding(const aril_embedding_args* args, void* stream);
int32_t aril_replace_embeddings(const aril_rows_args* args, void* stream);
int32_t aril_replace_logits(const aril_rows_args* args, void* stream);
int32_t aril_group(const aril_group_args* args, void* stream);
int32_t aril_experts(const aril_experts_args* args, void* stream);
int32_t aril_pack(const aril_pack_args* args, void* stream);

#ifdef __cplusplus
}
#endif
