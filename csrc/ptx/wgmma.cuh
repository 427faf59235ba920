// SPDX-License-Identifier: MIT OR Apache-2.0
//
// wgmma (sm_90a): products of 64 rows by one warpgroup. Warp w holds rows [16w, 16w + 16) of the
// accumulators, in the layout of mma_m16n8k16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "async.cuh"

namespace aril {

#if __CUDA_ARCH_FEAT_SM90_ALL
// The descriptor of an operand in shared memory made of 8-by-8 cores (8 rows of 16 bytes each):
// `to_columns` bytes separate a core from the next one along K, `to_rows` from the next 8 rows. To
// add n to a descriptor moves it by 16 n bytes.
__device__ __forceinline__ uint64_t core_descriptor(const void* shared, int to_columns,
                                                    int to_rows) {
  return (shared_address(shared) & 0x3ffff) >> 4 | static_cast<uint64_t>(to_columns >> 4) << 16 |
         static_cast<uint64_t>(to_rows >> 4) << 32;
}

// The descriptor of an operand of 128-byte rows in the 128-byte swizzle: vector i of 16 bytes of a
// row is stored at i ^ (row % 8). `shared` points into the first row.
__device__ __forceinline__ uint64_t swizzled_descriptor(const void* shared) {
  return core_descriptor(shared, 16, 1024) | uint64_t{1} << 62;
}

// Orders earlier writes of registers and shared memory before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Keeps the compiler from moving accumulators across wgmma_fence() and wgmma_wait().
template <int kColumns>
__device__ __forceinline__ void fence_operands(float (&sums)[kColumns][4]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums[c][e])::"memory");
  }
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// sums[64, 8 * kColumns] = rows[64, 16] * cores[16, 8 * kColumns], or += if `adds`.
template <typename T, int kColumns>
__device__ __forceinline__ void wgmma_k16(float (&sums)[kColumns][4], uint64_t rows, uint64_t cores,
                                          bool adds);

#define ARIL_COLUMN(c) "+f"(sums[c][0]), "+f"(sums[c][1]), "+f"(sums[c][2]), "+f"(sums[c][3])
#define ARIL_SUMS_2 ARIL_COLUMN(0), ARIL_COLUMN(1)
#define ARIL_SUMS_4 ARIL_SUMS_2, ARIL_COLUMN(2), ARIL_COLUMN(3)
#define ARIL_SUMS_8 ARIL_SUMS_4, ARIL_COLUMN(4), ARIL_COLUMN(5), ARIL_COLUMN(6), ARIL_COLUMN(7)
#define ARIL_NAMES_2 "%0,%1,%2,%3,%4,%5,%6,%7"
#define ARIL_NAMES_4 ARIL_NAMES_2 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define ARIL_NAMES_8 ARIL_NAMES_4 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define ARIL_WGMMA(type, name, columns, n, rows_operand, cores_operand, adds_operand) \
  template <>                                                                         \
  __device__ __forceinline__ void wgmma_k16<type, columns>(                           \
      float (&sums)[columns][4], uint64_t rows, uint64_t cores, bool adds) {          \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds_operand               \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." name "." name \
                 " {" ARIL_NAMES_##columns "}, " rows_operand ", " cores_operand      \
                                           ", adds, 1, 1, 0, 0;\n}\n"                 \
                 : ARIL_SUMS_##columns                                                \
                 : "l"(rows), "l"(cores), "r"(static_cast<int>(adds)));               \
  }
#define ARIL_WGMMAS(type, name)                        \
  ARIL_WGMMA(type, name, 2, "16", "%8", "%9", "%10")   \
  ARIL_WGMMA(type, name, 4, "32", "%16", "%17", "%18") \
  ARIL_WGMMA(type, name, 8, "64", "%32", "%33", "%34")
ARIL_WGMMAS(__nv_bfloat16, "bf16")
ARIL_WGMMAS(__half, "f16")
#undef ARIL_WGMMAS
#undef ARIL_WGMMA
#undef ARIL_NAMES_8
#undef ARIL_NAMES_4
#undef ARIL_NAMES_2
#undef ARIL_SUMS_8
#undef ARIL_SUMS_4
#undef ARIL_SUMS_2
#undef ARIL_COLUMN
#endif

}  // namespace aril
